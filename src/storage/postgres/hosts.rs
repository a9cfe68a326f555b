//! The servers of a URL, in the order in which connections try them.

use std::hash::{BuildHasher, RandomState};

use tokio::net::lookup_host;
use tokio_postgres::Config;
use tokio_postgres::config::{Host, LoadBalanceHosts};

use super::socket::Address;
use crate::storage::StorageError;

/// A server to connect to.
pub(super) struct Server {
    pub(super) address: Address,
    /// The name in its certificate.
    #[cfg_attr(not(feature = "postgres-rustls"), allow(dead_code, reason = "only TLS needs the name"))]
    pub(super) name: String,
}

/// Resolves the hosts.
///
/// # Errors
///
/// Returns the last error if no host can be resolved.
pub(super) async fn resolve(config: &Config, server: &str) -> Result<Vec<Server>, StorageError> {
    let (hosts, addresses, ports) = (config.get_hosts(), config.get_hostaddrs(), config.get_ports());
    let mut servers = Vec::new();
    let mut error = None;
    for at in 0..hosts.len().max(addresses.len()) {
        let port = ports.get(at).or_else(|| ports.first()).copied().unwrap_or(5_432);
        let name = match hosts.get(at) {
            Some(Host::Tcp(name)) => name.clone(),
            #[cfg(unix)]
            Some(Host::Unix(folder)) if addresses.is_empty() => {
                let address = Address::Unix(folder.join(format!(".s.PGSQL.{port}")));
                servers.push(Server { address, name: String::new() });
                continue;
            }
            _ => String::new(),
        };
        if let Some(address) = addresses.get(at) {
            servers.push(Server { address: Address::Tcp((*address, port).into()), name });
            continue;
        }
        match lookup_host((&*name, port)).await {
            Ok(found) => {
                servers.extend(found.map(|address| Server { address: Address::Tcp(address), name: name.clone() }));
            }
            Err(failed) => error = Some(failed),
        }
    }
    if config.get_load_balance_hosts() == LoadBalanceHosts::Random {
        let random = RandomState::new();
        servers.sort_by_key(|server| random.hash_one(&server.address));
    }
    match error {
        Some(error) if servers.is_empty() => Err(StorageError::unreachable(server, error)),
        _ => Ok(servers),
    }
}

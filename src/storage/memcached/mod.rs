mod client;
mod connection;
mod login;
mod meta;
mod node;
mod ring;
mod server_time;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use self::client::Client;
use self::login::MemcachedAccess;
use self::server_time::MachineClock;
use crate::error::ConfigError;
#[cfg(feature = "testing")]
use crate::storage::Clock;
use crate::storage::cas::{ServerCas, forward_to_server_cas};
use crate::storage::tls::Tls;
use crate::storage::url::{self, Address, Authority, CasOptions, Options, UrlParts, Wrong};

/// The valid forms of a URL.
const EXAMPLES: &str = "write memcached://host:11211, memcached://host:11211,host:11211, memcacheds://host:11211 or \
     memcached+unix:///path/to.sock";

const PORT: u16 = 11_211;

/// Shares rate limit states between processes through memcached (1.6.10 or later).
///
/// # Examples
///
/// ```
/// use tower_ratelimit::storage::MemcachedStorage;
///
/// let storage = MemcachedStorage::new("memcached://one,two/?prefix=shop&timeout=50ms")?;
///
/// let error = MemcachedStorage::new("http://one").unwrap_err();
/// assert!(error.to_string().starts_with("cannot read the URL \"http://one\": unknown scheme \"http\": write memcached://"));
/// # Ok::<(), tower_ratelimit::ConfigError>(())
/// ```
///
/// # Decisions
///
/// A hit stores the new state by compare-and-swap, if no other process has stored one meanwhile. To
/// decide before the round trip, each process caches the states of up to 16,384 keys that it used
/// in the last 10 seconds. States of more than 512 bytes are not cached.
///
/// | call | round trips |
/// |---|---|
/// | a peek, or a hit that changes no state, such as most refused hits | 1 |
/// | an admitted hit on a key whose cached state is current | 1 |
/// | any other admitted hit, and the next 8 after another process has changed the key | 2 |
/// | each race that a hit loses to another process | 2 more |
///
/// All processes together never admit more than the limit. A hit that loses every race is refused as
/// [contended](crate::Decision::is_contended). [`Cas`](crate::storage::Cas) has the details.
///
/// A policy that can keep more than 1,000 log entries per key is rejected when the limiter or layer
/// is built, unless [long logs](crate::guide::several_processes#long-logs) are allowed. Each
/// admitted hit loads and stores the whole log: 5,000 entries are 95 kB in each direction. A policy
/// that can keep more than 1 MB per key, about 55,000 entries, is always rejected.
///
/// A call decides on one key. For [several keys](crate::RateLimitLayer::and), wrap the storage in
/// [`InOrder`](crate::storage::InOrder).
///
/// [`clear_all`](crate::Storage::clear_all) and [`keys`](crate::Storage::keys) fail, because
/// memcached cannot list its keys.
///
/// # Options
///
/// | option of the URL | default | meaning |
/// |---|---|---|
/// | `prefix` | `rl` | the prefix of all keys: 1 to 64 printable ASCII characters without spaces, `{` and `}`; programs with the same prefix on the same servers share their counts |
/// | `timeout` | `100ms` | the timeout of a call, from `1ms` to `3600s` |
/// | `max-skew` | `5s` | the longest time by which the newest decision on a key may be ahead of this process's estimate of the server's time, up to `86400s`; if it is further ahead, the process corrects its estimate and logs a warning, see [`Cas::max_skew`](crate::storage::Cas::max_skew) |
/// | `long-logs` | `refuse` | `allow` accepts policies that can keep more than 1,000 log entries per key |
/// | `ca` | the system's certificates | for TLS, a PEM file with the certificates to trust |
/// | `cert`, `key` | none | for TLS, PEM files with a client certificate and its private key |
///
/// # Connections
///
/// Clones share one connection per server. Calls need a tokio runtime with time and I/O enabled.
/// The storage can be created outside of a runtime.
///
#[doc = include_str!("server.md")]
///
/// # Errors
///
/// Calls fail with [`StorageError`](crate::storage::StorageError) if the server of the key is
/// unreachable, fails, or does not reply within the timeout. They also fail if 1,024 calls are in
/// flight on its connection, or fewer while calls time out. A write that was sent is not retried,
/// because the server may have executed it: see
/// [`may_have_counted`](crate::storage::StorageError::may_have_counted).
#[derive(Clone)]
pub struct MemcachedStorage(ServerCas<Client>);

forward_to_server_cas!(MemcachedStorage);

impl MemcachedStorage {
    /// Creates a storage on the servers in `url`. It connects to each server on first use, but with
    /// TLS it loads the certificates and the private key immediately.
    ///
    /// # Errors
    ///
    /// Returns an error if the URL cannot be parsed, if it needs a feature that is not enabled, or
    /// if a certificate or the private key cannot be loaded. The error quotes the URL without its
    /// login and its options.
    pub fn new(url: &str) -> Result<Self, ConfigError> {
        let (servers, access, options) = url::read(url, EXAMPLES, read)?;
        Ok(Self(ServerCas::new(Client::new(servers, access, Arc::new(MachineClock)), &options)))
    }

    /// Sets the certificates for TLS. Replaces the options `ca`, `cert` and `key` of the URL,
    /// including those that `config` does not set.
    ///
    /// Call this method before the first decision, because the returned storage opens new
    /// connections.
    ///
    /// # Errors
    ///
    /// Returns an error if
    ///
    /// - a certificate or the private key is malformed, or they do not match,
    /// - `config` has no certificates to trust, and the system has none,
    /// - `config` was created by [`from_rustls`](crate::storage::TlsConfig::from_rustls), and also has
    ///   certificates of its own,
    /// - the scheme of the URL is not `memcacheds`.
    #[cfg(feature = "memcached-rustls")]
    pub fn try_tls(self, config: &crate::storage::TlsConfig) -> Result<Self, ConfigError> {
        let client = self.0.store();
        let Some(tls) = &client.access().tls else {
            return Err(ConfigError::new("the URL has no TLS: write memcacheds:// instead of memcached://"));
        };
        let tls = Some(tls.with(config).map_err(ConfigError::new)?);
        let client = client.with_access(MemcachedAccess { tls, ..client.access().clone() });
        Ok(Self(self.0.with_store(client)))
    }

    /// Sets the clock for decisions, for tests (feature `testing`). Defaults to the servers' time.
    #[cfg(feature = "testing")]
    #[must_use]
    pub fn clock(self, clock: impl Clock) -> Self {
        Self(self.0.clock(clock))
    }

    /// Replaces this machine's clock. Use it in tests of clock skew (feature `testing`).
    ///
    /// The storage corrects `machine` by the time that the servers report. It does not correct the
    /// clock that [`clock`](Self::clock) sets. The returned storage opens new connections.
    #[cfg(feature = "testing")]
    #[must_use]
    pub fn machine_clock(self, machine: impl Clock) -> Self {
        let client = self.0.store().reconnected(Arc::new(machine));
        Self(self.0.with_store(client))
    }
}

/// Parses the servers, at least one, their login and TLS, and the options of a URL.
fn read(parts: &UrlParts<'_>, wrong: &Wrong<'_>) -> Result<(Vec<Address>, MemcachedAccess, CasOptions), ConfigError> {
    let (unix, is_tls) = match parts.scheme {
        "memcached" => (false, false),
        "memcacheds" => (false, true),
        "memcached+unix" => (true, false),
        other => return Err(wrong(format!("unknown scheme {other:?}: {EXAMPLES}"))),
    };
    if is_tls && !cfg!(feature = "memcached-rustls") {
        return Err(wrong("memcacheds:// needs the feature \"memcached-rustls\" of tower-ratelimit".to_owned()));
    }
    let Authority { login, hosts } = Authority::parse(parts.authority, PORT, wrong)?;
    login::check(&login, wrong)?;
    let path = parts.decoded_path(wrong)?;
    let servers = if unix {
        if !cfg!(unix) {
            return Err(wrong("this system has no Unix sockets; write memcached://host:11211".to_owned()));
        }
        if !hosts.is_empty() || path.len() < 2 {
            return Err(wrong("write a path from the root, for example memcached+unix:///path/to.sock".to_owned()));
        }
        vec![Address::Unix(path.into())]
    } else {
        if hosts.is_empty() {
            return Err(wrong(format!("the host is missing: {EXAMPLES}")));
        }
        if path.len() > 1 {
            return Err(wrong(format!("memcached has no databases, but the path is {path:?}; leave it out")));
        }
        if let Some((_, twice)) = hosts.iter().enumerate().find(|(at, host)| hosts[..*at].contains(host)) {
            return Err(wrong(format!("the host {twice} occurs twice; write it once")));
        }
        hosts.into_iter().map(Address::Tcp).collect()
    };
    let mut options = Options::parse(parts.query, wrong)?;
    let tls = if is_tls { Some(Tls::from_options(&mut options, None, wrong)?) } else { None };
    let common = options.cas()?;
    options.end()?;
    Ok((servers, MemcachedAccess { login, tls }, common))
}

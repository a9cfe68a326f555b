//! Finds the primary through sentinels.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use redis::{Value, cmd};
use tokio::time::Instant;

use super::super::url::Access;
use super::connect::RedisConnection;
use super::node::{BoxFuture, Node, Route};
use crate::storage::StorageError;
use crate::storage::credentials::LoginSource;
use crate::storage::url::{Address, Host, Login};
use crate::sync::unpoisoned;

/// The timeout of a command on one sentinel.
const SENTINEL_TIMEOUT: Duration = Duration::from_millis(200);

/// The interval between two checks that the connection in use still leads to the primary.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// The sentinels of a service.
pub(super) struct Sentinels {
    nodes: Vec<Node>,
    /// The index of the sentinel that is asked first: the latest one that knew the primary.
    preferred: AtomicUsize,
    service: String,
    /// The access to the primary.
    access: Access,
    checked_at: Mutex<Instant>,
}

impl Sentinels {
    pub(super) fn new(hosts: Vec<Host>, service: String, login: Login, access: Access) -> Self {
        let sentinel_access = Access { login: LoginSource::Fixed(login), db: 0, tls: access.tls.clone() };
        let nodes = hosts.into_iter().map(|host| Node::at(Address::Tcp(host), sentinel_access.clone())).collect();
        Self { nodes, preferred: AtomicUsize::new(0), service, access, checked_at: Mutex::new(Instant::now()) }
    }

    /// Returns the address of the primary, from the first sentinel that knows it.
    async fn primary(&self) -> Result<Host, StorageError> {
        let mut command = cmd("SENTINEL");
        command.arg("GET-MASTER-ADDR-BY-NAME").arg(&self.service);
        let (preferred, count) = (self.preferred.load(Ordering::Relaxed), self.nodes.len());
        let mut last = None;
        for at in (0..count).map(|step| (preferred + step) % count) {
            match self.nodes[at].run(&command, Instant::now() + SENTINEL_TIMEOUT).await {
                Ok(reply) => {
                    if let Some(host) = host(&reply) {
                        self.preferred.store(at, Ordering::Relaxed);
                        return Ok(host);
                    }
                    let why =
                        format!("sentinel {} does not know the service {:?}", self.nodes[at].name(), self.service);
                    last = Some(StorageError::unreachable(&self.to_string(), why));
                }
                Err(error) => last = last.or(Some(error.while_connecting(self.nodes[at].name()))),
            }
        }
        Err(last.unwrap_or_else(|| StorageError::unreachable(&self.to_string(), "the URL has no sentinels")))
    }
}

impl Route for Sentinels {
    /// Connects to the server that the sentinels report. Checks with `ROLE` that it is a primary.
    fn connect(self: Arc<Self>) -> BoxFuture<Result<(RedisConnection, Option<Address>), StorageError>> {
        Box::pin(async move {
            let address = Address::Tcp(self.primary().await?);
            let (connection, role) = RedisConnection::open(&address, &self.access, &cmd("ROLE")).await?;
            if !matches!(&role, Value::Array(parts) if parts.first().and_then(text) == Some("master")) {
                let why = format!("the sentinels report {address}, which is not a primary according to ROLE");
                return Err(StorageError::unreachable(&self.to_string(), why));
            }
            Ok((connection, Some(address)))
        })
    }

    /// Returns `true` to one caller per [`CHECK_INTERVAL`].
    fn take_check(&self) -> bool {
        let mut checked_at = unpoisoned(self.checked_at.lock());
        let is_due = checked_at.elapsed() >= CHECK_INTERVAL;
        if is_due {
            *checked_at = Instant::now();
        }
        is_due
    }

    /// Asks the sentinels. A former primary can still accept writes, which are lost when it becomes
    /// a replica.
    fn has_moved(self: Arc<Self>, from: Address) -> BoxFuture<bool> {
        Box::pin(async move { self.primary().await.is_ok_and(|host| Address::Tcp(host) != from) })
    }
}

fn host(reply: &Value) -> Option<Host> {
    let Value::Array(parts) = reply else { return None };
    let [name, port] = parts.as_slice() else { return None };
    Some(Host { name: text(name)?.to_owned(), port: text(port)?.parse().ok()? })
}

fn text(value: &Value) -> Option<&str> {
    match value {
        Value::BulkString(bytes) => str::from_utf8(bytes).ok(),
        Value::SimpleString(text) => Some(text),
        _ => None,
    }
}

impl fmt::Display for Sentinels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the primary of {:?}", self.service)
    }
}

//! The [`CasStorage`] over the memcached servers: routes each key to its server.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::meta::{self, Cas, Reply};
use super::node::{Node, Request};
use super::ring::Ring;
use super::{expiry, keys};
use crate::storage::url::Address;
use crate::storage::{CasStorage, Clock, Loaded, StorageError, Swapped, net};

/// The maximum length of a text in bytes. By default, a server stores items of up to 1 MiB,
/// including the key and a header. Longer texts are not sent, because a server that rejects an item
/// deletes the old one.
const LARGEST: usize = (1 << 20) - 1_024;

/// A client for all servers. Clones share the connections.
#[derive(Clone)]
pub(super) struct Client {
    servers: Arc<Servers>,
    prefix: Arc<str>,
    /// The timeout of one load or one swap.
    deadline: Duration,
}

struct Servers {
    nodes: Vec<Node>,
    ring: Ring,
}

/// The CAS value of an item, and the number of the connection that loaded it. `None` if there was
/// no item.
///
/// A server that restarts assigns the same CAS values to other items, so a version is only valid on
/// its connection.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Version(Option<(Cas, u64)>);

impl Client {
    /// Creates a client. It does not connect yet.
    pub(super) fn new(servers: Vec<Address>, prefix: &str, deadline: Duration, machine: &Arc<dyn Clock>) -> Self {
        let ring = Ring::new(&servers);
        let nodes = servers.into_iter().map(|server| Node::new(server, Arc::clone(machine))).collect();
        Self { servers: Arc::new(Servers { nodes, ring }), prefix: prefix.into(), deadline }
    }

    /// Returns a client with another prefix and another deadline. It shares the connections.
    pub(super) fn with(&self, prefix: &str, deadline: Duration) -> Self {
        Self { servers: Arc::clone(&self.servers), prefix: prefix.into(), deadline }
    }

    /// Returns a client with new connections and another machine clock.
    #[cfg(feature = "testing")]
    pub(super) fn reconnected(&self, machine: &Arc<dyn Clock>) -> Self {
        let servers = self.servers.nodes.iter().map(|node| node.address().clone()).collect();
        Self::new(servers, &self.prefix, self.deadline, machine)
    }

    /// Waits until all servers reply.
    pub(super) async fn ready(&self, deadline: Instant) -> Result<(), StorageError> {
        for node in &self.servers.nodes {
            net::until_ready(deadline, |deadline| node.ping(deadline)).await?;
        }
        Ok(())
    }

    /// Checks that all servers reply.
    pub(super) async fn ping(&self, deadline: Instant) -> Result<(), StorageError> {
        for node in &self.servers.nodes {
            node.ping(deadline).await?;
        }
        Ok(())
    }

    /// Returns an error if too many keys are busy, or if all servers are overloaded.
    pub(super) fn overload(&self, busy: usize) -> Option<StorageError> {
        let max_busy = net::MOST * self.servers.nodes.len();
        let mut error = (busy >= max_busy).then(|| StorageError::overloaded("memcached", busy));
        if error.is_some() {
            return error;
        }
        for node in &self.servers.nodes {
            error = Some(node.overload()?);
        }
        error
    }

    /// Returns the server of the key, even if it is down, because another server would start to
    /// count at zero.
    fn node(&self, key: &str) -> &Node {
        let Servers { nodes, ring } = &*self.servers;
        &nodes[ring.index(key)]
    }
}

impl CasStorage for Client {
    type Error = StorageError;
    type Version = Version;

    async fn load(&self, name: &str) -> Result<Loaded<Version>, StorageError> {
        let (key, deadline) = (keys::key(&self.prefix, name), Instant::now() + self.deadline);
        let node = self.node(&key);
        let open = node.open(deadline).await?;
        node.learn_time(&open, self.deadline);
        let request = Request { bytes: meta::get(&key), changes: false };
        let (text, version) = match node.send(&open, request, deadline).await? {
            Reply::Value { cas, text } => {
                // Other programs may have written this item. Bytes that are not UTF-8 count as an
                // empty text.
                (String::from_utf8(text).unwrap_or_default(), Some((cas, open.number)))
            }
            Reply::NotFound => (String::new(), None),
            other => return Err(node.unexpected(&open, false, &other)),
        };
        Ok(Loaded { text, version: Version(version), now: Some(node.time().now()) })
    }

    async fn swap(
        &self,
        name: &str,
        version: &Version,
        text: &str,
        keep: Duration,
    ) -> Result<Swapped<Version>, StorageError> {
        let (key, deadline) = (keys::key(&self.prefix, name), Instant::now() + self.deadline);
        let node = self.node(&key);
        let open = node.open(deadline).await?;
        let bytes = match version.0 {
            Some((_, connection)) if connection != open.number => return Ok(Swapped::Lost(None)),
            Some((cas, _)) if text.is_empty() => meta::delete(&key, cas),
            None if text.is_empty() => meta::get(&key),
            version => meta::set(&key, text, version.map(|(cas, _)| cas), expiry::after(keep, node.time().known())),
        };
        let is_get = version.0.is_none() && text.is_empty();
        match node.send(&open, Request { bytes, changes: !is_get }, deadline).await? {
            Reply::Done if !is_get => Ok(Swapped::Stored),
            Reply::NotFound if is_get => Ok(Swapped::Stored),
            Reply::Value { .. } if is_get => Ok(Swapped::Lost(None)),
            Reply::Exists | Reply::NotFound | Reply::NotStored if !is_get => Ok(Swapped::Lost(None)),
            other => Err(node.unexpected(&open, !is_get, &other)),
        }
    }

    fn longest(&self) -> Option<usize> {
        Some(LARGEST)
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.servers.nodes).finish()
    }
}

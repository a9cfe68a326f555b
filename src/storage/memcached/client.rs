//! Loads and swaps on the server that a key lives on.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::meta::{self, Cas, Reply};
use super::node::{Node, Request};
use super::ring::Ring;
use super::{MemcachedStorageError, expiry, keys};
use crate::storage::net::{self, LinkError};
use crate::storage::url::Address;
use crate::storage::{CasStorage, Clock, Loaded, Swapped};

/// A server keeps a megabyte, of which the key and its own notes take some. What it is asked to keep beyond that makes it drop
/// what was there, so it is not to be asked.
const LARGEST: usize = (1 << 20) - 1_024;

/// A handle on connections that are shared with its clones.
#[derive(Clone)]
pub(super) struct Client {
    servers: Arc<Servers>,
    prefix: Arc<str>,
    /// Of one load and of one swap.
    deadline: Duration,
}

struct Servers {
    nodes: Vec<Node>,
    ring: Ring,
}

/// Which writing was loaded: its name, and the connection on which it was heard, as a server that has started again gives the same
/// names to others. Or that there was nothing.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Version(Option<(Cas, u64)>);

impl Client {
    /// Connects to nobody yet.
    pub(super) fn new(servers: Vec<Address>, prefix: &str, deadline: Duration, machine: &Arc<dyn Clock>) -> Self {
        let ring = Ring::of(&servers);
        let nodes = servers.into_iter().map(|server| Node::at(server, Arc::clone(machine))).collect();
        Self { servers: Arc::new(Servers { nodes, ring }), prefix: prefix.into(), deadline }
    }

    /// The same connections, for keys that begin otherwise, and with another deadline.
    pub(super) fn with(&self, prefix: &str, deadline: Duration) -> Self {
        Self { servers: Arc::clone(&self.servers), prefix: prefix.into(), deadline }
    }

    /// Connects anew, from a machine with this clock.
    #[cfg(feature = "testing")]
    pub(super) fn reconnected(&self, machine: &Arc<dyn Clock>) -> Self {
        let servers = self.servers.nodes.iter().map(|node| node.address().clone()).collect();
        Self::new(servers, &self.prefix, self.deadline, machine)
    }

    /// Returns as soon as all servers answer.
    pub(super) async fn ready(&self, deadline: Instant) -> Result<(), MemcachedStorageError> {
        for node in &self.servers.nodes {
            net::until_ready(deadline, |deadline| node.ping(deadline)).await?;
        }
        Ok(())
    }

    /// Returns the error of a call that does not fit while so many keys are busy, whichever server it goes to.
    pub(super) fn overload(&self, busy: usize) -> Option<MemcachedStorageError> {
        let most = net::MOST * self.servers.nodes.len();
        let mut error = (busy >= most).then(|| MemcachedStorageError::overloaded("memcached", busy));
        if error.is_some() {
            return error;
        }
        for node in &self.servers.nodes {
            error = Some(node.overload()?);
        }
        error
    }

    /// The server where the key lives, also when that is away: another one would not know what was counted.
    fn home(&self, key: &str) -> &Node {
        let Servers { nodes, ring } = &*self.servers;
        &nodes[ring.place(key)]
    }
}

impl CasStorage for Client {
    type Error = MemcachedStorageError;
    type Version = Version;

    async fn load(&self, name: &str) -> Result<Loaded<Version>, MemcachedStorageError> {
        let (key, deadline) = (keys::key(&self.prefix, name), Instant::now() + self.deadline);
        let node = self.home(&key);
        let open = node.open(deadline).await?;
        node.learn_time(&open, self.deadline);
        let request = Request { bytes: meta::get(&key), changes: false };
        let (text, version) = match node.ask(&open, request, deadline).await? {
            Reply::Value { cas, text } => {
                // What is no text was not written by us, and is nothing to whoever reads it.
                (String::from_utf8(text).unwrap_or_default(), Some((cas, open.number)))
            }
            Reply::Nothing => (String::new(), None),
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
    ) -> Result<Swapped<Version>, MemcachedStorageError> {
        let (key, deadline) = (keys::key(&self.prefix, name), Instant::now() + self.deadline);
        let node = self.home(&key);
        let open = node.open(deadline).await?;
        let bytes = match version.0 {
            Some((_, on)) if on != open.number => return Ok(Swapped::Lost(None)),
            Some((cas, _)) if text.is_empty() => meta::delete(&key, cas),
            None if text.is_empty() => meta::get(&key),
            written => meta::set(&key, text, written.map(|(cas, _)| cas), expiry::after(keep, node.time().known())),
        };
        let looks = version.0.is_none() && text.is_empty();
        match node.ask(&open, Request { bytes, changes: !looks }, deadline).await? {
            Reply::Done if !looks => Ok(Swapped::Stored),
            Reply::Nothing if looks => Ok(Swapped::Stored),
            Reply::Value { .. } if looks => Ok(Swapped::Lost(None)),
            Reply::Another | Reply::Nothing | Reply::Present if !looks => Ok(Swapped::Lost(None)),
            other => Err(node.unexpected(&open, !looks, &other)),
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

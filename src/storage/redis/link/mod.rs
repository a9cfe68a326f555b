//! The connections to the servers of a URL.
//!
//! Creating a [`Link`] does no I/O. It connects on first use, and reconnects after a failure.

#[cfg(feature = "redis-cluster")]
mod cluster;
mod connect;
mod node;
mod proof;
#[cfg(feature = "redis-sentinel")]
mod sentinel;
#[cfg(test)]
mod tests;

use redis::{Cmd, Value};
use tokio::time::Instant;

#[cfg(feature = "redis-cluster")]
use self::cluster::Cluster;
pub(super) use self::node::Node;
#[cfg(feature = "redis-sentinel")]
use self::sentinel::Sentinels;
use super::url::{Access, Servers};
use crate::storage::StorageError;

/// A handle to the connections. Clones share them.
#[derive(Clone, Debug)]
pub(super) struct Link(Topology);

#[derive(Clone, Debug)]
enum Topology {
    /// One server: the one in the URL, or the primary that sentinels report.
    Single(Node),
    #[cfg(feature = "redis-cluster")]
    Cluster(Cluster),
}

impl Link {
    pub(super) fn new(servers: Servers, access: &Access) -> Self {
        Self(match servers {
            Servers::Single(address) => Topology::Single(Node::at(address, access.clone())),
            #[cfg(feature = "redis-sentinel")]
            Servers::Sentinels { hosts, service, login } => {
                Topology::Single(Node::new(Sentinels::new(hosts, service, login, access.clone())))
            }
            #[cfg(feature = "redis-cluster")]
            Servers::Cluster(hosts) => Topology::Cluster(Cluster::new(hosts, access.clone())),
            #[allow(unreachable_patterns, reason = "depends on the enabled features")]
            _ => unreachable!("the URL's parser rejects servers whose feature is not enabled"),
        })
    }

    /// Sends `command`, and returns the reply.
    ///
    /// A command is sent again only if the reply of a cluster node means that the node did not
    /// execute it. In a cluster, the first key selects the node. For `EVAL` and `EVALSHA`, that is
    /// the argument after the number of keys. For other commands, it is the first argument.
    ///
    /// The future can be dropped at any time. The server may execute the command nevertheless.
    /// Other commands on the connection are not affected.
    ///
    /// # Errors
    ///
    /// Returns an error if no reply has arrived at `deadline`, even if that is because connecting
    /// took too long. Also returns an error if the reply is an error, or an array that contains
    /// one.
    pub(super) async fn run(&self, command: &Cmd, deadline: Instant) -> Result<Value, StorageError> {
        match &self.0 {
            Topology::Single(node) => node.run(command, deadline).await,
            #[cfg(feature = "redis-cluster")]
            Topology::Cluster(cluster) => cluster.run(command, deadline).await,
        }
    }

    /// Returns the only server, or `None` for a cluster.
    #[allow(clippy::unnecessary_wraps, reason = "there are no clusters without the feature")]
    pub(super) fn single(&self) -> Option<&Node> {
        match &self.0 {
            Topology::Single(node) => Some(node),
            #[cfg(feature = "redis-cluster")]
            Topology::Cluster(_) => None,
        }
    }

    /// Returns an error if too many calls are in flight. Use it to skip the preparation of a call.
    ///
    /// For a cluster, always returns `None`, because the key's node is not known yet.
    pub(super) fn overload(&self) -> Option<StorageError> {
        match &self.0 {
            Topology::Single(node) => node.overload(),
            #[cfg(feature = "redis-cluster")]
            Topology::Cluster(_) => None,
        }
    }

    /// Returns a key for each server that holds keys. `name` returns a different candidate for each
    /// number.
    #[allow(clippy::unused_async, reason = "a single server needs no request")]
    pub(super) async fn key_on_each(
        &self,
        deadline: Instant,
        name: impl Fn(u32) -> String,
    ) -> Result<Vec<String>, StorageError> {
        match &self.0 {
            Topology::Single(_) => {
                let _ = deadline;
                Ok(vec![name(0)])
            }
            #[cfg(feature = "redis-cluster")]
            Topology::Cluster(cluster) => cluster.key_on_each(deadline, name).await,
        }
    }

    /// Returns every server that holds keys.
    #[allow(clippy::unused_async, reason = "a single server needs no request")]
    pub(super) async fn nodes(&self, deadline: Instant) -> Result<Vec<Node>, StorageError> {
        match &self.0 {
            Topology::Single(node) => {
                let _ = deadline;
                Ok(vec![node.clone()])
            }
            #[cfg(feature = "redis-cluster")]
            Topology::Cluster(cluster) => cluster.nodes(deadline).await,
        }
    }

    /// Checks that the server replies. In a cluster, checks every node that holds keys.
    pub(super) async fn ping(&self, deadline: Instant) -> Result<(), StorageError> {
        match &self.0 {
            Topology::Single(node) => node.ping(deadline).await,
            #[cfg(feature = "redis-cluster")]
            Topology::Cluster(cluster) => cluster.ping(deadline).await,
        }
    }
}

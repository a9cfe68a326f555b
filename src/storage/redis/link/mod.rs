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
#[cfg(any(feature = "redis-connection-manager", feature = "redis-cluster-async"))]
mod shared;
#[cfg(test)]
mod tests;

use redis::{Cmd, Value};
use tokio::time::Instant;

#[cfg(feature = "redis-cluster")]
use self::cluster::Cluster;
pub(super) use self::node::Node;
#[cfg(feature = "redis-sentinel")]
use self::sentinel::Sentinels;
#[cfg(any(feature = "redis-connection-manager", feature = "redis-cluster-async"))]
use self::shared::Shared;
use super::error::is_script_missing;
use super::url::{Access, Servers};
use crate::storage::StorageError;
#[cfg(any(feature = "redis-connection-manager", feature = "redis-cluster-async"))]
use crate::storage::StorageErrorKind;

/// A handle to the connections. Clones share them.
#[derive(Clone, Debug)]
pub(super) struct Link(Topology);

#[derive(Clone, Debug)]
enum Topology {
    /// One server: the one in the URL, or the primary that sentinels report.
    Single(Node),
    #[cfg(feature = "redis-cluster")]
    Cluster(Cluster),
    /// A connection of the program. It may lead to several servers.
    #[cfg(any(feature = "redis-connection-manager", feature = "redis-cluster-async"))]
    Shared { node: Node, is_cluster: bool },
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

    #[cfg(feature = "redis-connection-manager")]
    pub(super) fn on_manager(manager: redis::aio::ConnectionManager) -> Self {
        Self(Topology::Shared { node: Node::new(Shared::manager(manager)), is_cluster: false })
    }

    #[cfg(feature = "redis-cluster-async")]
    pub(super) fn on_cluster(connection: redis::cluster_async::ClusterConnection) -> Self {
        Self(Topology::Shared { node: Node::new(Shared::cluster(connection)), is_cluster: true })
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
            #[cfg(any(feature = "redis-connection-manager", feature = "redis-cluster-async"))]
            Topology::Shared { node, .. } => node.run(command, deadline).await,
        }
    }

    /// Runs a script by its hash, or sends its text if the server has not cached it.
    ///
    /// # Errors
    ///
    /// Returns an error like [`run`](Self::run).
    pub(super) async fn run_script(
        &self,
        by_hash: &Cmd,
        by_text: impl FnOnce() -> Cmd,
        deadline: Instant,
    ) -> Result<Value, StorageError> {
        match self.run(by_hash, deadline).await {
            Err(error) if is_script_missing(&error) => self.run(&by_text(), deadline).await,
            reply => reply,
        }
    }

    /// Returns the only node that the URL leads to. A proxy behind its address may still have several
    /// servers. Returns `None` for a cluster, and for a connection of the program.
    #[allow(clippy::unnecessary_wraps, reason = "there are no clusters without the feature")]
    pub(super) fn only_node(&self) -> Option<&Node> {
        match &self.0 {
            Topology::Single(node) => Some(node),
            #[cfg(feature = "redis-cluster")]
            Topology::Cluster(_) => None,
            #[cfg(any(feature = "redis-connection-manager", feature = "redis-cluster-async"))]
            Topology::Shared { .. } => None,
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
            #[cfg(any(feature = "redis-connection-manager", feature = "redis-cluster-async"))]
            Topology::Shared { node, .. } => node.overload(),
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
            #[cfg(any(feature = "redis-connection-manager", feature = "redis-cluster-async"))]
            Topology::Shared { .. } => Ok(vec![name(0)]),
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
            #[cfg(any(feature = "redis-connection-manager", feature = "redis-cluster-async"))]
            Topology::Shared { node, is_cluster } => {
                if *is_cluster {
                    Err(cannot_list_nodes())
                } else {
                    Ok(vec![node.clone()])
                }
            }
        }
    }

    /// Checks that the server replies. In a cluster, checks every node that holds keys.
    pub(super) async fn ping(&self, deadline: Instant) -> Result<(), StorageError> {
        match &self.0 {
            Topology::Single(node) => node.ping(deadline).await,
            #[cfg(feature = "redis-cluster")]
            Topology::Cluster(cluster) => cluster.ping(deadline).await,
            #[cfg(any(feature = "redis-connection-manager", feature = "redis-cluster-async"))]
            Topology::Shared { node, .. } => node.ping(deadline).await,
        }
    }
}

/// Returns the error of a call that each node has to answer.
#[cfg(any(feature = "redis-connection-manager", feature = "redis-cluster-async"))]
fn cannot_list_nodes() -> StorageError {
    let message = "a cluster connection of the program cannot list the keys of each node: create another storage from \
                   a URL with redis+cluster://";
    StorageError::new(StorageErrorKind::Unsupported, message)
}

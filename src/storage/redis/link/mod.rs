//! The way to the servers that a URL names: made without any I/O, connected when it is used, and again after failures.

#[cfg(feature = "redis-cluster")]
mod cluster;
mod connect;
mod node;
#[cfg(feature = "redis-sentinel")]
mod sentinel;
#[cfg(feature = "redis-cluster")]
mod slots;
#[cfg(test)]
mod tests;

use redis::{Cmd, Value};
use tokio::time::Instant;

#[cfg(feature = "redis-cluster")]
use self::cluster::Cluster;
pub(super) use self::node::Node;
#[cfg(feature = "redis-sentinel")]
use self::sentinel::Sentinels;
use super::error::RedisStorageError;
use super::url::{Access, Place};

/// A handle on connections that are shared with its clones.
#[derive(Clone, Debug)]
pub(super) struct Link(Servers);

#[derive(Clone, Debug)]
enum Servers {
    /// One server, or the one that sentinels tell.
    One(Node),
    #[cfg(feature = "redis-cluster")]
    Cluster(Cluster),
}

impl Link {
    pub(super) fn new(place: Place, access: &Access) -> Self {
        Self(match place {
            Place::Server(address) => Servers::One(Node::at(address, access.clone())),
            #[cfg(feature = "redis-sentinel")]
            Place::Sentinels { hosts, service, login } => {
                Servers::One(Node::told_by(Sentinels::new(hosts, service, login, access.clone())))
            }
            #[cfg(feature = "redis-cluster")]
            Place::Cluster(hosts) => Servers::Cluster(Cluster::new(hosts, access.clone())),
            #[allow(unreachable_patterns, reason = "features")]
            _ => unreachable!("the URL's reader refuses what no feature is there for"),
        })
    }

    /// The reply to `command`, in time: neither connecting nor the server's silence takes longer than until `deadline`.
    ///
    /// The command is sent once and never again, unless a node of a cluster says that it has not executed it. Which node that
    /// is tells the first key: of `EVAL` and `EVALSHA` the argument after their number, else the first argument.
    ///
    /// The future may be dropped at any time; the command may have been executed then. Others are not disturbed.
    ///
    /// # Errors
    ///
    /// An error of the server is one, also inside of an array.
    pub(super) async fn run(&self, command: &Cmd, deadline: Instant) -> Result<Value, RedisStorageError> {
        match &self.0 {
            Servers::One(node) => node.run(command, deadline).await,
            #[cfg(feature = "redis-cluster")]
            Servers::Cluster(cluster) => cluster.run(command, deadline).await,
        }
    }

    /// Returns the error of a call that does not fit at the moment, where that is known before the call is prepared.
    pub(super) fn overload(&self) -> Option<RedisStorageError> {
        match &self.0 {
            Servers::One(node) => node.overload(),
            #[cfg(feature = "redis-cluster")]
            Servers::Cluster(_) => None,
        }
    }

    /// Returns a key for each server that holds keys, of those that `name` makes.
    #[allow(clippy::unused_async, reason = "one server is known without a request")]
    pub(super) async fn name_on_each(
        &self,
        deadline: Instant,
        name: impl Fn(u32) -> String,
    ) -> Result<Vec<String>, RedisStorageError> {
        match &self.0 {
            Servers::One(_) => {
                let _ = deadline;
                Ok(vec![name(0)])
            }
            #[cfg(feature = "redis-cluster")]
            Servers::Cluster(cluster) => cluster.name_on_each(deadline, name).await,
        }
    }

    /// Every server that holds keys.
    #[allow(clippy::unused_async, reason = "one server is known without asking")]
    pub(super) async fn nodes(&self, deadline: Instant) -> Result<Vec<Node>, RedisStorageError> {
        match &self.0 {
            Servers::One(node) => {
                let _ = deadline;
                Ok(vec![node.clone()])
            }
            #[cfg(feature = "redis-cluster")]
            Servers::Cluster(cluster) => cluster.nodes(deadline).await,
        }
    }

    /// Checks that the server answers, of a cluster every one that holds keys.
    pub(super) async fn look(&self, deadline: Instant) -> Result<(), RedisStorageError> {
        match &self.0 {
            Servers::One(node) => node.ping(deadline).await,
            #[cfg(feature = "redis-cluster")]
            Servers::Cluster(cluster) => cluster.look(deadline).await,
        }
    }
}

//! Connections of the program.
//!
//! The storage sends single commands on them, so it leaves no state on a connection and blocks no other
//! user. Connecting, logging in and connecting again are up to the connection itself.

use std::fmt;
use std::future::ready;
use std::sync::Arc;

#[cfg(feature = "redis-connection-manager")]
use redis::aio::ConnectionManager;
#[cfg(feature = "redis-cluster-async")]
use redis::cluster_async::ClusterConnection;

use super::connect::{RedisConnection, Sender};
use super::node::{BoxFuture, Route};
use crate::storage::StorageError;
use crate::storage::url::Address;

/// A connection of the program, whose address is not known.
pub(super) struct Shared(Sender);

impl Shared {
    #[cfg(feature = "redis-connection-manager")]
    pub(super) fn manager(manager: ConnectionManager) -> Self {
        Self(Sender::Manager(manager))
    }

    #[cfg(feature = "redis-cluster-async")]
    pub(super) fn cluster(connection: ClusterConnection) -> Self {
        Self(Sender::Cluster(connection))
    }
}

impl Route for Shared {
    fn connect(self: Arc<Self>) -> BoxFuture<Result<(RedisConnection, Option<Address>), StorageError>> {
        Box::pin(ready(Ok((RedisConnection::shared(self.0.clone()), None))))
    }
}

impl fmt::Display for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Redis")
    }
}

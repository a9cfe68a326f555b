//! The connection to one server. Its address is fixed, or found through sentinels.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;

use redis::{Cmd, RedisError, Value};
use tokio::time::{Instant, timeout_at};

use super::super::error::{from_redis, is_permission_denied, needs_new_connection};
use super::super::url::Access;
use super::connect::Connection;
#[cfg(feature = "redis-sentinel")]
use super::sentinel::Sentinels;
use crate::storage::net::{Calls, Connected, Reconnecting, Usable};
use crate::storage::url::Address;
use crate::storage::{StorageError, StorageErrorKind};

/// A handle to the connection of one server.
#[derive(Clone)]
pub(in super::super) struct Node(Arc<NodeInner>);

struct NodeInner {
    route: Route,
    connection: Arc<Reconnecting<OpenConnection>>,
}

/// The way to find the server.
#[derive(Clone)]
enum Route {
    Fixed(Arc<(Address, Access)>),
    #[cfg(feature = "redis-sentinel")]
    Sentinels(Arc<Sentinels>),
}

/// An open connection.
pub(super) struct OpenConnection {
    connection: Connection,
    address: Address,
    calls: Calls,
}

impl Usable for OpenConnection {
    fn is_usable(&self) -> bool {
        !self.connection.is_closed()
    }
}

impl Connected for OpenConnection {
    fn calls(&self) -> &Calls {
        &self.calls
    }
}

impl Node {
    pub(super) fn at(address: Address, access: Access) -> Self {
        let name = address.to_string();
        Self::new(Route::Fixed(Arc::new((address, access))), &name)
    }

    #[cfg(feature = "redis-sentinel")]
    pub(super) fn with_sentinels(sentinels: Sentinels) -> Self {
        let name = sentinels.to_string();
        Self::new(Route::Sentinels(Arc::new(sentinels)), &name)
    }

    fn new(route: Route, name: &str) -> Self {
        Self(Arc::new(NodeInner { route, connection: Reconnecting::new(name) }))
    }

    /// Returns the name of the server for error messages.
    pub(in super::super) fn name(&self) -> &str {
        self.0.connection.name()
    }

    /// Returns an error if too many calls are in flight.
    pub(super) fn overload(&self) -> Option<StorageError> {
        self.0.connection.overload()
    }

    /// Implements [`Link::run`](super::Link::run) on this server.
    pub(in super::super) async fn run(&self, command: &Cmd, deadline: Instant) -> Result<Value, StorageError> {
        let open = self.open(deadline).await?;
        let mut commands = open.connection.commands();
        self.receive(&open, deadline, commands.send_packed_command(command)).await
    }

    /// Checks that the server replies. A reply that denies the user `PING` counts too.
    pub(super) async fn ping(&self, deadline: Instant) -> Result<(), StorageError> {
        match self.run(&redis::cmd("PING"), deadline).await {
            Err(error) if !is_permission_denied(&error) => Err(error),
            _ => Ok(()),
        }
    }

    /// Runs `ASKING` and a command, for a key in a slot that is being migrated to this server.
    #[cfg(feature = "redis-cluster")]
    pub(super) async fn run_asking(&self, command: &Cmd, deadline: Instant) -> Result<Value, StorageError> {
        let open = self.open(deadline).await?;
        let mut commands = open.connection.commands();
        let mut pipeline = redis::Pipeline::with_capacity(2);
        pipeline.cmd("ASKING").add_command(command.clone());
        let reply = async {
            let replies = commands.send_packed_commands(&pipeline, 1, 1).await?;
            Ok(replies.into_iter().next().unwrap_or(Value::Nil))
        };
        self.receive(&open, deadline, reply).await
    }

    async fn open(&self, deadline: Instant) -> Result<Arc<OpenConnection>, StorageError> {
        if Instant::now() >= deadline {
            return Err(StorageError::not_connected(self.name()));
        }
        let open = self.0.connection.get(deadline, || self.0.route.clone().connect()).await?;
        #[cfg(feature = "redis-sentinel")]
        self.check_primary(&open);
        Ok(open)
    }

    async fn receive(
        &self,
        open: &Arc<OpenConnection>,
        deadline: Instant,
        reply: impl Future<Output = Result<Value, RedisError>>,
    ) -> Result<Value, StorageError> {
        let call = self.0.connection.begin(open, deadline).await?;
        let Ok(reply) = timeout_at(deadline, reply).await else {
            return Err(StorageError::timed_out(&open.address.to_string()));
        };
        call.answered();
        let reply = reply.and_then(Value::extract_error).map_err(|error| from_redis(&open.address.to_string(), error));
        match &reply {
            Err(error) if error.kind() == StorageErrorKind::ConnectionLost => self.0.connection.give_up(open, None),
            // The error delays the next attempt to connect, because the cause can persist.
            Err(error) if needs_new_connection(error) => self.0.connection.give_up(open, Some(error)),
            _ => {}
        }
        reply
    }

    /// Asks the sentinels in the background, and drops the connection if the primary has changed. A
    /// former primary can still accept writes, which are lost later.
    #[cfg(feature = "redis-sentinel")]
    fn check_primary(&self, open: &Arc<OpenConnection>) {
        let Route::Sentinels(sentinels) = &self.0.route else { return };
        if !sentinels.take_check() {
            return;
        }
        let (sentinels, connection, open) = (Arc::clone(sentinels), Arc::clone(&self.0.connection), Arc::clone(open));
        tokio::spawn(async move {
            if sentinels.primary().await.is_ok_and(|host| Address::Tcp(host) != open.address) {
                connection.give_up(&open, None);
            }
        });
    }
}

impl Route {
    /// Opens a connection. The future is boxed, because sentinels are nodes too.
    fn connect(self) -> Pin<Box<dyn Future<Output = Result<OpenConnection, StorageError>> + Send>> {
        Box::pin(async move {
            let (connection, address) = match &self {
                Self::Fixed(target) => {
                    let (address, access) = &**target;
                    let (connection, _) = Connection::open(address, access, &redis::cmd("PING")).await?;
                    (connection, address.clone())
                }
                #[cfg(feature = "redis-sentinel")]
                Self::Sentinels(sentinels) => sentinels.connect().await?,
            };
            Ok(OpenConnection { connection, address, calls: Calls::default() })
        })
    }
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Node").field(&self.0.connection).finish()
    }
}

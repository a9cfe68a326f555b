//! Opens one connection, logs in, and waits for a first reply.
//!
//! A connection is usable once it has replied to `PING`, or to `ROLE` if sentinels named the
//! server: without a password or a database to select, the client crate accepts any open port as a
//! server. It is dropped after an I/O error or a malformed reply, when the server replies
//! `READONLY` or asks for another login, and when it stops replying.

#[cfg(feature = "redis-connection-manager")]
use redis::aio::ConnectionManager;
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Cmd, ErrorKind, Pipeline, RedisConnectionInfo, RedisError, ServerErrorKind, Value};
#[cfg(feature = "redis-cluster-async")]
use redis::{aio::ConnectionLike, cluster_async::ClusterConnection};

use super::super::error::{from_redis, while_connecting};
use super::super::url::Access;
use crate::storage::StorageError;
use crate::storage::net::{self, Driver, FirstBytes, ServerStream};
use crate::storage::url::{Address, Login};

/// A handle to send commands on a connection: one of the storage, or one of the program.
#[derive(Clone)]
pub(super) enum Sender {
    Own(MultiplexedConnection),
    #[cfg(feature = "redis-connection-manager")]
    Manager(ConnectionManager),
    #[cfg(feature = "redis-cluster-async")]
    Cluster(ClusterConnection),
}

impl Sender {
    pub(super) async fn send_packed_command(&mut self, command: &Cmd) -> Result<Value, RedisError> {
        match self {
            Self::Own(connection) => connection.send_packed_command(command).await,
            #[cfg(feature = "redis-connection-manager")]
            Self::Manager(manager) => manager.send_packed_command(command).await,
            #[cfg(feature = "redis-cluster-async")]
            Self::Cluster(connection) => connection.req_packed_command(command).await,
        }
    }

    pub(super) async fn send_packed_commands(
        &mut self,
        commands: &Pipeline,
        offset: usize,
        count: usize,
    ) -> Result<Vec<Value>, RedisError> {
        match self {
            Self::Own(connection) => connection.send_packed_commands(commands, offset, count).await,
            #[cfg(feature = "redis-connection-manager")]
            Self::Manager(manager) => manager.send_packed_commands(commands, offset, count).await,
            #[cfg(feature = "redis-cluster-async")]
            Self::Cluster(connection) => connection.req_packed_commands(commands, offset, count).await,
        }
    }
}

/// A connection, and the task that does its I/O unless the connection is one of the program.
pub(super) struct RedisConnection {
    sender: Sender,
    driver: Option<Driver>,
}

impl RedisConnection {
    /// Connects to `address`, sends `hello`, and returns the connection and the reply.
    ///
    /// The reply proves that the server can run commands. A server that only accepts the connection
    /// may need a password, may still load its data, or may not speak the protocol.
    pub(super) async fn open(address: &Address, access: &Access, hello: &Cmd) -> Result<(Self, Value), StorageError> {
        let (server, first) = (address.to_string(), FirstBytes::default());
        let connected = async {
            let login = access.login.get().await.map_err(|error| StorageError::cannot_log_in(&server, error))?;
            let failed = |error: RedisError| while_connecting(&server, hide_password(error, &login));
            let stream = net::open(address, access.tls.as_ref(), &first).await.map_err(|error| failed(error.into()))?;
            let mut connection = Self::log_in(stream, access.db, &login).await.map_err(failed)?;
            let reply = connection.sender.send_packed_command(hello).await;
            match reply.and_then(Value::extract_error) {
                // A user without the right to run `hello` may have the rights to run the scripts.
                Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoPerm) => {
                    Ok((connection, Value::Nil))
                }
                Err(error) => Err(failed(error)),
                Ok(reply) => Ok((connection, reply)),
            }
        };
        net::connecting(&server, "Redis", &first, connected).await
    }

    /// Logs in on an open stream, and selects the database.
    async fn log_in(stream: Box<dyn ServerStream>, db: u32, login: &Login) -> Result<Self, RedisError> {
        let mut info = RedisConnectionInfo::default().set_db(db.into()).set_skip_set_lib_name();
        if let Some(user) = &login.user {
            info = info.set_username(user);
        }
        if let Some(password) = &login.password {
            info = info.set_password(password);
        }
        // Callers apply their own timeouts.
        let config = AsyncConnectionConfig::new().set_response_timeout(None).set_connection_timeout(None);
        let (commands, io) = MultiplexedConnection::new_with_config(&info, stream, config).await?;
        Ok(Self { sender: Sender::Own(commands), driver: Some(Driver::spawn(io)) })
    }

    /// Returns a handle to send commands.
    pub(super) fn sender(&self) -> Sender {
        self.sender.clone()
    }

    /// Creates a handle to a connection of the program.
    #[cfg(any(feature = "redis-connection-manager", feature = "redis-cluster-async"))]
    pub(super) fn shared(sender: Sender) -> Self {
        Self { sender, driver: None }
    }

    /// Converts the error of a call.
    pub(super) fn error_of_call(&self, server: &str, error: RedisError) -> StorageError {
        if self.driver.is_some() {
            return from_redis(server, error);
        }
        // A cluster connection tries again by itself, and an earlier attempt may have been executed.
        #[cfg(feature = "redis-cluster-async")]
        if matches!(self.sender, Sender::Cluster(_)) {
            return from_redis(server, error).with_may_have_counted(true);
        }
        // A manager has tried to connect again, so it has sent nothing.
        #[cfg(feature = "redis-connection-manager")]
        if matches!(self.sender, Sender::Manager(_)) && error.is_connection_refusal() {
            return while_connecting(server, error);
        }
        from_redis(server, error)
    }

    /// Returns `true` if the server closed the connection, or the runtime that opened it has ended.
    pub(super) fn is_closed(&self) -> bool {
        self.driver.as_ref().is_some_and(Driver::is_finished)
    }
}

/// Replaces an error whose message contains the password. A server without the `AUTH` command
/// quotes the arguments of the unknown command.
fn hide_password(error: RedisError, login: &Login) -> RedisError {
    match &login.password {
        Some(password) if error.to_string().contains(&**password) => {
            (error.kind(), "the server's message is hidden, because it contains the password").into()
        }
        _ => error,
    }
}

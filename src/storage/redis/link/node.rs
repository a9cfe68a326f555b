//! The connection to one server. A [`Route`] finds the server.

use std::fmt;
use std::future::ready;
use std::pin::Pin;
use std::sync::Arc;

use redis::{Cmd, RedisError, Value};
use tokio::time::{Instant, timeout, timeout_at};

use super::super::error::{is_permission_denied, needs_new_connection};
use super::super::url::Access;
use super::connect::RedisConnection;
use super::proof::{Proof, ProofCommands, is_refusal_of_a_slot};
use crate::storage::net::{CONNECT_WITHIN, CallInFlight, Reconnecting, Usable, WithCalls};
use crate::storage::url::Address;
use crate::storage::{StorageError, StorageErrorKind};

/// A handle to the connection of one server.
#[derive(Clone)]
pub(in super::super) struct Node(Arc<NodeInner>);

struct NodeInner {
    route: Arc<dyn Route>,
    connection: Arc<Reconnecting<WithCalls<OpenConnection>>>,
}

/// Finds a server. The [`fmt::Display`] form names the server in error messages.
pub(super) trait Route: fmt::Display + Send + Sync + 'static {
    /// Opens a connection to the server. Returns it with the server's address, if that is known.
    fn connect(self: Arc<Self>) -> BoxFuture<Result<(RedisConnection, Option<Address>), StorageError>>;

    /// Returns `true` if the caller must now check with [`has_moved`](Self::has_moved).
    fn take_check(&self) -> bool {
        false
    }

    /// Returns `true` if the server has left this address.
    fn has_moved(self: Arc<Self>, _from: Address) -> BoxFuture<bool> {
        Box::pin(ready(false))
    }
}

pub(super) type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// A server with a fixed address.
struct Fixed {
    address: Address,
    access: Access,
}

impl Route for Fixed {
    fn connect(self: Arc<Self>) -> BoxFuture<Result<(RedisConnection, Option<Address>), StorageError>> {
        Box::pin(async move {
            let (connection, _) = RedisConnection::open(&self.address, &self.access, &redis::cmd("PING")).await?;
            Ok((connection, Some(self.address.clone())))
        })
    }
}

impl fmt::Display for Fixed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.address.fmt(f)
    }
}

/// An open connection.
pub(super) struct OpenConnection {
    connection: RedisConnection,
    /// The server, unless the connection is one of the program.
    address: Option<Address>,
    proof: Proof,
}

impl OpenConnection {
    fn new(connection: RedisConnection, address: Option<Address>) -> Self {
        Self { connection, address, proof: Proof::new() }
    }

    /// Proves that all keys under `prefix` are on one server, if a proof can begin now. Waits for a proof
    /// that is running.
    async fn prove(&self, prefix: &str) {
        let Some(proving) = self.proof.begin().await else { return };
        let (mut connection, commands) = (self.connection.sender(), ProofCommands::new(prefix));
        let result = async {
            let stored = connection.send_packed_command(&commands.store).await?;
            if stored != Value::Okay {
                return Ok(is_refusal_of_a_slot(&stored).then_some(false));
            }
            let replies = connection.send_packed_commands(&commands.read, 0, ProofCommands::READS).await?;
            connection.send_packed_command(&commands.delete).await?;
            Ok::<_, RedisError>(commands.result(&replies))
        };
        if let Ok(Ok(Some(is_single_server))) = timeout(CONNECT_WITHIN, result).await {
            proving.end(is_single_server);
        }
    }
}

impl Usable for OpenConnection {
    fn is_usable(&self) -> bool {
        !self.connection.is_closed()
    }
}

impl Node {
    /// Creates a handle to the server at a fixed address.
    pub(super) fn at(address: Address, access: Access) -> Self {
        Self::new(Fixed { address, access })
    }

    /// Creates a handle to the server that `route` finds.
    pub(super) fn new(route: impl Route) -> Self {
        let connection = Reconnecting::new(&route.to_string());
        Self(Arc::new(NodeInner { route: Arc::new(route), connection }))
    }

    /// Returns the name of the server for error messages.
    pub(in super::super) fn name(&self) -> &str {
        self.0.connection.name()
    }

    /// Returns the error of a call that timed out without a connection.
    pub(in super::super) fn not_connected(&self) -> StorageError {
        self.0.connection.not_connected()
    }

    /// Returns an error if too many calls are in flight.
    pub(super) fn overload(&self) -> Option<StorageError> {
        self.0.connection.overload()
    }

    /// Implements [`Link::run`](super::Link::run) on this server.
    pub(in super::super) async fn run(&self, command: &Cmd, deadline: Instant) -> Result<Value, StorageError> {
        let open = self.open(deadline).await?;
        let call = self.0.connection.begin(&open, deadline).await?;
        let mut commands = open.connection.sender();
        self.receive(&open, call, deadline, commands.send_packed_command(command)).await
    }

    /// Runs a command for several keys, like [`run`](Self::run). It counts as `hits` calls. Calls the
    /// closure `command` only when the connection is ready to send. Returns `None` without sending
    /// anything if the closure returns `None`, or if the keys must be on one server (`needs_proof`) and the
    /// connection has not proved that.
    pub(in super::super) async fn run_on_one_server(
        &self,
        deadline: Instant,
        hits: usize,
        needs_proof: bool,
        command: impl FnOnce() -> Option<Cmd>,
    ) -> Result<Option<Value>, StorageError> {
        let open = self.open(deadline).await?;
        if needs_proof && !open.proof.is_single_server() {
            return Ok(None);
        }
        let call = self.0.connection.begin_several(&open, deadline, hits).await?;
        let Some(command) = command() else { return Ok(None) };
        let mut commands = open.connection.sender();
        self.receive(&open, call, deadline, commands.send_packed_command(&command)).await.map(Some)
    }

    /// Returns `true` if the open connection has proved that all keys under `prefix` are on one
    /// server. Otherwise begins a proof in the background, if one can begin now.
    pub(in super::super) fn is_single_server(&self, prefix: &Arc<str>) -> bool {
        let Some(open) = self.0.connection.value() else { return false };
        let is_single_server = open.proof.is_single_server();
        if !is_single_server && open.proof.is_due() {
            let prefix = Arc::clone(prefix);
            tokio::spawn(async move { open.prove(&prefix).await });
        }
        is_single_server
    }

    /// Waits for the proof that all keys under `prefix` are on one server, if one is running or can begin
    /// now. At `deadline`, it continues in the background.
    pub(in super::super) async fn prove(&self, prefix: &Arc<str>, deadline: Instant) {
        if let Some(open) = self.0.connection.value().filter(|open| !open.proof.is_single_server()) {
            let prefix = Arc::clone(prefix);
            let proof = tokio::spawn(async move { open.prove(&prefix).await });
            let _ = timeout_at(deadline, proof).await;
        }
    }

    /// Checks that the server replies. A user without the right to run `PING` passes the check.
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
        let call = self.0.connection.begin(&open, deadline).await?;
        let mut commands = open.connection.sender();
        let mut pipeline = redis::Pipeline::with_capacity(2);
        pipeline.cmd("ASKING").add_command(command.clone());
        let reply = async {
            let replies = commands.send_packed_commands(&pipeline, 1, 1).await?;
            Ok(replies.into_iter().next().unwrap_or(Value::Nil))
        };
        self.receive(&open, call, deadline, reply).await
    }

    async fn open(&self, deadline: Instant) -> Result<Arc<WithCalls<OpenConnection>>, StorageError> {
        if Instant::now() >= deadline {
            return Err(self.not_connected());
        }
        let connect = || {
            let connecting = Arc::clone(&self.0.route).connect();
            async {
                connecting.await.map(|(connection, address)| WithCalls::new(OpenConnection::new(connection, address)))
            }
        };
        let open = self.0.connection.get(deadline, connect).await?;
        self.check_route(&open);
        Ok(open)
    }

    async fn receive(
        &self,
        open: &Arc<WithCalls<OpenConnection>>,
        call: CallInFlight<'_, OpenConnection>,
        deadline: Instant,
        reply: impl Future<Output = Result<Value, RedisError>>,
    ) -> Result<Value, StorageError> {
        let server = || open.address.as_ref().map_or_else(|| self.name().to_owned(), Address::to_string);
        let Ok(reply) = timeout_at(deadline, reply).await else {
            return Err(StorageError::timed_out(&server()));
        };
        let reply = reply.and_then(Value::extract_error);
        if open.address.is_none() && reply.as_ref().is_err_and(RedisError::is_timeout) {
            // The timeout of a connection of the program is shorter.
            return Err(StorageError::timed_out(&server()));
        }
        call.answered();
        let reply = reply.map_err(|error| open.connection.error_of_call(&server(), error));
        match &reply {
            // A connection of the program connects again by itself, and may lead to several servers.
            _ if open.address.is_none() => {}
            Err(error) if error.kind() == StorageErrorKind::ConnectionLost => self.0.connection.give_up(open, None),
            // The error delays the next attempt to connect, because the cause can persist.
            Err(error) if needs_new_connection(error) => self.0.connection.give_up(open, Some(error)),
            _ => {}
        }
        reply
    }

    /// Checks the address in the background, and drops the connection if the server has moved.
    fn check_route(&self, open: &Arc<WithCalls<OpenConnection>>) {
        let Some(address) = open.address.as_ref().filter(|_| self.0.route.take_check()) else { return };
        let has_moved = Arc::clone(&self.0.route).has_moved(address.clone());
        let (connection, open) = (Arc::clone(&self.0.connection), Arc::clone(open));
        tokio::spawn(async move {
            if has_moved.await {
                connection.give_up(&open, None);
            }
        });
    }
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Node").field(&self.0.connection).finish()
    }
}

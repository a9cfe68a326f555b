//! The connection to one server, which is always the same, or the one that sentinels tell.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;

use redis::{Cmd, RedisError, Value};
use tokio::time::{Instant, timeout_at};

use super::super::error::RedisStorageError;
use super::super::url::Access;
use super::connect::Connection;
#[cfg(feature = "redis-sentinel")]
use super::sentinel::Sentinels;
use crate::storage::net::{Calls, Connected, Reconnecting, Usable};
use crate::storage::url::Address;

/// A handle on one server.
#[derive(Clone)]
pub(in super::super) struct Node(Arc<Shared>);

struct Shared {
    way: Way,
    open: Arc<Reconnecting<Open, RedisStorageError>>,
}

/// How to find the server.
#[derive(Clone)]
enum Way {
    At(Arc<(Address, Access)>),
    #[cfg(feature = "redis-sentinel")]
    ToldBy(Arc<Sentinels>),
}

/// A connection in use.
pub(super) struct Open {
    connection: Connection,
    address: Address,
    calls: Calls,
}

impl Usable for Open {
    fn is_usable(&self) -> bool {
        !self.connection.is_closed()
    }
}

impl Connected for Open {
    fn calls(&self) -> &Calls {
        &self.calls
    }
}

impl Node {
    pub(super) fn at(address: Address, access: Access) -> Self {
        let name = address.to_string();
        Self::by(Way::At(Arc::new((address, access))), &name)
    }

    #[cfg(feature = "redis-sentinel")]
    pub(super) fn told_by(sentinels: Sentinels) -> Self {
        let name = sentinels.to_string();
        Self::by(Way::ToldBy(Arc::new(sentinels)), &name)
    }

    fn by(way: Way, name: &str) -> Self {
        Self(Arc::new(Shared { way, open: Reconnecting::new(name) }))
    }

    /// What to call it in errors.
    pub(in super::super) fn name(&self) -> &str {
        self.0.open.name()
    }

    /// Returns the error of a call that does not fit at the moment.
    pub(super) fn overload(&self) -> Option<RedisStorageError> {
        self.0.open.overload()
    }

    /// As [`Link::run`](super::Link::run), on this server.
    pub(in super::super) async fn run(&self, command: &Cmd, deadline: Instant) -> Result<Value, RedisStorageError> {
        let open = self.open(deadline).await?;
        let mut commands = open.connection.commands();
        self.answer(&open, deadline, commands.send_packed_command(command)).await
    }

    /// Whether the server answers. That this user may not ask it is an answer too.
    pub(super) async fn ping(&self, deadline: Instant) -> Result<(), RedisStorageError> {
        match self.run(&redis::cmd("PING"), deadline).await {
            Err(error) if !error.is_no_permission() => Err(error),
            _ => Ok(()),
        }
    }

    /// As [`run`](Self::run), for a key that is on its way to this server: with `ASKING` before it.
    #[cfg(feature = "redis-cluster")]
    pub(super) async fn run_asking(&self, command: &Cmd, deadline: Instant) -> Result<Value, RedisStorageError> {
        let open = self.open(deadline).await?;
        let mut commands = open.connection.commands();
        let mut both = redis::Pipeline::with_capacity(2);
        both.cmd("ASKING").add_command(command.clone());
        let reply = async {
            let replies = commands.send_packed_commands(&both, 1, 1).await?;
            Ok(replies.into_iter().next().unwrap_or(Value::Nil))
        };
        self.answer(&open, deadline, reply).await
    }

    async fn open(&self, deadline: Instant) -> Result<Arc<Open>, RedisStorageError> {
        if Instant::now() >= deadline {
            return Err(RedisStorageError::late(self.name(), false));
        }
        let open = self.0.open.get(deadline, || self.0.way.clone().go()).await?;
        #[cfg(feature = "redis-sentinel")]
        self.ask_sentinels_again(&open);
        Ok(open)
    }

    async fn answer(
        &self,
        open: &Arc<Open>,
        deadline: Instant,
        reply: impl Future<Output = Result<Value, RedisError>>,
    ) -> Result<Value, RedisStorageError> {
        let call = self.0.open.begin(open, deadline).await?;
        let Ok(reply) = timeout_at(deadline, reply).await else {
            return Err(RedisStorageError::late(&open.address.to_string(), true));
        };
        call.answered();
        let reply = reply
            .and_then(Value::extract_error)
            .map_err(|error| RedisStorageError::answered(&open.address.to_string(), error));
        match &reply {
            Err(error) if error.is_lost() => self.0.open.give_up(open, None),
            // It may well be let in again, or be a replica for long: not each call is to find that out.
            Err(error) if error.is_of_the_wrong_server() => self.0.open.give_up(open, Some(error)),
            _ => {}
        }
        reply
    }

    /// Leaves a server that the sentinels no longer name, as an old primary goes on taking what is written to it.
    #[cfg(feature = "redis-sentinel")]
    fn ask_sentinels_again(&self, open: &Arc<Open>) {
        let Way::ToldBy(sentinels) = &self.0.way else { return };
        if !sentinels.is_time_to_ask() {
            return;
        }
        let (sentinels, renewed, open) = (Arc::clone(sentinels), Arc::clone(&self.0.open), Arc::clone(open));
        tokio::spawn(async move {
            if sentinels.primary().await.is_ok_and(|host| Address::Tcp(host) != open.address) {
                renewed.give_up(&open, None);
            }
        });
    }
}

impl Way {
    /// Boxed, since the way to a primary leads over other nodes.
    fn go(self) -> Pin<Box<dyn Future<Output = Result<Open, RedisStorageError>> + Send>> {
        Box::pin(async move {
            let (connection, address) = match &self {
                Self::At(there) => {
                    let (address, access) = &**there;
                    let (connection, _) = Connection::open(address, access, &redis::cmd("PING")).await?;
                    (connection, address.clone())
                }
                #[cfg(feature = "redis-sentinel")]
                Self::ToldBy(sentinels) => sentinels.connect().await?,
            };
            Ok(Open { connection, address, calls: Calls::default() })
        })
    }
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Node").field(&self.0.open).finish()
    }
}

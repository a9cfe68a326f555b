//! One of the servers: connected when it is asked, and again after failures.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

#[cfg(unix)]
use tokio::net::UnixStream;
use tokio::time::{Instant, timeout, timeout_at};

use super::MemcachedStorageError;
use super::connection::{Connection, Unanswered};
use super::meta::{NOOP, Reply, STATS};
use super::server_time::ServerTime;
use crate::BoxError;
use crate::storage::Clock;
use crate::storage::net::{CONNECT_WITHIN, Calls, Connected, Kind, LinkError, Reconnecting, Usable, socket};
use crate::storage::url::Address;

/// A handle on one server.
#[derive(Clone)]
pub(super) struct Node(Arc<Shared>);

struct Shared {
    address: Address,
    open: Arc<Reconnecting<Open, MemcachedStorageError>>,
    time: Arc<ServerTime>,
}

/// A connection in use.
pub(super) struct Open {
    connection: Connection,
    calls: Calls,
    /// No other connection of this process has it.
    pub(super) number: u64,
}

/// What a server is asked.
pub(super) struct Request {
    pub(super) bytes: Vec<u8>,
    pub(super) changes: bool,
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
    pub(super) fn at(address: Address, machine: Arc<dyn Clock>) -> Self {
        let open = Reconnecting::new(&address.to_string());
        Self(Arc::new(Shared { address, open, time: Arc::new(ServerTime::new(machine)) }))
    }

    #[cfg(feature = "testing")]
    pub(super) fn address(&self) -> &Address {
        &self.0.address
    }

    pub(super) fn time(&self) -> &ServerTime {
        &self.0.time
    }

    /// Asks the server for its time once a minute, in a task that no caller waits for.
    pub(super) fn learn_time(&self, open: &Arc<Open>, patience: Duration) {
        if self.time().is_due() {
            let (open, time) = (Arc::clone(open), Arc::clone(&self.0.time));
            tokio::spawn(async move { timeout(patience, learn(&open.connection, &time)).await });
        }
    }

    /// Returns the error of a call that does not fit at the moment.
    pub(super) fn overload(&self) -> Option<MemcachedStorageError> {
        self.0.open.overload()
    }

    /// A connection to ask on, if there is one by `deadline`.
    pub(super) async fn open(&self, deadline: Instant) -> Result<Arc<Open>, MemcachedStorageError> {
        let Shared { address, open: renewed, time } = &*self.0;
        if Instant::now() >= deadline {
            return Err(MemcachedStorageError::late(renewed.name()));
        }
        renewed.get(deadline, || connect(address.clone(), Arc::clone(time))).await
    }

    /// What the server replies, sent once and never again. The future may be dropped at any time, which disturbs nobody else.
    pub(super) async fn ask(
        &self,
        open: &Arc<Open>,
        request: Request,
        deadline: Instant,
    ) -> Result<Reply, MemcachedStorageError> {
        let error = |kind, source| MemcachedStorageError::new(kind, request.changes, self.name(), source);
        let call = self.0.open.begin(open, deadline).await?;
        let Ok(reply) = timeout_at(deadline, open.connection.ask(request.bytes)).await else {
            return Err(error(Kind::Late { sent: true }, None));
        };
        call.answered();
        match reply {
            Ok(Reply::Refused(mut why)) => {
                if why.contains("too large") {
                    why.push_str(" (start it with a larger -I, or limit by a strategy that keeps no log)");
                }
                // A proxy says so of what it may have passed on.
                let is_memcacheds = ["out of memory", "too large"].iter().any(|said| why.contains(said));
                Err(error(if is_memcacheds { Kind::Refused } else { Kind::Unexpected }, Some(why.into())))
            }
            Ok(Reply::Misunderstood(why)) => Err(error(Kind::Unexpected, Some(why.into()))),
            Ok(reply) => Ok(reply),
            Err(Unanswered::NotSent) => Err(error(Kind::Unreached, Some("the connection was closed".into()))),
            Err(Unanswered::Lost(why)) => Err(error(Kind::Lost, Some(why.into()))),
        }
    }

    /// The server replied to a request with what is never the reply to such a one: nothing on this connection can be trusted.
    pub(super) fn unexpected(&self, open: &Arc<Open>, changes: bool, reply: &Reply) -> MemcachedStorageError {
        self.0.open.give_up(open, None);
        MemcachedStorageError::new(Kind::Unexpected, changes, self.name(), Some(reply.word().into()))
    }

    /// Whether the server answers.
    pub(super) async fn ping(&self, deadline: Instant) -> Result<(), MemcachedStorageError> {
        let open = self.open(deadline).await?;
        let noop = Request { bytes: NOOP.to_vec(), changes: false };
        match self.ask(&open, noop, deadline).await? {
            Reply::Here => Ok(()),
            other => Err(self.unexpected(&open, false, &other)),
        }
    }

    fn name(&self) -> &str {
        self.0.open.name()
    }
}

/// A connection is one that has answered: a stopped server, or one that has no room for another, would let anybody connect.
async fn connect(address: Address, time: Arc<ServerTime>) -> Result<Open, MemcachedStorageError> {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let connected = async {
        let connection = match &address {
            Address::Tcp(host) => Connection::over(socket::open(host).await?),
            #[cfg(unix)]
            Address::Unix(path) => Connection::over(UnixStream::connect(path).await?),
            #[cfg(not(unix))]
            Address::Unix(_) => return Err(std::io::Error::from(std::io::ErrorKind::Unsupported).into()),
        };
        match connection.ask(NOOP.to_vec()).await {
            Ok(Reply::Here) => {
                learn(&connection, &time).await.map_err(BoxError::from)?;
                Ok(Open { connection, calls: Calls::default(), number: NUMBER.fetch_add(1, Ordering::Relaxed) })
            }
            Ok(other) => Err(format!("it says {:?} to a meta command", other.word()).into()),
            Err(Unanswered::Lost(why)) => Err(why.into()),
            Err(Unanswered::NotSent) => Err("it was closed".into()),
        }
    };
    let connected: Result<Result<Open, BoxError>, _> = timeout(CONNECT_WITHIN, connected).await;
    let late = |_| Err(format!("connecting took longer than {CONNECT_WITHIN:?}").into());
    connected.unwrap_or_else(late).map_err(|why| MemcachedStorageError::unreached(&address.to_string(), why))
}

/// Asks for the server's time. A proxy that does not know it is used without.
async fn learn(connection: &Connection, time: &ServerTime) -> Result<(), String> {
    let asked = time.machine();
    match connection.ask(STATS.to_vec()).await {
        Ok(Reply::Stats { time: Some(seconds) }) => time.learn(asked, seconds),
        Ok(_) => {}
        Err(Unanswered::Lost(why)) => return Err(why),
        Err(Unanswered::NotSent) => return Err("it was closed".to_owned()),
    }
    Ok(())
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Node").field(&self.0.open).finish()
    }
}

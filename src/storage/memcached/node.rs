//! One memcached server and its connection.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

#[cfg(unix)]
use tokio::net::UnixStream;
use tokio::time::{Instant, timeout, timeout_at};

use super::connection::{MemcachedConnection, Unanswered};
use super::meta::{NOOP, Reply, STATS};
use super::server_time::ServerTime;
use crate::error::BoxError;
use crate::storage::net::{CONNECT_WITHIN, Calls, Connected, FirstBytes, Reconnecting, Usable, open_tcp};
use crate::storage::url::Address;
use crate::storage::{Clock, StorageError};

/// A handle to one server. Clones share its connection.
#[derive(Clone)]
pub(super) struct Node(Arc<Inner>);

struct Inner {
    address: Address,
    connection: Arc<Reconnecting<Open>>,
    time: Arc<ServerTime>,
}

/// An open connection.
pub(super) struct Open {
    connection: MemcachedConnection,
    calls: Calls,
    /// The number of this connection. It is unique in this process.
    pub(super) number: u64,
}

/// A request to a server.
pub(super) struct Request {
    pub(super) bytes: Vec<u8>,
    /// `true` if the request changes an item.
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
    pub(super) fn new(address: Address, machine: Arc<dyn Clock>) -> Self {
        let connection = Reconnecting::new(&address.to_string());
        Self(Arc::new(Inner { address, connection, time: Arc::new(ServerTime::new(machine)) }))
    }

    #[cfg(feature = "testing")]
    pub(super) fn address(&self) -> &Address {
        &self.0.address
    }

    pub(super) fn time(&self) -> &ServerTime {
        &self.0.time
    }

    /// Requests the server's time in a background task, if the last request was at least a minute
    /// ago. `within` is the timeout of the request.
    pub(super) fn learn_time(&self, open: &Arc<Open>, within: Duration) {
        if self.time().is_due() {
            let (open, time) = (Arc::clone(open), Arc::clone(&self.0.time));
            tokio::spawn(async move { timeout(within, learn(&open.connection, &time)).await });
        }
    }

    /// Returns an error if too many calls are in flight.
    pub(super) fn overload(&self) -> Option<StorageError> {
        self.0.connection.overload()
    }

    /// Returns an open connection. Waits for one until `deadline`.
    pub(super) async fn open(&self, deadline: Instant) -> Result<Arc<Open>, StorageError> {
        let Inner { address, connection, time } = &*self.0;
        if Instant::now() >= deadline {
            return Err(connection.not_connected());
        }
        connection.get(deadline, || connect(address.clone(), Arc::clone(time))).await
    }

    /// Sends a request once, without retries, and returns the reply. The future may be dropped at
    /// any time.
    pub(super) async fn send(
        &self,
        open: &Arc<Open>,
        request: Request,
        deadline: Instant,
    ) -> Result<Reply, StorageError> {
        let call = self.0.connection.begin(open, deadline).await?;
        let Ok(reply) = timeout_at(deadline, open.connection.send(request.bytes)).await else {
            return Err(StorageError::timed_out(self.name()).with_may_have_counted(request.changes));
        };
        call.answered();
        let error = match reply {
            Ok(Reply::Refused(mut why)) => {
                if why.contains("too large") {
                    why.push_str(" (start it with a larger -I, or use a strategy without a log)");
                }
                // Other messages may come from a proxy, which may have forwarded the request.
                let is_from_memcached = ["out of memory", "too large"].iter().any(|text| why.contains(text));
                if is_from_memcached {
                    StorageError::refused(self.name(), why)
                } else {
                    StorageError::unexpected_reply(self.name(), why)
                }
            }
            Ok(Reply::Misunderstood(why)) => StorageError::unexpected_reply(self.name(), why),
            Ok(reply) => return Ok(reply),
            Err(Unanswered::NotSent) => StorageError::unreachable(self.name(), "connection closed"),
            Err(Unanswered::Lost(why)) => StorageError::connection_lost(self.name(), why),
        };
        Err(if request.changes { error } else { error.uncounted() })
    }

    /// Returns the error of a reply that does not match its request, and closes the connection,
    /// because later replies may be mismatched too.
    pub(super) fn unexpected(&self, open: &Arc<Open>, changes: bool, reply: &Reply) -> StorageError {
        self.0.connection.give_up(open, None);
        StorageError::unexpected_reply(self.name(), reply.word()).with_may_have_counted(changes)
    }

    /// Checks that the server replies.
    pub(super) async fn ping(&self, deadline: Instant) -> Result<(), StorageError> {
        let open = self.open(deadline).await?;
        let noop = Request { bytes: NOOP.to_vec(), changes: false };
        match self.send(&open, noop, deadline).await? {
            Reply::Noop => Ok(()),
            other => Err(self.unexpected(&open, false, &other)),
        }
    }

    pub(super) fn name(&self) -> &str {
        self.0.connection.name()
    }
}

/// Opens a connection, waits for the first reply, and requests the server's time. An accepted TCP
/// connection is not enough: a server that hangs, or that has too many connections, still accepts
/// them.
async fn connect(address: Address, time: Arc<ServerTime>) -> Result<Open, StorageError> {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let first = FirstBytes::default();
    let connected = async {
        let connection = match &address {
            Address::Tcp(host) => MemcachedConnection::new(first.of(open_tcp((&*host.name, host.port)).await?)),
            #[cfg(unix)]
            Address::Unix(path) => MemcachedConnection::new(first.of(UnixStream::connect(path).await?)),
            #[cfg(not(unix))]
            Address::Unix(_) => return Err(std::io::Error::from(std::io::ErrorKind::Unsupported).into()),
        };
        match connection.send(NOOP.to_vec()).await {
            Ok(Reply::Noop) => {
                learn(&connection, &time).await.map_err(BoxError::from)?;
                Ok(Open { connection, calls: Calls::default(), number: NUMBER.fetch_add(1, Ordering::Relaxed) })
            }
            Ok(other) => Err(format!("unexpected reply {:?} to a meta command", other.word()).into()),
            Err(Unanswered::Lost(why)) => Err(why.into()),
            Err(Unanswered::NotSent) => Err("connection closed".into()),
        }
    };
    let connected: Result<Result<Open, BoxError>, _> = timeout(CONNECT_WITHIN, connected).await;
    let late = |_| Err(format!("no connection within {CONNECT_WITHIN:?}").into());
    connected.unwrap_or_else(late).map_err(|why| {
        let server = address.to_string();
        first.foreign(&server, "memcached").unwrap_or_else(|| StorageError::unreachable(&server, why))
    })
}

/// Requests the server's time. Also succeeds if the server reports no time, as some proxies do.
async fn learn(connection: &MemcachedConnection, time: &ServerTime) -> Result<(), String> {
    let requested_at = time.machine();
    match connection.send(STATS.to_vec()).await {
        Ok(Reply::Stats { time: Some(seconds) }) => time.learn(requested_at, seconds),
        Ok(_) => {}
        Err(Unanswered::Lost(why)) => return Err(why),
        Err(Unanswered::NotSent) => return Err("connection closed".to_owned()),
    }
    Ok(())
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Node").field(&self.0.connection).finish()
    }
}

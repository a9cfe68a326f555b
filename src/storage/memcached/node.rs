//! One memcached server and its connection.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout, timeout_at};

use super::connection::{MemcachedConnection, NoReply};
use super::login::MemcachedAccess;
use super::meta::{NOOP, Reply, STATS};
use super::server_time::ServerTime;
use crate::storage::net::{self, FirstBytes, Reconnecting, WithCalls};
use crate::storage::url::Address;
use crate::storage::{Clock, StorageError};

/// One server.
pub(super) struct Node {
    address: Address,
    access: MemcachedAccess,
    connection: Arc<Reconnecting<WithCalls<MemcachedConnection>>>,
    time: Arc<ServerTime>,
}

/// A request to a server.
pub(super) struct Request {
    pub(super) bytes: Vec<u8>,
    /// `true` if the request changes an item.
    pub(super) changes: bool,
}

impl Node {
    pub(super) fn new(address: Address, access: MemcachedAccess, machine: Arc<dyn Clock>) -> Self {
        let connection = Reconnecting::new(&address.to_string());
        Self { address, access, connection, time: Arc::new(ServerTime::new(machine)) }
    }

    #[cfg(any(feature = "memcached-rustls", feature = "testing"))]
    pub(super) fn address(&self) -> &Address {
        &self.address
    }

    pub(super) fn time(&self) -> &ServerTime {
        &self.time
    }

    /// Requests the server's time in a background task, if the last request was at least a minute
    /// ago. `within` is the timeout of the request.
    pub(super) fn learn_time(&self, open: &Arc<WithCalls<MemcachedConnection>>, within: Duration) {
        if self.time().is_due() {
            let (open, time) = (Arc::clone(open), Arc::clone(&self.time));
            tokio::spawn(async move { timeout(within, learn(&open, &time)).await });
        }
    }

    /// Returns an error if too many calls are in flight.
    pub(super) fn overload(&self) -> Option<StorageError> {
        self.connection.overload()
    }

    /// Returns an open connection. Waits for one until `deadline`.
    pub(super) async fn open(&self, deadline: Instant) -> Result<Arc<WithCalls<MemcachedConnection>>, StorageError> {
        let Self { address, access, connection, time } = self;
        if Instant::now() >= deadline {
            return Err(connection.not_connected());
        }
        connection.get(deadline, || connect(address.clone(), access.clone(), Arc::clone(time))).await
    }

    /// Sends a request once, without retries, and returns the reply. The future may be dropped at
    /// any time.
    pub(super) async fn send(
        &self,
        open: &Arc<WithCalls<MemcachedConnection>>,
        request: Request,
        deadline: Instant,
    ) -> Result<Reply, StorageError> {
        let call = self.connection.begin(open, deadline).await?;
        let Ok(reply) = timeout_at(deadline, open.send(request.bytes)).await else {
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
            Err(unanswered @ NoReply::NotSent) => StorageError::unreachable(self.name(), unanswered.why()),
            Err(unanswered @ NoReply::Lost(_)) => StorageError::connection_lost(self.name(), unanswered.why()),
        };
        Err(if request.changes { error } else { error.uncounted() })
    }

    /// Returns the error of a reply that does not match its request, and closes the connection,
    /// because later replies may be mismatched too.
    pub(super) fn unexpected(
        &self,
        open: &Arc<WithCalls<MemcachedConnection>>,
        changes: bool,
        reply: &Reply,
    ) -> StorageError {
        self.connection.give_up(open, None);
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
        self.connection.name()
    }
}

/// Opens a connection, waits for the first reply, logs in, and requests the server's time. An
/// accepted TCP connection is not enough: a server that hangs, or that has too many connections,
/// still accepts them.
async fn connect(
    address: Address,
    access: MemcachedAccess,
    time: Arc<ServerTime>,
) -> Result<WithCalls<MemcachedConnection>, StorageError> {
    let (server, first) = (address.to_string(), FirstBytes::default());
    let failed = |why| StorageError::unreachable(&server, why);
    let connected = async {
        let stream = net::open(&address, access.tls.as_ref(), &first).await;
        let mut stream = stream.map_err(|error| failed(error.to_string()))?;
        access.begin(&server, &mut stream).await?;
        let connection = MemcachedConnection::new(stream);
        match connection.send(NOOP.to_vec()).await.map_err(|unanswered| failed(unanswered.why()))? {
            Reply::Noop => learn(&connection, &time).await.map_err(failed)?,
            other => return Err(failed(format!("unexpected reply {:?} to a meta command", other.word()))),
        }
        Ok(WithCalls::new(connection))
    };
    net::connecting(&server, "memcached", &first, connected).await
}

/// Requests the server's time. Also succeeds if the server reports no time, as some proxies do.
async fn learn(connection: &MemcachedConnection, time: &ServerTime) -> Result<(), String> {
    let requested_at = time.machine();
    if let Reply::Stats { time: Some(seconds) } = connection.send(STATS.to_vec()).await.map_err(NoReply::why)? {
        time.learn(requested_at, seconds);
    }
    Ok(())
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Node").field(&self.connection).finish()
    }
}

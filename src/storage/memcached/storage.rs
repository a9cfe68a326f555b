use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::MemcachedStorageError;
use super::client::Client;
use super::server_time::MachineClock;
use super::url::Target;
use crate::error::or_panic;
use crate::storage::cas::skew;
use crate::storage::net::overloaded;
use crate::storage::url::checked_prefix;
use crate::storage::{Cas, Clock, Storage, StorageRequest, deadline};
use crate::{ConfigError, Decision, Key, Policy};

/// Shares states between processes on memcached servers (1.6.10 or later).
///
/// ```
/// use std::time::Duration;
/// use tower_ratelimit::storage::MemcachedStorage;
///
/// let storage = MemcachedStorage::new("memcached://one,two/?prefix=shop")?.deadline(Duration::from_millis(50));
///
/// let error = MemcachedStorage::new("http://one").unwrap_err();
/// assert!(error.to_string().starts_with("cannot read the URL \"http://one\": its scheme is \"http\", write memcached://"));
/// # Ok::<(), tower_ratelimit::ConfigError>(())
/// ```
///
/// A hit loads the state of its key, decides, and stores the new state by compare-and-swap. That takes
/// two round trips, and never admits more than the limit. [`Cas`] has the details. A hit that loses every
/// race is refused as [contended](crate::Decision::is_contended).
///
/// | option of the URL | default | meaning |
/// |---|---|---|
/// | `prefix` | `rl` | the prefix of all keys |
/// | `deadline` | `100ms` | the timeout of a call |
/// | `max-skew` | `5s` | [`max_skew`](Self::max_skew) |
/// | `long-logs` | `refuse` | `allow` calls [`allow_long_logs`](Self::allow_long_logs) |
///
/// A policy that can keep more than 1,000 log entries per key is rejected when the limiter or layer is
/// built: see [long logs](crate::guide::several_processes#long-logs).
///
/// Clones share one connection per server. It needs a tokio runtime with time and I/O, and can be created
/// outside of one.
///
/// | question | guide |
/// |---|---|
/// | URLs, several servers, limits of memcached | [several processes](crate::guide::several_processes#memcached) |
/// | clocks | [several processes](crate::guide::several_processes#clocks) |
/// | the effect of each fault, and its duration | [outages](crate::guide::outages#memcached) |
/// | the keys on the server | [operating](crate::guide::operating#keys-on-memcached) |
///
/// # Errors
///
/// Calls fail with [`MemcachedStorageError`] if a server fails or does not answer within the timeout. A
/// state that was sent is not sent again, because the server may have stored it: see
/// [`may_have_counted`](MemcachedStorageError::may_have_counted).
#[derive(Clone)]
pub struct MemcachedStorage {
    client: Client,
    prefix: Arc<str>,
    deadline: Duration,
    long_logs: bool,
    max_skew: Duration,
    /// Where time is not this machine's: in tests.
    clock: Option<Arc<dyn Clock>>,
    cas: Cas<Client>,
}

impl MemcachedStorage {
    /// Creates a storage on the servers that `url` names. It does not connect yet.
    ///
    /// # Errors
    ///
    /// Returns an error if the URL cannot be parsed.
    pub fn new(url: &str) -> Result<Self, ConfigError> {
        let Target { servers, prefix, deadline, long_logs, max_skew } = Target::parse(url)?;
        let machine: Arc<dyn Clock> = Arc::new(MachineClock);
        let client = Client::new(servers, &prefix, deadline, &machine);
        let cas = Cas::new(client.clone());
        Ok(Self { client, prefix: prefix.into(), deadline, long_logs, max_skew, clock: None, cas }.renewed())
    }

    /// The same, where what decides knows of what was changed.
    fn renewed(mut self) -> Self {
        // A little sooner than who waits gives up, who then hears which server it was.
        self.client = self.client.with(&self.prefix, self.deadline * 15 / 16);
        self.cas = Cas::new(self.client.clone()).deadline(self.deadline).max_skew(self.max_skew);
        if !self.long_logs {
            self.cas = self.cas.without_long_logs();
        }
        if let Some(clock) = &self.clock {
            self.cas = self.cas.clock(Arc::clone(clock));
        }
        self
    }

    /// Sets the prefix of all keys, in place of the URL's. Defaults to `rl`. Use different prefixes for
    /// programs that share a server and must not share counts.
    ///
    /// # Panics
    ///
    /// Panics if `prefix` is not 1 to 64 ASCII characters, or contains white space, `{` or `}`.
    /// [`try_prefix`](Self::try_prefix) returns an error instead.
    #[must_use]
    #[track_caller]
    pub fn prefix(self, prefix: &str) -> Self {
        or_panic(self.try_prefix(prefix))
    }

    /// As [`prefix`](Self::prefix), without panics.
    ///
    /// # Errors
    ///
    /// Returns an error if `prefix` is not 1 to 64 ASCII characters, or contains white space, `{` or `}`.
    pub fn try_prefix(self, prefix: &str) -> Result<Self, ConfigError> {
        checked_prefix(prefix)?;
        Ok(Self { prefix: prefix.into(), ..self }.renewed())
    }

    /// Sets the timeout of a call, in place of the URL's. Defaults to 100 milliseconds.
    ///
    /// # Panics
    ///
    /// Panics if `deadline` is less than a millisecond or more than an hour.
    /// [`try_deadline`](Self::try_deadline) returns an error instead.
    #[must_use]
    #[track_caller]
    pub fn deadline(self, deadline: Duration) -> Self {
        or_panic(self.try_deadline(deadline))
    }

    /// As [`deadline`](Self::deadline), without panics.
    ///
    /// # Errors
    ///
    /// Returns an error if `deadline` is less than a millisecond or more than an hour.
    pub fn try_deadline(self, deadline: Duration) -> Result<Self, ConfigError> {
        deadline::checked(deadline)?;
        Ok(Self { deadline, ..self }.renewed())
    }

    /// Allows policies that can keep more than 1,000 log entries per key. By default they are rejected.
    ///
    /// Of the library's strategies only the moving window keeps a log. Each hit loads and stores the whole
    /// log: with 5,000 entries that is 95 kB in each direction. Prefer
    /// [`SlidingWindowCounter`](crate::SlidingWindowCounter), which keeps two numbers.
    #[must_use]
    pub fn allow_long_logs(self) -> Self {
        Self { long_logs: true, ..self }.renewed()
    }

    /// Sets how far the newest decision on a key may be ahead of this node's clock, in place of the URL's.
    /// Defaults to 5 seconds. The guide explains [clocks](crate::guide::several_processes#clocks).
    ///
    /// # Panics
    ///
    /// Panics if `max_skew` is more than a day. [`try_max_skew`](Self::try_max_skew) returns an error
    /// instead.
    #[must_use]
    #[track_caller]
    pub fn max_skew(self, max_skew: Duration) -> Self {
        or_panic(self.try_max_skew(max_skew))
    }

    /// As [`max_skew`](Self::max_skew), without panics.
    ///
    /// # Errors
    ///
    /// Returns an error if `max_skew` is more than a day.
    pub fn try_max_skew(self, max_skew: Duration) -> Result<Self, ConfigError> {
        Ok(Self { max_skew: skew::checked(max_skew)?, ..self }.renewed())
    }

    /// Sets the clock, in place of the machine's and the servers'; for tests (feature `testing`).
    #[cfg(feature = "testing")]
    #[must_use]
    pub fn clock(self, clock: impl Clock) -> Self {
        Self { clock: Some(Arc::new(clock)), ..self }.renewed()
    }

    /// Sets the machine's clock; for tests of clocks that differ (feature `testing`). Unlike
    /// [`clock`](Self::clock), it is corrected by the servers' time. The returned storage has new
    /// connections.
    #[cfg(feature = "testing")]
    #[must_use]
    pub fn machine_clock(mut self, machine: impl Clock) -> Self {
        let machine: Arc<dyn Clock> = Arc::new(machine);
        self.client = self.client.reconnected(&machine);
        self.renewed()
    }

    /// Waits until all servers answer. Call it before a program takes traffic. It tries again until
    /// `timeout` has passed.
    ///
    /// # Errors
    ///
    /// Returns the last error when `timeout` has passed.
    pub async fn ready(&self, timeout: Duration) -> Result<(), MemcachedStorageError> {
        self.client.ready(Instant::now() + timeout.min(FOREVER)).await
    }
}

/// An instant that is further away cannot be counted on every system.
const FOREVER: Duration = Duration::from_secs(365 * 86_400);

type Later<T> = Pin<Box<dyn Future<Output = Result<T, MemcachedStorageError>> + Send>>;

impl Storage for MemcachedStorage {
    type Error = MemcachedStorageError;
    type DecideFuture = Later<Decision>;
    type UpdateFuture = Later<()>;

    fn decide(&self, ask: StorageRequest<'_>) -> Self::DecideFuture {
        if let Some(error) = self.client.overload(self.cas.busy_keys()) {
            return Box::pin(overloaded(error, self.deadline));
        }
        let decided = self.cas.decide(ask);
        Box::pin(async { Ok(decided.await?) })
    }

    fn clear(&self, policy: &Policy, key: &Key) -> Self::UpdateFuture {
        let done = self.cas.clear(policy, key);
        Box::pin(async { Ok(done.await?) })
    }

    fn refund(&self, policy: &Policy, key: &Key, decision: &Decision) -> Self::UpdateFuture {
        let done = self.cas.refund(policy, key, decision);
        Box::pin(async { Ok(done.await?) })
    }

    fn validate(&self, policy: &Policy) -> Result<(), ConfigError> {
        self.cas.validate(policy)
    }
}

impl fmt::Debug for MemcachedStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { client, prefix, deadline, .. } = self;
        f.debug_struct("MemcachedStorage")
            .field("servers", client)
            .field("prefix", prefix)
            .field("deadline", deadline)
            .finish()
    }
}

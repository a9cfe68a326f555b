use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::client::Client;
use super::server_time::MachineClock;
use super::url::MemcachedUrl;
use crate::decision::Decision;
use crate::error::{ConfigError, or_panic};
use crate::key::Key;
use crate::policy::Policy;
use crate::storage::calls::measured;
use crate::storage::net::overloaded;
use crate::storage::url::checked_prefix;
use crate::storage::{Cas, Clock, Storage, StorageError, StorageErrorKind, StorageFuture, StorageRequest, deadline};

/// Shares rate limit states between processes through memcached (1.6.10 or later).
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use tower_ratelimit::storage::MemcachedStorage;
///
/// let storage = MemcachedStorage::new("memcached://one,two/?prefix=shop")?.timeout(Duration::from_millis(50));
///
/// let error = MemcachedStorage::new("http://one").unwrap_err();
/// assert!(error.to_string().starts_with("cannot read the URL \"http://one\": unknown scheme \"http\": write memcached://"));
/// # Ok::<(), tower_ratelimit::ConfigError>(())
/// ```
///
/// # Decisions
///
/// A hit loads the state of its key, decides, and stores the new state by compare-and-swap. That
/// takes two round trips, or one if the state does not change, as after most refusals. All
/// processes together never admit more than the limit. A hit that loses every race is refused as
/// [contended](crate::Decision::is_contended). [`Cas`] has the details.
///
/// A policy that can keep more than 1,000 log entries per key is rejected when the limiter or layer
/// is built: see [long logs](crate::guide::several_processes#long-logs). A policy that can keep
/// more than 1 MB per key, about 55,000 entries, is always rejected.
///
/// # Options
///
/// | option of the URL | default | meaning |
/// |---|---|---|
/// | `prefix` | `rl` | the prefix of all keys |
/// | `timeout` | `100ms` | the timeout of a call, such as `50ms` or `2s` |
/// | `max-skew` | `5s` | the largest clock skew, as [`max_skew`](Self::max_skew) |
/// | `long-logs` | `refuse` | `allow` has the effect of [`allow_long_logs`](Self::allow_long_logs) |
///
/// # Connections
///
/// Clones share one connection per server. Calls need a tokio runtime with time and I/O enabled.
/// The storage can be created outside of a runtime.
///
#[doc = include_str!("server.md")]
///
/// # Errors
///
/// Calls fail with [`StorageError`] if the server of the key is unreachable, fails, or does not
/// reply within the timeout. They also fail if 1,024 calls are in flight on its connection, or
/// fewer while calls time out. A write that was sent is not retried, because the server may have
/// executed it: see [`may_have_counted`](StorageError::may_have_counted).
#[derive(Clone)]
pub struct MemcachedStorage {
    client: Client,
    prefix: Arc<str>,
    deadline: Duration,
    cas: Cas<Client>,
}

impl MemcachedStorage {
    /// Creates a storage on the servers in `url`. It connects to each server on first use.
    ///
    /// # Errors
    ///
    /// Returns an error if the URL cannot be parsed.
    pub fn new(url: &str) -> Result<Self, ConfigError> {
        let MemcachedUrl { servers, prefix, deadline, long_logs, max_skew } = MemcachedUrl::parse(url)?;
        let machine: Arc<dyn Clock> = Arc::new(MachineClock);
        let client = Client::new(servers, &prefix, deadline, &machine);
        let cas = Cas::new(client.clone()).metrics_label(LABEL).max_skew(max_skew).long_logs(long_logs);
        Ok(Self { client, prefix: prefix.into(), deadline, cas }.with_changed_client())
    }

    /// Applies a changed prefix, timeout or client.
    fn with_changed_client(mut self) -> Self {
        // The client times out shortly before `cas`, because its error names the server.
        self.client = self.client.with(&self.prefix, self.deadline * 15 / 16);
        Self { cas: self.cas.with_store(self.client.clone()).timeout(self.deadline), ..self }
    }

    /// Sets the prefix of all keys. Overrides the URL. Defaults to `rl`.
    ///
    /// Programs with the same prefix on the same servers share their counts.
    ///
    /// # Panics
    ///
    /// Panics if `prefix` is not 1 to 64 printable ASCII characters, or contains a space, `{` or
    /// `}`.
    #[must_use]
    #[track_caller]
    pub fn prefix(self, prefix: &str) -> Self {
        or_panic(checked_prefix(prefix));
        Self { prefix: prefix.into(), ..self }.with_changed_client()
    }

    /// Sets the timeout of a call. Overrides the URL. Defaults to 100 milliseconds.
    ///
    /// # Panics
    ///
    /// Panics if `timeout` is less than a millisecond or more than an hour.
    #[must_use]
    #[track_caller]
    pub fn timeout(self, timeout: Duration) -> Self {
        or_panic(deadline::checked(timeout));
        Self { deadline: timeout, ..self }.with_changed_client()
    }

    /// Allows policies that can keep more than 1,000 log entries per key. Overrides the URL. By
    /// default, such policies are rejected. Policies that can keep more than 1 MB per key, about
    /// 55,000 entries, are always rejected.
    ///
    /// Of the built-in strategies, only the moving window keeps a log. Each admitted hit loads and
    /// stores the whole log: 5,000 entries are 95 kB in each direction. Prefer
    /// [`SlidingWindowCounter`](crate::SlidingWindowCounter), which keeps two numbers.
    #[must_use]
    pub fn allow_long_logs(self) -> Self {
        Self { cas: self.cas.long_logs(true), ..self }
    }

    /// Sets the time by which the newest decision on a key may be ahead of this process's estimate
    /// of the server's time. Overrides the URL. Defaults to 5 seconds.
    ///
    /// If the decision is further ahead, the process corrects its estimate and logs a warning
    /// (feature `tracing`). [`Cas::max_skew`] has the details, also for zero. The guide explains
    /// [clock skew](crate::guide::several_processes#clocks).
    ///
    /// # Panics
    ///
    /// Panics if `max_skew` is more than a day.
    #[must_use]
    #[track_caller]
    pub fn max_skew(self, max_skew: Duration) -> Self {
        Self { cas: self.cas.max_skew(max_skew), ..self }
    }

    /// Decides by `clock` instead of the servers' time. Use it in tests (feature `testing`).
    #[cfg(feature = "testing")]
    #[must_use]
    pub fn clock(self, clock: impl Clock) -> Self {
        Self { cas: self.cas.clock(clock), ..self }
    }

    /// Replaces this machine's clock. Use it in tests of clock skew (feature `testing`).
    ///
    /// The storage corrects `machine` by the time that the servers report. It does not correct the
    /// clock that [`clock`](Self::clock) sets. The returned storage opens new connections.
    #[cfg(feature = "testing")]
    #[must_use]
    pub fn machine_clock(mut self, machine: impl Clock) -> Self {
        let machine: Arc<dyn Clock> = Arc::new(machine);
        self.client = self.client.reconnected(&machine);
        self.with_changed_client()
    }

    /// Waits until all servers have replied, for at most `timeout`. Call this method before the
    /// program accepts traffic.
    ///
    /// # Errors
    ///
    /// Returns the last error of the first server that does not reply within `timeout`.
    pub async fn ready(&self, timeout: Duration) -> Result<(), StorageError> {
        self.client.ready(Instant::now() + timeout.min(MAX_TIMEOUT)).await
    }
}

/// The label `storage` of the metrics.
const LABEL: &str = "memcached";

/// The longest timeout of `ready`. A later instant can overflow on some systems.
const MAX_TIMEOUT: Duration = Duration::from_secs(365 * 86_400);

impl Storage for MemcachedStorage {
    fn decide(&self, request: StorageRequest<'_>) -> StorageFuture<Decision> {
        if let Some(error) = self.client.overload(self.cas.busy_keys()) {
            return StorageFuture::new(measured(LABEL, overloaded(error, self.deadline)));
        }
        self.cas.decide(request)
    }

    fn clear(&self, policy: &Policy, key: &Key) -> StorageFuture<()> {
        self.cas.clear(policy, key)
    }

    fn settle(&self, policy: &Policy, key: &Key, decision: &Decision, actual: u32) -> StorageFuture<()> {
        self.cas.settle(policy, key, decision, actual)
    }

    /// Checks that all servers reply, within one timeout.
    fn check(&self) -> StorageFuture<()> {
        let (client, timeout) = (self.client.clone(), self.deadline);
        StorageFuture::new(async move { client.ping(Instant::now() + timeout).await })
    }

    /// Fails, because memcached cannot list its keys.
    fn clear_all(&self) -> StorageFuture<u64> {
        let message = "memcached cannot list its keys; use another prefix, or empty the servers with flush_all";
        StorageFuture::ready(Err(StorageError::new(StorageErrorKind::Unsupported, message)))
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
            .field("timeout", deadline)
            .finish()
    }
}

mod access;
mod decide;
mod error;
mod lease;
mod link;
mod store;
mod url;
mod wire;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use self::lease::Leases;
use self::link::Members;
use self::store::Store;
use self::url::EtcdUrl;
use crate::error::{ConfigError, or_panic};
use crate::storage::net::until_ready;
use crate::storage::url::checked_prefix;
use crate::storage::{Cas, StorageError, deadline, names};

/// Shares rate limit states between processes through etcd (3.4 or later).
///
/// A majority of the members stores each write on disk, so the storage tolerates the loss of a
/// minority. Use it for limits that must survive the loss of a server, at up to a few hundred hits
/// per second. For thousands of hits per second, use `RedisStorage`.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use tower_ratelimit::storage::EtcdStorage;
///
/// let storage =
///     EtcdStorage::new("etcd://localhost/?prefix=shop")?.timeout(Duration::from_millis(50));
///
/// let error = EtcdStorage::new("http://localhost").unwrap_err();
/// let expected = "cannot read the URL \"http://localhost\": unknown scheme \"http\"";
/// assert!(error.to_string().starts_with(expected));
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
/// Each process decides by the clock of its own machine. The guide has the bounds for [different
/// clocks](crate::guide::several_processes#clocks).
///
/// A policy that can keep more than 1,000 log entries per key is rejected when the limiter or layer
/// is built: see [long logs](crate::guide::several_processes#long-logs). A policy that can keep
/// more than 1.5 MB per key, about 75,000 entries, is always rejected.
///
/// # Options
///
/// The URL has the scheme `etcd`, or `etcds` for TLS (feature `etcd-rustls`).
///
/// | option of the URL | default | meaning |
/// |---|---|---|
/// | `prefix` | `rl` | the prefix of all keys |
/// | `timeout` | `100ms` | the timeout of a call, such as `50ms` or `2s` |
/// | `max-skew` | `5s` | the largest clock skew, as [`max_skew`](Self::max_skew) |
/// | `long-logs` | `refuse` | `allow` has the effect of [`allow_long_logs`](Self::allow_long_logs) |
/// | `ca` | the system's certificates | for TLS, a PEM file with the certificates to trust |
/// | `cert`, `key` | none | for TLS, PEM files with a client certificate and its private key |
///
/// # Connections
///
/// Clones share one connection per member. Calls need a tokio runtime with time and I/O enabled.
/// The storage can be created outside of a runtime.
///
#[doc = include_str!("server.md")]
///
/// # Errors
///
/// Calls fail with [`StorageError`] if no member is reachable, if etcd rejects the call, or if it
/// does not reply within the timeout. They also fail if 1,024 calls are in flight on the connection
/// to a member, or fewer while calls time out. A write that etcd may have executed is not retried:
/// see [`may_have_counted`](StorageError::may_have_counted).
#[derive(Clone)]
pub struct EtcdStorage {
    store: Store,
    cas: Cas<Store>,
}

impl EtcdStorage {
    /// Creates a storage for the members in `url`. It connects on first use, but with TLS it loads
    /// the certificates and the private key immediately.
    ///
    /// # Errors
    ///
    /// Returns an error if the URL cannot be parsed, if it needs a feature that is not enabled, or
    /// if a certificate or the private key cannot be loaded. The error quotes the URL without its
    /// login and its options.
    pub fn new(url: &str) -> Result<Self, ConfigError> {
        let EtcdUrl { members, access, prefix, deadline, long_logs, max_skew } = EtcdUrl::parse(url)?;
        let (members, leases) = (Members::new(members, access), Arc::new(Leases::new()));
        let store = Store { members, leases, prefix: names::prefix(&prefix), deadline };
        let cas = Cas::new(store.clone()).metrics_label(LABEL).timeout(deadline).max_skew(max_skew);
        Ok(Self { store, cas: cas.long_logs(long_logs) })
    }

    fn with_changed_store(self) -> Self {
        Self { cas: self.cas.with_store(self.store.clone()), ..self }
    }

    /// Sets the prefix of all keys. Overrides the URL. Defaults to `rl`.
    ///
    /// Programs with the same prefix on the same etcd cluster share their counts.
    ///
    /// # Panics
    ///
    /// Panics if `prefix` is not 1 to 64 printable ASCII characters, or contains a space, `{` or
    /// `}`.
    #[must_use]
    #[track_caller]
    pub fn prefix(mut self, prefix: &str) -> Self {
        or_panic(checked_prefix(prefix));
        self.store.prefix = names::prefix(prefix);
        self.with_changed_store()
    }

    /// Sets the timeout of a call. Overrides the URL. Defaults to 100 milliseconds.
    ///
    /// # Panics
    ///
    /// Panics if `timeout` is less than a millisecond or more than an hour.
    #[must_use]
    #[track_caller]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        or_panic(deadline::checked(timeout));
        self.store.deadline = timeout;
        self.cas = self.cas.timeout(timeout);
        self.with_changed_store()
    }

    /// Allows policies that can keep more than 1,000 log entries per key. Overrides the URL. By
    /// default, such policies are rejected. Policies that can keep more than 1.5 MB per key, about
    /// 75,000 entries, are always rejected.
    ///
    /// Of the built-in strategies, only the moving window keeps a log. Each admitted hit loads and
    /// stores the whole log, and etcd keeps old versions until it compacts them. In a test,
    /// `moving-window 5000/day` wrote 41 kB per hit and filled 256 MB in 11,400 hits. Prefer
    /// [`SlidingWindowCounter`](crate::SlidingWindowCounter), which keeps two numbers.
    #[must_use]
    pub fn allow_long_logs(self) -> Self {
        Self { cas: self.cas.long_logs(true), ..self }
    }

    /// Sets the time by which the newest decision on a key may be ahead of this machine's clock.
    /// Overrides the URL. Defaults to 5 seconds.
    ///
    /// If the decision is further ahead, the process corrects this machine's clock and logs a
    /// warning (feature `tracing`). [`Cas::max_skew`] has the details, also for zero. The guide
    /// explains [clock skew](crate::guide::several_processes#clocks).
    ///
    /// # Panics
    ///
    /// Panics if `max_skew` is more than a day.
    #[must_use]
    #[track_caller]
    pub fn max_skew(self, max_skew: Duration) -> Self {
        Self { cas: self.cas.max_skew(max_skew), ..self }
    }

    /// Decides by `clock` instead of this machine's clock. Use it in tests (feature `testing`).
    #[cfg(feature = "testing")]
    #[must_use]
    pub fn clock(self, clock: impl crate::storage::Clock) -> Self {
        Self { cas: self.cas.clock(clock), ..self }
    }

    /// Waits until etcd can decide, for at most `timeout`: a majority of its members replies, and
    /// the user may read the keys of the storage. Call this method before the program accepts
    /// traffic.
    ///
    /// # Errors
    ///
    /// Returns the last error if etcd cannot decide within `timeout`.
    pub async fn ready(&self, timeout: Duration) -> Result<(), StorageError> {
        until_ready(Instant::now() + timeout.min(LONGEST_WAIT), |deadline| self.store.ping(deadline)).await
    }
}

/// The label `storage` of the metrics.
const LABEL: &str = "etcd";

/// The longest timeout of `ready`. An instant in the far future can overflow on some systems.
const LONGEST_WAIT: Duration = Duration::from_secs(365 * 86_400);

impl fmt::Debug for EtcdStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Store { members, prefix, deadline, .. } = &self.store;
        f.debug_struct("EtcdStorage")
            .field("members", members)
            .field("prefix", prefix)
            .field("timeout", deadline)
            .finish_non_exhaustive()
    }
}

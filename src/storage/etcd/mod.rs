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

pub use self::error::EtcdStorageError;
use self::lease::Leases;
use self::link::Members;
use self::store::Store;
use self::url::Target;
use crate::ConfigError;
use crate::error::or_panic;
use crate::storage::cas::skew;
use crate::storage::net::until_ready;
use crate::storage::url::checked_prefix;
use crate::storage::{Cas, Clock, deadline};

/// Shares states between processes in etcd (3.4 or later), and tolerates the loss of a member.
///
/// ```
/// use std::time::Duration;
/// use tower_ratelimit::storage::EtcdStorage;
///
/// let storage = EtcdStorage::new("etcd://localhost/?prefix=shop")?.deadline(Duration::from_millis(50));
///
/// let error = EtcdStorage::new("http://localhost").unwrap_err();
/// assert!(error.to_string().starts_with("cannot read the URL \"http://localhost\": its scheme is \"http\", write etcd://"));
/// # Ok::<(), tower_ratelimit::ConfigError>(())
/// ```
///
/// Every admitted hit is a write that a majority of the members stores on disk. Use it for limits that
/// must survive the loss of a server, at some hundreds of hits per second. For thousands, use
/// `RedisStorage`.
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
/// | `ca` | the system's roots | for TLS, a PEM file with the certificates to trust |
///
/// A policy that can keep more than 1,000 log entries per key is rejected when the limiter or layer is
/// built: see [long logs](crate::guide::several_processes#long-logs). Beyond 1.5 MB, some 75,000 entries,
/// it is rejected in any case.
///
/// Clones share one connection per member. It needs a tokio runtime with time and I/O, and can be created
/// outside of one.
///
/// | question | guide |
/// |---|---|
/// | URLs for several members, logins and TLS | [several processes](crate::guide::several_processes#etcd) |
/// | clocks | [several processes](crate::guide::several_processes#clocks) |
/// | the effect of each fault, and its duration | [outages](crate::guide::outages#etcd) |
/// | keys, and the compaction that etcd needs | [operating](crate::guide::operating#etcd) |
///
/// # Errors
///
/// Calls fail with [`EtcdStorageError`] if no member answers within the timeout. A swap that was sent is
/// not sent again, because etcd may have executed it: see
/// [`may_have_counted`](EtcdStorageError::may_have_counted).
#[derive(Clone)]
pub struct EtcdStorage {
    store: Store,
    /// Where time is not this machine's: in tests.
    clock: Option<Arc<dyn Clock>>,
    long_logs: bool,
    max_skew: Duration,
    deciding: Cas<Store>,
}

impl EtcdStorage {
    /// Creates a storage on the members that `url` names. It does not connect yet.
    ///
    /// # Errors
    ///
    /// Returns an error if the URL cannot be parsed, or needs a feature that is not enabled. The error quotes
    /// the URL without its login.
    pub fn new(url: &str) -> Result<Self, ConfigError> {
        let Target { members, access, prefix, deadline, long_logs, max_skew } = Target::parse(url)?;
        let (members, leases) = (Members::new(members, access), Arc::new(Leases::new()));
        let store = Store { members, leases, prefix: prefix.into(), deadline };
        let deciding = Cas::new(store.clone());
        Ok(Self { store, clock: None, long_logs, max_skew, deciding }.rebuilt())
    }

    /// The same with a `Cas` that has the current settings.
    fn rebuilt(mut self) -> Self {
        self.deciding = Cas::new(self.store.clone()).deadline(self.store.deadline).max_skew(self.max_skew);
        if !self.long_logs {
            self.deciding = self.deciding.without_long_logs();
        }
        if let Some(clock) = &self.clock {
            self.deciding = self.deciding.clock(Arc::clone(clock));
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
    pub fn try_prefix(mut self, prefix: &str) -> Result<Self, ConfigError> {
        checked_prefix(prefix)?;
        self.store.prefix = prefix.into();
        Ok(self.rebuilt())
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
    pub fn try_deadline(mut self, deadline: Duration) -> Result<Self, ConfigError> {
        deadline::checked(deadline)?;
        self.store.deadline = deadline;
        Ok(self.rebuilt())
    }

    /// Allows policies that can keep more than 1,000 log entries per key. By default they are
    /// rejected.
    ///
    /// Of the library's strategies only the moving window keeps a log. Each hit loads and stores
    /// the whole log, and etcd keeps the old ones until it compacts them. `moving-window 5000/day`
    /// wrote 41 kB per hit and filled 256 MB in 11,400 hits. Prefer
    /// [`SlidingWindowCounter`](crate::SlidingWindowCounter), which keeps two numbers.
    #[must_use]
    pub fn allow_long_logs(self) -> Self {
        Self { long_logs: true, ..self }.rebuilt()
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
        Ok(Self { max_skew: skew::checked(max_skew)?, ..self }.rebuilt())
    }

    /// Sets the clock, in place of the machine's; for tests (feature `testing`).
    #[cfg(feature = "testing")]
    #[must_use]
    pub fn clock(self, clock: impl Clock) -> Self {
        Self { clock: Some(Arc::new(clock)), ..self }.rebuilt()
    }

    /// Waits until etcd answers, which takes a majority of its members. Call it before a program takes
    /// traffic. It tries again until `timeout` has passed.
    ///
    /// # Errors
    ///
    /// Returns the last error when `timeout` has passed.
    pub async fn ready(&self, timeout: Duration) -> Result<(), EtcdStorageError> {
        until_ready(Instant::now() + timeout.min(FOREVER), |deadline| self.store.look(deadline)).await
    }

    /// Deletes all keys of the prefix in one call, also those of other processes that use it. Returns the
    /// number of keys that were deleted.
    ///
    /// # Errors
    ///
    /// Returns an error if etcd does not answer within the [timeout](Self::deadline). The keys may be deleted
    /// all the same.
    pub async fn reset(&self) -> Result<u64, EtcdStorageError> {
        self.store.reset().await
    }
}

/// An instant that is further away cannot be counted on every system.
const FOREVER: Duration = Duration::from_secs(365 * 86_400);

impl fmt::Debug for EtcdStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Store { members, prefix, deadline, .. } = &self.store;
        f.debug_struct("EtcdStorage")
            .field("members", members)
            .field("prefix", prefix)
            .field("deadline", deadline)
            .finish_non_exhaustive()
    }
}

//! Storages: the trait, the memory storage, shared storages, and wrappers around them.
//!
//! | storage | for | feature |
//! |---|---|---|
//! | [`MemoryStorage`] | one process; the default | |
//! | `RedisStorage` | several processes, on Redis or Valkey | `redis` |
//! | `MemcachedStorage` | several processes, on memcached | `memcached` |
//! | `EtcdStorage` | several processes, on etcd | `etcd` |
//! | `PostgresStorage` | several processes, on PostgreSQL | `postgres` |
//! | `SqliteStorage` | the processes of one machine; survives restarts | `sqlite` |
//! | [`Cas`] | your own store, by two methods of [`CasStorage`] | |
//! | [`AnyStorage`] | a storage that is chosen at run time, for example by a URL | |
//!
//! Every strategy runs on every storage, with two exceptions. Storages on servers reject policies
//! whose logs can become [too long](crate::guide::several_processes#long-logs), and [`Leases`]
//! accept only a single fixed window.
//!
//! A wrapper is a storage around another storage. This table lists them from the inside out:
//!
//! | wrapper | adds |
//! |---|---|
//! | [`Timeout`] | a timeout; the shared storages already have one |
//! | [`Breaker`] | a circuit breaker, with an optional fallback |
//! | [`RefusalCache`] | refusals without a round trip |
//! | [`Leases`] | hits without a round trip |
//!
//! The guide on [several processes](crate::guide::several_processes) helps to choose a storage, and
//! lists the round trips of each. The guide on [outages](crate::guide::outages) lists the requests
//! that fail during an outage.

mod any;
mod breaker;
mod calls;
mod cas;
mod clock;
mod counters;
#[cfg(any(feature = "redis", feature = "etcd"))]
mod credentials;
mod deadline;
mod error;
#[cfg(feature = "etcd")]
mod etcd;
mod infallible;
mod key_table;
mod leases;
#[cfg(feature = "memcached")]
mod memcached;
mod memory;
mod names;
#[cfg(any(feature = "redis", feature = "memcached", feature = "etcd", feature = "postgres"))]
mod net;
#[cfg(feature = "postgres")]
mod postgres;
#[cfg(feature = "redis")]
mod redis;
mod refusal_cache;
#[cfg(feature = "sqlite")]
mod sqlite;
mod storage_url;
mod text;
mod timeout;
#[cfg(any(feature = "redis", feature = "etcd", feature = "postgres"))]
mod tls;
#[cfg(any(feature = "redis", feature = "memcached", feature = "etcd", feature = "postgres", feature = "sqlite"))]
mod url;

use std::fmt;
use std::future::ready;

use crate::strategy::Status;
use crate::{BoxError, ConfigError, Decision, Key, Op, Policy, Timestamp};

pub use self::any::{AnyFuture, AnyStorage};
#[cfg(feature = "metrics")]
pub(crate) use self::breaker::PATHS;
pub use self::breaker::{Breaker, Circuit, CircuitState, NoFallback, Phase};
#[cfg(feature = "metrics")]
pub(crate) use self::calls::{IN_FLIGHT, LATENCY};
pub use self::cas::{Cas, CasStorage, Loaded, Swapped};
#[cfg(feature = "coarse-clock")]
pub use self::clock::CoarseClock;
pub use self::clock::{Clock, ManualClock, SystemClock, TokioClock};
#[cfg(any(feature = "redis", feature = "etcd"))]
pub use self::credentials::Credentials;
pub use self::error::{StorageError, StorageErrorKind};
#[cfg(feature = "etcd")]
pub use self::etcd::EtcdStorage;
pub use self::infallible::InfallibleStorage;
pub use self::leases::Leases;
#[cfg(feature = "memcached")]
pub use self::memcached::MemcachedStorage;
pub use self::memory::{MemoryStats, MemoryStorage, MemoryStorageBuilder, OnFull};
#[cfg(feature = "postgres")]
pub use self::postgres::PostgresStorage;
#[cfg(feature = "redis")]
pub use self::redis::RedisStorage;
pub use self::refusal_cache::RefusalCache;
#[cfg(feature = "sqlite")]
pub use self::sqlite::{Durability, SqliteStorage};
pub use self::storage_url::StorageUrl;
pub use self::timeout::Timeout;
#[cfg(any(feature = "redis-rustls", feature = "etcd-rustls", feature = "postgres-rustls"))]
pub use self::tls::TlsConfig;

/// A request to [`Storage::decide`] or [`Storage::try_admit`]: an operation on the states of a key.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct StorageRequest<'a> {
    /// The policy whose limits apply.
    pub policy: &'a Policy,
    /// The rate limit key.
    pub key: &'a Key,
    /// The operation: a hit, a peek or a charge.
    pub op: Op,
    /// The number of units to spend. A cost of 0 spends nothing and is always admitted.
    pub cost: u32,
}

impl<'a> StorageRequest<'a> {
    /// Creates a request for the operation `op` on `cost` units of `key`.
    pub fn new(policy: &'a Policy, key: &'a Key, op: Op, cost: u32) -> Self {
        Self { policy, key, op, cost }
    }
}

/// A decision reduced to the values that response headers report: its time, and the status of one
/// limit. [`Storage::try_admit`] fills it in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "a storage fills in every field")]
pub struct Summary {
    /// The time of the decision, by the wall clock.
    pub at: Timestamp,
    /// The status that [`Decision::shown`] returns for the same decision.
    pub limit: Status,
}

impl Summary {
    /// Returns the decision if [`Storage::try_admit`] has filled in a refusal. Returns `None` if
    /// the caller must call [`Storage::decide`].
    #[inline]
    pub(crate) fn refusal(&self, request: &StorageRequest<'_>) -> Option<Decision> {
        match request.policy.limits() {
            [limit] if !self.limit.is_admitted() && !limit.counts_refusals() => {
                Some(Decision::of(self.at, request.cost, self.limit))
            }
            _ => None,
        }
    }

    /// Removes a refusal from the summary, so that the caller calls [`Storage::decide`]. Returns
    /// `false`, the result of [`Storage::try_admit`] in this case.
    pub(crate) fn remove_refusal(summary: Option<&mut Self>) -> bool {
        if let Some(summary) = summary {
            *summary = Self::default();
        }
        false
    }
}

impl Default for Summary {
    #[inline]
    fn default() -> Self {
        Self { at: Timestamp::EPOCH, limit: Status::admitted(0, 0, 0) }
    }
}

/// Stores the rate limit states of keys, and makes atomic decisions on them.
///
/// For a decision, a storage
///
/// 1. loads the states of the key,
/// 2. calls [`Policy::decide`] with the storage's own time,
/// 3. saves the changed states.
///
/// Nothing else may change the states of the key between these steps. The same applies to
/// [`clear`](Self::clear) and [`settle`](Self::settle). A clone of a storage is another handle to
/// the same states.
///
/// A state belongs to
///
/// - a policy, identified by [`Policy::identity`],
/// - a key,
/// - a limit, identified by its digest in [`Policy::limit_digests`].
///
/// A digest identifies the position, the strategy and the period of a limit. It may differ between
/// builds of a program. A storage that outlives the process must therefore store those three
/// instead of the digest.
///
/// The futures are `'static`, so they own the values that they need. `testing::StorageLaws`
/// (feature `testing`) tests an implementation.
///
/// # Examples
///
/// ```
/// use std::collections::HashMap;
/// use std::convert::Infallible;
/// use std::future::{Ready, ready};
/// use std::sync::{Arc, Mutex};
/// use tower_ratelimit::storage::{StorageRequest, Storage};
/// use tower_ratelimit::strategy::State;
/// use tower_ratelimit::{Decision, Key, Policy, Timestamp};
///
/// /// Keeps all states in a map, and never removes any.
/// #[derive(Clone, Debug, Default)]
/// struct MapStorage(Arc<Mutex<HashMap<(String, Key, u32), State>>>);
///
/// impl MapStorage {
///     fn with_states<T>(&self, policy: &Policy, key: &Key, f: impl FnOnce(&mut [State]) -> T) -> T {
///         let mut map = self.0.lock().unwrap();
///         let name = |digest: &u32| (policy.identity().to_owned(), key.clone(), *digest);
///         let names: Vec<_> = policy.limit_digests().iter().map(name).collect();
///         let mut states: Vec<_> = names.iter().map(|name| map.remove(name).unwrap_or_default()).collect();
///         let result = f(&mut states);
///         map.extend(names.into_iter().zip(states));
///         result
///     }
/// }
///
/// impl Storage for MapStorage {
///     type Error = Infallible;
///     type DecideFuture = Ready<Result<Decision, Infallible>>;
///     type UpdateFuture = Ready<Result<(), Infallible>>;
///
///     fn decide(&self, request: StorageRequest<'_>) -> Self::DecideFuture {
///         let StorageRequest { policy, key, op, cost, .. } = request;
///         let now = Timestamp::wall_clock();
///         ready(Ok(self.with_states(policy, key, |states| policy.decide(states, now, op, cost))))
///     }
///
///     fn clear(&self, policy: &Policy, key: &Key) -> Self::UpdateFuture {
///         ready(Ok(self.with_states(policy, key, |states| states.fill(State::Fresh))))
///     }
///
///     fn settle(&self, policy: &Policy, key: &Key, decision: &Decision, actual: u32) -> Self::UpdateFuture {
///         let now = Timestamp::wall_clock();
///         ready(Ok(self.with_states(policy, key, |states| policy.settle(states, now, decision, actual))))
///     }
/// }
/// ```
pub trait Storage: Clone + fmt::Debug + Send + Sync + 'static {
    /// The error of the storage: [`StorageError`], any other type, or
    /// [`Infallible`](std::convert::Infallible) if the storage cannot fail.
    type Error: Into<BoxError> + Send + 'static;
    /// The future that [`decide`](Self::decide) returns.
    type DecideFuture: Future<Output = Result<Decision, Self::Error>> + Send + Unpin + 'static;
    /// The future that [`clear`](Self::clear) and [`settle`](Self::settle) return.
    type UpdateFuture: Future<Output = Result<(), Self::Error>> + Send + Unpin + 'static;

    /// Decides on a hit or a peek, or charges units, as [`Policy::decide`] does.
    ///
    /// A charge is refused only as [storage full](Decision::is_storage_full) or
    /// [contended](Decision::is_contended). A refused charge has spent nothing.
    ///
    /// # Errors
    ///
    /// The future returns an error if the storage fails. If the error is a [`StorageError`],
    /// [`may_have_counted`](StorageError::may_have_counted) returns `true` if units may have been
    /// spent.
    fn decide(&self, request: StorageRequest<'_>) -> Self::DecideFuture;

    /// Tries to admit a hit without a future, which is faster than [`decide`](Self::decide). The
    /// operation of `request` is [`Op::Hit`].
    ///
    /// The caller passes `None`, or a default summary, which the storage fills in:
    ///
    /// | result | summary | meaning |
    /// |---|---|---|
    /// | `true` | the decision | the hit was counted, and does not have to wait |
    /// | `false` | a refusal by the only limit of the policy | nothing was counted; the caller may refuse the hit without calling `decide` |
    /// | `false` | anything else, or `None` | nothing was counted; the caller calls `decide` |
    ///
    /// Filling in a refusal is optional. A wrapper whose own `decide` must run for each refusal
    /// resets the summary to its default.
    ///
    /// The default implementation returns `false`, and does not change the summary.
    #[inline]
    fn try_admit(&self, request: StorageRequest<'_>, summary: Option<&mut Summary>) -> bool {
        let _ = (request, summary);
        false
    }

    /// Removes the states of the key in all limits of the policy.
    ///
    /// # Errors
    ///
    /// The future returns an error if the storage fails.
    fn clear(&self, policy: &Policy, key: &Key) -> Self::UpdateFuture;

    /// Corrects the cost of a hit to `actual` units, as [`Policy::settle`] does. `decision` is the
    /// decision on that hit. Does nothing if the decision [has not spent](Decision::has_spent)
    /// units. Call this method once per hit, because a second call is not detected.
    ///
    /// # Errors
    ///
    /// The future returns an error if the storage fails.
    fn settle(&self, policy: &Policy, key: &Key, decision: &Decision, actual: u32) -> Self::UpdateFuture;

    /// Checks that the storage is reachable, for example for a health endpoint. Makes one attempt
    /// and spends nothing.
    ///
    /// A wrapper checks its inner storage, and a [`Breaker`] checks its primary storage. The
    /// default implementation never fails.
    ///
    /// # Errors
    ///
    /// The future returns an error if the storage is not reachable.
    fn check(&self) -> impl Future<Output = Result<(), StorageError>> + Send + 'static {
        ready(Ok(()))
    }

    /// Removes all keys of this storage, and returns their number. A shared storage removes all
    /// keys with its prefix, including the keys of other processes.
    ///
    /// Use it in tests and for operations, because it may visit every key. Hits during the call may
    /// stay counted.
    ///
    /// # Errors
    ///
    /// The future returns an error if the storage fails. The default implementation, [`Cas`] and
    /// `MemcachedStorage` always return an error of the kind
    /// [`Unsupported`](StorageErrorKind::Unsupported).
    fn clear_all(&self) -> impl Future<Output = Result<u64, StorageError>> + Send + 'static {
        let message = "this storage cannot list its keys";
        ready(Err(StorageError::new(StorageErrorKind::Unsupported, message)))
    }

    /// Checks that this storage supports the policy.
    ///
    /// A limiter and a layer call this method when they are built, and when their
    /// [`LivePolicy`](crate::LivePolicy) is set. They do not check a policy that is chosen per
    /// request. So [`decide`](Self::decide) must handle every policy, and can return an error for
    /// an unsupported one.
    ///
    /// # Errors
    ///
    /// Returns an error if the storage does not support the policy. For example, its states can
    /// grow longer than the storage allows, or it is not a single fixed window and the storage
    /// is [`Leases`]. The default implementation never fails.
    fn validate(&self, policy: &Policy) -> Result<(), ConfigError> {
        let _ = policy;
        Ok(())
    }

    /// Returns the number of clients that fill this storage if all of them have exhausted a limit
    /// of `policy`. Returns `None` if the storage is unbounded, which is the default.
    ///
    /// A full [`MemoryStorage`] refuses new clients by default: see [`OnFull`]. So a layer warns if
    /// the number is less than 10,000: see [`Lint::SmallStorage`](crate::Lint::SmallStorage).
    fn clients_to_fill(&self, policy: &Policy) -> Option<u64> {
        let _ = policy;
        None
    }

    /// Returns `true` if this storage is a [`Breaker`], or wraps one. [`Breaker::new`] panics for
    /// such a storage, because a breaker cannot contain another one.
    ///
    /// A wrapper returns the result of its inner storage. The default implementation returns
    /// `false`.
    fn contains_breaker(&self) -> bool {
        false
    }
}

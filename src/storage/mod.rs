//! Storages: the trait, the memory storage, shared storages, and wrappers around them.
//!
//! | storage | for | feature |
//! |---|---|---|
//! | [`MemoryStorage`] | one process; the default | |
//! | `RedisStorage` | several processes, on Redis or Valkey | `redis` |
//! | `MemcachedStorage` | several processes, on memcached | `memcached` |
//! | `EtcdStorage` | several processes, on etcd | `etcd` |
//! | [`Cas`] | your own store, by two methods of [`CasStorage`] | |
//! | [`AnyStorage`] | a URL from the configuration | |
//!
//! Every strategy runs on every storage. Wrappers are storages around a storage, listed here from the inside
//! out:
//!
//! | wrapper | adds |
//! |---|---|
//! | [`Timeout`] | a timeout; the shared storages have one of their own |
//! | [`Breaker`] | no calls to a storage that keeps failing, and a fallback |
//! | [`RefusalCache`] | refusals without a round trip |
//! | [`Leases`] | hits without a round trip |
//!
//! The guide on [several processes](crate::guide::several_processes) helps to choose, and has the round trips
//! of each storage. The guide on [outages](crate::guide::outages) says which requests fail, and for how long.

mod any;
mod boxed;
mod breaker;
mod cas;
mod clock;
mod counters;
mod deadline;
#[cfg(feature = "etcd")]
mod etcd;
mod infallible;
mod key_table;
mod leases;
#[cfg(feature = "memcached")]
mod memcached;
mod memory;
mod names;
#[cfg(any(feature = "redis", feature = "memcached", feature = "etcd"))]
mod net;
#[cfg(feature = "redis")]
mod redis;
mod refusal_cache;
mod text;
mod timeout;
#[cfg(any(feature = "redis", feature = "etcd"))]
mod tls;
#[cfg(any(feature = "redis", feature = "memcached", feature = "etcd"))]
mod url;

use std::fmt;

use crate::strategy::Status;
use crate::{BoxError, ConfigError, Decision, Key, Op, Policy, Timestamp};

pub use self::any::{AnyFuture, AnyStorage};
pub use self::boxed::{BoxAnswer, BoxStorage};
#[cfg(feature = "metrics")]
pub(crate) use self::breaker::PATHS;
pub use self::breaker::{Breaker, BreakerError, Circuit, CircuitState, NoFallback, Phase};
pub use self::cas::{Cas, CasError, CasStorage, Loaded, Swapped};
pub use self::clock::{Clock, ManualClock, SystemClock, TokioClock};
#[cfg(feature = "etcd")]
pub use self::etcd::{EtcdStorage, EtcdStorageError};
pub use self::infallible::InfallibleStorage;
pub use self::leases::{LeaseError, Leases};
#[cfg(feature = "memcached")]
pub use self::memcached::{MemcachedStorage, MemcachedStorageError};
pub use self::memory::{MemoryStats, MemoryStorage, MemoryStorageBuilder, OnFull};
#[cfg(feature = "redis")]
pub use self::redis::{RedisStorage, RedisStorageError};
pub use self::refusal_cache::RefusalCache;
pub use self::timeout::{Timeout, TimeoutError};

/// What a storage is asked to decide.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct StorageRequest<'a> {
    /// The limits that bind the key.
    pub policy: &'a Policy,
    /// Who is asking.
    pub key: &'a Key,
    /// Whether to spend.
    pub op: Op,
    /// How many units. 0 spends nothing and is always admitted.
    pub cost: u32,
}

impl<'a> StorageRequest<'a> {
    /// A hit or a peek of `cost` units by `key`.
    pub fn new(policy: &'a Policy, key: &'a Key, op: Op, cost: u32) -> Self {
        Self { policy, key, op, cost }
    }
}

/// What a client is told of a hit that was admitted at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "a storage fills in every field")]
pub struct Summary {
    /// When the storage decided, by the wall clock.
    pub at: Timestamp,
    /// The answer of the one limit that a decision would [show](Decision::shown).
    pub limit: Status,
}

impl Default for Summary {
    #[inline]
    fn default() -> Self {
        Self { at: Timestamp::EPOCH, limit: Status::admitted(0, 0, 0) }
    }
}

/// Keeps states and lets a policy decide on them, atomically.
///
/// A decision is: load the states of the key, ask [`Policy::decide`] with the storage's own time, and save what it
/// left, so that nobody else's decision on the same key comes between. Cloning a storage makes another handle on the
/// same states.
///
/// A state belongs to a policy by its [identity](Policy::identity), to a key, and to a limit by what
/// [`Policy::limit_digests`] tell apart: its place, its strategy and its period. What another one has written is not there. The
/// digests themselves may differ between builds of a program; what outlives it had better keep the three.
///
/// Its futures do not borrow, so whatever they need of the ask they take along.
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
/// /// A map and the pure function: never forgets, for a look at the shape.
/// #[derive(Clone, Debug, Default)]
/// struct MapStorage(Arc<Mutex<HashMap<(String, Key, u32), State>>>);
///
/// impl MapStorage {
///     fn with_states<T>(&self, policy: &Policy, key: &Key, f: impl FnOnce(&mut [State]) -> T) -> T {
///         let mut map = self.0.lock().unwrap();
///         let name = |digest: &u32| (policy.identity().to_owned(), key.clone(), *digest);
///         let names: Vec<_> = policy.limit_digests().iter().map(name).collect();
///         let mut states: Vec<_> = names.iter().map(|name| map.remove(name).unwrap_or_default()).collect();
///         let answer = f(&mut states);
///         map.extend(names.into_iter().zip(states));
///         answer
///     }
/// }
///
/// impl Storage for MapStorage {
///     type Error = Infallible;
///     type DecideFuture = Ready<Result<Decision, Infallible>>;
///     type UpdateFuture = Ready<Result<(), Infallible>>;
///
///     fn decide(&self, ask: StorageRequest<'_>) -> Self::DecideFuture {
///         let now = Timestamp::wall_clock();
///         ready(Ok(self.with_states(ask.policy, ask.key, |states| ask.policy.decide(states, now, ask.op, ask.cost))))
///     }
///
///     fn clear(&self, policy: &Policy, key: &Key) -> Self::UpdateFuture {
///         ready(Ok(self.with_states(policy, key, |states| states.fill(State::Fresh))))
///     }
///
///     fn refund(&self, policy: &Policy, key: &Key, decision: &Decision) -> Self::UpdateFuture {
///         let now = Timestamp::wall_clock();
///         ready(Ok(self.with_states(policy, key, |states| policy.refund(states, now, decision))))
///     }
/// }
/// ```
pub trait Storage: Clone + fmt::Debug + Send + Sync + 'static {
    /// Why it could not decide. A storage that cannot fail says [`Infallible`](std::convert::Infallible).
    type Error: Into<BoxError> + Send + 'static;
    /// A decision on its way.
    type DecideFuture: Future<Output = Result<Decision, Self::Error>> + Send + Unpin + 'static;
    /// A change on its way.
    type UpdateFuture: Future<Output = Result<(), Self::Error>> + Send + Unpin + 'static;

    /// Decides on a hit or a peek.
    fn decide(&self, ask: StorageRequest<'_>) -> Self::DecideFuture;

    /// A hit, where that can be told at once and faster than a whole decision is put together: `true` when it is admitted
    /// and goes on without waiting; then `shown` is filled in, if it is there. `false` may mean anything, and nothing has
    /// happened, not even a refusal that counts: [`decide`](Self::decide) is asked then. It is what a storage answers that does not override this.
    #[inline]
    fn try_admit(&self, ask: StorageRequest<'_>, shown: Option<&mut Summary>) -> bool {
        let _ = (ask, shown);
        false
    }

    /// Forgets the key: all limits of the policy.
    fn clear(&self, policy: &Policy, key: &Key) -> Self::UpdateFuture;

    /// Gives back what a hit took, as far as [`Policy::refund`] says. `decision` is what that hit was answered.
    fn refund(&self, policy: &Policy, key: &Key, decision: &Decision) -> Self::UpdateFuture;

    /// Refuses a policy that this storage cannot keep: one that may remember more than there is room for, or of which there are no
    /// [leases](Leases). It is asked when policy
    /// and storage meet; where policies are chosen for each request, that is when it has to decide.
    ///
    /// # Errors
    ///
    /// Unless overridden, none.
    fn validate(&self, policy: &Policy) -> Result<(), ConfigError> {
        let _ = policy;
        Ok(())
    }

    /// Returns how many clients that have exhausted `policy` fill this storage. Then it refuses new
    /// clients. `None`, the default, if it has no bound of its own.
    ///
    /// A layer warns of fewer than 10,000: see [`Lint::SmallStorage`](crate::Lint::SmallStorage).
    fn clients_to_fill(&self, policy: &Policy) -> Option<u64> {
        let _ = policy;
        None
    }
}

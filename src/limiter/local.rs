//! The limiter in memory, whose methods need no `await`.

use super::RateLimiter;
use crate::decision::Decision;
use crate::error::or_panic;
use crate::key::Key;
use crate::policy::{IntoPolicy, Op, Policy, SharedPolicy};
use crate::reservation::{LimitedKey, Reservation};
use crate::storage::{MemoryStorage, Storage, StorageRequest};

/// A rate limiter in memory. Its methods are not asynchronous and cannot fail.
///
/// Use it outside of a runtime, or for the fastest decisions. For other storages, use
/// [`RateLimiter`]. Cloning is cheap, and clones share their counts. A limiter ignores the [shadow
/// limits](Policy#shadow-limits) of its policy.
///
/// ```
/// use tower_ratelimit::{Key, LocalLimiter, Quota};
///
/// let limiter = LocalLimiter::new(Quota::per_minute(2));
/// let alice = Key::from("alice");
/// assert!(limiter.admit(&alice));
/// assert_eq!(limiter.hit(&alice).remaining(), 0);
/// assert!(!limiter.admit(&alice));
/// ```
///
/// A `RateLimiter` that is created from a local limiter shares its counts:
///
/// ```
/// use tower_ratelimit::{Key, LocalLimiter, Quota, RateLimiter};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tower_ratelimit::storage::StorageError> {
/// let local = LocalLimiter::new(Quota::per_minute(2));
/// let limiter = RateLimiter::from(local.clone());
/// let _ = limiter.hit(&Key::from("alice")).await?;
/// assert_eq!(local.peek(&Key::from("alice")).remaining(), 1);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct LocalLimiter {
    policy: SharedPolicy,
    storage: MemoryStorage,
}

impl LocalLimiter {
    /// Creates a limiter with a new [`MemoryStorage`], which has the default bounds.
    ///
    /// # Panics
    ///
    /// Panics as [`with_storage`](Self::with_storage) does.
    #[track_caller]
    pub fn new(policy: impl IntoPolicy) -> Self {
        Self::with_storage(policy, MemoryStorage::new())
    }

    /// Creates a limiter on `storage`, which supports every policy.
    ///
    /// # Panics
    ///
    /// Panics if all limits of the policy are lockouts [by refusals](crate::Lockout::by_refusals),
    /// which have no refusals to count.
    #[track_caller]
    pub fn with_storage(policy: impl IntoPolicy, storage: MemoryStorage) -> Self {
        Self { policy: or_panic(policy.into_shared().bind(|policy, _| policy.validate())), storage }
    }

    /// Spends one unit of `key` and returns `true` if the hit is admitted without a delay.
    ///
    /// This is [`hit`](Self::hit) without a [`Decision`], which makes it faster. If a
    /// [leaky bucket](crate::LeakyBucket) would delay the hit, it returns `false` and spends
    /// nothing.
    #[inline]
    pub fn admit(&self, key: &Key) -> bool {
        self.admit_with_cost(key, 1)
    }

    /// Like [`admit`](Self::admit), but for `cost` units. Spends all of them or none. A cost of 0
    /// is always admitted and spends nothing.
    #[inline]
    pub fn admit_with_cost(&self, key: &Key, cost: u32) -> bool {
        self.policy.with(|policy| self.storage.admit(&StorageRequest::new(policy, key, Op::Hit, cost)))
    }

    /// Spends one unit of `key`, like [`RateLimiter::hit`].
    #[inline]
    pub fn hit(&self, key: &Key) -> Decision {
        self.hit_with_cost(key, 1)
    }

    /// Spends `cost` units of `key`, like [`RateLimiter::hit_with_cost`].
    #[inline]
    pub fn hit_with_cost(&self, key: &Key, cost: u32) -> Decision {
        self.decide(key, Op::Hit, cost)
    }

    /// Returns the verdict that a hit would get now, like [`RateLimiter::peek`]. Spends nothing.
    pub fn peek(&self, key: &Key) -> Decision {
        self.peek_with_cost(key, 1)
    }

    /// Returns the verdict that a hit of `cost` units would get now, like
    /// [`RateLimiter::peek_with_cost`]. Spends nothing.
    pub fn peek_with_cost(&self, key: &Key, cost: u32) -> Decision {
        self.decide(key, Op::Peek, cost)
    }

    /// Spends `units` of `key` even if fewer remain, like [`RateLimiter::charge`].
    pub fn charge(&self, key: &Key, units: u32) -> Decision {
        self.decide(key, Op::Charge, units)
    }

    /// Spends `cost` units of `key`, like [`RateLimiter::reserve`], and returns a [`Reservation`],
    /// which can correct the cost once.
    ///
    /// ```
    /// use tower_ratelimit::{Key, LocalLimiter, Quota};
    ///
    /// let limiter = LocalLimiter::new(Quota::per_minute(2));
    /// let alice = Key::from("alice");
    /// let hit = limiter.reserve(&alice, 2);
    /// hit.settle(1);
    /// assert!(limiter.admit(&alice));
    /// assert!(!limiter.admit(&alice));
    /// ```
    pub fn reserve(&self, key: &Key, cost: u32) -> Reservation {
        self.policy.with(|policy| {
            let decision = self.storage.decide_now(&StorageRequest::new(policy, key, Op::Hit, cost));
            let limited = LimitedKey { storage: self.storage.clone().into(), policy: policy.clone(), key: key.clone() };
            Reservation::of_limiter(decision, limited)
        })
    }

    #[inline]
    fn decide(&self, key: &Key, op: Op, cost: u32) -> Decision {
        self.policy.with(|policy| self.storage.decide_now(&StorageRequest::new(policy, key, op, cost)))
    }

    /// Deletes the states of all limits of the policy for this key.
    pub fn clear(&self, key: &Key) {
        // The memory storage is ready at once.
        self.policy.with(|policy| drop(self.storage.clear(policy, key)));
    }

    /// Returns the policy, or the current one of a [`LivePolicy`](crate::LivePolicy).
    pub fn policy(&self) -> Policy {
        self.policy.read().into_owned()
    }

    /// Returns the fixed or live policy.
    pub(crate) fn shared_policy(&self) -> SharedPolicy {
        self.policy.clone()
    }

    /// Returns the storage.
    pub fn storage(&self) -> &MemoryStorage {
        &self.storage
    }
}

/// The limiter shares the policy and the counts.
impl From<LocalLimiter> for RateLimiter {
    fn from(local: LocalLimiter) -> Self {
        Self::of(local.policy, local.storage.into())
    }
}

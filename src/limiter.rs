//! The limiter itself, without HTTP.

use crate::error::or_panic;
use crate::storage::{MemoryStorage, Storage, StorageRequest};
use crate::{ConfigError, Decision, IntoPolicy, Key, Op, Policy};

/// A policy on a storage: what decides, without HTTP.
///
/// Use it for jobs, messages and keys in a body. Cloning is cheap, and clones share their counts.
/// [`RateLimitLayer::limiter`](crate::RateLimitLayer::limiter) returns the limiter of a layer.
///
/// ```
/// use tower_ratelimit::{Key, Quota, RateLimiter};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let limiter = RateLimiter::new(Quota::per_minute(2));
/// let alice = Key::from("alice");
///
/// assert!(limiter.hit(&alice).await?.is_admitted());
/// let second = limiter.hit(&alice).await?;
/// assert!(limiter.hit(&alice).await?.is_refused());
///
/// // The second one turned out not to count.
/// limiter.refund(&alice, &second).await?;
/// assert_eq!(limiter.peek(&alice).await?.remaining(), 1);
///
/// limiter.clear(&alice).await?;
/// assert_eq!(limiter.peek(&alice).await?.remaining(), 2);
/// # Ok(())
/// # }
/// ```
/// # Other requests than HTTP
///
/// [`RateLimitLayer`](crate::RateLimitLayer) takes `http::Request` only. In front of a tower service
/// with requests of another type, ask the limiter in `filter_async`:
///
/// ```
/// use std::convert::Infallible;
/// use tower::{BoxError, ServiceBuilder, ServiceExt, service_fn};
/// use tower_ratelimit::{Key, Quota, RateLimiter};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), BoxError> {
/// let limiter = RateLimiter::new(Quota::per_minute(1));
/// let service = ServiceBuilder::new()
///     .filter_async(move |job: String| {
///         let limiter = limiter.clone();
///         async move {
///             let decision = limiter.hit(&Key::from(&job)).await?;
///             if decision.is_admitted() { Ok(job) } else { Err(BoxError::from("too many jobs")) }
///         }
///     })
///     .service(service_fn(|job: String| async move { Ok::<_, Infallible>(job.len()) }));
///
/// assert_eq!(service.clone().oneshot("alice".to_owned()).await?, 5);
/// assert_eq!(service.oneshot("alice".to_owned()).await.unwrap_err().to_string(), "too many jobs");
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct RateLimiter<St = MemoryStorage> {
    policy: Policy,
    storage: St,
}

impl RateLimiter {
    /// Keeps this policy on a memory storage of its own.
    pub fn new(policy: impl IntoPolicy) -> Self {
        Self { policy: policy.into_policy(), storage: MemoryStorage::new() }
    }
}

/// On the memory storage, which never has to be waited for.
impl RateLimiter {
    /// Spends one unit and says whether the hit goes on: a [`hit`](Self::hit) whose numbers nobody wants to know, in half of
    /// its time and without `await`.
    ///
    /// A hit that a leaky bucket would make wait is turned away and takes no place.
    ///
    /// ```
    /// use tower_ratelimit::{Key, Quota, RateLimiter};
    ///
    /// let limiter = RateLimiter::new(Quota::per_minute(1));
    /// let alice = Key::from("alice");
    /// assert!(limiter.admit(&alice));
    /// assert!(!limiter.admit(&alice));
    /// ```
    #[inline]
    pub fn admit(&self, key: &Key) -> bool {
        self.admit_with_cost(key, 1)
    }

    /// As [`admit`](Self::admit), for `cost` units, all or none. Cost 0 is admitted and spends nothing.
    #[inline]
    pub fn admit_with_cost(&self, key: &Key, cost: u32) -> bool {
        self.storage.admit(&StorageRequest::new(&self.policy, key, Op::Hit, cost))
    }
}

impl<St: Storage> RateLimiter<St> {
    /// Keeps this policy on `storage`.
    ///
    /// # Panics
    ///
    /// When the storage cannot keep the policy, as it may remember more than there is room for: a long log. The memory storage and
    /// Redis can keep all, and [leases](crate::storage::Leases) are of fixed windows alone; [`try_with_storage`](Self::try_with_storage) returns an error instead.
    #[track_caller]
    pub fn with_storage(policy: impl IntoPolicy, storage: St) -> Self {
        or_panic(Self::try_with_storage(policy, storage))
    }

    /// As [`with_storage`](Self::with_storage).
    ///
    /// # Errors
    ///
    /// When the storage cannot keep the policy.
    pub fn try_with_storage(policy: impl IntoPolicy, storage: St) -> Result<Self, ConfigError> {
        let policy = policy.into_policy();
        storage.validate(&policy)?;
        Ok(Self { policy, storage })
    }

    /// Spends one unit, if all limits of the policy have one.
    ///
    /// # Errors
    ///
    /// Those of the storage; the memory storage has none.
    pub fn hit(&self, key: &Key) -> St::DecideFuture {
        self.hit_with_cost(key, 1)
    }

    /// Spends `cost` units, all or none. Cost 0 is admitted and spends nothing.
    ///
    /// # Errors
    ///
    /// Those of the storage; the memory storage has none.
    pub fn hit_with_cost(&self, key: &Key, cost: u32) -> St::DecideFuture {
        self.storage.decide(StorageRequest::new(&self.policy, key, Op::Hit, cost))
    }

    /// Says what a hit would be answered now, and changes nothing.
    ///
    /// # Errors
    ///
    /// Those of the storage; the memory storage has none.
    pub fn peek(&self, key: &Key) -> St::DecideFuture {
        self.peek_with_cost(key, 1)
    }

    /// Says what a hit of `cost` units would be answered now, and changes nothing.
    ///
    /// # Errors
    ///
    /// Those of the storage; the memory storage has none.
    pub fn peek_with_cost(&self, key: &Key, cost: u32) -> St::DecideFuture {
        self.storage.decide(StorageRequest::new(&self.policy, key, Op::Peek, cost))
    }

    /// Gives back what a hit took, as far as it has not been forgotten: each limit gives back only into the window in
    /// which the hit was spent, and never above its capacity. `decision` is what the hit was answered; a refusal and a
    /// peek give back nothing. Call it once: nobody remembers what has been given back.
    ///
    /// A bucket gives back what has not been refilled since, and a leaky bucket only its last place. Nothing is given
    /// back after a [`clear`](Self::clear), as far as can be told: a hit anew in the same microsecond in which the window
    /// had begun, or in the same bucket of an aligned sliding window, looks like the hit that was cleared.
    ///
    /// # Errors
    ///
    /// Those of the storage; the memory storage has none.
    pub fn refund(&self, key: &Key, decision: &Decision) -> St::UpdateFuture {
        self.storage.refund(&self.policy, key, decision)
    }

    /// Forgets the key: all limits of the policy.
    ///
    /// # Errors
    ///
    /// Those of the storage; the memory storage has none.
    pub fn clear(&self, key: &Key) -> St::UpdateFuture {
        self.storage.clear(&self.policy, key)
    }

    /// What it keeps.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// Where it keeps it.
    pub fn storage(&self) -> &St {
        &self.storage
    }
}

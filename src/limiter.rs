//! The rate limiter without HTTP.

mod acquire;
mod local;

use std::sync::Arc;

pub(crate) use self::acquire::acquire;
pub use self::local::LocalLimiter;
use crate::decision::Decision;
use crate::error::{ConfigError, or_panic};
use crate::key::Key;
use crate::policy::{IntoPolicy, Op, Policy, SharedPolicy};
use crate::reservation::{LimitedKey, Reservation};
use crate::storage::{
    AnyStorage, KeyPage, KeysRequest, MemoryStorage, Storage, StorageError, StorageErrorKind, StorageFuture,
    StorageRequest,
};
use crate::waiting::WaitQueues;

/// A rate limiter that is independent of HTTP: a policy on a storage.
///
/// Use it for jobs, for messages, and for keys in the body of a request. Cloning is cheap, and
/// clones share their counts. To get a limiter that shares the counts of a layer, call
/// [`RateLimitLayer::limiter`](crate::RateLimitLayer::limiter).
///
/// A limiter ignores the [shadow limits](Policy#shadow-limits) of its policy.
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
/// let second = limiter.reserve(&alice, 1).await?;
/// assert!(limiter.hit(&alice).await?.is_refused());
///
/// // Suppose that the second hit should not count.
/// second.refund().await?;
/// assert_eq!(limiter.peek(&alice).await?.remaining(), 1);
///
/// limiter.clear(&alice).await?;
/// assert_eq!(limiter.peek(&alice).await?.remaining(), 2);
/// # Ok(())
/// # }
/// ```
///
/// # Requests other than HTTP
///
/// [`RateLimitLayer`](crate::RateLimitLayer) supports `http::Request` only. For a tower service
/// with another request type, call the limiter in `ServiceBuilder::filter_async`:
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
pub struct RateLimiter {
    policy: SharedPolicy,
    storage: AnyStorage,
    /// The hits that wait in `acquire`.
    queues: Arc<WaitQueues>,
}

impl RateLimiter {
    /// Creates a limiter with a new [`MemoryStorage`], which has the default bounds.
    ///
    /// # Panics
    ///
    /// Panics if all limits of the policy are lockouts [by refusals](crate::Lockout::by_refusals),
    /// which have no refusals to count.
    #[track_caller]
    pub fn new(policy: impl IntoPolicy) -> Self {
        Self::with_storage(policy, MemoryStorage::new())
    }
}

impl RateLimiter {
    /// Creates a limiter on `storage`.
    ///
    /// # Panics
    ///
    /// Panics if all limits of the policy are lockouts [by refusals](crate::Lockout::by_refusals),
    /// or if the storage does not support the policy or one of its shadow limits. For example,
    /// memcached, etcd and PostgreSQL reject [long logs](crate::guide::several_processes#long-logs).
    /// To get an error instead, use [`try_with_storage`](Self::try_with_storage).
    #[track_caller]
    pub fn with_storage(policy: impl IntoPolicy, storage: impl Storage) -> Self {
        or_panic(Self::try_with_storage(policy, storage))
    }

    /// Like [`with_storage`](Self::with_storage), but returns an error instead of panicking.
    ///
    /// # Errors
    ///
    /// Returns an error in the cases in which `with_storage` panics.
    pub fn try_with_storage(policy: impl IntoPolicy, storage: impl Storage) -> Result<Self, ConfigError> {
        let storage = AnyStorage::new(storage);
        let bound = storage.clone();
        // All later policies of a live one are checked too.
        let policy = policy.into_shared().bind(move |policy, _| validate(policy, &bound))?;
        Ok(Self::of(policy, storage))
    }

    /// Creates a limiter with a policy that was validated.
    pub(crate) fn of(policy: SharedPolicy, storage: AnyStorage) -> Self {
        Self { policy, storage, queues: Arc::default() }
    }

    /// Sets the queues in which calls of [`acquire`](Self::acquire) wait.
    pub(crate) fn waiting_in(self, queues: Arc<WaitQueues>) -> Self {
        Self { queues, ..self }
    }

    /// Spends one unit of `key` from each limit of the policy if all of them admit it. Otherwise
    /// spends nothing and returns a refusal, with the time until a [retry](Decision::retry_after)
    /// can succeed.
    ///
    /// A [leaky bucket](crate::LeakyBucket) may admit a hit with a [`delay`](Decision::delay). Then
    /// the caller has to sleep for this time. [`acquire`](Self::acquire) sleeps before it returns.
    ///
    /// # Errors
    ///
    /// Returns the storage's error if the storage fails. The memory storage never fails.
    #[doc(alias("check", "consume", "try_acquire"))]
    pub fn hit(&self, key: &Key) -> StorageFuture<Decision> {
        self.hit_with_cost(key, 1)
    }

    /// Like [`hit`](Self::hit), but for `cost` units. Spends all of them or none. A cost of 0 is
    /// always admitted and spends nothing. A cost above the [capacity](Decision::capacity) is
    /// always refused.
    ///
    /// # Errors
    ///
    /// Returns the storage's error if the storage fails. The memory storage never fails.
    pub fn hit_with_cost(&self, key: &Key, cost: u32) -> StorageFuture<Decision> {
        self.policy.with(|policy| self.storage.decide(StorageRequest::new(policy, key, Op::Hit, cost)))
    }

    /// Returns the current state of the limits, and the verdict that a hit would get now. Spends
    /// nothing.
    ///
    /// # Errors
    ///
    /// Returns the storage's error if the storage fails. The memory storage never fails.
    pub fn peek(&self, key: &Key) -> StorageFuture<Decision> {
        self.peek_with_cost(key, 1)
    }

    /// Like [`peek`](Self::peek), but returns the verdict that a hit of `cost` units would get.
    /// Spends nothing.
    ///
    /// # Errors
    ///
    /// Returns the storage's error if the storage fails. The memory storage never fails.
    pub fn peek_with_cost(&self, key: &Key, cost: u32) -> StorageFuture<Decision> {
        self.policy.with(|policy| self.storage.decide(StorageRequest::new(policy, key, Op::Peek, cost)))
    }

    /// Spends `cost` units of `key` like [`hit_with_cost`](Self::hit_with_cost), and returns a
    /// [`Reservation`], which can correct the cost once. A reservation that is dropped keeps the
    /// cost.
    ///
    /// ```
    /// use tower_ratelimit::{Key, Quota, RateLimiter};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_ratelimit::storage::StorageError> {
    /// let limiter = RateLimiter::new(Quota::per_hour(1_000));
    /// let alice = Key::from("alice");
    ///
    /// let answer = limiter.reserve(&alice, 256).await?;
    /// if answer.is_admitted() {
    ///     answer.settle(40).await?;
    /// }
    /// assert_eq!(limiter.peek(&alice).await?.remaining(), 960);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// Returns the storage's error if the storage fails. The memory storage never fails.
    pub fn reserve(&self, key: &Key, cost: u32) -> StorageFuture<Reservation> {
        let limited = self.policy.with(|policy| LimitedKey {
            storage: self.storage.clone(),
            policy: policy.clone(),
            key: key.clone(),
        });
        limited.decide(Op::Hit, cost).map(|decided| Ok(Reservation::of_limiter(decided?, limited)))
    }

    /// Spends `cost` units of each key under its own limiter, or nothing if one of them refuses.
    /// Use it for the limits of a user, a tenant and all clients. Returns a [`Reservation`], which
    /// settles all of them together.
    ///
    /// Create the limiters with clones of one storage, which decides on several keys
    /// [together](Storage::decide_all). The storage of the first limiter decides on all keys and
    /// settles them. The reservation dereferences to the decision that refuses with the longest
    /// [`retry_after`](Decision::retry_after), or else to the one with the fewest
    /// [remaining](Decision::remaining) units.
    ///
    /// ```
    /// use tower_ratelimit::{Key, MemoryStorage, Policy, RateLimiter};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let storage = MemoryStorage::new();
    /// let (user, tenant): (Policy, Policy) = ("10/minute".parse()?, "3/minute".parse()?);
    /// let per_user = RateLimiter::with_storage(user.with_name("user"), storage.clone());
    /// let per_tenant = RateLimiter::with_storage(tenant.with_name("tenant"), storage);
    /// let (alice, bob, acme) = (Key::from("alice"), Key::from("bob"), Key::from("acme"));
    ///
    /// let hit = RateLimiter::reserve_all(&[(&per_user, &alice), (&per_tenant, &acme)], 2).await?;
    /// assert!(hit.is_admitted());
    /// // One unit of the tenant is left, so the hit spends nothing of the user either.
    /// let hit = RateLimiter::reserve_all(&[(&per_user, &bob), (&per_tenant, &acme)], 2).await?;
    /// assert!(hit.is_refused());
    /// assert_eq!(hit.policy(), &per_tenant.policy());
    /// assert_eq!(per_user.peek(&bob).await?.remaining(), 10);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// Returns the storage's error if the storage fails.
    ///
    /// Returns an error of the kind [`Unsupported`](StorageErrorKind::Unsupported), and spends
    /// nothing, in these cases:
    ///
    /// - `members` is empty, or has more than eight pairs.
    /// - Two pairs have the same key, and policies with the same [identity](Policy#identity). Give
    ///   each policy its own name.
    /// - There are several pairs, and the storage cannot decide on these policies together. Wrap it
    ///   in [`InOrder`](crate::storage::InOrder).
    /// - The limiters have storages of different types, or different memory storages. Two storages
    ///   of the same type on servers are not recognized as different.
    pub fn reserve_all(members: &[(&Self, &Key)], cost: u32) -> StorageFuture<Reservation> {
        let unsupported = |why| StorageFuture::ready(Err(StorageError::new(StorageErrorKind::Unsupported, why)));
        let Some((first, _)) = members.first() else { return unsupported("no limiter for the hit") };
        if members.iter().any(|(limiter, _)| limiter.storage.certainly_differs_from(&first.storage)) {
            return unsupported("the limiters have different storages: create them with clones of one storage");
        }
        let limited = |(limiter, key): &(&Self, &Key)| LimitedKey {
            storage: first.storage.clone(),
            policy: limiter.policy.read().into_owned(),
            key: (*key).clone(),
        };
        let limited: Vec<_> = members.iter().map(limited).collect();
        let requests: Vec<_> = limited.iter().map(|limited| limited.request(Op::Hit, cost)).collect();
        let deciding = first.storage.decide_all(&requests);
        deciding.map(|decided| Ok(Reservation::of_limiters(limited, decided?)))
    }

    /// Spends `units` of `key` from each limit, even if fewer remain. No limit refuses a charge.
    ///
    /// A charge can leave the key in debt: then nothing remains, and hits are refused until enough
    /// units are free again. The decision contains the state after the charge. A charge cannot be
    /// refunded.
    ///
    /// Nothing is charged in these cases:
    ///
    /// - `units` is 0.
    /// - The storage is [contended](Decision::is_contended). The decision is a refusal.
    /// - The storage is [full](Decision::is_storage_full) and does not contain the key. The
    ///   decision is a refusal, or an admission with
    ///   [`OnFull::Admit`](crate::storage::OnFull::Admit).
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_ratelimit::storage::ManualClock;
    /// use tower_ratelimit::{Key, MemoryStorage, Quota, RateLimiter};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let storage = MemoryStorage::builder().clock(ManualClock::default()).build()?;
    /// let limiter = RateLimiter::with_storage(Quota::per_minute(60).burst(100), storage);
    /// let alice = Key::from("alice");
    ///
    /// let charged = limiter.charge(&alice, 400).await?;
    /// assert_eq!(charged.remaining(), 0);
    /// // 300 units are owed. The next unit is free when they are paid.
    /// assert_eq!(limiter.hit(&alice).await?.retry_after(), Some(Duration::from_secs(301)));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// Returns the storage's error if the storage fails. The memory storage never fails.
    pub fn charge(&self, key: &Key, units: u32) -> StorageFuture<Decision> {
        self.policy.with(|policy| self.storage.decide(StorageRequest::new(policy, key, Op::Charge, units)))
    }

    /// Deletes the states of all limits of the policy for this key, so that all its units are free
    /// again. A call of [`acquire`](Self::acquire) that sleeps does not notice the deletion before
    /// its next attempt.
    ///
    /// # Errors
    ///
    /// Returns the storage's error if the storage fails. The memory storage never fails.
    #[doc(alias = "reset")]
    pub fn clear(&self, key: &Key) -> StorageFuture<()> {
        self.policy.with(|policy| self.storage.clear(policy, key))
    }

    /// Returns a page of the keys that have spent units, each with a [peek](Self::peek) at its
    /// limits. Use it to show operators which clients are near their limit or locked out.
    ///
    /// `prefix` is the beginning of the [texts](Key#impl-Display-for-Key) of the keys, for example
    /// `t:ali`, or empty for all keys. `after` is the [`next`](KeyPage::next) of the page before,
    /// or `None` for the first page. `limit` is the desired number of keys of a page: values
    /// below 1 count as 1, and values above 1,000 as 1,000. A page can have fewer keys, even none,
    /// and on Redis more.
    /// [`Storage::keys`] lists the storages that support it, and the keys that a page omits.
    ///
    /// ```
    /// use tower_ratelimit::{Key, MemoryStorage, Quota, RateLimiter};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let storage = MemoryStorage::builder().keep_keys(true).build()?;
    /// let limiter = RateLimiter::with_storage(Quota::per_hour(10), storage);
    /// let _ = limiter.hit_with_cost(&Key::from("alice"), 10).await?;
    /// let _ = limiter.hit(&Key::from("bob")).await?;
    ///
    /// let (mut refused, mut after) = (Vec::new(), None);
    /// loop {
    ///     let page = limiter.keys("t:", after.as_deref(), 100).await?;
    ///     refused.extend(page.keys.into_iter().filter(|(_, peek)| peek.is_refused()));
    ///     after = page.next;
    ///     if after.is_none() {
    ///         break;
    ///     }
    /// }
    /// assert_eq!(refused.len(), 1);
    /// assert_eq!(refused[0].0, Key::from("alice"));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// Returns an error of the kind [`Unsupported`](StorageErrorKind::Unsupported) if the storage
    /// cannot list its keys, if `prefix` is not printable ASCII, or if `after` is not from another
    /// page. Returns the storage's error if the storage fails.
    pub fn keys(&self, prefix: &str, after: Option<&str>, limit: usize) -> StorageFuture<KeyPage> {
        self.policy.with(|policy| self.storage.keys(KeysRequest::new(policy, prefix, after, limit)))
    }

    /// Returns the policy, or the current one of a [`LivePolicy`](crate::LivePolicy).
    pub fn policy(&self) -> Policy {
        self.policy.read().into_owned()
    }

    /// Returns the storage.
    pub fn storage(&self) -> &AnyStorage {
        &self.storage
    }
}

/// Checks the policy, and that the storage supports it and its shadow limits.
pub(crate) fn validate(policy: &Policy, storage: &AnyStorage) -> Result<(), ConfigError> {
    policy.validate()?;
    storage.validate(policy)?;
    policy.shadows().iter().try_for_each(|shadow| storage.validate(shadow))
}

//! A cache of refusals in front of a storage.

mod cache;
mod entry;

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use self::cache::{Beginning, Cache, UnderWay};
use crate::error::or_panic;
use crate::storage::key_table::MOST;
use crate::storage::{Clock, Storage, StorageRequest, Summary, SystemClock};
use crate::time::micros;
use crate::{ConfigError, Decision, Key, Op, Policy};

/// Caches refusals, so that refused clients barely touch the storage.
///
/// ```
/// use std::time::Duration;
/// use tower_ratelimit::storage::RefusalCache;
/// use tower_ratelimit::{Key, MemoryStorage, Quota, RateLimiter};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// // In production, this is the storage of a server.
/// let storage = RefusalCache::new(MemoryStorage::new()).ttl(Duration::from_millis(500));
/// let limiter = RateLimiter::with_storage(Quota::per_hour(1), storage.clone());
/// let alice = Key::from("alice");
///
/// assert!(limiter.hit(&alice).await?.is_admitted());
/// for _ in 0..100 {
///     assert!(limiter.hit(&alice).await?.is_refused());
/// }
/// assert_eq!((storage.misses(), storage.hits(), storage.len()), (2, 99, 1));
/// # Ok(())
/// # }
/// ```
///
/// A refusal is cached until its `retry_after` has passed, for at most 1 second ([`ttl`](Self::ttl)).
/// Until then, hits of the same policy and key with the same or a larger cost, or with a cost above the
/// remaining units, are refused without asking the storage. `retry_after` counts down meanwhile. Peeks,
/// elastic windows and leaky buckets always ask the storage.
///
/// A [`clear`](Storage::clear) or a [`refund`](Storage::refund) through a handle on this cache drops the
/// key's entry. Changes by other processes show after at most one `ttl`.
///
/// It caches the refusals of up to 100,000 keys ([`max_keys`](Self::max_keys)), some 300 bytes for
/// each of up to four costs of a key.
///
/// Put it around a [`Breaker`](super::Breaker). It gains nothing around the memory storage. The guide on
/// [several processes](crate::guide::several_processes#fewer-requests-to-the-storage) has the details.
///
/// # Errors
///
/// The errors are those of the storage inside.
#[derive(Clone)]
pub struct RefusalCache<St> {
    inner: St,
    known: Arc<Cache>,
}

/// The defaults.
const MAX_KEYS: usize = 100_000;
const TTL: u64 = 1_000_000;

impl<St: Storage> RefusalCache<St> {
    /// Wraps `storage`.
    pub fn new(storage: St) -> Self {
        Self { inner: storage, known: Arc::new(Cache::new(MAX_KEYS, TTL, Arc::new(SystemClock::new()))) }
    }

    /// Returns the same with an empty cache.
    fn with(self, max_keys: usize, ttl: u64, clock: Arc<dyn Clock>) -> Self {
        Self { known: Arc::new(Cache::new(max_keys, ttl, clock)), ..self }
    }

    /// Sets the longest time for which a refusal is cached. Defaults to 1 second.
    ///
    /// Call it before the first hit: the returned cache is empty.
    ///
    /// # Panics
    ///
    /// Panics if `ttl` is less than a millisecond or more than a day. [`try_ttl`](Self::try_ttl)
    /// returns an error instead.
    #[must_use]
    #[track_caller]
    pub fn ttl(self, ttl: Duration) -> Self {
        or_panic(self.try_ttl(ttl))
    }

    /// As [`ttl`](Self::ttl), without panics.
    ///
    /// # Errors
    ///
    /// Returns an error if `ttl` is less than a millisecond or more than a day.
    pub fn try_ttl(self, ttl: Duration) -> Result<Self, ConfigError> {
        if !(Duration::from_millis(1)..=Duration::from_secs(86_400)).contains(&ttl) {
            return Err(ConfigError::new(format!(
                "a life of {ttl:?} cannot be: use at least a millisecond and at most a day, \
                 for example Duration::from_secs(1)"
            )));
        }
        let (max_keys, clock) = (self.known.max_keys, Arc::clone(&self.known.clock));
        Ok(self.with(max_keys, micros(ttl), clock))
    }

    /// Sets the largest number of keys whose refusals are cached. Defaults to 100,000.
    ///
    /// Call it before the first hit: the returned cache is empty.
    ///
    /// # Panics
    ///
    /// Panics if `max_keys` is 0 or more than 100 million. [`try_max_keys`](Self::try_max_keys) returns
    /// an error instead.
    #[must_use]
    #[track_caller]
    pub fn max_keys(self, max_keys: usize) -> Self {
        or_panic(self.try_max_keys(max_keys))
    }

    /// As [`max_keys`](Self::max_keys), without panics.
    ///
    /// # Errors
    ///
    /// Returns an error if `max_keys` is 0 or more than 100 million.
    pub fn try_max_keys(self, max_keys: usize) -> Result<Self, ConfigError> {
        if max_keys == 0 || max_keys > MOST {
            return Err(ConfigError::new(
                "max_keys must be at least 1 and at most 100 million, for example 100_000: to keep no refusals, leave the cache out",
            ));
        }
        let (ttl, clock) = (self.known.ttl, Arc::clone(&self.known.clock));
        Ok(self.with(max_keys, ttl, clock))
    }

    /// Sets the clock that measures how long a refusal is cached; for tests. It need not agree with
    /// the storage's clock.
    #[must_use]
    pub fn clock(self, clock: impl Clock) -> Self {
        let (max_keys, ttl) = (self.known.max_keys, self.known.ttl);
        self.with(max_keys, ttl, Arc::new(clock))
    }

    /// Returns the storage inside.
    pub fn inner(&self) -> &St {
        &self.inner
    }

    /// Returns the number of hits that were refused from the cache.
    pub fn hits(&self) -> u64 {
        self.known.counters.counted().0
    }

    /// Returns the number of hits that the storage inside decided.
    pub fn misses(&self) -> u64 {
        self.known.counters.counted().1
    }

    /// Returns the number of cached keys, including expired ones that no hit has removed yet.
    pub fn len(&self) -> usize {
        self.known.len()
    }

    /// Returns `true` if no refusals are cached.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn change(
        &self,
        policy: &Policy,
        key: &Key,
        change: impl FnOnce(&St) -> St::UpdateFuture,
    ) -> Change<St::UpdateFuture> {
        // It may be done as soon as it is asked for, or whenever it is polled; so what is known is dropped then, and again when it is
        // done or given up.
        let doubt = InvalidateOnDrop { known: Arc::clone(&self.known), policy: policy.clone(), key: key.clone() };
        let done = change(&self.inner);
        doubt.known.forget(policy, key);
        Change { done, doubt: Some(doubt) }
    }
}

impl<St: Storage> Storage for RefusalCache<St> {
    type Error = St::Error;
    type DecideFuture = Answer<St::DecideFuture>;
    type UpdateFuture = Change<St::UpdateFuture>;

    fn decide(&self, ask: StorageRequest<'_>) -> Self::DecideFuture {
        if ask.op == Op::Peek || ask.cost == 0 {
            return Answer(Progress::Asked(self.inner.decide(ask), None));
        }
        match self.known.begin(&ask) {
            Beginning::Cache(decision) => Answer(Progress::Cache(Some(decision))),
            Beginning::StorageRequest(under_way) => Answer(Progress::Asked(self.inner.decide(ask), Some(under_way))),
        }
    }

    fn try_admit(&self, ask: StorageRequest<'_>, shown: Option<&mut Summary>) -> bool {
        if ask.cost == 0 {
            return self.inner.try_admit(ask, shown);
        }
        // The decision that is asked for next says the rest.
        if self.known.knows(&ask) || !self.inner.try_admit(ask, shown) {
            return false;
        }
        self.known.counters.asked(ask.policy);
        self.known.forget(ask.policy, ask.key);
        true
    }

    fn clear(&self, policy: &Policy, key: &Key) -> Self::UpdateFuture {
        self.change(policy, key, |storage| storage.clear(policy, key))
    }

    fn refund(&self, policy: &Policy, key: &Key, decision: &Decision) -> Self::UpdateFuture {
        self.change(policy, key, |storage| storage.refund(policy, key, decision))
    }

    fn clients_to_fill(&self, policy: &Policy) -> Option<u64> {
        self.inner.clients_to_fill(policy)
    }

    fn validate(&self, policy: &Policy) -> Result<(), ConfigError> {
        self.inner.validate(policy)
    }
}

/// Shows what is counted.
impl<St: fmt::Debug> fmt::Debug for RefusalCache<St> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (answered, asked) = self.known.counters.counted();
        f.debug_struct("RefusalCache")
            .field("inner", &self.inner)
            .field("life", &Duration::from_micros(self.known.ttl))
            .field("max_keys", &self.known.max_keys)
            .field("held", &self.known.len())
            .field("answered", &answered)
            .field("asked", &asked)
            .finish_non_exhaustive()
    }
}

/// An answer of a [`RefusalCache`], on its way.
#[derive(Debug)]
#[must_use = "futures do nothing unless they are polled"]
pub struct Answer<F>(Progress<F>);

#[derive(Debug)]
#[allow(
    clippy::large_enum_variant,
    reason = "it is polled where it is made; boxing would cost a refusal an allocation"
)]
enum Progress<F> {
    Cache(Option<Decision>),
    Asked(F, Option<UnderWay>),
}

impl<F, E> Future for Answer<F>
where
    F: Future<Output = Result<Decision, E>> + Unpin,
{
    type Output = Result<Decision, E>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut self.0 {
            Progress::Cache(decision) => Poll::Ready(Ok(decision.take().expect("polled after it has answered"))),
            Progress::Asked(asked, under_way) => {
                let answer = std::task::ready!(Pin::new(asked).poll(cx));
                if let (Some(under_way), Ok(decision)) = (under_way.take(), &answer) {
                    under_way.decided(decision);
                }
                Poll::Ready(answer)
            }
        }
    }
}

/// A change through a [`RefusalCache`], on its way.
#[derive(Debug)]
#[must_use = "futures do nothing unless they are polled"]
pub struct Change<F> {
    done: F,
    doubt: Option<InvalidateOnDrop>,
}

impl<F: Future + Unpin> Future for Change<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let done = std::task::ready!(Pin::new(&mut self.done).poll(cx));
        drop(self.doubt.take());
        Poll::Ready(done)
    }
}

/// While a change is under way; what is known when it ends is from before.
#[derive(Debug)]
struct InvalidateOnDrop {
    known: Arc<Cache>,
    policy: Policy,
    key: Key,
}

impl Drop for InvalidateOnDrop {
    fn drop(&mut self) {
        self.known.forget(&self.policy, &self.key);
    }
}

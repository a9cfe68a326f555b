//! A cache of refusals in front of a storage.
//!
//! An entry counts the changes of its key. A clear, a settlement, a charge or an admitted hit
//! increments the count at its start and at its end, because it may take effect at any time in
//! between. A refusal that was requested before the last change is not cached.

mod cache;
mod entry;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use self::cache::{Cache, CacheLookup};
use crate::decision::Decision;
use crate::error::ConfigError;
use crate::key::Key;
use crate::policy::{Limit, Op, Policy};
use crate::storage::contract::forward_storage;
use crate::storage::key_table::{assert_max_keys, checked_ttl};
use crate::storage::{AnyStorage, Clock, Storage, StorageFuture, StorageRequest, Summary, SystemClock};

/// Caches refusals, so that refused clients barely touch the storage.
///
/// ```
/// use std::time::Duration;
/// use tower_ratelimit::storage::RefusalCache;
/// use tower_ratelimit::{Key, MemoryStorage, Quota, RateLimiter};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// // In production, wrap a storage on a server, such as Redis.
/// let storage = RefusalCache::new(MemoryStorage::new()).ttl(Duration::from_secs(5));
/// let limiter = RateLimiter::with_storage(Quota::per_hour(1), storage.clone());
/// let alice = Key::from("alice");
///
/// assert!(limiter.hit(&alice).await?.is_admitted());
/// for _ in 0..100 {
///     assert!(limiter.hit(&alice).await?.is_refused());
/// }
/// assert_eq!((storage.misses(), storage.local_decisions(), storage.len()), (2, 99, 1));
/// # Ok(())
/// # }
/// ```
///
/// A refusal is cached until its `retry_after` has passed, for at most 1 second
/// ([`ttl`](Self::ttl)). Meanwhile the cache answers later hits of the same policy and key, and
/// `retry_after` counts down:
///
/// | cost of a later hit | answer |
/// |---|---|
/// | the same | from the cache |
/// | different, and may fit | from the storage |
/// | different, and cannot fit yet | from the storage once for each cost, then from the cache |
///
/// The last row has three exceptions, in which the cache answers at once:
///
/// - The cache can compute the exact `retry_after`, as for a fixed window.
/// - The cache already has refusals of four costs of the key. Then `retry_after` can be too short.
/// - Another hit of the key is in flight to the storage. Then `retry_after` can be too short.
///
/// Peeks, charges and hits of cost 0 always go to the storage. So do hits of policies with an
/// [`ElasticWindow`](crate::ElasticWindow), a [`LeakyBucket`](crate::LeakyBucket), or a lockout [by
/// refusals](crate::Lockout::by_refusals) that is not locked. A refusal is not cached if it is
/// [storage full](Decision::is_storage_full), [contended](Decision::is_contended) or from a
/// [fallback](Decision::is_from_fallback).
///
/// A request with [several keys](Storage::decide_all) is refused from the cache if the cache
/// refuses one of its keys. The lists of header fields then leave out the policies of the other
/// keys, because their states are not known. The request goes to the storage if another key has a
/// limit that counts refusals.
///
/// A [`clear`](Storage::clear), a [`settle`](Storage::settle) or a charge through this cache
/// removes the refusals of the key. A change by another process takes effect after at most one
/// `ttl`. There is one exception: while a hit is in flight to the storage, an expired refusal of
/// the same key answers the other hits, for at most one more `ttl`.
///
/// The time to live of an entry starts before the storage is asked, so it is never too long. The
/// `retry_after` and `reset_after` of a refusal count down from its arrival. So for the same cost,
/// they are never too short.
///
/// The cache holds refusals of up to 100,000 keys ([`max_keys`](Self::max_keys)), and of up to four
/// costs per key. A refusal takes about 300 bytes. Clones share one cache.
///
/// With a [`Breaker`](super::Breaker), wrap the breaker in the cache. A cache around a
/// [`MemoryStorage`](crate::MemoryStorage) has no benefit. The guide on [several
/// processes](crate::guide::several_processes#fewer-requests-to-the-storage) has the details.
///
/// # Errors
///
/// Calls fail with the errors of the inner storage. A hit that the cache refuses does not fail.
#[doc(alias = "negative cache")]
#[derive(Clone)]
pub struct RefusalCache {
    inner: AnyStorage,
    cache: Arc<Cache>,
}

/// The default of [`RefusalCache::max_keys`].
const MAX_KEYS: usize = 100_000;

/// The default of [`RefusalCache::ttl`], in microseconds.
const TTL: u64 = 1_000_000;

impl RefusalCache {
    /// Creates an empty cache in front of `storage`.
    pub fn new(storage: impl Storage) -> Self {
        Self {
            inner: AnyStorage::new(storage),
            cache: Arc::new(Cache::new(MAX_KEYS, TTL, Arc::new(SystemClock::new()))),
        }
    }

    /// Returns a handle to the same storage, with these settings and an empty cache.
    fn with(self, max_keys: usize, ttl: u64, clock: Arc<dyn Clock>) -> Self {
        Self { cache: Arc::new(Cache::new(max_keys, ttl, clock)), ..self }
    }

    /// Sets the maximum time to live of a cached refusal. Defaults to 1 second. While a hit of the
    /// same key is in flight to the storage, an expired refusal still answers other hits, for at
    /// most one more `ttl`.
    ///
    /// The returned cache is empty, and independent of clones of this one.
    ///
    /// # Panics
    ///
    /// Panics if `ttl` is less than a millisecond or more than a day.
    #[must_use]
    #[track_caller]
    pub fn ttl(self, ttl: Duration) -> Self {
        let (max_keys, clock) = (self.cache.max_keys, Arc::clone(&self.cache.clock));
        self.with(max_keys, checked_ttl(ttl), clock)
    }

    /// Sets the maximum number of keys whose refusals are cached. Defaults to 100,000.
    ///
    /// A key counts once for each policy that refuses it. If the cache is full, the refusals that
    /// expire last are kept.
    ///
    /// The returned cache is empty, and independent of clones of this one.
    ///
    /// # Panics
    ///
    /// Panics if `max_keys` is 0 or more than 100 million.
    #[must_use]
    #[track_caller]
    pub fn max_keys(self, max_keys: usize) -> Self {
        assert_max_keys(max_keys, "100_000", "to cache no refusals, remove the cache");
        let (ttl, clock) = (self.cache.ttl, Arc::clone(&self.cache.clock));
        self.with(max_keys, ttl, clock)
    }

    /// Sets the clock that measures the age of refusals, for example in tests. Defaults to
    /// [`SystemClock`]. It does not have to agree with the clock of the storage.
    ///
    /// The returned cache is empty, and independent of clones of this one.
    #[must_use]
    pub fn clock(self, clock: impl Clock) -> Self {
        let (max_keys, ttl) = (self.cache.max_keys, self.cache.ttl);
        self.with(max_keys, ttl, Arc::new(clock))
    }

    /// Returns the inner storage.
    pub fn get_ref(&self) -> &AnyStorage {
        &self.inner
    }

    /// Returns the number of hits that were refused from the cache.
    pub fn local_decisions(&self) -> u64 {
        self.cache.counters.counted().0
    }

    /// Returns the number of hits that were sent to the inner storage. Peeks, charges and hits of
    /// cost 0 are not counted.
    pub fn misses(&self) -> u64 {
        self.cache.counters.counted().1
    }

    /// Returns the number of keys with cached refusals. A key counts once for each policy that
    /// refuses it. An expired refusal counts until a later miss or an eviction removes it.
    pub fn len(&self) -> usize {
        self.cache.len()
    }

    /// Returns `true` if [`len`](Self::len) is 0.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Removes the refusals of the key now, and again when the change ends or is dropped. Refusals
    /// that were cached while it was in flight may be older than the change.
    ///
    /// Call this after the inner storage has returned the future of the change. The storage may
    /// have made the change by then, or may make it at any later poll.
    fn changed<T: Send + 'static>(&self, policy: &Policy, key: &Key, change: StorageFuture<T>) -> StorageFuture<T> {
        self.cache.invalidate(policy, key);
        let (cache, policy, key) = (Arc::clone(&self.cache), policy.clone(), key.clone());
        change.finally(move || cache.invalidate(&policy, &key))
    }
}

impl Storage for RefusalCache {
    forward_storage!(self => self.inner; check, validate, validate_members, needs_outer_key);

    fn decide(&self, request: StorageRequest<'_>) -> StorageFuture<Decision> {
        if request.op == Op::Peek || request.cost == 0 {
            return self.inner.decide(request);
        }
        if request.op == Op::Charge {
            // The waits of the cached refusals become too short.
            return self.changed(request.policy, request.key, self.inner.decide(request));
        }
        match self.cache.look_up(&request) {
            CacheLookup::Hit(decision) => StorageFuture::ok(decision),
            CacheLookup::Miss(in_flight) => self.inner.decide(request).map(move |decided| {
                if let Ok(decision) = &decided {
                    in_flight.decided(decision);
                }
                decided
            }),
        }
    }

    /// A cached refusal of one member refuses the request without a round trip. The decisions on
    /// members without a cached refusal then have no limits, because their states are not known.
    ///
    /// All members go to the storage if a member without a cached refusal has a limit that counts
    /// refusals.
    fn decide_all(&self, members: &[StorageRequest<'_>]) -> StorageFuture<Vec<Decision>> {
        if let Err(error) = StorageRequest::check_members(members) {
            return StorageFuture::ready(Err(error));
        }
        let spends = |member: &&StorageRequest<'_>| member.op == Op::Hit && member.cost > 0;
        let cached: Vec<_> =
            members.iter().map(|member| Some(member).filter(spends).and_then(|hit| self.cache.answer(hit))).collect();
        let must_ask = |(member, cached): (&StorageRequest<'_>, &Option<Decision>)| {
            cached.is_none() && spends(&member) && member.policy.limits().iter().any(Limit::counts_refusals)
        };
        if let Some(at) = cached.iter().flatten().map(Decision::at).next()
            && !members.iter().zip(&cached).any(must_ask)
        {
            let decide = |(member, cached): (&StorageRequest<'_>, Option<Decision>)| match cached {
                Some(refusal) => {
                    self.cache.counters.here(member.policy);
                    refusal
                }
                None => Decision::from_statuses(at, member.cost, [].into_iter()),
            };
            return StorageFuture::ok(members.iter().zip(cached).map(decide).collect());
        }
        let in_flight: Vec<_> =
            members.iter().map(|member| Some(member).filter(spends).map(|hit| self.cache.begin(hit))).collect();
        self.inner.decide_all(members).map(move |decided| {
            for (in_flight, decision) in in_flight.into_iter().zip(decided.iter().flatten()) {
                if let Some(in_flight) = in_flight {
                    in_flight.decided(decision);
                }
            }
            decided
        })
    }

    fn try_admit(&self, request: StorageRequest<'_>, mut shown: Option<&mut Summary>) -> bool {
        if request.cost == 0 {
            return self.inner.try_admit(request, shown);
        }
        // After `false`, the caller calls `decide`, which answers from the cache if it contains a
        // refusal, and otherwise asks the inner storage.
        if self.cache.answer(&request).is_some() || !self.inner.try_admit(request, shown.as_deref_mut()) {
            return Summary::remove_refusal(shown);
        }
        self.cache.counters.asked(request.policy);
        self.cache.invalidate(request.policy, request.key);
        true
    }

    fn clear(&self, policy: &Policy, key: &Key) -> StorageFuture<()> {
        self.changed(policy, key, self.inner.clear(policy, key))
    }

    fn settle(&self, policy: &Policy, key: &Key, decision: &Decision, actual: u32) -> StorageFuture<()> {
        self.changed(policy, key, self.inner.settle(policy, key, decision, actual))
    }

    /// Clears the inner storage, and removes all cached refusals, even if the inner storage fails.
    fn clear_all(&self) -> StorageFuture<u64> {
        let cleared = self.inner.clear_all();
        self.cache.invalidate_all();
        let cache = Arc::clone(&self.cache);
        cleared.finally(move || cache.invalidate_all())
    }

    forward_storage!(self => self.inner; keys);

    fn wrapped(&self) -> Option<&dyn Storage> {
        Some(&self.inner)
    }
}

/// Prints the inner storage, the settings and the counts, but no keys and no refusals.
impl fmt::Debug for RefusalCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (hits, misses) = self.cache.counters.counted();
        f.debug_struct("RefusalCache")
            .field("inner", &self.inner)
            .field("ttl", &Duration::from_micros(self.cache.ttl))
            .field("max_keys", &self.cache.max_keys)
            .field("len", &self.cache.len())
            .field("hits", &hits)
            .field("misses", &misses)
            .finish_non_exhaustive()
    }
}

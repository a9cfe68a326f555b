//! Quotas that no benchmark exhausts, and limiters that already have states of all keys.

use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tower_ratelimit::storage::{ManualClock, StorageError, StorageFuture, StorageRequest};
use tower_ratelimit::strategy::Strategy;
use tower_ratelimit::{
    Decision, ElasticWindow, FixedWindow, IntoPolicy, Key, LeakyBucket, LocalLimiter, MemoryStorage, MovingWindow, Op,
    Policy, Quota, SlidingWindowCounter, Storage, TokenBucket,
};

use super::hits::MakeKey;

/// The units that are spent on each key beforehand. They keep the state of a bucket for a quarter
/// of an hour.
const HEAD_START: u32 = 1_000_000_000;

/// A strategy with a quota that admits all hits of a benchmark, and whose states last longer than
/// the benchmark.
pub(crate) trait Generous: Strategy + Default {
    fn generous() -> Policy;
}

impl Generous for TokenBucket {
    fn generous() -> Policy {
        bursting(u32::MAX)
    }
}

impl Generous for LeakyBucket {
    fn generous() -> Policy {
        Policy::new(Self::new().queue(u32::MAX - 1), Quota::per_second(1_000_000))
    }
}

/// Uses short windows, so that most decisions depend on a previous window, as in practice.
impl Generous for SlidingWindowCounter {
    fn generous() -> Policy {
        Policy::new(Self::new(), Quota::per(u32::MAX, Duration::from_secs(3)))
    }
}

impl Generous for FixedWindow {
    fn generous() -> Policy {
        Policy::new(Self::new(), Quota::per_minute(u32::MAX))
    }
}

impl Generous for ElasticWindow {
    fn generous() -> Policy {
        Policy::new(Self::new(), Quota::per_minute(u32::MAX))
    }
}

/// Returns a token bucket that refills a unit per microsecond.
pub(crate) fn bursting(burst: u32) -> Policy {
    several(1, burst)
}

/// Returns a policy of several token buckets. Each burst is a unit smaller than the one before.
pub(crate) fn several(limits: u32, burst: u32) -> Policy {
    let quota = |index| Quota::per_second(1_000_000).burst(burst - index);
    let first = Policy::new(TokenBucket::new(), quota(0));
    (1..limits).fold(first, |policy, index| policy.limit(TokenBucket::new(), quota(index)))
}

/// Returns a policy of one hit per day.
pub(crate) fn stingy<S: Strategy + Default>() -> Policy {
    Policy::new(S::default(), Quota::per_day(1))
}

/// Returns a limiter with states of `count` keys, which admits further hits.
pub(crate) fn with_known_keys(policy: Policy, count: u32, key: MakeKey) -> LocalLimiter {
    let limiter = LocalLimiter::new(policy);
    for i in 0..count {
        assert!(limiter.hit_with_cost(&key(i), HEAD_START).is_admitted());
    }
    limiter
}

/// Hits each of `count` keys once.
pub(crate) fn hit_once(limiter: LocalLimiter, count: u32, key: MakeKey) -> LocalLimiter {
    assert!((0..count).all(|i| admits(&limiter, &key(i))));
    limiter
}

/// Returns a limiter that keeps at most `max_keys` keys.
pub(crate) fn capped(policy: Policy, max_keys: u32) -> LocalLimiter {
    let storage = MemoryStorage::builder().max_keys(max_keys as usize).build().expect("the configuration is valid");
    LocalLimiter::with_storage(policy, storage)
}

/// Returns a limiter with a manual clock.
pub(crate) fn with_manual_clock(policy: impl IntoPolicy) -> (LocalLimiter, ManualClock) {
    let clock = ManualClock::default();
    let storage = MemoryStorage::builder().clock(clock.clone()).build().expect("the configuration is valid");
    (LocalLimiter::with_storage(policy, storage), clock)
}

/// Returns a moving window with a full log, its clock, and the time until it admits another hit.
pub(crate) fn full_log(amount: u32, key: &Key) -> (LocalLimiter, ManualClock, Duration) {
    let (limiter, clock) = with_manual_clock(Policy::new(MovingWindow::new(), Quota::per_minute(amount)));
    let pace = Duration::from_secs(60) / amount;
    for _ in 0..amount {
        clock.advance(pace);
        assert!(admits(&limiter, key));
    }
    (limiter, clock, pace)
}

/// Makes one decision, and reads its result, because a caller would read it too.
#[inline]
pub(crate) fn admits(limiter: &LocalLimiter, key: &Key) -> bool {
    limiter.hit(key).is_admitted()
}

/// A storage that always fails.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FailingStorage;

impl Storage for FailingStorage {
    fn decide(&self, _: StorageRequest<'_>) -> StorageFuture<Decision> {
        StorageFuture::ready(Err(StorageError::from_boxed("the storage is down")))
    }

    fn clear(&self, _: &Policy, _: &Key) -> StorageFuture<()> {
        StorageFuture::ready(Err(StorageError::from_boxed("the storage is down")))
    }

    fn settle(&self, _: &Policy, _: &Key, _: &Decision, _: u32) -> StorageFuture<()> {
        StorageFuture::ready(Err(StorageError::from_boxed("the storage is down")))
    }
}

/// Makes one decision like a layer: first with `try_admit`, then with `decide`. The storage must
/// not wait.
#[inline]
pub(crate) fn decides(storage: &impl Storage, policy: &Policy, key: &Key) -> bool {
    let request = StorageRequest::new(policy, key, Op::Hit, 1);
    if storage.try_admit(request, None) {
        return true;
    }
    let mut decision = storage.decide(request);
    match Pin::new(&mut decision).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(Ok(decision)) => decision.is_admitted(),
        _ => panic!("the storage must not wait"),
    }
}

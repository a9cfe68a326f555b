//! Quotas that no benchmark uses up, and limiters that know the keys they will be asked about.

use std::future::{Ready, ready};
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tower_ratelimit::storage::{ManualClock, StorageRequest};
use tower_ratelimit::strategy::Strategy;
use tower_ratelimit::{
    Decision, ElasticWindow, FixedWindow, Key, LeakyBucket, MemoryStorage, MovingWindow, Op, Policy, Quota,
    RateLimiter, SlidingWindowCounter, Storage, TokenBucket,
};

use super::hits::MakeKey;

/// So much is spent on a key beforehand that a bucket remembers it for a quarter of an hour, however seldom it is hit.
const HEAD_START: u32 = 1_000_000_000;

/// A strategy with a quota that admits everything a benchmark asks, and remembers a key for longer than one runs.
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

/// With short windows, so that most decisions weigh a previous one, as they do in real life.
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

/// A token bucket that refills a unit each microsecond.
pub(crate) fn bursting(burst: u32) -> Policy {
    several(1, burst)
}

/// So many token buckets under one key, each a unit smaller than the one before.
pub(crate) fn several(limits: u32, burst: u32) -> Policy {
    let quota = |less| Quota::per_second(1_000_000).burst(burst - less);
    let first = Policy::new(TokenBucket::new(), quota(0));
    (1..limits).fold(first, |policy, less| policy.limit(TokenBucket::new(), quota(less)))
}

/// One hit a day.
pub(crate) fn stingy<S: Strategy + Default>() -> Policy {
    Policy::new(S::default(), Quota::per_day(1))
}

/// A limiter to which `count` keys are known, and that will admit them.
pub(crate) fn knowing(policy: Policy, count: u32, key: MakeKey) -> RateLimiter {
    let limiter = RateLimiter::new(policy);
    for i in 0..count {
        let Ok(decision) = limiter.hit_with_cost(&key(i), HEAD_START).into_inner();
        assert!(decision.is_admitted());
    }
    limiter
}

/// A limiter that has admitted each of `count` keys once.
pub(crate) fn once_hit(limiter: RateLimiter, count: u32, key: MakeKey) -> RateLimiter {
    assert!((0..count).all(|i| admits(&limiter, &key(i))));
    limiter
}

/// A limiter that keeps so many keys at most.
pub(crate) fn capped(policy: Policy, max_keys: u32) -> RateLimiter {
    let storage = MemoryStorage::builder().max_keys(max_keys as usize).build().expect("it may keep keys");
    RateLimiter::with_storage(policy, storage)
}

/// A limiter with a clock in hand.
pub(crate) fn by_hand(policy: Policy) -> (RateLimiter, ManualClock) {
    let clock = ManualClock::default();
    let storage = MemoryStorage::builder().clock(clock.clone()).build().expect("it may keep keys");
    (RateLimiter::with_storage(policy, storage), clock)
}

/// A moving window whose log is full, its clock, and the time after which it has room for one hit more.
pub(crate) fn full_log(amount: u32, key: &Key) -> (RateLimiter, ManualClock, Duration) {
    let (limiter, clock) = by_hand(Policy::new(MovingWindow::new(), Quota::per_minute(amount)));
    let pace = Duration::from_secs(60) / amount;
    for _ in 0..amount {
        clock.advance(pace);
        assert!(admits(&limiter, key));
    }
    (limiter, clock, pace)
}

/// One decision. Whoever asks wants to know, so looking at the answer is part of it.
#[inline]
pub(crate) fn admits(limiter: &RateLimiter, key: &Key) -> bool {
    let Ok(decision) = limiter.hit(key).into_inner();
    decision.is_admitted()
}

/// A storage that is never there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Away;

impl Storage for Away {
    type Error = &'static str;
    type DecideFuture = Ready<Result<Decision, &'static str>>;
    type UpdateFuture = Ready<Result<(), &'static str>>;

    fn decide(&self, _: StorageRequest<'_>) -> Self::DecideFuture {
        ready(Err("it is away"))
    }

    fn clear(&self, _: &Policy, _: &Key) -> Self::UpdateFuture {
        ready(Err("it is away"))
    }

    fn refund(&self, _: &Policy, _: &Key, _: &Decision) -> Self::UpdateFuture {
        ready(Err("it is away"))
    }
}

/// One decision by a storage that answers at once, as a layer asks it: first whether it is a yes.
#[inline]
pub(crate) fn answered<St: Storage>(storage: &St, policy: &Policy, key: &Key) -> bool {
    let ask = StorageRequest::new(policy, key, Op::Hit, 1);
    if storage.try_admit(ask, None) {
        return true;
    }
    let mut decided = storage.decide(ask);
    match Pin::new(&mut decided).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(Ok(decision)) => decision.is_admitted(),
        _ => panic!("it makes nobody wait"),
    }
}

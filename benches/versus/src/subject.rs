//! The limiters that are compared, set up so that one quota fits all of them.

use std::num::NonZeroU32;
use std::time::Duration;

use axum_gcra::gcra;
use governor::DefaultKeyedRateLimiter;
use governor::clock::{DefaultClock, QuantaInstant};
use governor::middleware::{RateLimitingMiddleware, StateInformationMiddleware};
use governor::state::keyed::DefaultKeyedStateStore;
use tower_ratelimit::strategy::Strategy;
use tower_ratelimit::{Key, Policy, Quota, RateLimiter, SlidingWindowCounter, TokenBucket};

use crate::keys::PeerKey;

/// So much is spent on a key beforehand that it is a known one for a quarter of an hour, however seldom it is hit.
const HEAD_START: u32 = 1_000_000_000;

pub type Governor<K> = DefaultKeyedRateLimiter<K>;
pub type TellingGovernor<K> =
    governor::RateLimiter<K, DefaultKeyedStateStore<K>, DefaultClock, StateInformationMiddleware>;
pub type Gcra<K> = gcra::RateLimiter<K, ahash::RandomState>;

/// With a burst that a hot key takes more than a minute to use up.
pub fn token_bucket() -> Policy {
    bursting(u32::MAX)
}

/// A microsecond for each unit.
pub fn bursting(burst: u32) -> Policy {
    Policy::new(TokenBucket::new(), Quota::per_second(1_000_000).burst(burst))
}

pub fn three_token_buckets(burst: u32) -> Policy {
    three(Quota::per_second(1_000_000), burst)
}

/// A thousand at once, as a service might have it, which come back faster than anybody asks for them.
pub fn thousand() -> Policy {
    Policy::new(TokenBucket::new(), Quota::per_second(1_000_000_000).burst(1_000))
}

pub fn three_thousands() -> Policy {
    three(Quota::per_second(1_000_000_000), 1_000)
}

fn three(quota: Quota, burst: u32) -> Policy {
    [1, 2].into_iter().fold(Policy::new(TokenBucket::new(), quota.burst(burst)), |policy, less| {
        policy.limit(TokenBucket::new(), quota.burst(burst - less))
    })
}

/// Short windows, so that most decisions weigh a previous one, as they do in real life.
pub fn sliding_window_counter() -> Policy {
    Policy::new(SlidingWindowCounter::new(), Quota::per(u32::MAX, Duration::from_secs(3)))
}

/// What a first hit leaves behind is remembered for several seconds: longer than anything is measured.
pub fn daily(strategy: impl Strategy) -> Policy {
    Policy::new(strategy, Quota::per_day(10_000))
}

/// One hit a day.
pub fn stingy(strategy: impl Strategy) -> Policy {
    Policy::new(strategy, Quota::per_day(1))
}

pub fn governor<K: PeerKey>() -> Governor<K> {
    Governor::keyed(governor::Quota::per_second(of(1_000_000)).allow_burst(NonZeroU32::MAX))
}

/// It says what remains, too.
pub fn telling_governor<K: PeerKey>() -> TellingGovernor<K> {
    governor().with_middleware()
}

pub fn stingy_governor<K: PeerKey>() -> Governor<K> {
    Governor::keyed(governor::Quota::per_hour(of(1)))
}

/// Without its garbage collection, which would go through all keys once in 8,192 new ones.
pub fn gcra<K: PeerKey>() -> Gcra<K> {
    Gcra::new(u64::MAX, ahash::RandomState::new())
}

pub fn gcra_quota() -> gcra::Quota {
    gcra::Quota::new(Duration::from_micros(1), NonZeroU32::MAX.into())
}

fn of(amount: u32) -> NonZeroU32 {
    NonZeroU32::new(amount).expect("not zero")
}

/// What governor's `check_key` says, asked of ours.
pub fn admits(limiter: &RateLimiter, key: &Key) -> bool {
    limiter.admit(key)
}

/// One decision of ours, with all its numbers. Whoever asks wants to know, so looking at the answer is part of it.
pub fn decides(limiter: &RateLimiter, key: &Key) -> bool {
    let Ok(decision) = limiter.hit(key).into_inner();
    decision.is_admitted()
}

/// Makes all keys known ones.
pub fn prepare(limiter: &RateLimiter, keys: &[Key]) {
    for key in keys {
        let Ok(decision) = limiter.hit_with_cost(key, HEAD_START).into_inner();
        assert!(decision.is_admitted());
    }
}

/// The same for governor.
pub fn prepare_governor<K, M>(
    limiter: &governor::RateLimiter<K, DefaultKeyedStateStore<K>, DefaultClock, M>,
    keys: &[K],
) where
    K: PeerKey,
    M: RateLimitingMiddleware<QuantaInstant>,
{
    for key in keys {
        assert!(limiter.check_key_n(key, of(HEAD_START)).expect("the burst is larger").is_ok());
    }
}

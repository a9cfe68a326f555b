//! The compared limiters, with equivalent quotas.

use std::num::NonZeroU32;
use std::time::Duration;

use axum_gcra::gcra;
use governor::DefaultKeyedRateLimiter;
use governor::clock::{DefaultClock, QuantaInstant};
use governor::middleware::{RateLimitingMiddleware, StateInformationMiddleware};
use governor::state::keyed::DefaultKeyedStateStore;
use tower_ratelimit::strategy::Strategy;
use tower_ratelimit::{Key, LocalLimiter, Policy, Quota, SlidingWindowCounter, TokenBucket};

use crate::keys::PeerKey;

/// The units that are spent on each key beforehand. They keep its state for a quarter of an hour.
const HEAD_START: u32 = 1_000_000_000;

pub type Governor<K> = DefaultKeyedRateLimiter<K>;
pub type SnapshotGovernor<K> =
    governor::RateLimiter<K, DefaultKeyedStateStore<K>, DefaultClock, StateInformationMiddleware>;
pub type Gcra<K> = gcra::RateLimiter<K, ahash::RandomState>;

/// Returns a token bucket whose burst lasts for more than a minute of hits on one key.
pub fn token_bucket() -> Policy {
    bursting(u32::MAX)
}

/// Returns a token bucket that refills a unit per microsecond.
pub fn bursting(burst: u32) -> Policy {
    Policy::new(TokenBucket::new(), Quota::per_second(1_000_000).burst(burst))
}

pub fn three_token_buckets(burst: u32) -> Policy {
    three(Quota::per_second(1_000_000), burst)
}

/// Returns a token bucket with a realistic burst, which refills faster than it is spent.
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

/// Uses short windows, so that most decisions depend on a previous window, as in practice.
pub fn sliding_window_counter() -> Policy {
    Policy::new(SlidingWindowCounter::new(), Quota::per(u32::MAX, Duration::from_secs(3)))
}

/// Returns a policy whose states last for several seconds after one hit, which is longer than the
/// measurement.
pub fn daily(strategy: impl Strategy) -> Policy {
    Policy::new(strategy, Quota::per_day(10_000))
}

/// Returns a policy of one hit per day.
pub fn stingy(strategy: impl Strategy) -> Policy {
    Policy::new(strategy, Quota::per_day(1))
}

pub fn governor<K: PeerKey>() -> Governor<K> {
    Governor::keyed(governor::Quota::per_second(of(1_000_000)).allow_burst(NonZeroU32::MAX))
}

/// Returns a governor that also returns the remaining burst.
pub fn governor_with_snapshot<K: PeerKey>() -> SnapshotGovernor<K> {
    governor().with_middleware()
}

pub fn stingy_governor<K: PeerKey>() -> Governor<K> {
    Governor::keyed(governor::Quota::per_hour(of(1)))
}

/// Disables garbage collection, which would visit all keys after every 8,192 new ones.
pub fn gcra<K: PeerKey>() -> Gcra<K> {
    Gcra::new(u64::MAX, ahash::RandomState::new())
}

pub fn gcra_quota() -> gcra::Quota {
    gcra::Quota::new(Duration::from_micros(1), NonZeroU32::MAX.into())
}

fn of(amount: u32) -> NonZeroU32 {
    NonZeroU32::new(amount).expect("not zero")
}

/// Returns `true` if a hit is admitted, like governor's `check_key`.
pub fn admits(limiter: &LocalLimiter, key: &Key) -> bool {
    limiter.admit(key)
}

/// Makes a decision with all its numbers, and reads the result, because a caller would read it too.
pub fn decides(limiter: &LocalLimiter, key: &Key) -> bool {
    limiter.hit(key).is_admitted()
}

/// Creates states of all keys.
pub fn prepare(limiter: &LocalLimiter, keys: &[Key]) {
    for key in keys {
        assert!(limiter.hit_with_cost(key, HEAD_START).is_admitted());
    }
}

/// Creates states of all keys in governor.
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

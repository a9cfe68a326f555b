//! The laws of every strategy and of the memory storage.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use common::members::random_members_decide_like_the_model;
use common::{EVERY_STRATEGY, KEEPING, memory, memory_with_manual_clock, now, policy};
use tower_ratelimit::storage::{InOrder, StorageError, StorageErrorKind, StorageFuture, StorageRequest};
use tower_ratelimit::testing::{
    StorageLaws, StrategyLaws, concurrent_hits_are_exact, decides_like_the_model, members_decide_like_the_model,
};
use tower_ratelimit::{
    CalendarWindow, ConfigError, Decision, ElasticWindow, FixedWindow, Key, LeakyBucket, Lockout, MemoryStorage,
    MovingWindow, Policy, Quota, RateLimiter, SlidingWindowCounter, Storage, TokenBucket,
};

/// Guards against these defects: a WRONGTYPE error if two strategies use one key, counts of
/// one period in another, and different keys with the same text.
#[test]
fn memory_obeys_the_laws() {
    StorageLaws::new(memory).check();
    let keeps_keys = |clock| MemoryStorage::builder().clock(clock).keep_keys(true).build().unwrap();
    StorageLaws::new(keeps_keys).scripts(64).check();
}

/// `PROPTEST_CASES` sets the number of scripts.
#[test]
fn memory_decides_on_several_keys_like_the_model() {
    members_decide_like_the_model(memory);
}

/// Without logs, the states of up to eight limits are decided without being moved.
#[tokio::test]
async fn memory_decides_on_several_small_states_like_the_model() {
    let limits: Vec<_> = EVERY_STRATEGY.into_iter().chain(KEEPING).filter(|text| !text.starts_with("moving")).collect();
    random_members_decide_like_the_model(300, &limits, memory).await;
}

/// It also refunds, so it need not equal the model.
#[test]
fn members_in_order_obey_the_laws() {
    StorageLaws::new(|clock| InOrder::new(memory(clock))).check();
}

/// A handle to a memory storage whose first decisions fail, as on a server that is not connected yet.
#[derive(Clone, Debug)]
struct Connecting {
    memory: MemoryStorage,
    failures: Arc<AtomicU32>,
}

impl Connecting {
    fn new(memory: MemoryStorage) -> Self {
        Self { memory, failures: Arc::new(AtomicU32::new(2)) }
    }
}

impl Storage for Connecting {
    fn decide(&self, request: StorageRequest<'_>) -> StorageFuture<Decision> {
        match self.failures.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |failures| failures.checked_sub(1)) {
            Ok(_) => StorageFuture::ready(Err(StorageError::new(StorageErrorKind::Unreachable, "not connected yet"))),
            Err(_) => self.memory.decide(request),
        }
    }

    fn settle(&self, policy: &Policy, key: &Key, decision: &Decision, actual: u32) -> StorageFuture<()> {
        self.memory.settle(policy, key, decision, actual)
    }

    fn clear(&self, policy: &Policy, key: &Key) -> StorageFuture<()> {
        self.memory.clear(policy, key)
    }

    fn validate(&self, policy: &Policy) -> Result<(), ConfigError> {
        self.memory.validate(policy)
    }
}

/// Guards against this defect: on a busy machine, the first connection of a storage or of a second
/// handle takes longer than the storage allows, and a law fails.
#[test]
fn suite_waits_until_each_storage_is_connected() {
    StorageLaws::new(|clock| Connecting::new(memory(clock)))
        .second_handle(|first| Connecting::new(first.memory.clone()))
        .scripts(16)
        .check();
}

#[test]
fn fixed_window_obeys_the_laws() {
    StrategyLaws::new(FixedWindow::new()).promise(|quota| 2 * u64::from(quota.amount()) - 1).check();
}

#[test]
fn fixed_window_aligned_obeys_the_laws() {
    StrategyLaws::new(FixedWindow::aligned()).promise(|quota| 2 * u64::from(quota.amount())).check();
}

#[test]
fn elastic_window_obeys_the_laws() {
    StrategyLaws::new(ElasticWindow::new()).promise(|quota| quota.amount().into()).check();
}

#[test]
fn moving_window_obeys_the_laws() {
    StrategyLaws::new(MovingWindow::new()).promise(|quota| quota.amount().into()).check();
}

#[test]
fn sliding_window_counter_obeys_the_laws() {
    // Rounding the previous bucket's share down can admit one more than 2N - 1. At N = 1 the share
    // is always 0.
    StrategyLaws::new(SlidingWindowCounter::new()).promise(|quota| 2 * u64::from(quota.amount())).check();
}

#[test]
fn sliding_window_counter_aligned_obeys_the_laws() {
    StrategyLaws::new(SlidingWindowCounter::aligned()).promise(|quota| 2 * u64::from(quota.amount())).check();
}

#[test]
fn token_bucket_obeys_the_laws() {
    StrategyLaws::new(TokenBucket::new())
        .with_bursts()
        .promise(|quota| u64::from(quota.burst_size().unwrap_or(quota.amount())) + u64::from(quota.amount()))
        .check();
}

#[test]
fn leaky_bucket_obeys_the_laws() {
    for slots in [0, 3] {
        let promise = move |quota: &Quota| u64::from(slots) + 1 + u64::from(quota.amount());
        StrategyLaws::new(LeakyBucket::new().queue(slots)).promise(promise).check();
    }
    StrategyLaws::new(LeakyBucket::new()).promise(|quota| 2 * u64::from(quota.amount()) + 1).check();
}

/// The locks are shorter than the period, longer, and longer than every script.
#[test]
fn lockout_obeys_the_laws() {
    let longest_wait = |lock: Duration| move |quota: &Quota| lock.max(quota.period());
    for (lock, factor, longest, quiet) in [(1, 1, 1, 1), (1, 2, 5_000_000, 7), (3_000, 3, 60_000, 90_000)] {
        let [lock, longest, quiet] = [lock, longest, quiet].map(Duration::from_micros);
        let strategy = Lockout::lasting(lock).escalating(factor, longest).forgetting_after(quiet);
        StrategyLaws::new(strategy).longest_wait(longest_wait(longest)).check();
    }
    let years = Duration::from_secs(100 * 365 * 86_400);
    StrategyLaws::new(Lockout::lasting(years))
        .promise(|quota| 2 * u64::from(quota.amount()) - 1)
        .longest_wait(longest_wait(years))
        .check();
}

/// A period of 30 days can contain a February and parts of its neighbors.
#[test]
fn calendar_window_obeys_the_laws() {
    let promise = |quota: &Quota| 3 * u64::from(quota.amount());
    let windows = [
        CalendarWindow::new(),
        CalendarWindow::new().in_zone("America/Havana").unwrap(),
        CalendarWindow::new().first_day(31).unwrap().in_zone("Europe/Berlin").unwrap(),
    ];
    for window in windows {
        StrategyLaws::new(window).promise(promise).check();
    }
}

#[test]
fn memory_decides_like_the_model() {
    let policies = [
        "3/second",
        "fixed-window 3/second",
        "elastic-window 3/second",
        "moving-window 3/second",
        "token-bucket 7/second burst 4",
        "leaky-bucket 3/second queue 2",
        "lockout 3/second for 2s x2 up to 1m forget 10s",
        "3/second; lockout 5 refusals/10 seconds for 2s x2 up to 1m",
        "calendar 3/day in America/Havana",
        "elastic-window 2/second; moving-window 5/20 seconds",
        "token-bucket 7/second burst 4; sliding-window-counter-aligned 9/minute; leaky-bucket 3/second queue 2",
        "moving-window 4/second; moving-window 6/second; 20/minute; fixed-window-aligned 5/second; 30/hour",
    ];
    decides_like_the_model(&policies.map(policy), memory);
}

/// Guards against this defect: check and increment are two steps.
#[test]
fn memory_storage_is_exact_for_concurrent_hits() {
    for text in [
        "5000/day",
        "fixed-window 5000/day",
        "elastic-window 5000/day",
        "moving-window 5000/day",
        "token-bucket 5000/year",
        "leaky-bucket 1/day queue 4999",
        "lockout 5000/day for 1d",
        "moving-window 7000/day; fixed-window 5000/day; token-bucket 6000/year",
    ] {
        concurrent_hits_are_exact(&policy(text), &MemoryStorage::new());
    }
}

/// The table in the documentation: a client hits once, then as often as it can around the end of
/// the minute.
#[test]
fn bursts_at_a_window_boundary_match_the_docs() {
    for (text, in_two_seconds) in [
        ("fixed-window 100/minute", 199),
        ("fixed-window-aligned 100/minute", 199),
        ("elastic-window 100/minute", 99),
        ("sliding-window-counter 100/minute", 101),
        ("moving-window 100/minute", 100),
        ("token-bucket 100/minute", 103),
        ("token-bucket 100/minute burst 10", 13),
    ] {
        let (storage, clock) = memory_with_manual_clock();
        let limiter = RateLimiter::with_storage(policy(text), storage);
        let hit = || now(limiter.hit(&"greedy".into())).is_admitted();
        assert!(hit());
        clock.advance(Duration::from_secs(59));
        let mut admitted = 0;
        for _ in 0..200 {
            while hit() {
                admitted += 1;
            }
            clock.advance(Duration::from_millis(10));
        }
        assert_eq!(admitted, in_two_seconds, "{text}");
    }
}

#[test]
fn model_is_send_sync_and_debug() {
    fn check<T: Send + Sync + std::fmt::Debug>() {}
    check::<tower_ratelimit::testing::Model>();
}

//! The laws of the wrappers.

use std::sync::Arc;
use std::time::Duration;

use common::random::Numbers;
use common::{EVERY_STRATEGY, FakeStorage, failing, memory, memory_with_manual_clock, policy};
use tower_ratelimit::storage::{
    AnyStorage, Breaker, Clock, Leases, ManualClock, RefusalCache, StorageFuture, StorageRequest, Summary,
};
use tower_ratelimit::testing::{Model, StorageLaws, concurrent_hits_are_exact, decides_like_the_model};
use tower_ratelimit::{Decision, DecisionSource, Key, Op, Policy, Storage, Timestamp};

/// The scripts of wrappers that pass each call on. The memory storage inside runs many more.
const SCRIPTS: u32 = 48;

/// Runs a million times as fast as the inner clock. A cached refusal expires within a microsecond
/// of the inner clock, so the cache returns the model's numbers.
#[derive(Debug)]
struct FastClock(ManualClock);

impl Clock for FastClock {
    fn now(&self) -> Timestamp {
        let passed = self.0.now().since(ManualClock::default().now());
        Timestamp::EPOCH.plus(u64::from(u32::MAX)).plus(passed.saturating_mul(1_000_000))
    }
}

/// A refusal cache around a memory storage, both with the same clock.
fn cached_memory() -> (RefusalCache, ManualClock) {
    let (memory, clock) = memory_with_manual_clock();
    (RefusalCache::new(FakeStorage::around(memory)).clock(clock.clone()), clock)
}

#[test]
fn boxed_storages_obey_the_laws() {
    StorageLaws::new(|clock| AnyStorage::new(memory(clock))).scripts(SCRIPTS).check();
    StorageLaws::new(|clock| Arc::new(memory(clock))).scripts(SCRIPTS).check();
    StorageLaws::new(|clock: ManualClock| {
        let breaker = AnyStorage::new(Breaker::new(AnyStorage::new(memory(clock.clone()))));
        AnyStorage::new(RefusalCache::new(breaker).clock(FastClock(clock)))
    })
    .scripts(SCRIPTS)
    .check();
}

#[test]
fn breaker_obeys_the_laws() {
    StorageLaws::new(|clock| Breaker::new(memory(clock))).scripts(SCRIPTS).check();
    StorageLaws::new(|clock| Breaker::new(memory(clock)).fallback(memory(ManualClock::default()), 3))
        .scripts(SCRIPTS)
        .check();
}

/// Returns the decisions of a fallback as those of a primary. Asserts that clearing the primary
/// fails.
#[derive(Debug)]
struct FallbackOnly(Breaker);

impl Storage for FallbackOnly {
    fn decide(&self, request: StorageRequest<'_>) -> StorageFuture<Decision> {
        let deciding = self.0.decide(request);
        StorageFuture::new(async {
            let decision = deciding.await?;
            assert!(decision.is_from_fallback());
            Ok(decision.with_source(DecisionSource::Primary))
        })
    }

    fn try_admit(&self, request: StorageRequest<'_>, shown: Option<&mut Summary>) -> bool {
        self.0.try_admit(request, shown)
    }

    fn clear(&self, policy: &Policy, key: &Key) -> StorageFuture<()> {
        let clearing = self.0.clear(policy, key);
        StorageFuture::new(async {
            assert!(clearing.await.is_err(), "the primary is down");
            Ok(())
        })
    }

    fn settle(&self, policy: &Policy, key: &Key, decision: &Decision, actual: u32) -> StorageFuture<()> {
        self.0.settle(policy, key, &decision.clone().with_source(DecisionSource::Fallback), actual)
    }
}

#[test]
fn fallback_obeys_the_laws_while_the_primary_fails() {
    // The circuit opens in the middle of a script, or not at all.
    let make = |clock: ManualClock| FallbackOnly(Breaker::new(failing()).failures(10).fallback(memory(clock), 1));
    let together = "elastic-window 2/second; moving-window 5/20 seconds; leaky-bucket 3/second queue 2";
    let policies = EVERY_STRATEGY.into_iter().chain([together]).map(policy);
    decides_like_the_model(&policies.collect::<Vec<_>>(), make);
}

#[test]
fn refusal_cache_obeys_the_laws() {
    StorageLaws::new(|clock: ManualClock| {
        let storage = memory(clock.clone());
        RefusalCache::new(storage).clock(FastClock(clock))
    })
    .scripts(128)
    .check();
}

/// Law 8, at any later instant: refusals and waits equal the model's to the microsecond. The
/// other numbers are equal until units refill, which the cache does not notice.
#[tokio::test]
async fn cached_refusals_and_waits_equal_the_models() {
    let more =
        ["elastic-window 2/second; moving-window 5/20 seconds", "fixed-window 2/second; fixed-window-aligned 9/minute"];
    let more = more.into_iter().chain([
        "token-bucket 2/second; moving-window 4 per 3 seconds; 9/minute",
        "fixed-window 2/second; lockout 3 refusals/5 seconds for 2 seconds x2 up to 8 seconds",
    ]);
    let policies: Vec<Policy> = EVERY_STRATEGY.into_iter().chain(more).map(policy).collect();
    let mut numbers = Numbers(20_261_120);
    for life in [1, 700, 5_000, 3_600_000] {
        let mut answered = 0;
        for script in 0..400 {
            let (cache, clock) = cached_memory();
            let cache = cache.ttl(Duration::from_millis(life));
            let (mut model, mut last) = (Model::default(), None);
            for _ in 0..60 {
                let wait = match numbers.below(4) {
                    0 | 1 => 0,
                    2 => numbers.below(400_000),
                    // Sometimes exactly at the end of a wait.
                    _ => numbers.below(60) * 50_000,
                };
                clock.advance(Duration::from_micros(wait));
                let policy = &policies[(script + usize::from(numbers.below(4) == 0)) % policies.len()];
                let (key, now) = (Key::from(numbers.below(2)), clock.now());
                let (op, cost) =
                    (numbers.one_of(&[Op::Hit, Op::Hit, Op::Hit, Op::Peek]), numbers.one_of(&[1, 1, 2, 3, 4, 5]));
                match numbers.below(16) {
                    0 => {
                        cache.clear(policy, &key).await.unwrap();
                        model.clear(policy, &key);
                    }
                    1 => {
                        if let Some((policy, key, decision)) = last.take() {
                            cache.settle(policy, &key, &decision, 0).await.unwrap();
                            model.settle(policy, &key, &decision, 0, now);
                        }
                    }
                    _ => {
                        let got = cache.decide(StorageRequest::new(policy, &key, op, cost)).await.unwrap();
                        let expected = model.decide(policy, &key, op, cost, now);
                        let answer =
                            |it: &Decision| (it.at(), it.cost(), it.is_admitted(), it.delay(), it.retry_after());
                        assert_eq!(answer(&got), answer(&expected), "{policy}: {got:?}, {expected:?}");
                        assert_eq!(got.capacity(), expected.capacity());
                        assert!(got.remaining() <= expected.remaining(), "{policy}: {got:?}, {expected:?}");
                        if got.remaining() == expected.remaining() {
                            let resets = (got.reset_after(), expected.reset_after());
                            assert!(
                                resets.0 == resets.1 || resets.0 <= Duration::from_micros(1),
                                "{policy}: {resets:?}"
                            );
                        }
                        if got.statuses() != expected.statuses() {
                            assert!(got.is_refused(), "{policy}: {got:?}, {expected:?}");
                        }
                        for (limit, status) in policy.limits().iter().zip(got.statuses()) {
                            assert_ne!(status.retry_after(), Some(Duration::ZERO), "{policy}: {got:?}");
                            if limit.strategy().name() == "lockout-by-refusals" {
                                continue;
                            }
                            let is_full = status.remaining() == status.capacity();
                            assert_eq!(status.reset_after().is_zero(), is_full, "{policy}: {got:?}");
                            assert_eq!(status.is_admitted(), cost <= status.remaining() || got.is_admitted());
                        }
                        last = Some((policy, key, got));
                    }
                }
            }
            answered += cache.local_decisions();
        }
        assert!(answered > 300, "{answered}");
    }
}

/// Leases around a refusal cache and a breaker.
fn leased(slice: u32) -> Leases {
    let clock = ManualClock::default();
    let memory = || memory(clock.clone());
    let breaker = Breaker::new(memory()).fallback(memory(), 2);
    Leases::new(RefusalCache::new(breaker).clock(FastClock(clock.clone())), slice).clock(clock)
}

/// Law 9: a process spends leased units exactly once.
#[test]
fn concurrent_hits_of_leases_are_exact() {
    for slice in [1, 7, 1_000] {
        for text in ["fixed-window 5000/day", "moving-window 5000/day", "5000/day"] {
            concurrent_hits_are_exact(&policy(text), &leased(slice));
        }
    }
}

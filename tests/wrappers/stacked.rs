//! Stacked wrappers: a wrapper must not confuse decisions of a fallback with those of the primary.

use std::time::Duration;

use common::{Behavior, FakeStorage, policy, spend};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};
use tower_ratelimit::storage::{Breaker, Leases, ManualClock, RefusalCache};
use tower_ratelimit::{Decision, Key, MemoryStorage, RateLimiter};

const MS: Duration = Duration::from_millis(1);

/// Returns a breaker for `replicas` replicas that opens at the first failure, its primary, and the
/// clock of both.
fn breaker(replicas: u32) -> (Breaker, FakeStorage, ManualClock) {
    let (primary, clock) = FakeStorage::in_memory(Behavior::Works);
    let fallback = MemoryStorage::builder().clock(clock.clone()).build().unwrap();
    (Breaker::new(primary.clone()).failures(1).probe_after(MS, MS).fallback(fallback, replicas), primary, clock)
}

async fn hit_by(limiter: &RateLimiter, key: &Key, cost: u32) -> Decision {
    limiter.hit_with_cost(key, cost).await.unwrap()
}

/// Hits with another key until the primary decides.
async fn until_primary_decides(limiter: &RateLimiter) {
    while hit_by(limiter, &Key::from("other"), 1).await.is_from_fallback() {
        sleep(MS).await;
    }
}

#[tokio::test(start_paused = true)]
async fn refusals_of_a_fallback_are_not_cached() {
    let (breaker, primary, clock) = breaker(1);
    let cache = RefusalCache::new(breaker).clock(clock);
    let limiter = RateLimiter::with_storage(policy("1/day"), cache.clone());
    primary.set(Behavior::Fails);
    assert!(spend(&limiter, 1).await.is_admitted());
    for _ in 0..3 {
        let refused = spend(&limiter, 1).await;
        assert!(refused.is_refused() && refused.is_from_fallback());
    }
    assert_eq!((cache.len(), cache.local_decisions()), (0, 0));
    primary.set(Behavior::Works);
    sleep(MS).await;
    let decision = spend(&limiter, 1).await;
    assert!(decision.is_admitted() && !decision.is_from_fallback());
}

#[tokio::test(start_paused = true)]
async fn cached_refusals_stay_during_an_outage() {
    let (breaker, primary, clock) = breaker(1);
    let limiter = RateLimiter::with_storage(policy("1/day"), RefusalCache::new(breaker).clock(clock.clone()));
    assert!(spend(&limiter, 1).await.is_admitted());
    assert!(spend(&limiter, 1).await.is_refused());
    primary.set(Behavior::Fails);
    let refused = spend(&limiter, 1).await;
    assert!(refused.is_refused() && !refused.is_from_fallback());
    // After the time to live the entry is gone, and the fallback has its own quota.
    clock.advance(Duration::from_secs(1));
    let admitted = spend(&limiter, 1).await;
    assert!(admitted.is_admitted() && admitted.is_from_fallback());
}

#[tokio::test(start_paused = true)]
async fn leases_are_spent_during_an_outage_and_none_are_taken_from_the_fallback() {
    for text in ["fixed-window 1000/day", "moving-window 1000/day", "calendar 1000/day"] {
        let (breaker, primary, clock) = breaker(4);
        let leases = Leases::new(breaker, 10).clock(clock);
        let limiter = RateLimiter::with_storage(policy(text), leases.clone());
        for spent in 1..=2 {
            assert_eq!(spend(&limiter, 1).await.remaining(), 1_000 - spent);
        }
        primary.set(Behavior::Fails);
        for spent in 3..=12 {
            let decision = spend(&limiter, 1).await;
            assert!(!decision.is_from_fallback());
            assert_eq!(decision.remaining(), 1_000 - spent);
        }
        for spent in 1..=250 {
            let decision = spend(&limiter, 1).await;
            assert!(decision.is_admitted() && decision.is_from_fallback(), "{spent}");
            assert_eq!((decision.capacity(), decision.remaining(), decision.cost()), (250, 250 - spent, 1));
        }
        let peek = limiter.peek(&Key::global()).await.unwrap();
        assert!(peek.is_from_fallback() && peek.remaining() == 0);
        let refused = spend(&limiter, 1).await;
        assert!(refused.is_refused() && refused.is_from_fallback());
        assert_eq!((refused.capacity(), refused.remaining(), refused.cost()), (250, 0, 1));

        primary.set(Behavior::Works);
        until_primary_decides(&limiter).await;
        let before = leases.misses();
        for spent in 13..=24 {
            assert_eq!(spend(&limiter, 1).await.remaining(), 1_000 - spent, "{text}");
        }
        // One hit without a slice, because its key failed last, and then a slice.
        assert_eq!(leases.misses() - before, 2);
    }
}

/// The hits wait for a slice, which the fallback decides.
#[tokio::test(start_paused = true)]
async fn waiting_callers_each_get_a_decision_of_the_fallback() {
    let (breaker, primary, clock) = breaker(4);
    let limiter = RateLimiter::with_storage(policy("fixed-window 400/day"), Leases::new(breaker, 10).clock(clock));
    let _ = spend(&limiter, 1).await;
    primary.set(Behavior::FailsAfter(5 * MS));
    let mut hits = JoinSet::new();
    for cost in [1, 2, 30, 3, 20, 4, 1] {
        let limiter = limiter.clone();
        hits.spawn(async move { spend(&limiter, cost).await });
    }
    let started = Instant::now();
    let decisions = hits.join_all().await;
    assert!(started.elapsed() <= 11 * MS, "callers wait for at most two timeouts: {:?}", started.elapsed());
    assert!(decisions.iter().all(|decision| decision.is_from_fallback() && decision.is_admitted()));
    sleep(10 * MS).await;
    let peek = limiter.peek(&Key::global()).await.unwrap();
    assert_eq!((peek.is_from_fallback(), peek.remaining()), (true, 100 - 61), "the slice was refunded");
}

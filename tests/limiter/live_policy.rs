//! Policies that change while limiters use them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use common::{FakeStorage, failing, foreign, memory_with_manual_clock, now, policy};
use tower_ratelimit::storage::{Breaker, ManualClock};
use tower_ratelimit::{Global, Key, LivePolicy, MemoryStorage, OnError, Policy, RateLimitLayer, RateLimiter};

fn api(text: &str) -> Policy {
    policy(text).with_name("api")
}

fn limiter(live: &LivePolicy) -> (RateLimiter, ManualClock) {
    let (storage, clock) = memory_with_manual_clock();
    (RateLimiter::with_storage(live.clone(), storage), clock)
}

fn alice() -> Key {
    Key::from("alice")
}

/// A storage that rejects policies with a larger capacity.
fn small_storage(capacity: u32) -> FakeStorage {
    FakeStorage::around(MemoryStorage::new()).holding_at_most(capacity)
}

async fn left(limiter: &RateLimiter) -> u32 {
    limiter.peek(&alice()).await.unwrap().remaining()
}

#[tokio::test]
async fn change_keeps_the_units_spent_under_the_same_name() {
    let live = LivePolicy::new(api("fixed-window 10/minute"));
    let (limiter, _clock) = limiter(&live);
    assert!(limiter.hit_with_cost(&alice(), 4).await.unwrap().is_admitted());
    for (text, expected) in [
        ("fixed-window 20/minute", 16),
        ("fixed-window 3/minute", 0),
        ("fixed-window 10/minute", 6),
        ("fixed-window 10/hour", 10),
        ("fixed-window 10/minute", 6),
    ] {
        live.set(api(text)).unwrap();
        assert_eq!(left(&limiter).await, expected, "{text}");
        assert_eq!((live.get(), limiter.policy()), (api(text), api(text)));
    }
    live.set(policy("fixed-window 10/minute").with_name("other")).unwrap();
    assert_eq!(left(&limiter).await, 10);
}

#[tokio::test]
async fn clones_of_the_handle_change_every_limiter() {
    let live = LivePolicy::new(api("5/minute"));
    let limiters = [limiter(&live).0, limiter(&live).0];
    live.clone().set(api("7/minute")).unwrap();
    for limiter in &limiters {
        assert_eq!(left(limiter).await, 7);
        assert!(now(limiter.hit_with_cost(&alice(), 7)).is_admitted() && now(limiter.hit(&alice())).is_refused());
    }
}

#[tokio::test]
async fn reservation_is_settled_under_the_policy_of_its_hit() {
    let live = LivePolicy::new(api("fixed-window 5/minute"));
    let (limiter, _clock) = limiter(&live);
    let (hit, counted) = (limiter.reserve(&alice(), 1).await.unwrap(), limiter.reserve(&alice(), 1).await.unwrap());
    let mut counter = counted.counter();
    let before = hit.policy().clone();
    live.set(api("fixed-window 5/hour; 100/day")).unwrap();
    hit.refund().await.unwrap();
    counter.add(3);
    drop(counter);
    let before = RateLimiter::with_storage(before, limiter.storage().clone());
    assert_eq!(left(&before).await, 2);
    assert_eq!(limiter.peek(&alice()).await.unwrap().statuses().len(), 2);
}

/// Guards against this defect: settling a hit under its own policy deletes the units that were spent
/// under a larger one since, and 5,945 of 6,000 units remain instead of one.
#[tokio::test]
async fn settlement_under_the_previous_policy_keeps_later_units() {
    for later in [5_990, 990] {
        for actual in [0, 9, 10, 11, 20, 150] {
            let live = LivePolicy::new(api("token-bucket 60/hour"));
            let (limiter, _clock) = limiter(&live);
            let hit = limiter.reserve(&alice(), 10).await.unwrap();
            live.set(api("token-bucket 60/hour burst 6000")).unwrap();
            assert!(limiter.hit_with_cost(&alice(), later).await.unwrap().is_admitted());
            hit.settle(actual).await.unwrap();
            let peek = limiter.peek(&alice()).await.unwrap();
            let spent = later + actual;
            assert_eq!(peek.remaining(), 6_000_u32.saturating_sub(spent), "{later}, settled as {actual}");
            // One unit is refilled per minute, so the client is in debt.
            let minutes = peek.retry_after().map_or(0, |wait| wait.as_secs() / 60);
            assert_eq!(minutes, u64::from((spent + 1).saturating_sub(6_000)), "{later}, settled as {actual}");
        }
    }
}

#[tokio::test]
async fn set_rejects_a_policy_that_one_of_the_storages_cannot_keep() {
    let live = LivePolicy::new(api("5/minute"));
    let (limiter, _clock) = limiter(&live);
    let small = RateLimiter::with_storage(live.clone(), small_storage(50));
    let error = live.set(api("51/minute")).unwrap_err();
    assert_eq!(error.to_string(), "at most 50");
    assert_eq!((left(&limiter).await, left(&small).await), (5, 5));

    live.set(api("50/minute")).unwrap();
    assert_eq!((left(&limiter).await, left(&small).await), (50, 50));

    drop(small);
    live.set(api("51/minute")).unwrap();
    let small = small_storage(50);
    assert!(RateLimiter::try_with_storage(live, small).is_err(), "a limiter validates the current policy");
}

#[tokio::test]
async fn set_validates_shadow_limits_and_clones_of_limiters() {
    let live = LivePolicy::new(api("5/minute"));
    let small = RateLimiter::with_storage(live.clone(), small_storage(50));
    let clone = small.clone();
    drop(small);
    assert!(live.set(api("5/minute; shadow 51/minute")).is_err());
    live.set(api("5/minute; shadow 50/minute")).unwrap();
    assert_eq!(left(&clone).await, 5);
}

#[tokio::test]
async fn fallback_of_a_breaker_divides_the_new_policy() {
    let live = LivePolicy::new(api("fixed-window 30/minute"));
    let storage = Breaker::new(failing()).fallback(MemoryStorage::new(), 3);
    let limiter = RateLimiter::with_storage(live.clone(), storage);
    let capacity = async || limiter.peek(&alice()).await.unwrap().capacity();
    assert_eq!(capacity().await, 10);
    live.set(api("fixed-window 60/minute")).unwrap();
    assert_eq!(capacity().await, 20);

    let fallback = small_storage(25);
    let _limiter = RateLimiter::with_storage(live.clone(), Breaker::new(MemoryStorage::new()).fallback(fallback, 3));
    assert!(live.set(api("fixed-window 78/minute")).is_err(), "a third of it is 26");
    live.set(api("fixed-window 75/minute")).unwrap();
}

#[tokio::test]
async fn many_distinct_policies_are_read_correctly() {
    let live = LivePolicy::new(api("fixed-window 1/minute"));
    let (limiter, _clock) = limiter(&live);
    for (round, amount) in (1..=200).chain([1, 200, 63, 64, 65, 200]).enumerate() {
        live.set(api(&format!("fixed-window {amount}/minute"))).unwrap();
        assert_eq!(left(&limiter).await, amount);
        assert!(now(limiter.hit_with_cost(&Key::from(round.to_string()), amount)).is_admitted());
    }
}

#[tokio::test]
async fn live_policy_does_not_confuse_custom_strategies_with_equal_texts() {
    let live = LivePolicy::new(foreign(5));
    let first = live.get();
    let second = foreign(5);
    assert_eq!(first.to_string(), second.to_string());
    live.set(second.clone()).unwrap();
    let shared = |policy: &Policy| std::ptr::from_ref(&policy.limits()[0]);
    assert_eq!(shared(&live.get()), shared(&second));
    live.set(first.clone()).unwrap();
    assert_eq!(shared(&live.get()), shared(&first));
}

#[test]
fn concurrent_changes_lose_no_unit() {
    let live = LivePolicy::new(api("fixed-window 4000000000/minute"));
    let (limiter, _clock) = limiter(&live);
    let is_over = AtomicBool::new(false);
    let hits: u32 = thread::scope(|scope| {
        let spenders: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(|| {
                    let mut hits = 0;
                    while !is_over.load(Ordering::Relaxed) || hits == 0 {
                        assert!(now(limiter.hit(&alice())).is_admitted());
                        hits += 1;
                    }
                    hits
                })
            })
            .collect();
        for round in 0..500_u32 {
            // More distinct policies than slots.
            live.set(api(&format!("fixed-window {}/minute", 4_000_000_000 + round % 100))).unwrap();
        }
        is_over.store(true, Ordering::Relaxed);
        spenders.into_iter().map(|spender| spender.join().unwrap()).sum()
    });
    live.set(api("fixed-window 4000000000/minute")).unwrap();
    assert_eq!(now(limiter.peek(&alice())).remaining(), 4_000_000_000 - hits);
}

/// Guards against this defect: each limiter of a live policy takes memory until the next `set`.
#[test]
fn dropped_limiters_and_layers_leave_no_memory() {
    let (storage, _clock) = memory_with_manual_clock();
    let live = LivePolicy::new(api("fixed-window 10/minute"));
    let layer = RateLimitLayer::new(live.clone(), Global::new()).storage(storage.clone(), OnError::Refuse);
    let limiter = layer.limiter().unwrap();
    let info = allocation_counter::measure(|| {
        for _ in 0..1_000_000 {
            drop(layer.limiter_for(live.clone()).unwrap());
        }
        for _ in 0..10_000 {
            drop(RateLimitLayer::new(live.clone(), Global::new()).storage(storage.clone(), OnError::Refuse));
        }
    });
    assert!(info.bytes_current < 1_000, "{} bytes are left", info.bytes_current);
    assert!(info.bytes_max < 100_000, "{} bytes at the peak", info.bytes_max);
    live.set(api("fixed-window 20/minute")).unwrap();
    assert_eq!(common::now(limiter.peek(&alice())).capacity(), 20);
}

/// A limiter that is still in use is asked for each later policy, whatever others are dropped.
#[test]
fn remaining_limiters_validate_later_policies() {
    let live = LivePolicy::new(api("fixed-window 10/minute"));
    let limiter = |capacity| RateLimiter::with_storage(live.clone(), small_storage(capacity));
    let mut limiters: Vec<_> = (0..100).map(|number| limiter(20 + number)).collect();
    for drop_at in [0, 50, 40, 0, 7] {
        drop(limiters.remove(drop_at));
    }
    // The smallest storage that is left holds 22 units.
    assert!(live.set(api("fixed-window 22/minute")).is_ok());
    assert!(live.set(api("fixed-window 23/minute")).is_err());
    drop(limiters);
    assert!(live.set(api("fixed-window 1000/minute")).is_ok());
}

#[test]
fn limiters_are_created_and_dropped_while_the_policy_is_set() {
    let live = LivePolicy::new(api("fixed-window 10/minute"));
    let storage = MemoryStorage::new();
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    let limiter = RateLimiter::with_storage(live.clone(), storage.clone());
                    let clone = limiter.clone();
                    drop(limiter);
                    assert!(clone.policy().limits()[0].capacity() >= 10);
                }
            });
        }
        for amount in 10..5_000 {
            live.set(api(&format!("fixed-window {amount}/minute"))).unwrap();
        }
        // A policy that a storage rejects: the users are dropped while the error returns.
        let picky = RateLimiter::with_storage(live.clone(), small_storage(4_999));
        for amount in 5_000..6_000 {
            assert!(live.set(api(&format!("fixed-window {amount}/minute"))).is_err());
        }
        drop(picky);
        done.store(true, Ordering::Relaxed);
    });
}

//! Limits that keep units for others.

use std::time::Duration;

use common::time::eventually;
use common::{EVERY_STRATEGY, FakeStorage, memory_with_manual_clock, message, policy};
use tower_ratelimit::storage::{Leases, RefusalCache, TokioClock};
use tower_ratelimit::{
    Global, Key, Limit, LivePolicy, LocalLimiter, Lockout, MemoryStorage, OnError, Policy, Quota, RateLimitLayer,
    RateLimiter, Storage,
};

fn key() -> Key {
    Key::from("alice")
}

/// A limiter of people, and one of batch work that leaves them two units.
fn limiters(text: &str, storage: &(impl Storage + Clone)) -> [RateLimiter; 2] {
    [text.to_owned(), format!("{text} keep 2")].map(|text| RateLimiter::with_storage(policy(&text), storage.clone()))
}

async fn admitted(limiter: &RateLimiter, cost: u32) -> bool {
    limiter.hit_with_cost(&key(), cost).await.unwrap().is_admitted()
}

#[tokio::test]
async fn batch_work_leaves_units_to_people_under_every_strategy() {
    let mut checked = 0;
    for text in EVERY_STRATEGY.into_iter().chain(["leaky-bucket 3 per 7 seconds queue 3", "calendar 3/day"]) {
        let Ok(kept) = format!("{text} keep 2").parse::<Policy>() else { continue };
        let (storage, _clock) = memory_with_manual_clock();
        let [people, batch] = limiters(text, &storage);
        assert_eq!((kept.identity(), people.policy() == kept), (people.policy().identity(), false), "{text}");
        let capacity = kept.limits()[0].capacity();
        assert!(!admitted(&batch, capacity - 1).await, "{text}");
        assert!(admitted(&batch, capacity - 2).await, "{text}");
        let refused = batch.hit(&key()).await.unwrap();
        assert_eq!((refused.is_refused(), refused.remaining(), refused.capacity()), (true, 2, capacity), "{text}");
        assert!(admitted(&people, 2).await, "{text}");
        assert!(!admitted(&people, 1).await && !admitted(&batch, 1).await, "{text}");
        assert!(admitted(&batch, 0).await, "{text}");
        // It never fits, although the quota has so many units.
        assert_eq!(batch.peek_with_cost(&key(), capacity - 1).await.unwrap().retry_after(), None, "{text}");
        assert!(people.peek_with_cost(&key(), capacity - 1).await.unwrap().retry_after().is_some(), "{text}");
        checked += 1;
    }
    assert!(checked >= 10, "only {checked} strategies keep units");
}

#[tokio::test]
async fn wait_of_batch_work_ends_when_the_kept_units_remain_too() {
    let (storage, clock) = memory_with_manual_clock();
    let [people, batch] = limiters("token-bucket 10/second burst 5", &storage);
    assert!(admitted(&people, 5).await);
    let wait = Duration::from_millis(300);
    assert_eq!(batch.peek(&key()).await.unwrap().retry_after(), Some(wait));
    assert_eq!(people.peek(&key()).await.unwrap().retry_after(), Some(wait / 3));
    clock.advance(wait.saturating_sub(Duration::from_micros(1)));
    assert!(batch.peek(&key()).await.unwrap().is_refused());
    clock.advance(Duration::from_micros(1));
    assert!(admitted(&batch, 1).await);
    assert_eq!(people.peek(&key()).await.unwrap().remaining(), 2);
}

#[test]
fn text_has_the_kept_units_and_the_identity_has_not() {
    for (text, written) in [
        ("100/minute keep 20", "sliding-window-counter 100/minute keep 20"),
        ("\"api\": token-bucket 10/second burst 20 KEEP 5", "\"api\": token-bucket 10/second burst 20 keep 5"),
        ("leaky-bucket 5/second queue 3 keep 3", "leaky-bucket 5/second queue 3 keep 3"),
        (
            "fixed-window 5/second keep 1; moving-window 9/hour keep 2",
            "fixed-window 5/second keep 1; moving-window 9/hour keep 2",
        ),
        ("calendar 1000/month keep 20", "calendar 1000/month keep 20"),
        ("fixed-window 5/second keep 0", "fixed-window 5/second"),
        (
            "5/second; shadow fixed-window 9/hour keep 4",
            "sliding-window-counter 5/second; shadow fixed-window 9/hour keep 4",
        ),
    ] {
        let parsed = policy(text);
        assert_eq!(parsed.to_string(), written);
        assert_eq!(policy(written), parsed);
        assert!(!parsed.identity().contains("keep"), "{}", parsed.identity());
    }
    let limit = Limit::from(Quota::per_minute(100)).keep(20);
    assert_eq!((limit.kept(), limit.named("short").kept()), (20, 20));
    let shared = policy("fixed-window 9/minute keep 5").divide(std::num::NonZeroU32::new(3).unwrap()).unwrap();
    assert_eq!(shared.to_string(), "fixed-window 3/minute keep 2");
    let shared = policy("fixed-window 10/minute keep 9").divide(std::num::NonZeroU32::new(3).unwrap()).unwrap();
    assert_eq!(shared.to_string(), "fixed-window 3/minute keep 2");
}

#[test]
fn error_says_how_many_units_a_limit_can_keep() {
    for (text, parts) in [
        ("fixed-window 100/minute keep 100", ["has 100 units", "keep at most 99"]),
        ("token-bucket 10/s burst 20 keep 30", ["cannot keep 30", "keep at most 19"]),
        ("leaky-bucket 5/s queue 3 keep 4", ["has 4 units", "keep at most 3"]),
        ("fixed-window 4294967295/day keep 1", ["too many units", "use at most 4294967294"]),
        ("lockout 5/10m for 15m keep 1", ["is a lockout", "remove \"keep 1\""]),
        ("100/minute keep", ["after \"keep\"", "keep"]),
        ("100/minute keep=20", ["a number after \"keep\"", "100/minute keep 20"]),
    ] {
        let error = message(text.parse::<Policy>().unwrap_err());
        assert!(parts.iter().all(|part| error.contains(part)), "{text}: {error}");
    }
    assert!(Limit::new(Lockout::lasting(Duration::from_secs(60)), Quota::per_minute(5)).try_keep(1).is_err());
}

/// Guards against this defect: people are refused because of a cached refusal of batch work.
#[tokio::test]
async fn cached_refusal_of_batch_work_refuses_only_hits_that_keep_as_much() {
    let (storage, clock) = memory_with_manual_clock();
    let cache = RefusalCache::new(FakeStorage::around(storage)).clock(clock.clone());
    let [people, batch] = limiters("fixed-window 5/minute", &cache);
    assert!(admitted(&people, 2).await);
    for cost in [2, 2, 3, 4] {
        assert!(!admitted(&batch, cost).await, "{cost}");
    }
    let wait = |cost| batch.peek_with_cost(&key(), cost);
    assert_eq!(batch.hit_with_cost(&key(), 3).await.unwrap().retry_after(), Some(Duration::from_secs(60)));
    assert_eq!(batch.hit_with_cost(&key(), 4).await.unwrap().retry_after(), None);
    assert_eq!(wait(1).await.unwrap().retry_after(), None);
    assert!(admitted(&batch, 1).await && !admitted(&batch, 1).await);
    assert!(admitted(&people, 2).await && !admitted(&people, 1).await);
}

#[tokio::test]
async fn leases_decide_no_hits_that_keep_units() {
    let storage = FakeStorage::around(memory_with_manual_clock().0);
    let leases = Leases::new(storage.clone(), 50);
    let [_, batch] = limiters("fixed-window 100/minute", &leases);
    for _ in 0..98 {
        assert!(admitted(&batch, 1).await);
    }
    assert!(!admitted(&batch, 1).await);
    assert_eq!(storage.decisions(), 99);
}

/// Guards against this defect: batch work at the front of a queue holds up the people behind it.
#[tokio::test(start_paused = true)]
async fn people_do_not_wait_behind_batch_work() {
    let storage = MemoryStorage::builder().clock(TokioClock::new()).build().unwrap();
    let layer =
        RateLimitLayer::new(policy("token-bucket 1/second burst 3"), Global::new()).storage(storage, OnError::Refuse);
    let people = layer.limiter().unwrap();
    let batch = layer.limiter_for(policy("token-bucket 1/second burst 3 keep 2")).unwrap();
    assert!(admitted(&people, 3).await);
    let begin = tokio::time::Instant::now();
    let waiting = tokio::spawn({
        let batch = batch.clone();
        async move { batch.acquire(&key(), Duration::from_secs(60)).await.unwrap().is_admitted() }
    });
    tokio::task::yield_now().await;
    for _ in 0..3 {
        assert!(people.acquire(&key(), Duration::from_secs(60)).await.unwrap().is_admitted());
    }
    assert!(begin.elapsed() < Duration::from_secs(4), "{:?}", begin.elapsed());
    eventually("the batch work is admitted", async || waiting.is_finished()).await;
    assert!(waiting.await.unwrap());
    assert!(begin.elapsed() >= Duration::from_secs(6));
}

#[test]
fn local_limiters_and_live_policies_keep_units() {
    let live = LivePolicy::new(policy("fixed-window 5/minute"));
    let limiter = LocalLimiter::new(live.clone());
    assert!(limiter.admit(&key()) && limiter.admit(&key()));
    live.set(policy("fixed-window 5/minute keep 3")).unwrap();
    assert!(!limiter.admit(&key()) && !limiter.admit(&key()));
    live.set(policy("fixed-window 5/minute keep 2")).unwrap();
    assert!(limiter.admit(&key()) && !limiter.admit(&key()));
}

//! Hits whose receipt corrects their cost.

use std::time::Duration;

use common::{
    Behavior, FAILURE, FakeStorage, counted, failing, memory_with_manual_clock, message, now, outside_of_a_runtime,
    policy, slow,
};
use tokio::task::yield_now;
use tower_ratelimit::storage::{Breaker, Cas};
use tower_ratelimit::{Key, LocalLimiter, RateLimiter, Reservation, Storage};

const POLICY: &str = "fixed-window 100/day";

fn limiter(storage: impl Storage) -> RateLimiter {
    RateLimiter::with_storage(policy(POLICY), storage)
}

async fn left(limiter: &RateLimiter) -> u32 {
    limiter.peek(&Key::global()).await.unwrap().remaining()
}

async fn reserve(limiter: &RateLimiter, cost: u32) -> Reservation {
    limiter.reserve(&Key::global(), cost).await.unwrap()
}

/// Lets the spawned tasks run until all of them wait.
async fn yields() {
    for _ in 0..20 {
        yield_now().await;
    }
}

/// Memory, a storage that is ready later, and one that has to be asked twice for each change.
fn limiters() -> [RateLimiter; 3] {
    let memory = || memory_with_manual_clock().0;
    let cas = Cas::new(common::fake_cas_store::FakeCasStore::default()).timeout(Duration::from_secs(60));
    [limiter(memory()), limiter(slow(memory())), limiter(cas)]
}

#[tokio::test]
async fn settlement_refunds_or_charges_the_difference_on_every_storage() {
    for limiter in limiters() {
        let hit = reserve(&limiter, 20).await;
        assert_eq!((hit.is_admitted(), hit.cost(), hit.remaining()), (true, 20, 80), "{hit:?}");
        hit.settle(5).await.unwrap();
        assert_eq!(left(&limiter).await, 95);
        reserve(&limiter, 20).await.settle(30).await.unwrap();
        assert_eq!(left(&limiter).await, 65);
        reserve(&limiter, 20).await.refund().await.unwrap();
        assert_eq!(left(&limiter).await, 65);
        reserve(&limiter, 20).await.settle(20).await.unwrap();
        assert_eq!(left(&limiter).await, 45);
    }
}

#[tokio::test]
async fn settlement_that_is_dropped_goes_on_in_a_task() {
    for limiter in limiters() {
        drop(reserve(&limiter, 20).await.settle(5));
        drop(reserve(&limiter, 20).await.refund());
        yields().await;
        assert_eq!(left(&limiter).await, 95);
    }
}

#[tokio::test]
async fn reservation_that_is_dropped_or_kept_keeps_the_estimate() {
    for limiter in limiters() {
        drop(reserve(&limiter, 20).await);
        assert_eq!(reserve(&limiter, 20).await.keep().remaining(), 60);
        yields().await;
        assert_eq!(left(&limiter).await, 60);
    }
}

#[tokio::test]
async fn refused_or_free_reservation_has_nothing_to_settle() {
    let fake = FakeStorage::around(memory_with_manual_clock().0);
    let limiter = limiter(fake.clone());
    for actual in [0, 1, 500] {
        for cost in [101, 0] {
            let hit = reserve(&limiter, cost).await;
            assert_eq!(hit.is_refused(), cost > 100);
            hit.settle(actual).await.unwrap();
            let mut counter = reserve(&limiter, cost).await.counter();
            counter.add(actual);
            drop(counter);
        }
    }
    assert_eq!((left(&limiter).await, fake.changes()), (100, 0), "the storage is not called");
}

#[tokio::test]
async fn counter_settles_at_its_end_and_when_it_is_dropped() {
    for limiter in limiters() {
        let mut counter = reserve(&limiter, 20).await.counter();
        counter.add(1);
        counter.add(2);
        assert_eq!(counter.units(), 3);
        counter.finish().await.unwrap();
        assert_eq!(left(&limiter).await, 97);

        let mut counter = reserve(&limiter, 20).await.counter();
        counter.add(30);
        drop(counter);
        yields().await;
        assert_eq!(left(&limiter).await, 67);

        drop(reserve(&limiter, 20).await.counter());
        yields().await;
        assert_eq!(left(&limiter).await, 67, "nothing was counted");
    }
}

#[tokio::test]
async fn counter_saturates() {
    let [limiter, ..] = limiters();
    let mut counter = reserve(&limiter, 20).await.counter();
    counter.add(u32::MAX);
    counter.add(7);
    assert_eq!(counter.units(), u32::MAX);
    drop(counter);
    assert_eq!(left(&limiter).await, 0);
}

#[tokio::test]
async fn counter_settles_if_its_task_panics_or_is_aborted() {
    for limiter in limiters() {
        for aborts in [false, true] {
            limiter.clear(&Key::global()).await.unwrap();
            let mut counter = reserve(&limiter, 20).await.counter();
            let task = tokio::spawn(async move {
                counter.add(7);
                if aborts {
                    std::future::pending::<()>().await;
                }
                panic!("a bug after {} units", counter.units());
            });
            yields().await;
            task.abort();
            task.await.unwrap_err();
            yields().await;
            assert_eq!(left(&limiter).await, 93, "aborts: {aborts}");
        }
    }
}

/// The timer of [`Behavior::WorksAfter`] panics outside of a runtime.
#[test]
fn counter_that_another_thread_drops_settles_in_the_runtime_of_its_hit() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    for behavior in [Behavior::Works, Behavior::WorksAfterPolls(2), Behavior::WorksAfter(Duration::from_millis(1))] {
        let fake = FakeStorage::around(memory_with_manual_clock().0);
        fake.set(behavior);
        let limiter = limiter(fake.clone());
        let mut counter = runtime.block_on(reserve(&limiter, 20)).counter();
        counter.add(3);
        let dropped = std::thread::spawn(move || drop(counter)).join();
        assert!(dropped.is_ok(), "{behavior:?}");
        runtime.block_on(async {
            while left(&limiter).await != 97 {
                yield_now().await;
            }
        });
    }
}

#[test]
fn counter_without_a_runtime_settles_only_in_a_storage_that_is_ready() {
    for (is_slow, expected) in [(false, 97), (true, 80)] {
        let fake = FakeStorage::around(memory_with_manual_clock().0);
        fake.set(if is_slow { Behavior::WorksAfterPolls(2) } else { Behavior::Works });
        let limiter = limiter(fake);
        let mut counter = outside_of_a_runtime(reserve(&limiter, 20)).counter();
        counter.add(3);
        drop(counter);
        assert_eq!(outside_of_a_runtime(left(&limiter)), expected, "slow: {is_slow}");
    }
}

#[tokio::test]
async fn failure_of_the_storage_is_returned_and_keeps_the_estimate() {
    assert!(limiter(failing()).reserve(&Key::global(), 1).await.is_err());
    let fake = FakeStorage::around(memory_with_manual_clock().0);
    let limiter = limiter(fake.clone());
    let (awaited, dropped) = (reserve(&limiter, 20).await, reserve(&limiter, 20).await);
    fake.set_changes(Behavior::Fails);
    assert_eq!(message(awaited.settle(5).await.unwrap_err()), FAILURE);
    drop(dropped.settle(5));
    assert_eq!(left(&limiter).await, 60);
}

#[tokio::test(start_paused = true)]
async fn breaker_settles_a_reservation_in_the_storage_that_decided() {
    let ((primary, _), (fallback, _)) = (FakeStorage::in_memory(Behavior::Works), memory_with_manual_clock());
    let limiter = limiter(Breaker::new(primary.clone()).fallback(fallback.clone(), 1));
    let counted = || (counted(primary.inner(), &policy(POLICY)), counted(&fallback, &policy(POLICY)));
    let (of_primary, mut counter) = (reserve(&limiter, 10).await, reserve(&limiter, 10).await.counter());
    primary.set(Behavior::Fails);
    let of_fallback = reserve(&limiter, 10).await;
    assert!(of_fallback.is_from_fallback());
    of_fallback.settle(25).await.unwrap();
    assert_eq!(counted(), (20, 25));
    primary.set(Behavior::Works);
    of_primary.refund().await.unwrap();
    counter.add(4);
    drop(counter);
    assert_eq!(counted(), (4, 25));
}

#[tokio::test(start_paused = true)]
async fn call_that_waited_returns_a_reservation() {
    let limiter = RateLimiter::new(policy("leaky-bucket 1 per 4 seconds queue 4"));
    let _ = now(limiter.hit(&Key::global()));
    let hit = limiter.acquire(&Key::global(), Duration::from_secs(5)).await.unwrap();
    assert!(hit.is_admitted() && !hit.delay().is_zero());
    hit.refund().await.unwrap();
    assert_eq!(left(&limiter).await, 4);
}

#[test]
fn local_limiter_settles_without_a_runtime() {
    let (storage, _clock) = memory_with_manual_clock();
    let limiter = LocalLimiter::with_storage(policy(POLICY), storage);
    let key = Key::from("alice");
    limiter.reserve(&key, 20).settle(30);
    limiter.reserve(&key, 20).refund();
    let mut counter = limiter.reserve(&key, 20).counter();
    counter.add(5);
    drop(counter);
    assert!(limiter.reserve(&key, 66).is_refused());
    assert_eq!(limiter.peek(&key).remaining(), 65);
}

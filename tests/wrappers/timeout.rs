//! A timeout around any storage.

use std::error::Error;
use std::time::Duration;

use common::{
    Behavior, FAILURE, FakeStorage, ask, counted, get, memory_with_manual_clock, message, panic_message, policy,
};
use tokio::time::Instant;
use tower::Layer;
use tower_ratelimit::storage::{StorageRequest, Summary, Timeout};
use tower_ratelimit::{Global, Key, MemoryStorage, OnError, Op, RateLimitLayer, RateLimiter, Storage};

const WITHIN: Duration = Duration::from_millis(70);

fn limiter(behavior: Behavior) -> (RateLimiter<Timeout<FakeStorage>>, FakeStorage) {
    let (storage, _) = FakeStorage::in_memory(behavior);
    (RateLimiter::with_storage(policy("fixed-window 9/day"), Timeout::new(storage.clone(), WITHIN)), storage)
}

#[tokio::test(start_paused = true)]
async fn hanging_storage_fails_at_the_deadline() {
    let (limiter, _) = limiter(Behavior::Hangs);
    let (key, started) = (Key::everybody(), Instant::now());
    let late = limiter.hit(&key).await.unwrap_err();
    assert_eq!(started.elapsed(), WITHIN);
    assert!(late.is_timeout() && late.may_have_counted() && late.source().is_none(), "{late:?}");
    assert_eq!(late.to_string(), "the storage did not answer within 70ms");
    for harmless in [limiter.peek(&key).await.unwrap_err(), limiter.hit_with_cost(&key, 0).await.unwrap_err()] {
        assert!(harmless.is_timeout() && !harmless.may_have_counted());
    }
    assert!(limiter.clear(&key).await.unwrap_err().may_have_counted());
    assert_eq!(started.elapsed(), 4 * WITHIN);
}

#[tokio::test(start_paused = true)]
async fn late_result_is_a_timeout_that_may_have_counted() {
    let (limiter, storage) = limiter(Behavior::WorksAfter(Duration::from_millis(69)));
    let hit = limiter.hit(&Key::everybody()).await.unwrap();
    assert_eq!((hit.is_admitted(), hit.remaining()), (true, 8));
    limiter.refund(&Key::everybody(), &hit).unwrap().await.unwrap();
    assert_eq!(counted(storage.inner(), &limiter.policy()), 0);
    storage.set(Behavior::WorksAfter(Duration::from_millis(71)));
    assert!(limiter.hit(&Key::everybody()).await.unwrap_err().is_timeout());
    let late = limiter.refund(&Key::everybody(), &hit).unwrap().await.unwrap_err();
    assert!(late.is_timeout() && late.may_have_counted());
}

#[tokio::test(start_paused = true)]
async fn deadline_starts_at_the_first_poll() {
    let (limiter, _) = limiter(Behavior::WorksAfter(WITHIN / 2));
    let hit = limiter.hit(&Key::everybody());
    tokio::time::sleep(WITHIN * 3).await;
    assert!(hit.await.unwrap().is_admitted());
}

#[tokio::test]
async fn error_of_the_storage_is_returned() {
    let (limiter, _) = limiter(Behavior::Fails);
    let error = limiter.hit(&Key::everybody()).await.unwrap_err();
    assert!(!error.is_timeout() && error.may_have_counted(), "the outcome of an unknown error is unknown");
    assert_eq!(message(error), format!("storage failed: {FAILURE}"));
}

#[test]
fn only_pending_calls_need_a_runtime() {
    let storage = Timeout::new(memory_with_manual_clock().0, WITHIN);
    let (policy, key) = (policy("fixed-window 2/day"), Key::everybody());
    let mut shown = Summary::default();
    assert!(storage.try_admit(StorageRequest::new(&policy, &key, Op::Hit, 1), Some(&mut shown)));
    assert_eq!(shown.limit.remaining(), 1);
    let mut hit = Box::pin(storage.decide(StorageRequest::new(&policy, &key, Op::Hit, 1)));
    assert!(common::poll(&mut hit).is_ready());

    let (limiter, _) = limiter(Behavior::Hangs);
    let mut hit = Box::pin(limiter.hit(&key));
    let std::task::Poll::Ready(Err(error)) = common::poll(&mut hit) else {
        panic!("the hit is pending without a runtime")
    };
    assert_eq!(error.to_string(), "a storage timeout needs a tokio runtime");
    assert!(error.may_have_counted() && !error.is_timeout(), "the storage was called");
}

#[tokio::test(start_paused = true)]
async fn layer_obeys_on_error_at_the_deadline() {
    for (on_error, status) in [(OnError::Admit, 200), (OnError::Refuse, 503)] {
        let (storage, _) = FakeStorage::in_memory(Behavior::Hangs);
        let layer = RateLimitLayer::new(policy("9/day"), Global).storage(Timeout::new(storage, WITHIN), on_error);
        let started = Instant::now();
        assert_eq!(ask(&layer.layer(common::Inner::default()), get("/")).await.status(), status);
        assert_eq!(started.elapsed(), WITHIN);
    }
}

#[test]
fn invalid_deadline_panics_with_an_example_of_a_valid_one() {
    for wrong in [Duration::ZERO, Duration::from_micros(999), Duration::from_secs(3_601)] {
        let error = panic_message(|| Timeout::new(MemoryStorage::new(), wrong));
        assert!(error.contains("for example Duration::from_millis(100)"), "{error}");
    }
}

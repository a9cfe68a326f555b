//! `check`, `ready` and `clear_all` through wrappers.

use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use common::fake_cas_store::FakeCasStore;
use common::{Behavior, FAILURE, FakeStorage, hit, memory_with_manual_clock, message, policy, poll, start_hit};
use tokio::time::{Instant, sleep};
use tower_ratelimit::storage::{AnyStorage, Breaker, Cas, Leases, Phase, RefusalCache, StorageErrorKind};
use tower_ratelimit::{Key, MemoryStorage, Storage};

const WITHIN: Duration = Duration::from_millis(70);

/// Wraps a storage in all wrappers.
fn stacked(storage: impl Storage) -> AnyStorage {
    let breaker = Breaker::new(storage).fallback(MemoryStorage::new(), 1);
    AnyStorage::new(Leases::new(RefusalCache::new(breaker), 10))
}

#[tokio::test(start_paused = true)]
async fn check_reaches_the_storage_through_all_wrappers() {
    let store = FakeCasStore::default();
    let stacked = stacked(Cas::new(store.clone()).timeout(WITHIN));
    stacked.check().await.unwrap();
    store.fail(true);
    assert_eq!(message(stacked.check().await.unwrap_err()), "storage failed: the disk is full");
    store.fail(false);
    store.hang(true);
    let started = Instant::now();
    let late = stacked.check().await.unwrap_err();
    assert!(late.is_timeout() && !late.may_have_counted(), "{late:?}");
    assert_eq!(started.elapsed(), WITHIN);
    assert!(MemoryStorage::new().check().await.is_ok(), "a storage without a check is ready");
}

#[tokio::test(start_paused = true)]
async fn ready_waits_for_the_storage_through_all_wrappers() {
    let (store, second) = (FakeCasStore::default(), Duration::from_secs(1));
    let stacked = stacked(Cas::new(store.clone()).timeout(WITHIN));
    stacked.ready(second).await.unwrap();
    store.fail(true);
    let started = Instant::now();
    let (ready, ()) = tokio::join!(stacked.ready(second), async {
        sleep(second / 2).await;
        store.fail(false);
    });
    ready.unwrap();
    assert!((second / 2..second / 2 + WITHIN).contains(&started.elapsed()), "{:?}", started.elapsed());
}

#[tokio::test(start_paused = true)]
async fn ready_fails_at_its_timeout_with_the_last_other_error() {
    let (store, second) = (FakeCasStore::default(), Duration::from_secs(1));
    let slow = stacked(Cas::new(store.clone()).timeout(60 * second));
    for (storage, timeout) in [(stacked(Cas::new(store.clone()).timeout(WITHIN)), second), (slow, 9 * second)] {
        store.hang(true);
        let started = Instant::now();
        let error = storage.ready(timeout).await.unwrap_err();
        assert!(error.is_timeout() && !error.may_have_counted(), "{error:?}");
        let elapsed = started.elapsed();
        assert!((timeout..timeout + WITHIN).contains(&(elapsed + WITHIN / 2)), "{elapsed:?}");
        store.hang(false);
        store.fail(true);
        let (ready, ()) = tokio::join!(storage.ready(timeout), async {
            sleep(timeout / 2).await;
            store.hang(true);
        });
        assert_eq!(message(ready.unwrap_err()), "storage failed: the disk is full");
        store.hang(false);
        store.fail(false);
    }
}

#[test]
fn ready_needs_a_runtime_only_to_wait() {
    let memory: AnyStorage = "memory://".parse().unwrap();
    assert!(matches!(poll(&mut pin!(memory.ready(WITHIN))), Poll::Ready(Ok(()))));
    let cas = stacked(Cas::new(FakeCasStore::default()));
    let Poll::Ready(Err(error)) = poll(&mut pin!(cas.ready(WITHIN))) else { panic!("without a runtime") };
    assert_eq!(message(error), "no tokio runtime: await the call inside a tokio runtime");
}

#[tokio::test(start_paused = true)]
async fn check_calls_the_primary_of_an_open_breaker_and_keeps_it_open() {
    let (storage, _) = FakeStorage::in_memory(Behavior::Fails);
    let breaker = Breaker::new(storage.clone()).fallback(MemoryStorage::new(), 1).failures(1);
    assert!(hit(&breaker, &policy("9/day"), "a", 1).await.is_from_fallback());
    assert_eq!(breaker.circuit().state().phase, Phase::Open);
    assert!(breaker.check().await.is_err());
    storage.set(Behavior::Works);
    breaker.check().await.unwrap();
    assert_eq!(breaker.circuit().state().phase, Phase::Open);
}

#[tokio::test(start_paused = true)]
async fn cas_checks_its_store_within_the_deadline() {
    let store = FakeCasStore::default();
    let storage = Cas::new(store.clone());
    storage.check().await.unwrap();
    store.fail(true);
    assert_eq!(message(storage.check().await.unwrap_err()), "storage failed: the disk is full");
    store.fail(false);
    store.hang(true);
    let started = Instant::now();
    assert!(storage.check().await.unwrap_err().is_timeout());
    assert_eq!(started.elapsed(), Duration::from_millis(100));
    let error = storage.clear_all().await.unwrap_err();
    assert_eq!(error.kind(), StorageErrorKind::Unsupported);
}

#[tokio::test]
async fn clear_all_drops_cached_refusals() {
    let storage = FakeStorage::around(memory_with_manual_clock().0);
    let cache = RefusalCache::new(storage.clone());
    let policy = policy("fixed-window 1/day");
    for key in ["a", "b"] {
        assert!(hit(&cache, &policy, key, 1).await.is_admitted());
        assert!(hit(&cache, &policy, key, 1).await.is_refused());
    }
    assert_eq!(cache.len(), 2);
    assert_eq!(cache.clear_all().await.unwrap(), 2);
    assert!(cache.is_empty());
    assert!(hit(&cache, &policy, "a", 1).await.is_admitted());
    assert!(hit(&cache, &policy, "a", 1).await.is_refused());
    // The storage may have cleared its keys before it failed.
    storage.set_changes(Behavior::FailsAfterCounting);
    assert!(cache.clear_all().await.is_err() && cache.is_empty());
    storage.set_changes(Behavior::Works);
    assert!(hit(&cache, &policy, "a", 1).await.is_admitted());
}

#[tokio::test]
async fn clear_all_keeps_refusals_in_flight_out_of_the_cache() {
    let storage = FakeStorage::around(memory_with_manual_clock().0);
    let cache = RefusalCache::new(storage.clone());
    let (policy, key) = (policy("fixed-window 1/day"), Key::from("a"));
    assert!(hit(&cache, &policy, "a", 1).await.is_admitted());
    storage.close();
    let mut refused = start_hit(&cache, &policy, &key, 1);
    assert!(poll(&mut refused).is_pending());
    let clear_all = cache.clear_all();
    storage.open();
    assert_eq!(clear_all.await.unwrap(), 1);
    assert!(refused.await.unwrap().is_refused());
    assert!(hit(&cache, &policy, "a", 1).await.is_admitted());
}

#[tokio::test]
async fn clear_all_drops_leases() {
    let leases = Leases::new(FakeStorage::around(memory_with_manual_clock().0), 10);
    let policy = policy("fixed-window 1000/day");
    for key in ["a", "a", "b", "b"] {
        assert!(hit(&leases, &policy, key, 1).await.is_admitted());
    }
    assert_eq!(leases.len(), 2);
    assert_eq!(leases.clear_all().await.unwrap(), 2);
    assert_eq!((leases.len(), leases.misses()), (0, 4));
    assert!(hit(&leases, &policy, "a", 1).await.is_admitted());
    assert_eq!(leases.misses(), 5, "the old slice is not spent after the clear");
}

#[tokio::test]
async fn clear_all_clears_both_storages_of_a_breaker() {
    let ((primary, _), fallback) = (FakeStorage::in_memory(Behavior::Works), memory_with_manual_clock().0);
    let breaker = Breaker::new(primary.clone()).fallback(fallback.clone(), 1);
    let policy = policy("9/day");
    for key in ["a", "b"] {
        assert!(!hit(&breaker, &policy, key, 1).await.is_from_fallback());
    }
    primary.set(Behavior::Fails);
    assert!(hit(&breaker, &policy, "a", 1).await.is_from_fallback());
    let keys = || [primary.inner().stats().keys, fallback.stats().keys];
    assert_eq!(keys(), [2, 1]);
    assert_eq!(message(breaker.clear_all().await.unwrap_err()), FAILURE);
    assert_eq!(keys(), [2, 0], "the fallback is cleared even if the primary fails");
    primary.set(Behavior::Works);
    assert_eq!(breaker.clear_all().await.unwrap(), 2);
    assert_eq!(keys(), [0, 0]);
}

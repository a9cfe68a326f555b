//! Storages with an erased type.

use std::error::Error;
use std::sync::Arc;

use common::{FAILURE, FakeStorage, counted, failing, memory_with_manual_clock, message, policy, poll, slow};
use futures_util::FutureExt;
use tower_ratelimit::storage::{AnyStorage, Breaker, StorageError, StorageErrorKind, StorageFuture, StorageRequest};
use tower_ratelimit::{Decision, Key, Op, Policy, RateLimiter, Storage};

/// Fails with a custom error type.
#[derive(Clone, Debug)]
struct Broken;

fn broken<T>() -> StorageFuture<T> {
    StorageFuture::ready(Err(StorageError::from_boxed(std::io::Error::from(std::io::ErrorKind::BrokenPipe))))
}

impl Storage for Broken {
    fn decide(&self, _: StorageRequest<'_>) -> StorageFuture<Decision> {
        broken()
    }

    fn clear(&self, _: &Policy, _: &Key) -> StorageFuture<()> {
        broken()
    }

    fn settle(&self, _: &Policy, _: &Key, _: &Decision, _: u32) -> StorageFuture<()> {
        broken()
    }
}

/// Returns the number of allocations of a second hit on a key, up to the end of its future's first
/// poll.
fn allocations(storage: &impl Storage) -> u64 {
    let (policy, key) = (policy("1000/minute"), Key::from("k"));
    let hit = || drop(storage.decide(StorageRequest::new(&policy, &key, Op::Hit, 1)).now_or_never());
    hit();
    allocation_counter::measure(hit).count_total
}

#[test]
fn ready_future_takes_no_allocation() {
    assert_eq!(allocations(&AnyStorage::new(memory_with_manual_clock().0)), 0);
    assert_eq!(allocations(&"memory://".parse::<AnyStorage>().unwrap()), 0);
}

#[tokio::test]
async fn pending_future_takes_no_further_allocation() {
    let [plain, boxed] = [(); 2].map(|()| slow(memory_with_manual_clock().0));
    let boxed = AnyStorage::new(boxed);
    assert_eq!(allocations(&boxed), allocations(&plain));
    let (policy, key) = (policy("1000/minute"), Key::from("k"));
    assert!(boxed.decide(StorageRequest::new(&policy, &key, Op::Hit, 1)).await.unwrap().is_admitted());
}

/// The inner storage counts at the first poll.
#[tokio::test]
async fn future_is_not_polled_before_its_caller_polls_it() {
    let memory = memory_with_manual_clock().0;
    let boxed = AnyStorage::new(slow(memory.clone()));
    let policy = policy("1000/minute");
    let mut hit = boxed.decide(StorageRequest::new(&policy, &Key::global(), Op::Hit, 1));
    assert_eq!(counted(&memory, &policy), 0);
    assert!(poll(&mut hit).is_pending());
    assert_eq!(counted(&memory, &policy), 1);
}

/// Guards against this defect: a storage is not recognized inside an `Arc`.
#[tokio::test]
async fn limiters_on_a_storage_and_on_an_arc_of_it_decide_together() {
    let memory = memory_with_manual_clock().0;
    let shared: Arc<dyn Storage> = Arc::new(Arc::new(memory.clone()));
    let [user, tenant, all] = ["user", "tenant", "all"].map(|name| policy("2/minute").with_name(name));
    let user = RateLimiter::with_storage(user, memory.clone());
    let tenant = RateLimiter::with_storage(tenant, Arc::new(memory.clone()));
    let all = RateLimiter::with_storage(all, shared);
    let key = Key::from("k");
    let hit = RateLimiter::reserve_all(&[(&user, &key), (&tenant, &key), (&all, &key)], 1).await.unwrap();
    assert!(!hit.is_refused());
    for limiter in [user, tenant, all] {
        assert_eq!(limiter.peek(&key).await.unwrap().remaining(), 1);
    }
}

#[tokio::test]
async fn changes_reach_the_inner_storage() {
    let inside = FakeStorage::around(memory_with_manual_clock().0);
    let limiter = RateLimiter::with_storage(policy("2/minute"), AnyStorage::new(inside.clone()));
    let key = Key::from("k");
    let hit = limiter.hit(&key).await.unwrap();
    assert_eq!(hit.remaining(), 1);
    common::settle(&limiter, &key, &hit, 0).await.unwrap();
    assert_eq!(limiter.peek(&key).await.unwrap().remaining(), 2);
    let _ = limiter.hit(&key).await.unwrap();
    limiter.clear(&key).await.unwrap();
    assert_eq!(limiter.peek(&key).await.unwrap().remaining(), 2);
}

#[test]
fn policy_that_the_inner_storage_rejects_is_rejected() {
    let small = FakeStorage::around(memory_with_manual_clock().0).holding_at_most(10);
    let boxed = AnyStorage::new(small.clone());
    let [fits, large] = ["10/minute", "11/minute"].map(policy);
    assert!(boxed.validate(&fits).is_ok());
    assert_eq!(boxed.validate(&large).unwrap_err().to_string(), small.validate(&large).unwrap_err().to_string());
}

#[tokio::test]
async fn error_of_the_inner_storage_is_kept() {
    let (policy, key) = (policy("1/minute"), Key::from("k"));
    let request = StorageRequest::new(&policy, &key, Op::Hit, 1);
    let error = AnyStorage::new(Broken).decide(request).await.unwrap_err();
    assert_eq!(error.kind(), StorageErrorKind::Other);
    let source = error.source().unwrap().downcast_ref::<std::io::Error>();
    assert_eq!(source.unwrap().kind(), std::io::ErrorKind::BrokenPipe);
    let error = AnyStorage::new(failing()).clear(&policy, &key).await.unwrap_err();
    assert_eq!(message(error), FAILURE);
    let text = "the storage did not answer within 5ms";
    let (late, _) = FakeStorage::scripted(move |_| Some(Err(StorageError::new(StorageErrorKind::Timeout, text))));
    let wrapped = AnyStorage::new(Breaker::new(AnyStorage::new(late)));
    let error = wrapped.decide(request).await.unwrap_err();
    assert!(error.is_timeout() && error.may_have_counted(), "wrappers keep the kind: {error:?}");
    assert_eq!(message(error), text);
}

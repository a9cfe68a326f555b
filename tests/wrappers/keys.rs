//! `keys` through wrappers.

use common::{Behavior, FAILURE, FakeStorage, hit, message, policy};
use tower_ratelimit::storage::{AnyStorage, Breaker, InOrder, KeysRequest, Leases, ManualClock, RefusalCache};
use tower_ratelimit::{MemoryStorage, Storage};

#[tokio::test]
async fn wrappers_list_the_keys_of_the_inner_storage() {
    let memory = MemoryStorage::builder().clock(ManualClock::default()).keep_keys(true).build().unwrap();
    let primary = FakeStorage::around(memory);
    let breaker = Breaker::new(primary.clone()).fallback(MemoryStorage::new(), 1).failures(1);
    let storage = AnyStorage::new(Leases::new(InOrder::new(RefusalCache::new(breaker.clone())), 10));
    let policy = policy("fixed-window 1/day");
    for _ in 0..2 {
        let _ = hit(&storage, &policy, "alice", 1).await;
    }
    let keys = || storage.keys(KeysRequest::new(&policy, "t:", None, 10));
    let page = keys().await.unwrap();
    let seen: Vec<_> = page.keys.iter().map(|(key, peek)| (key.to_string(), peek.is_refused())).collect();
    assert_eq!((seen, page.next), (vec![("t:alice".to_owned(), true)], None));
    // The breaker opens, and the primary is listed nevertheless.
    primary.set(Behavior::Fails);
    assert!(hit(&breaker, &policy, "bob", 1).await.is_from_fallback());
    assert_eq!(message(keys().await.unwrap_err()), FAILURE);
    primary.set(Behavior::Works);
    assert_eq!(keys().await.unwrap().keys.len(), 1);
}

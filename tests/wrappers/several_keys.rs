//! Several keys through wrappers.

use common::{Behavior, FakeStorage, memory_with_manual_clock, policy};
use tower_ratelimit::storage::{Breaker, InOrder, RefusalCache, StorageErrorKind, StorageRequest};
use tower_ratelimit::{Decision, DecisionSource, Key, Op, Storage};

/// The primary or the fallback decides on all keys, the fallback by divided quotas.
#[tokio::test]
async fn breaker_decides_all_keys_on_one_storage() {
    let ((primary, _), (fallback, _)) = (FakeStorage::in_memory(Behavior::Works), memory_with_manual_clock());
    let breaker = Breaker::new(InOrder::new(primary.clone())).fallback(fallback, 2);
    let policies = [("user", "fixed-window 4/day"), ("all", "fixed-window 20/day")];
    let policies = policies.map(|(name, text)| policy(text).with_name(name));
    breaker.validate_members(&policies).unwrap();
    let keys = [Key::from("user"), Key::global()];
    let hit = async || {
        let members = [0, 1].map(|at| StorageRequest::new(&policies[at], &keys[at], Op::Hit, 1));
        breaker.decide_all(&members).await.unwrap()
    };
    let numbers = |decisions: &[Decision]| {
        decisions.iter().map(|decision| (decision.is_admitted(), decision.remaining())).collect::<Vec<_>>()
    };
    let decided = hit().await;
    assert_eq!(numbers(&decided), [(true, 3), (true, 19)]);
    assert!(decided.iter().all(|decision| decision.source() == DecisionSource::Primary));

    primary.set(Behavior::Fails);
    for expected in [[(true, 1), (true, 9)], [(true, 0), (true, 8)], [(false, 0), (true, 8)]] {
        let decided = hit().await;
        assert_eq!(numbers(&decided), expected);
        assert!(decided.iter().all(|decision| decision.source() == DecisionSource::Fallback));
    }
    // Each failure is counted once, although two keys were decided.
    assert_eq!(breaker.circuit().state().failures, 3);

    // Each decision is settled on the storage that made it.
    primary.set(Behavior::Works);
    for ((policy, key), decision) in policies.iter().zip(&keys).zip(&decided) {
        breaker.settle(policy, key, decision, 0).await.unwrap();
    }
    assert_eq!(numbers(&hit().await), [(true, 3), (true, 19)]);
}

#[test]
fn breaker_around_a_storage_that_decides_one_key_is_rejected() {
    let ((primary, _), (fallback, _)) = (FakeStorage::in_memory(Behavior::Works), memory_with_manual_clock());
    let error = Breaker::new(primary.clone()).validate_members(&[]).unwrap_err().to_string();
    assert!(error.contains("InOrder::new(storage)"), "{error}");
    let error = Breaker::new(fallback).fallback(primary, 1).validate_members(&[]).unwrap_err().to_string();
    assert!(error.contains("InOrder::new(storage)"), "{error}");
}

#[tokio::test]
async fn refusal_cache_checks_the_members_before_it_answers() {
    let cache = RefusalCache::new(memory_with_manual_clock().0);
    let (policies, key) = (["user", "all"].map(|name| policy("fixed-window 1/day").with_name(name)), Key::from("a"));
    let request = |at: usize, op| StorageRequest::new(&policies[at], &key, op, 1);
    for expected in [true, false, false] {
        assert_eq!(cache.decide(request(0, Op::Hit)).await.unwrap().is_admitted(), expected);
    }
    for others in [[request(0, Op::Hit), request(1, Op::Charge)], [request(0, Op::Hit), request(0, Op::Hit)]] {
        let error = cache.decide_all(&others).await.unwrap_err();
        assert_eq!(error.kind(), StorageErrorKind::Unsupported, "{error}");
    }
}

/// The tenant's cached refusal stays true if another member refuses the hit.
#[tokio::test]
async fn refusal_is_still_cached_after_a_hit_that_another_key_refused() {
    let (memory, clock) = memory_with_manual_clock();
    let storage = FakeStorage::around(InOrder::new(memory));
    let cache = RefusalCache::new(InOrder::new(storage.clone())).clock(clock);
    let user = policy("elastic-window 1/day").with_name("user");
    let tenant = policy("fixed-window 3/day").with_name("tenant");
    let (alice, umbrella) = (Key::from("alice"), Key::from("umbrella"));
    let hit = async |policy, key, cost| {
        let refused = cache.decide(StorageRequest::new(policy, key, Op::Hit, cost)).await.unwrap().is_refused();
        (refused, storage.take_decisions())
    };
    assert_eq!(hit(&user, &alice, 1).await, (false, 1));
    assert_eq!(hit(&tenant, &umbrella, 2).await, (false, 1));
    assert_eq!(hit(&tenant, &umbrella, 2).await, (true, 1));
    let members =
        [(&user, &alice), (&tenant, &umbrella)].map(|(policy, key)| StorageRequest::new(policy, key, Op::Hit, 1));
    let decided = cache.decide_all(&members).await.unwrap();
    assert!(decided[0].is_refused() && decided[1].is_admitted() && !decided[1].has_spent());
    storage.take_decisions();
    assert_eq!(hit(&tenant, &umbrella, 2).await, (true, 0));
}

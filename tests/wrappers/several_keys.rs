//! Several keys through wrappers.

use common::{Behavior, FakeStorage, memory_with_manual_clock, policy};
use tower_ratelimit::storage::{Breaker, InOrder, StorageRequest};
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

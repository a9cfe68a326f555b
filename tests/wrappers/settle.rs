//! Hits whose cost is settled through the wrappers.

use std::time::Duration;

use common::{Behavior, FakeStorage, counted, hit, memory_with_manual_clock, policy, start_hit};
use tower_ratelimit::storage::{Breaker, Leases, RefusalCache, StorageRequest};
use tower_ratelimit::{Key, Op, Policy, RateLimiter, Storage};

#[tokio::test(start_paused = true)]
async fn breaker_settles_in_the_storage_that_decided_the_hit() {
    let whole = policy("fixed-window 100/day");
    let ((primary, _), (fallback, _)) = (FakeStorage::in_memory(Behavior::Works), memory_with_manual_clock());
    let breaker = Breaker::new(primary.clone()).fallback(fallback.clone(), 1);
    let (limiter, key) = (RateLimiter::with_storage(whole.clone(), breaker), Key::global());
    let counted = || (counted(primary.inner(), &whole), counted(&fallback, &whole));

    let of_primary = limiter.hit_with_cost(&key, 10).await.unwrap();
    primary.set(Behavior::Fails);
    let of_fallback = limiter.hit_with_cost(&key, 10).await.unwrap();
    assert_eq!(counted(), (10, 10));
    for (actual, expected) in [(25, (10, 25)), (4, (10, 19))] {
        common::settle(&limiter, &key, &of_fallback, actual).await.unwrap();
        assert_eq!(counted(), expected, "settled as {actual}");
    }
    for actual in [25, 4] {
        common::settle(&limiter, &key, &of_primary, actual).await.unwrap_err();
        assert_eq!(counted(), (10, 19), "the estimate stays");
    }
    primary.set(Behavior::Works);
    for (actual, expected) in [(25, (25, 19)), (4, (19, 19))] {
        common::settle(&limiter, &key, &of_primary, actual).await.unwrap();
        assert_eq!(counted(), expected, "settled as {actual}");
    }
}

#[tokio::test]
async fn charge_invalidates_cached_refusals() {
    let (storage, clock) = memory_with_manual_clock();
    let cache = RefusalCache::new(storage.clone()).clock(clock.clone());
    let limiter = RateLimiter::with_storage(policy("token-bucket 10/second"), cache.clone());
    let key = Key::from("a");
    let taken = limiter.hit_with_cost(&key, 10).await.unwrap();
    let refused_for = async || limiter.hit(&key).await.unwrap().retry_after().unwrap();
    for _ in 0..3 {
        assert_eq!(refused_for().await, Duration::from_millis(100));
    }
    assert_eq!((cache.local_decisions(), cache.misses()), (2, 2));
    let charged = limiter.charge(&key, 10).await.unwrap();
    assert_eq!((charged.is_admitted(), charged.cost(), cache.len()), (true, 10, 0));
    for _ in 0..3 {
        assert_eq!(refused_for().await, Duration::from_millis(1_100));
    }
    common::settle(&limiter, &key, &taken, 20).await.unwrap();
    assert!(cache.is_empty());
    assert_eq!(refused_for().await, Duration::from_millis(2_100));
    assert_eq!((cache.local_decisions(), cache.misses()), (4, 4));
}

/// A slice of 10 units besides those of its hit.
#[tokio::test]
async fn leases_settle_in_the_slice_first_and_then_in_the_storage() {
    for text in ["fixed-window 1000/minute", "moving-window 1000/minute", "token-bucket 1000/minute"] {
        let (leases, storage) = leased();
        let (policy, key) = (policy(text), Key::from("a"));
        let _ = hit(&leases, &policy, "a", 1).await;
        let first = hit(&leases, &policy, "a", 2).await;
        let _ = (storage.take_decisions(), storage.take_changes());
        let peek = || leases.decide(StorageRequest::new(&policy, &key, Op::Peek, 1));

        leases.settle(&policy, &key, &first, 1).await.unwrap();
        let second = hit(&leases, &policy, "a", 1).await;
        leases.settle(&policy, &key, &second, 6).await.unwrap();
        assert_eq!((storage.take_decisions(), storage.take_changes()), (0, 0), "the slice had enough units");
        assert_eq!(peek().await.unwrap().remaining(), 992, "{text}");

        // Three units are left in the slice. The other 17 are charged to the storage.
        let third = hit(&leases, &policy, "a", 1).await;
        let _ = storage.take_decisions();
        leases.settle(&policy, &key, &third, 20).await.unwrap();
        assert_eq!((storage.take_decisions(), storage.take_changes(), leases.len()), (0, 1, 0), "{text}");
        assert_eq!(peek().await.unwrap().remaining(), 972, "{text}");
        assert_eq!(spent(&storage, &policy).await, 28, "nothing is left in the slice");

        // A refund goes to the storage after that.
        leases.settle(&policy, &key, &third, 0).await.unwrap();
        assert_eq!((storage.take_changes(), spent(&storage, &policy).await), (1, 27), "{text}");
    }
}

/// Leases of up to 10 units, and their storage.
fn leased() -> (Leases, FakeStorage) {
    let (storage, clock) = FakeStorage::in_memory(Behavior::Works);
    (Leases::new(storage.clone(), 10).clock(clock), storage)
}

async fn spent(storage: &impl Storage, policy: &Policy) -> u32 {
    let peek = storage.decide(StorageRequest::new(policy, &Key::from("a"), Op::Peek, 1)).await.unwrap();
    peek.capacity() - peek.remaining()
}

#[tokio::test]
async fn charges_use_the_slice_first() {
    let (leases, storage) = leased();
    let (policy, key) = (policy("sliding-window-counter 1000/minute"), Key::from("a"));
    let charge = |units| leases.decide(StorageRequest::new(&policy, &key, Op::Charge, units));
    for _ in 0..2 {
        let _ = hit(&leases, &policy, "a", 1).await;
    }
    storage.take_decisions();
    let charged = charge(4).await.unwrap();
    assert_eq!(
        (charged.is_admitted(), charged.cost(), charged.remaining(), charged.has_spent()),
        (true, 4, 994, false)
    );
    assert_eq!(storage.take_decisions(), 0);
    let charged = charge(9).await.unwrap();
    assert_eq!((charged.cost(), charged.remaining(), storage.take_decisions(), leases.len()), (9, 985, 1, 0));
}

/// The part of a charge or settlement that a slice has paid goes back to it if the storage does not
/// charge the rest.
#[tokio::test]
async fn failed_charge_leaves_the_slice_as_it_was() {
    for is_settled in [false, true] {
        let (leases, storage) = leased();
        let (policy, key) = (policy("fixed-window 1000/day"), Key::from("a"));
        let _ = hit(&leases, &policy, "a", 2).await;
        let first = hit(&leases, &policy, "a", 2).await;
        storage.set(Behavior::Fails);
        let charge = || leases.decide(StorageRequest::new(&policy, &key, Op::Charge, 50));
        if is_settled {
            leases.settle(&policy, &key, &first, 52).await.unwrap_err();
        } else {
            charge().await.unwrap_err();
            drop(charge());
        }
        // All units are still there, and the storage still fails.
        assert!(hit(&leases, &policy, "a", 10).await.is_admitted(), "{is_settled}");
        assert!(start_hit(&leases, &policy, &key, 1).await.is_err());
    }
}

#[tokio::test]
async fn refunds_do_not_undo_a_charge_above_the_limit() {
    let (leases, _) = leased();
    let (policy, key) = (policy("fixed-window 200/minute"), Key::from("a"));
    let _ = hit(&leases, &policy, "a", 1).await;
    let hits = [hit(&leases, &policy, "a", 1).await, hit(&leases, &policy, "a", 1).await];
    let charge = leases.decide(StorageRequest::new(&policy, &key, Op::Charge, 300)).await.unwrap();
    assert_eq!((charge.is_admitted(), charge.cost(), charge.remaining()), (true, 300, 0));
    for taken in hits {
        leases.settle(&policy, &key, &taken, 0).await.unwrap();
        assert!(hit(&leases, &policy, "a", 1).await.is_refused(), "300 of 200 units are spent");
    }
}

/// The hit of a policy with two limits has spent units of both. The lease of another policy with the
/// same name has the same window as the first one.
#[tokio::test]
async fn hit_on_several_limits_is_refunded_to_the_storage() {
    let (leases, storage) = leased();
    let [two, one] = ["fixed-window 100/minute; fixed-window 1000/hour", "fixed-window 100/minute"]
        .map(|text| policy(text).with_name("api"));
    let by_two = hit(&leases, &two, "a", 1).await;
    for _ in 0..2 {
        let _ = hit(&leases, &one, "a", 1).await;
    }
    leases.settle(&two, &Key::from("a"), &by_two, 0).await.unwrap();
    let peeked = storage.decide(StorageRequest::new(&two, &Key::from("a"), Op::Peek, 1)).await.unwrap();
    assert_eq!(peeked.statuses()[1].remaining(), 1_000);
}

/// The policy of the charge has the same name, and shares the window with the lease.
#[tokio::test]
async fn charge_by_another_policy_of_the_name_ends_the_lease() {
    let (leases, storage) = leased();
    let [policy, other] =
        ["fixed-window 400/minute", "fixed-window 50/minute"].map(|text| policy(text).with_name("api"));
    let key = Key::from("a");
    let _ = hit(&leases, &policy, "a", 1).await;
    let [settled, charged] = [hit(&leases, &policy, "a", 1).await, hit(&leases, &policy, "a", 1).await];
    leases.settle(&policy, &key, &settled, 0).await.unwrap();
    assert_eq!(storage.take_changes(), 0, "the slice takes the refund");
    leases.settle(&other, &key, &charged, 200).await.unwrap();
    assert_eq!((storage.take_changes(), leases.len()), (2, 0), "a refund of the lease, and the charge");
    leases.settle(&policy, &key, &charged, 0).await.unwrap();
    assert_eq!(storage.take_changes(), 1, "a refund pays off the charge first");
}

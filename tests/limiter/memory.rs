//! The memory storage: eviction, the sweep, allocations, and the states of changed policies.

use std::time::Duration;

use common::{STRATEGY_NAMES, memory_with_manual_clock, now, policy};
use futures_util::FutureExt;
use tower_ratelimit::storage::{ManualClock, Storage};
use tower_ratelimit::{Decision, Key, LocalLimiter, MemoryStorage, Policy, Quota};

fn limiter(text: &str, max_keys: usize) -> (LocalLimiter, ManualClock) {
    let clock = ManualClock::default();
    let storage = MemoryStorage::builder().max_keys(max_keys).clock(clock.clone()).build().unwrap();
    (LocalLimiter::with_storage(policy(text), storage), clock)
}

fn hit(limiter: &LocalLimiter, key: impl Into<Key>) -> Decision {
    limiter.hit(&key.into())
}

/// Guards against these defects: unbounded maps, and a full map that admits every new client
/// without counting.
#[test]
fn flood_of_keys_stays_within_the_cap_and_evicts_no_refused_key() {
    for (policy, max_keys) in [("2/minute", 1), ("2/minute", 7), ("fixed-window 2/minute", 1_000), ("2/minute", 5_000)]
    {
        let (limiter, _) = limiter(policy, max_keys);
        let refused = [u64::MAX, u64::MAX - 1].into_iter().take(max_keys);
        for key in refused.clone() {
            while hit(&limiter, key).is_admitted() {}
        }
        for key in 0..20_000 {
            let _ = hit(&limiter, key);
            assert!(limiter.storage().stats().keys <= max_keys);
        }
        for key in refused {
            assert!(hit(&limiter, key).is_refused(), "{policy} at {max_keys}");
        }
    }
}

#[test]
fn new_key_is_refused_with_a_wait_if_all_others_are_refused() {
    let (limiter, clock) = limiter("fixed-window 1/minute; fixed-window 2/hour", 3);
    for key in 0..3_u64 {
        assert!(hit(&limiter, key).is_admitted());
        clock.advance(Duration::from_secs(10));
    }
    let newcomer = Key::from("newcomer");
    let peeked = limiter.peek(&newcomer);
    let refused = limiter.hit(&newcomer);
    for decision in [&peeked, &refused] {
        assert!(decision.is_refused() && decision.is_storage_full());
        assert_eq!(decision.retry_after(), Some(Duration::from_secs(30)), "the wait of the first of the three");
        assert_eq!((decision.remaining(), decision.capacity()), (0, 1));
    }
    assert_eq!(limiter.storage().stats().newcomers_refused, 1, "a peek does not count");
    assert_eq!(limiter.storage().stats().keys, 3);
    clock.advance(Duration::from_secs(30));
    assert!(limiter.hit(&newcomer).is_admitted());
    assert!(hit(&limiter, 1_u64).is_refused(), "a refused key is not evicted");
}

#[test]
fn admitted_key_that_expires_first_is_evicted_first() {
    let (limiter, clock) = limiter("fixed-window 2/minute", 3);
    for key in 0..3_u64 {
        assert!(hit(&limiter, key).is_admitted());
        clock.advance(Duration::from_secs(1));
    }
    assert!(hit(&limiter, 3_u64).is_admitted());
    let remembered: Vec<_> = (0..4_u64).filter(|&key| limiter.peek(&key.into()).remaining() == 1).collect();
    assert_eq!(remembered, [1, 2, 3]);
}

/// A key of several limits expires with the last of them.
#[test]
fn eviction_considers_the_longest_limit() {
    let (first, clock) = limiter("fixed-window 5/second; fixed-window 9/hour", 2);
    let second = policy("fixed-window 5/minute");
    let second = LocalLimiter::with_storage(second, first.storage().clone());
    assert!(hit(&first, "an hour to go").is_admitted());
    assert!(hit(&second, "a minute to go").is_admitted());
    clock.advance(Duration::from_millis(1));
    assert!(hit(&second, "newcomer").is_admitted());
    assert_eq!(second.peek(&"a minute to go".into()).remaining(), 5, "evicted");
    assert_eq!(first.peek(&"an hour to go".into()).statuses()[1].remaining(), 8, "kept");
}

#[test]
fn expired_keys_are_evicted_first() {
    let (limiter, clock) = limiter("fixed-window 2/minute", 2);
    assert!(hit(&limiter, 0_u64).is_admitted());
    clock.advance(Duration::from_secs(60));
    assert!(hit(&limiter, 1_u64).is_admitted());
    assert!(hit(&limiter, 2_u64).is_admitted());
    assert_eq!(limiter.peek(&1_u64.into()).remaining(), 1);
}

/// Guards against these defects: expired keys are removed only once, or only by the user.
#[test]
fn hits_on_one_key_sweep_all_expired_keys() {
    for policy in ["5/second", "moving-window 5/second", "token-bucket 5/second; elastic-window 3/second; 9/second"] {
        let (limiter, clock) = limiter(policy, 100_000);
        for key in 0..20_000_u64 {
            let _ = hit(&limiter, key);
        }
        assert_eq!(limiter.storage().stats().keys, 20_000, "{policy}");
        clock.advance(Duration::from_secs(2));
        for _ in 0..40_000 {
            let _ = hit(&limiter, "the one");
        }
        assert_eq!(limiter.storage().stats().keys, 1, "{policy}");
        // Sweeping continues after the first round.
        for key in 0..20_000_u64 {
            let _ = hit(&limiter, key);
        }
        clock.advance(Duration::from_secs(2));
        for _ in 0..40_000 {
            let _ = hit(&limiter, "the one");
        }
        assert_eq!(limiter.storage().stats().keys, 1, "{policy}");
    }
}

#[test]
fn calls_that_leave_nothing_spent_store_nothing() {
    let (limiter, _) = limiter("2/minute", 10);
    for key in 0..5_u64 {
        let _ = limiter.peek(&key.into());
        let _ = limiter.hit_with_cost(&key.into(), 3);
        let _ = limiter.hit_with_cost(&key.into(), 0);
        limiter.reserve(&key.into(), 1).refund();
        let _ = hit(&limiter, key);
        limiter.clear(&key.into());
    }
    assert_eq!(limiter.storage().stats().keys, 0);
}

/// Guards against this defect: a cap of 0 disables the limit.
#[test]
fn max_keys_of_zero_is_an_error() {
    let error = MemoryStorage::builder().max_keys(0).build().unwrap_err();
    assert!(error.to_string().contains("invalid max_keys 0: it must be at least 1"), "{error}");
}

#[test]
fn policies_share_states_only_under_equal_names() {
    let storage = memory_with_manual_clock().0;
    let on = |policy: Policy| LocalLimiter::with_storage(policy, storage.clone());
    let _ = hit(&on(policy("fixed-window 5/minute; 9/hour").with_name("free")), "alice");

    let remaining = |policy: Policy| {
        let decision = on(policy).peek(&"alice".into());
        decision.statuses().iter().map(tower_ratelimit::strategy::Status::remaining).collect::<Vec<_>>()
    };
    assert_eq!(remaining(policy("fixed-window 5/minute; 9/hour").with_name("paid")), [5, 9]);
    assert_eq!(remaining(policy("fixed-window 5/minute; 9/hour")), [5, 9]);
    assert_eq!(remaining(policy("fixed-window 5/minute; 9/hour").with_name("free")), [4, 8]);
    assert_eq!(remaining(policy("fixed-window 5/minute").with_name("free")), [4]);
    // A lowered or raised limit keeps the spent units.
    assert_eq!(remaining(policy("fixed-window 3/minute; 20/hour").with_name("free")), [2, 19]);
    // A limit of another strategy starts fresh. The other limit keeps its state.
    assert_eq!(remaining(policy("elastic-window 5/minute; 9/hour").with_name("free")), [5, 8]);
}

/// Guards against this defect: `remaining` is negative after the limit was lowered.
#[test]
fn lowered_limit_refuses_until_the_spent_units_fit() {
    for strategy in ["fixed-window", "elastic-window", "moving-window", "sliding-window-counter"] {
        let (before, clock) = limiter(&format!("{strategy} 50/minute"), 10);
        let lowered = policy(&format!("{strategy} 5/minute")).with_name("p");
        let before = LocalLimiter::with_storage(before.policy().with_name("p"), before.storage().clone());
        let after = LocalLimiter::with_storage(lowered, before.storage().clone());
        let _ = before.hit_with_cost(&"alice".into(), 40);
        let refused = hit(&after, "alice");
        assert!(refused.is_refused(), "{strategy}");
        assert_eq!(refused.remaining(), 0, "{strategy}");
        clock.advance(refused.retry_after().unwrap());
        assert!(hit(&after, "alice").is_admitted(), "{strategy}");
    }
}

#[test]
fn bucket_with_a_changed_quota_keeps_the_instant_at_which_it_is_full() {
    let (before, clock) = limiter("token-bucket 60/minute", 10);
    let named = |text: &str| policy(text).with_name("p");
    let before = LocalLimiter::with_storage(before.policy().with_name("p"), before.storage().clone());
    let _ = before.hit_with_cost(&"alice".into(), 30);
    for (text, remaining) in [("token-bucket 6/minute", 3), ("token-bucket 600/minute", 300)] {
        let after = LocalLimiter::with_storage(named(text), before.storage().clone());
        assert_eq!(after.peek(&"alice".into()).remaining(), remaining, "the bucket is full in half a minute");
    }
    clock.advance(Duration::from_secs(30));
    let after = LocalLimiter::with_storage(named("token-bucket 6/minute"), before.storage().clone());
    assert_eq!(after.peek(&"alice".into()).remaining(), 6);
}

/// Covers admitted and refused hits.
#[test]
fn hit_on_a_stored_key_does_not_allocate() {
    let mut policies: Vec<String> = STRATEGY_NAMES.map(|strategy| format!("{strategy} 1000/minute")).into();
    policies.push("1000/minute; token-bucket 2000/minute; fixed-window 3000/hour; elastic-window 50000/day".to_owned());
    for policy in policies {
        let (limiter, _) = limiter(&policy, 1_000);
        let keys = [Key::from("alice"), Key::from(std::net::Ipv4Addr::LOCALHOST), Key::from("k".repeat(100))];
        for key in &keys {
            let _ = limiter.hit(key);
        }
        let admitted = allocation_counter::measure(|| {
            for key in keys.iter().cycle().take(300) {
                // `admit` refuses a hit that a leaky bucket would delay.
                assert!(limiter.hit(key).is_admitted() && (limiter.admit(key) || policy.starts_with("leaky")));
            }
        });
        assert_eq!(admitted.count_total, 0, "{policy}, admitting");
        let _ = limiter.hit_with_cost(&keys[0], limiter.peek(&keys[0]).remaining());
        let refused = allocation_counter::measure(|| {
            assert!(limiter.hit(&keys[0]).is_refused() && !limiter.admit(&keys[0]));
        });
        assert_eq!(refused.count_total, 0, "{policy}, refusing");
    }
}

/// Products of amounts and periods are exact, even far above 2^53.
#[test]
fn retry_after_is_exact_for_large_amounts_and_long_periods() {
    for (text, amount) in [("10000/month", 10_000_u32), ("1000000/day", 1_000_000), ("300/year", 300)] {
        for strategy in ["", "token-bucket ", "moving-window ", "fixed-window ", "leaky-bucket "] {
            let (limiter, clock) = limiter(&format!("{strategy}{text}"), 10);
            let capacity = limiter.policy().limits()[0].capacity();
            assert!(limiter.hit_with_cost(&"k".into(), capacity).is_admitted());
            let refused = hit(&limiter, "k");
            let wait = refused.retry_after().unwrap();
            clock.advance(wait.saturating_sub(Duration::from_micros(1)));
            assert!(limiter.peek(&"k".into()).is_refused(), "{strategy}{text}");
            clock.advance(Duration::from_micros(1));
            assert!(limiter.peek(&"k".into()).is_admitted(), "{strategy}{text}");
            if strategy == "token-bucket " {
                let pace = limiter.policy().limits()[0].quota().period().as_micros().div_ceil(u128::from(amount));
                assert_eq!(wait.as_micros(), pace);
            }
        }
    }
}

/// A free request is admitted in any state of the storage or of the queue.
#[test]
fn cost_0_is_admitted_at_once_even_if_the_storage_is_full() {
    let (limiter, _) = limiter("fixed-window 1/minute", 1);
    assert!(hit(&limiter, "resident").is_admitted());
    assert!(hit(&limiter, "newcomer").is_storage_full());
    assert!(limiter.hit_with_cost(&"newcomer".into(), 0).is_admitted());
    assert!(limiter.peek_with_cost(&"newcomer".into(), 0).is_admitted());

    let (limiter, _) = self::limiter("leaky-bucket 1/minute queue 3", 1);
    let _ = (hit(&limiter, "k"), hit(&limiter, "k"));
    let free = limiter.hit_with_cost(&"k".into(), 0);
    assert!(free.is_admitted() && free.delay().is_zero());
}

#[test]
fn refused_new_key_evicts_nothing() {
    let (limiter, _) = limiter("fixed-window 5/minute", 1);
    assert!(hit(&limiter, "resident").is_admitted());
    let refused = limiter.hit_with_cost(&"newcomer".into(), 6);
    assert!(refused.is_refused() && !refused.is_storage_full());
    assert_eq!(limiter.peek(&"resident".into()).remaining(), 4);
}

#[test]
fn log_that_does_not_grow_needs_no_room() {
    let clock = ManualClock::default();
    let storage = MemoryStorage::builder().max_keys(2).clock(clock.clone()).build().unwrap();
    let moving = LocalLimiter::with_storage(policy("moving-window 4/second"), storage.clone());
    let fixed = LocalLimiter::with_storage(policy("fixed-window 1/day"), storage);
    for _ in 0..4 {
        assert!(hit(&moving, "a").is_admitted());
        clock.advance(Duration::from_millis(250));
    }
    assert!(hit(&fixed, "b").is_admitted());
    assert!(hit(&moving, "a").is_admitted(), "its first entry has expired, so the log does not grow");
}

/// A panic in a strategy must not affect other policies.
#[test]
fn storage_is_usable_after_a_panic_in_a_strategy() {
    use tower_ratelimit::strategy::{Hit, Log, State, Status, Strategy};
    use tower_ratelimit::{FixedWindow, Timestamp};

    #[derive(Clone, Copy, Debug)]
    struct Panics;

    impl Strategy for Panics {
        fn name(&self) -> &'static str {
            "panics"
        }

        fn check(&self, _: &Quota, _: &State, _: Timestamp, cost: u32) -> Status {
            assert!(cost < 2, "panics on purpose");
            Status::admitted(1_000, 1_000, 0)
        }

        fn spend(&self, _: &Quota, state: &mut State, now: Timestamp, _: u32) -> u64 {
            let entries = (1..=1_000).map(|i| (now.minus(i), 1));
            *state = State::Log(Box::new(Log::from_entries(now.plus(1_000_000_000), entries)));
            0
        }

        fn refund(&self, _: &Quota, _: &mut State, _: Timestamp, _: &Hit, _: u32) {
            panic!("panics on purpose");
        }
    }

    let clock = ManualClock::default();
    let storage = MemoryStorage::builder().max_keys(1_000).clock(clock.clone()).build().unwrap();
    let panicking = Policy::new(Panics, Quota::per_day(1));
    let panics = LocalLimiter::with_storage(panicking.clone(), storage.clone());
    let fixed = LocalLimiter::with_storage(Policy::new(FixedWindow::new(), Quota::per_day(1)), storage);
    assert!(hit(&panics, "k").is_admitted() && panics.storage().stats().log_bytes > 1_000);
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| panics.hit_with_cost(&"k".into(), 2)));
    assert!(caught.is_err());
    panics.clear(&"k".into());
    assert_eq!(panics.storage().stats().bytes, 0, "lost logs take no room");
    let spent = hit(&panics, "k");
    assert!(spent.has_spent() && panics.storage().stats().log_bytes > 1_000);
    let settle = || panics.storage().settle(&panicking, &"k".into(), &spent, 0);
    assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(settle)).is_err());
    panics.clear(&"k".into());
    assert_eq!(panics.storage().stats().bytes, 0, "logs that a refund lost take no room");
    assert!(hit(&fixed, "k").is_admitted());
    assert!(hit(&fixed, "k").is_refused());
    for key in 0..100_u64 {
        assert!(hit(&fixed, key).is_admitted());
    }
    clock.advance(Duration::from_secs(2 * 86_400));
    for _ in 0..1_000 {
        let _ = hit(&fixed, "k");
    }
    assert_eq!(fixed.storage().stats().keys, 1, "sweeping continues");
}

/// Guards against this defect: an idle client gets burst + 1 units.
#[test]
fn fresh_and_idle_keys_are_treated_equally() {
    for strategy in ["fixed-window", "elastic-window", "moving-window", "sliding-window-counter", "token-bucket"] {
        let (limiter, clock) = limiter(&format!("{strategy} 7/second"), 10);
        let burst = || (0..20).filter(|_| hit(&limiter, "k").is_admitted()).count();
        assert_eq!(burst(), 7);
        clock.advance(Duration::from_secs(1_000));
        assert_eq!(burst(), 7, "{strategy}");
    }
}

/// Guards against this defect: two limits whose 30-bit hashes collide share their states.
#[test]
fn limits_with_colliding_hashes_count_separately() {
    let (first, second) = ("fixed-window 10/minute", "fixed-window 100/2786174215 ms");
    let (limiter, _) = limiter(&format!("{first}; {second}"), 10);
    let decision = hit(&limiter, "k");
    let remaining = decision.statuses().iter().map(tower_ratelimit::strategy::Status::remaining);
    assert_eq!(remaining.collect::<Vec<_>>(), [9, 99]);

    let tried_out = policy(&format!("1/day; shadow {first}; shadow {second}"));
    let remaining = tried_out.shadows().iter().map(|shadow| {
        let limiter = LocalLimiter::with_storage(shadow.clone(), limiter.storage().clone());
        hit(&limiter, "k").remaining()
    });
    assert_eq!(remaining.collect::<Vec<_>>(), [9, 99]);
}

#[test]
fn limit_digests_of_a_policy_differ() {
    let text = (1..=40).map(|minutes| format!("fixed-window 9/{minutes} min")).collect::<Vec<_>>().join("; ");
    let colliding = policy(&format!("fixed-window 10/minute; fixed-window 100/2786174215 ms; {text}"));
    let mut digests: Vec<_> = colliding.limit_digests().iter().map(|digest| digest >> 2).collect();
    digests.sort_unstable();
    digests.dedup();
    assert_eq!(digests.len(), 42);
}

/// Guards against this defect: the earlier limits are spent although a later one refuses.
#[test]
fn refusal_spends_nothing_from_any_limit() {
    let (limiter, _) = limiter("10/minute; fixed-window 1/minute", 10);
    let _ = hit(&limiter, "k");
    for _ in 0..5 {
        let refused = hit(&limiter, "k");
        assert_eq!(refused.statuses()[0].remaining(), 9);
        assert_eq!(refused.statuses()[1].remaining(), 0);
    }
}

#[test]
fn clones_are_handles_on_the_same_states() {
    let limiter = LocalLimiter::new(Quota::per_day(2));
    let _ = hit(&limiter, "k");
    let _ = hit(&limiter.clone(), "k");
    assert!(hit(&limiter, "k").is_refused());
}

#[test]
fn admit_equals_hit_unless_the_hit_would_be_delayed() {
    for policy in
        ["3/minute", "fixed-window 3/minute; 5/hour", "moving-window 3/minute", "leaky-bucket 1/minute queue 3"]
    {
        let (limiter, clock) = limiter(policy, 10);
        let alice = Key::from("alice");
        assert!(limiter.admit(&alice) && limiter.admit_with_cost(&alice, 0));
        // A leaky bucket would delay the second hit.
        assert_eq!(limiter.admit(&alice), !policy.starts_with("leaky"));
        assert!(!limiter.admit_with_cost(&alice, 2), "{policy}");
        let spent = if policy.starts_with("leaky") { 1 } else { 2 };
        let peek = limiter.peek(&alice);
        assert_eq!(peek.capacity() - peek.remaining(), spent, "{policy}");
        clock.advance(Duration::from_secs(120));
        assert!(limiter.admit(&alice));
    }
}

#[test]
fn repeatedly_refused_key_is_admitted_after_its_wait() {
    for strategy in ["fixed-window", "sliding-window-counter", "token-bucket", "moving-window", "elastic-window"] {
        let (limiter, clock) = limiter(&format!("{strategy} 2/minute"), 10);
        let hammer = || (0..50).fold(hit(&limiter, "k"), |_, _| hit(&limiter, "k"));
        let refused = hammer();
        assert!(refused.is_refused());
        clock.advance(refused.retry_after().expect("the hit fits later"));
        assert!(hit(&limiter, "k").is_admitted(), "{strategy}");
        assert!(hammer().is_refused());
        limiter.clear(&"k".into());
        let first = limiter.reserve(&"k".into(), 1);
        assert!(first.is_admitted() && hit(&limiter, "k").is_admitted() && hammer().is_refused());
        first.refund();
        assert!(hit(&limiter, "k").is_admitted(), "{strategy} after a refund");
    }
}

/// Refilling each of these costs takes more than 2^64 microseconds.
#[test]
fn cost_above_the_capacity_is_refused() {
    for (policy, cost) in [("1/year", 584_943), ("1/day", 213_503_983), ("1/365 days", u32::MAX)] {
        let (limiter, _) = limiter(&format!("token-bucket {policy}"), 10);
        let key = Key::from("k");
        assert!(!limiter.admit_with_cost(&key, cost) && limiter.hit_with_cost(&key, cost).is_refused(), "{policy}");
        assert!(limiter.admit(&key));
    }
}

#[test]
fn evicting_a_refused_key_drops_its_refusal_hint() {
    for max_keys in [1, 64] {
        let (limiter, clock) = limiter("token-bucket 10/second", max_keys);
        let key = Key::from("k");
        assert!(limiter.hit_with_cost(&key, 10).is_admitted());
        assert!(limiter.hit_with_cost(&key, 5).is_refused());
        // It has one unit, so it may be evicted, and it expires before the others.
        clock.advance(Duration::from_millis(150));
        assert!((0..1_000_u64).all(|other| limiter.hit_with_cost(&other.into(), 9).is_admitted()));
        let fresh = limiter.peek_with_cost(&key, 5);
        assert_eq!((fresh.is_admitted(), fresh.remaining()), (true, 10));
    }
}

#[test]
fn key_refused_by_a_lowered_limit_is_not_evicted() {
    let (storage, limiter) = {
        let clock = ManualClock::default();
        let storage = MemoryStorage::builder().max_keys(2).clock(clock).build().unwrap();
        let limiter = |text: &str| LocalLimiter::with_storage(policy(text), storage.clone());
        (storage.clone(), [r#""u": fixed-window 100/hour"#, r#""u": fixed-window 10/hour"#, "100/day"].map(limiter))
    };
    let [generous, strict, others] = limiter;
    for _ in 0..50 {
        assert!(hit(&generous, "k").is_admitted());
    }
    assert!(hit(&strict, "k").is_refused());
    for key in 0..100_u64 {
        let _ = hit(&others, key);
    }
    assert!(hit(&strict, "k").is_refused());
    assert_eq!(storage.stats().keys, 2);
}

/// The middleware calls `try_admit` first and then `decide`, but the refusal counts once.
#[tokio::test]
async fn refusal_through_the_middleware_counts_once() {
    use tower::{Layer, Service, ServiceExt, service_fn};
    use tower_ratelimit::{Global, OnError, RateLimitLayer};

    let storage = MemoryStorage::builder().max_keys(1).build().unwrap();
    let others = LocalLimiter::with_storage(policy("fixed-window 1/day"), storage.clone());
    assert!(hit(&others, "k").is_admitted());
    let ok =
        service_fn(async |_: http::Request<()>| Ok::<_, std::convert::Infallible>(http::Response::new(String::new())));
    let mut service =
        RateLimitLayer::new(Quota::per_minute(5), Global::new()).storage(storage.clone(), OnError::Refuse).layer(ok);
    let refused = service.ready().await.unwrap().call(http::Request::new(())).await.unwrap();
    assert_eq!((refused.status().as_u16(), storage.stats().newcomers_refused), (429, 1));
}

#[test]
fn try_admit_returns_false_for_peeks() {
    use tower_ratelimit::storage::{Storage, StorageRequest};
    use tower_ratelimit::{Op, Policy};

    let policy: Policy = "2/minute".parse().unwrap();
    let storage = MemoryStorage::new();
    let key = Key::from("k");
    for _ in 0..3 {
        assert!(!storage.try_admit(StorageRequest::new(&policy, &key, Op::Peek, 1), None));
    }
    assert!(storage.try_admit(StorageRequest::new(&policy, &key, Op::Hit, 1), None));
}

/// Between the refusals, the same policy hits the key, or one with the same name and more limits.
#[test]
fn repeated_refusal_reports_units_refilled_since() {
    let one = r#""u": token-bucket 10/second"#;
    for other in [one, r#""u": token-bucket 10/second; fixed-window 100/hour"#] {
        let (limiter, clock) = limiter(one, 10);
        let other = LocalLimiter::with_storage(policy(other), limiter.storage().clone());
        let key = Key::from("k");
        assert!(other.hit(&key).is_admitted() && limiter.hit_with_cost(&key, 9).is_admitted());
        assert!((0..3).all(|_| hit(&limiter, "k").is_refused()));
        clock.advance(Duration::from_millis(300));
        assert!(other.hit_with_cost(&key, 2).is_admitted());
        let refused = limiter.hit_with_cost(&key, 5);
        assert_eq!((refused.is_refused(), refused.remaining()), (true, 1));
    }
}

#[test]
fn each_refusal_of_an_elastic_window_extends_the_wait() {
    let (limiter, clock) = limiter("elastic-window 1/minute", 10);
    assert!(hit(&limiter, "k").is_admitted());
    assert!((0..5).all(|_| hit(&limiter, "k").is_refused()));
    clock.advance(Duration::from_secs(30));
    assert!(hit(&limiter, "k").is_refused());
    clock.advance(Duration::from_secs(31));
    assert!(hit(&limiter, "k").is_refused(), "each refused hit extends the wait");
}

#[test]
fn keys_with_and_without_a_trailing_zero_byte_differ() {
    let (limiter, _) = limiter("1/day", 10);
    assert!(limiter.admit(&"a".into()) && limiter.admit(&"a\0".into()) && !limiter.admit(&"a".into()));
}

/// Covers policies of one limit and of several.
#[test]
fn refusal_found_by_try_admit_counts_once() {
    use tower_ratelimit::storage::{Storage, StorageRequest};
    use tower_ratelimit::strategy::{Hit, State, Status, Strategy};
    use tower_ratelimit::{Op, Timestamp};

    /// Admits one hit. Each refused hit extends the wait by a microsecond.
    #[derive(Clone, Copy, Debug)]
    struct ExtendingStrategy;

    impl Strategy for ExtendingStrategy {
        fn name(&self) -> &'static str {
            "penal"
        }

        fn check(&self, _: &Quota, state: &State, _: Timestamp, cost: u32) -> Status {
            match *state {
                State::Counts { amounts: [_, wait], .. } if cost > 0 => Status::refused(1, 0, 1, Some(wait.into())),
                State::Counts { .. } => Status::admitted(1, 0, 1),
                _ => Status::admitted(1, 1, 0),
            }
        }

        fn spend(&self, quota: &Quota, state: &mut State, now: Timestamp, _: u32) -> u64 {
            *state = State::Counts { until: now.plus(quota.period_micros()), amounts: [1, 1] };
            0
        }

        fn refuse(&self, _: &Quota, state: &mut State, _: Timestamp) {
            if let State::Counts { amounts: [_, wait], .. } = state {
                *wait += 1;
            }
        }

        fn counts_refusals(&self) -> bool {
            true
        }

        fn refund(&self, _: &Quota, _: &mut State, _: Timestamp, _: &Hit, _: u32) {}
    }

    let one = Policy::new(ExtendingStrategy, Quota::per_day(1));
    for policy in [one.clone(), one.limit(ExtendingStrategy, Quota::per_day(1))] {
        let storage = MemoryStorage::new();
        let key = Key::from("k");
        let request = || StorageRequest::new(&policy, &key, Op::Hit, 1);
        assert!(storage.try_admit(request(), None));
        for refusals in 1..5 {
            assert!(!storage.try_admit(request(), None));
            let refused = now(storage.decide(request()));
            assert_eq!(refused.retry_after(), Some(Duration::from_micros(1 + refusals)));
        }
    }
}

#[test]
fn clear_all_removes_every_key_and_its_bytes() {
    let (limiter, _) = limiter("moving-window 200/day; 300/day", 100_000);
    for client in 0..1_000_u64 {
        let cost = if client == 7 { 200 } else { 1 };
        assert!(limiter.hit_with_cost(&Key::from(client), cost).is_admitted());
    }
    // Several entries, and a published refusal hint.
    for _ in 0..3 {
        assert!(limiter.hit(&Key::from(7)).is_refused());
    }
    assert!(limiter.storage().stats().keys >= 1_000);
    let clear_all = || limiter.storage().clear_all().now_or_never().unwrap().unwrap();
    assert_eq!(clear_all(), 1_000);
    assert_eq!((limiter.storage().stats().bytes, clear_all()), (0, 0));
    assert!(limiter.admit(&Key::from(7)) && limiter.hit_with_cost(&Key::from(7), 199).is_admitted());
}

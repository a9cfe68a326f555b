//! Charges, partial refunds, and hits whose cost is settled afterwards.

use std::time::Duration;

use common::{memory_with_manual_clock, now, policy, settle};
use tower_ratelimit::storage::ManualClock;
use tower_ratelimit::strategy::State;
use tower_ratelimit::{Key, MemoryStorage, Op, Policy, RateLimiter, Timestamp};

const EVERY: [&str; 8] = [
    "fixed-window 5/second",
    "fixed-window-aligned 5/second",
    "elastic-window 5/second",
    "moving-window 5/second",
    "sliding-window-counter 5/second",
    "sliding-window-counter-aligned 5/second",
    "token-bucket 5/second",
    "leaky-bucket 1/second queue 4",
];

const START: Timestamp = Timestamp::from_micros(1_728_000_000_123_457);

fn alice() -> Key {
    Key::from("alice")
}

fn limiter(text: &str) -> (RateLimiter, ManualClock) {
    let (storage, clock) = memory_with_manual_clock();
    (RateLimiter::with_storage(policy(text), storage), clock)
}

fn wait_of(policy: &Policy, states: &[State], now: Timestamp) -> u64 {
    let peek = policy.decide(&mut states.to_vec(), now, Op::Peek, 1);
    u64::try_from(peek.retry_after().map_or(0, |wait| wait.as_micros())).unwrap()
}

#[test]
fn settlement_of_a_hit_that_has_spent_nothing_changes_nothing() {
    for text in EVERY {
        let (limiter, _) = limiter(text);
        let hit = now(limiter.hit_with_cost(&alice(), 3));
        let refused = now(limiter.hit_with_cost(&alice(), 4));
        let peek = now(limiter.peek_with_cost(&alice(), 1));
        let free = now(limiter.hit_with_cost(&alice(), 0));
        let charge = now(limiter.charge(&alice(), 1));
        assert!(hit.has_spent());
        for actual in [0, 1, 9] {
            for unspent in [&refused, &peek, &free, &charge] {
                assert!(!unspent.has_spent(), "{text}");
                now(settle(&limiter, &alice(), unspent, actual));
            }
            for cost in [4, 0] {
                now(limiter.reserve(&alice(), cost)).settle(actual);
            }
        }
        assert_eq!(now(limiter.peek(&alice())).remaining(), 1, "{text}");
    }
}

#[test]
fn parts_of_a_hit_are_refunded() {
    for text in EVERY {
        let (limiter, _) = limiter(text);
        let hit = now(limiter.hit_with_cost(&alice(), 4));
        now(settle(&limiter, &alice(), &hit, 3));
        assert_eq!(now(limiter.peek(&alice())).remaining(), 2, "{text}");
        now(settle(&limiter, &alice(), &hit, 4));
        assert_eq!(now(limiter.peek(&alice())).remaining(), 2, "{text}");
        // The first refund has moved the end of a leaky bucket's queue.
        now(settle(&limiter, &alice(), &hit, 1));
        let expected = if text.starts_with("leaky") { 2 } else { 5 };
        assert_eq!(now(limiter.peek(&alice())).remaining(), expected, "{text}");
    }
}

#[test]
fn client_in_debt_is_refused_until_its_cost_fits() {
    for text in EVERY {
        for cost in [1, 5] {
            let (limiter, clock) = limiter(text);
            let hit = now(limiter.hit_with_cost(&alice(), 2));
            now(settle(&limiter, &alice(), &hit, 23));
            let refused = now(limiter.hit_with_cost(&alice(), cost));
            assert_eq!((refused.is_refused(), refused.remaining()), (true, 0), "{text}");
            let wait = refused.retry_after().unwrap();
            clock.advance(wait.saturating_sub(Duration::from_micros(1)));
            assert!(now(limiter.peek_with_cost(&alice(), cost)).is_refused(), "{text}");
            clock.advance(Duration::from_micros(1));
            assert!(now(limiter.hit_with_cost(&alice(), cost)).is_admitted(), "{text}");
        }
    }
}

/// A refused key is refused from a hint, without the lock of its shard.
#[test]
fn charge_replaces_the_refusal_hint() {
    let (limiter, _) = limiter("token-bucket 5/second");
    let _ = now(limiter.hit_with_cost(&alice(), 5));
    for _ in 0..3 {
        assert_eq!(now(limiter.hit(&alice())).retry_after(), Some(Duration::from_millis(200)));
    }
    let _ = now(limiter.charge(&alice(), 10));
    for _ in 0..3 {
        assert_eq!(now(limiter.hit(&alice())).retry_after(), Some(Duration::from_millis(2_200)));
    }
}

#[test]
fn debts_and_counts_saturate() {
    for text in EVERY.into_iter().chain(["token-bucket 1/year", "moving-window 4294967295/day"]) {
        let (limiter, clock) = limiter(text);
        for _ in 0..3 {
            let charge = now(limiter.charge(&alice(), u32::MAX));
            assert_eq!((charge.is_admitted(), charge.remaining()), (true, 0), "{text}");
            clock.advance(Duration::from_micros(7));
        }
        let wait = now(limiter.hit(&alice())).retry_after().unwrap();
        assert!(wait <= Duration::from_micros((1 << 52) + 1_000_000), "{text}: {wait:?}");
    }
}

#[test]
fn refund_after_an_overdraft_keeps_the_overdraft() {
    let (limiter, _) = limiter("token-bucket 10/second");
    let hit = now(limiter.hit_with_cost(&alice(), 4));
    let _ = now(limiter.charge(&alice(), 26));
    now(settle(&limiter, &alice(), &hit, 0));
    // The debt is 26 units: the 10 units of the bucket, and an overdraft of 16.
    assert_eq!(now(limiter.hit(&alice())).retry_after(), Some(Duration::from_millis(1_700)));
}

/// The state stores an upper bound of an overdraft, which is at most about 1.6 times the debt.
#[test]
fn overdraft_grows_by_at_most_the_rounding_of_its_bound_if_the_clock_goes_back() {
    for text in ["token-bucket 10/minute burst 20", "leaky-bucket 10/minute queue 19"] {
        let policy = policy(text);
        for units in [21, 30, 45, 100, 10_000] {
            let mut states = [State::Fresh];
            let _ = policy.decide(&mut states, START, Op::Charge, units);
            let owed = wait_of(&policy, &states, START);
            for back in [1, 1_000_000, 3_600_000_000, 365 * 86_400_000_000] {
                let earlier = START.minus(back);
                let mut states = states.clone();
                let refused = policy.decide(&mut states, earlier, Op::Hit, 1);
                assert!(refused.is_refused());
                let wait = wait_of(&policy, &states, earlier);
                let full = 120_000_000;
                assert!(
                    wait >= owed && wait <= ((owed + full) / 8 * 13).min(owed + back) + full / 8,
                    "{text}: {wait} us"
                );
                // The first refusal has determined the wait.
                assert!(wait_of(&policy, &states, earlier.plus(wait - 1)) == 1);
                assert!(wait_of(&policy, &states, earlier.plus(wait)) == 0);
            }
        }
    }
}

/// A smaller capacity keeps the units that were charged beyond the larger one.
#[test]
fn lower_burst_keeps_an_overdraft() {
    for [before, after] in [
        ["token-bucket 10/minute burst 200", "token-bucket 10/minute burst 20"],
        ["leaky-bucket 10/minute queue 199", "leaky-bucket 10/minute queue 19"],
    ] {
        let [before, after] = [before, after].map(|text| policy(text).with_name("tier"));
        let mut states = [State::Fresh];
        let _ = before.decide(&mut states, START, Op::Charge, 205);
        let (wait, owed, full) = (wait_of(&after, &states, START), 36_000_000, 1_200_000_000);
        assert!(wait <= owed && wait + full / 16 >= owed, "{wait} us instead of {owed}");
        assert_eq!(wait_of(&after, &states, START.plus(wait)), 0);
    }
}

/// Guards against this defect: a client that owed 100 units of ten per minute waits nine minutes,
/// although the new quota of 100 per minute owes nothing.
#[test]
fn debt_counts_as_at_most_the_full_bucket_after_the_quota_was_raised() {
    let mut partly = 0;
    for strategy in ["token-bucket", "leaky-bucket"] {
        for (old, new) in [(1, 2), (10, 11), (10, 100), (10, 1_000), (99, 100), (999_999, 1_000_000), (3, 40_000_000)] {
            for bursts in [[None, None], [Some(20), Some(20)], [Some(20), Some(30)], [Some(3), Some(1_000_000)]] {
                let [before, after] = [(old, bursts[0]), (new, bursts[1])].map(|(amount, burst)| {
                    let word = if strategy == "token-bucket" { "burst" } else { "queue" };
                    let extra = burst.map_or(String::new(), |burst| format!(" {word} {burst}"));
                    policy(&format!("{strategy} {amount}/minute{extra}")).with_name("tier")
                });
                let capacity = after.limits()[0].capacity();
                if capacity < before.limits()[0].capacity() {
                    continue;
                }
                let mut exhausted = [State::Fresh];
                let _ = after.decide(&mut exhausted, START, Op::Hit, capacity);
                for units in [before.limits()[0].capacity() + 1, old * 2, old * 10, old * 1_000, u32::MAX] {
                    let mut states = [State::Fresh];
                    let _ = before.decide(&mut states, START, Op::Charge, units);
                    for later in [0, 1, 250_000, 30_000_000] {
                        let now = START.plus(later);
                        let [owes, longest] = [&states, &exhausted].map(|states| wait_of(&after, states, now));
                        assert!(owes <= longest, "{before} to {after}, {units} units: {owes} us, at most {longest}");
                        assert_eq!(wait_of(&after, &states, now.plus(owes)), 0, "{before} to {after}: tight");
                    }
                    let left = after.decide(&mut states.clone(), START, Op::Peek, 1).remaining();
                    partly += u32::from(left < capacity);
                    // Under its own quota, the debt stays as it is.
                    let _ = after.decide(&mut states.clone(), START, Op::Hit, capacity);
                    let again = before.decide(&mut states, START, Op::Peek, 1);
                    assert_eq!(again.remaining(), before.limits()[0].capacity().saturating_sub(units), "{before}");
                }
            }
        }
    }
    assert!(partly > 50, "only {partly} debts count as some units");
}

#[test]
fn full_storage_stores_no_charge_on_a_new_key() {
    let storage = MemoryStorage::builder().max_keys(1).clock(ManualClock::default()).build().unwrap();
    let limiter = RateLimiter::with_storage(policy("fixed-window 2/minute"), storage.clone());
    let _ = now(limiter.hit_with_cost(&alice(), 2));
    let bob = Key::from("bob");
    let charge = now(limiter.charge(&bob, 1));
    assert!(charge.is_refused() && charge.is_storage_full());
    assert_eq!(storage.stats().keys, 1);
    for units in [1, 5] {
        let charge = now(limiter.charge(&alice(), units));
        assert!(charge.is_admitted(), "a stored key needs no room");
        assert!(now(limiter.charge(&bob, units)).is_storage_full());
    }
    assert_eq!(storage.stats().keys, 1);
}

/// A charge above the limit on a new key evicts another one, and the bound holds.
#[test]
fn charges_keep_the_bound_of_the_memory() {
    for text in ["fixed-window 2/minute", "moving-window 2/minute", "fixed-window 2/minute; moving-window 2/hour"] {
        let storage = MemoryStorage::builder().max_keys(20_000).max_bytes(1 << 20).build().unwrap();
        let limiter = RateLimiter::with_storage(policy(text), storage.clone());
        for key in 0..30_000_u64 {
            let _ = now(limiter.charge(&key.into(), if key % 2 == 0 { 1 } else { 9 }));
        }
        let stats = storage.stats();
        assert!(stats.keys > 1_000 && stats.keys <= 20_000 && stats.bytes <= 1 << 20, "{text}: {stats:?}");
    }
}

/// The log of a client in debt does not grow beyond the memory of the storage.
#[test]
fn charges_on_a_log_that_cannot_grow_are_counted() {
    let clock = ManualClock::default();
    let storage = MemoryStorage::builder().max_bytes(65_536).clock(clock.clone()).build().unwrap();
    let limiter = RateLimiter::with_storage(policy("moving-window 10/day"), storage.clone());
    for _ in 0..20_000 {
        clock.advance(Duration::from_micros(1));
        assert!(now(limiter.charge(&alice(), 1)).is_admitted());
    }
    assert!(storage.stats().bytes <= 65_536, "{:?}", storage.stats());
    clock.advance(Duration::from_secs(86_399));
    assert_eq!(now(limiter.peek(&alice())).remaining(), 0);
    clock.advance(Duration::from_secs(2));
    assert_eq!(now(limiter.peek(&alice())).remaining(), 10);
}

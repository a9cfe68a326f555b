//! Refunds: their amount, their window, and their time limit.

use std::time::Duration;

use common::{memory_with_manual_clock, now, policy};
use tower_ratelimit::storage::ManualClock;
use tower_ratelimit::{Decision, Key, MemoryStorage, RateLimiter};

struct Limiter {
    inside: RateLimiter,
    clock: ManualClock,
    key: Key,
}

impl Limiter {
    fn new(text: &str) -> Self {
        let (storage, clock) = memory_with_manual_clock();
        let inside = RateLimiter::with_storage(policy(text), storage);
        Self { inside, clock, key: Key::from("alice") }
    }

    fn hit(&self, cost: u32) -> Decision {
        now(self.inside.hit_with_cost(&self.key, cost))
    }

    fn refund(&self, decision: &Decision) {
        now(common::settle(&self.inside, &self.key, decision, 0));
    }

    fn clear(&self) {
        now(self.inside.clear(&self.key));
    }

    fn remaining(&self) -> u32 {
        now(self.inside.peek(&self.key)).remaining()
    }

    fn wait(&self, millis: u64) {
        self.clock.advance(Duration::from_millis(millis));
    }
}

#[test]
fn refund_returns_the_cost_of_the_hit() {
    for policy in [
        "fixed-window 5/second",
        "fixed-window-aligned 5/second",
        "elastic-window 5/second",
        "moving-window 5/second",
        "sliding-window-counter 5/second",
        "sliding-window-counter-aligned 5/second",
        "token-bucket 5/second",
        "leaky-bucket 1/second queue 4",
        "moving-window 5/second; token-bucket 7/minute; elastic-window 9/hour",
    ] {
        let limiter = Limiter::new(policy);
        let _ = limiter.hit(1);
        let taken = limiter.hit(3);
        let refused = limiter.hit(2);
        assert!(refused.is_refused());
        limiter.refund(&refused);
        assert_eq!(limiter.remaining(), 1, "{policy}: a refusal refunds nothing");
        limiter.refund(&taken);
        assert_eq!(limiter.remaining(), 4, "{policy}");
    }
}

/// Guards against this defect: a refund goes to the next window and makes it negative.
#[test]
fn refund_of_an_expired_hit_returns_nothing() {
    for (policy, forgotten_after) in [
        ("fixed-window 5/second", 1_000),
        ("fixed-window-aligned 5/second", 1_000),
        ("elastic-window 5/second", 1_000),
        ("moving-window 5/second", 1_000),
        ("sliding-window-counter 5/second", 2_000),
        ("sliding-window-counter-aligned 5/second", 2_000),
        ("token-bucket 5/second", 600),
        ("leaky-bucket 5/second queue 4", 600),
    ] {
        let limiter = Limiter::new(policy);
        let taken = limiter.hit(3);
        limiter.wait(forgotten_after);
        let _ = limiter.hit(2);
        limiter.refund(&taken);
        assert_eq!(limiter.remaining(), 3, "{policy}");
    }
}

#[test]
fn refund_after_a_clear_returns_nothing() {
    for policy in [
        "fixed-window 5/second",
        "fixed-window-aligned 5/second",
        "elastic-window 5/second",
        "moving-window 5/second",
        "sliding-window-counter 5/second",
        "token-bucket 5/second",
        "leaky-bucket 5/second queue 4",
    ] {
        let limiter = Limiter::new(policy);
        limiter.wait(100);
        let taken = limiter.hit(3);
        limiter.wait(200);
        limiter.clear();
        limiter.wait(100);
        let _ = limiter.hit(3);
        limiter.refund(&taken);
        assert_eq!(limiter.remaining(), 2, "{policy}");
    }
}

#[test]
fn sliding_window_refunds_the_bucket_of_the_hit() {
    for policy in ["sliding-window-counter 10/second", "sliding-window-counter-aligned 10/second"] {
        let limiter = Limiter::new(policy);
        let taken = limiter.hit(8);
        limiter.wait(1_000);
        let _ = limiter.hit(1);
        limiter.wait(500);
        assert_eq!(limiter.remaining(), 5, "half of the previous eight, and one");
        limiter.refund(&taken);
        assert_eq!(limiter.remaining(), 9, "{policy}");
    }
}

#[test]
fn elastic_window_refunds_until_the_hit_or_the_window_expires() {
    let limiter = Limiter::new("elastic-window 5/second");
    let taken = limiter.hit(2);
    limiter.wait(900);
    let _ = limiter.hit(1);
    limiter.refund(&taken);
    assert_eq!(limiter.remaining(), 4);
    limiter.wait(200);
    limiter.refund(&taken);
    assert_eq!(limiter.remaining(), 4, "the hit expires after a second, although the window continues");
}

/// Units that were refilled are not refunded again. The oldest hit is refilled first.
#[test]
fn token_bucket_refunds_only_units_not_yet_refilled() {
    let limiter = Limiter::new("token-bucket 10/second");
    let first = limiter.hit(5);
    limiter.wait(400);
    let second = limiter.hit(5);
    limiter.wait(50);
    assert_eq!(limiter.remaining(), 4);
    limiter.refund(&first);
    assert_eq!(limiter.remaining(), 5, "as if the first hit had never happened");
    limiter.refund(&second);
    assert_eq!(limiter.remaining(), 10);
}

#[test]
fn leaky_bucket_refunds_only_the_last_slot() {
    let limiter = Limiter::new("leaky-bucket 1/second queue 4");
    let _served = limiter.hit(1);
    let (earlier, last) = (limiter.hit(1), limiter.hit(1));
    limiter.refund(&earlier);
    assert_eq!(limiter.remaining(), 2, "later requests do not move up");
    limiter.refund(&last);
    assert_eq!(limiter.remaining(), 3);
    limiter.refund(&earlier);
    assert_eq!(limiter.remaining(), 4, "its slot is the last now");
}

#[test]
fn refunded_key_may_be_evicted() {
    let clock = ManualClock::default();
    let storage = MemoryStorage::builder().max_keys(1).clock(clock).build().unwrap();
    let limiter = RateLimiter::with_storage(policy("fixed-window 2/minute"), storage);
    let (alice, bob) = (Key::from("alice"), Key::from("bob"));
    let taken = now(limiter.hit(&alice));
    let _ = now(limiter.hit(&alice));
    assert!(now(limiter.hit(&bob)).is_storage_full());
    now(common::settle(&limiter, &alice, &taken, 0));
    assert!(now(limiter.hit(&bob)).is_admitted());
}

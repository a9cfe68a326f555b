//! Policies that change while their states exist.

use std::time::Duration;

use common::{STRATEGY_NAMES, memory_with_manual_clock, policy};
use tower_ratelimit::storage::ManualClock;
use tower_ratelimit::{Key, MemoryStorage, RateLimiter};

/// One key under policies that change, and the clock of its storage.
struct Account(MemoryStorage, ManualClock);

impl Account {
    fn new() -> Self {
        let (storage, clock) = memory_with_manual_clock();
        Self(storage, clock)
    }

    fn under(&self, text: &str) -> RateLimiter {
        RateLimiter::with_storage(policy(text).with_name("api"), self.0.clone())
    }

    async fn spend(&self, text: &str, units: u32) {
        assert!(self.under(text).hit_with_cost(&Key::from("a"), units).await.unwrap().is_admitted(), "{text}");
    }

    async fn left(&self, text: &str) -> u32 {
        self.under(text).peek(&Key::from("a")).await.unwrap().remaining()
    }
}

/// Guards against this defect: lowering or raising a limit deletes the spent units.
#[tokio::test]
async fn windows_keep_the_units_that_were_spent() {
    for strategy in STRATEGY_NAMES.into_iter().filter(|name| !name.ends_with("bucket")) {
        let account = Account::new();
        account.spend(&format!("{strategy} 10/minute"), 8).await;
        for (amount, left) in
            [(10_u32, 2_u32), (20, 12), (9, 1), (8, 0), (5, 0), (1, 0), (2_000_000_000, 1_999_999_992), (10, 2)]
        {
            assert_eq!(account.left(&format!("{strategy} {amount}/minute")).await, left, "{strategy} {amount}");
        }
        account.spend(&format!("{strategy} 20/minute"), 5).await;
        assert_eq!(account.left(&format!("{strategy} 14/minute")).await, 1, "{strategy}");
        account.1.advance(Duration::from_secs(120));
        assert_eq!(account.left(&format!("{strategy} 5/minute")).await, 5, "{strategy}");
    }
}

#[tokio::test]
async fn buckets_keep_the_time_until_they_are_full() {
    for (strategy, extra) in [("token-bucket", 0), ("gcra", 0)] {
        let account = Account::new();
        account.spend(&format!("{strategy} 10/minute"), 6).await;
        for (amount, left) in [(20, 8), (10, 4), (5, 2), (100, 40), (1, 0)] {
            assert_eq!(account.left(&format!("{strategy} {amount}/minute")).await, left + extra, "{strategy} {amount}");
        }
        account.1.advance(Duration::from_secs(18));
        // The bucket needed six tenths of a minute to be full, and three have passed.
        for (amount, left) in [(20, 14), (10, 7), (100, 70)] {
            assert_eq!(account.left(&format!("{strategy} {amount}/minute")).await, left, "{strategy} {amount}");
        }
    }
    let account = Account::new();
    account.spend("token-bucket 10/minute burst 20", 15).await;
    for (text, left) in [
        ("token-bucket 20/minute burst 40", 10),
        ("token-bucket 2/minute burst 4", 1),
        // Only the burst changes: the spent units stay.
        ("token-bucket 10/minute burst 30", 15),
        ("token-bucket 10/minute burst 15", 0),
        // Only the amount changes: the time until the bucket is full stays, a minute and a half.
        ("token-bucket 5/minute burst 20", 12),
        ("token-bucket 20/minute burst 20", 0),
    ] {
        assert_eq!(account.left(text).await, left, "{text}");
    }
    let account = Account::new();
    account.spend("leaky-bucket 10/minute queue 9", 5).await;
    assert_eq!(account.left("leaky-bucket 20/minute queue 19").await, 10);
    assert_eq!(account.left("leaky-bucket 10/minute queue 3").await, 0);
}

#[tokio::test]
async fn changed_period_strategy_or_position_starts_fresh() {
    for strategy in STRATEGY_NAMES {
        let account = Account::new();
        let text = format!("{strategy} 10/minute");
        account.spend(&text, 10).await;
        let left = account.left(&text).await;
        assert!(left <= 1);
        let fresh = account.under(&text).policy().limits()[0].capacity();
        for changed in
            [format!("{strategy} 10/second"), format!("{strategy} 10/hour"), format!("{strategy} 10/59 seconds")]
        {
            assert_eq!(account.left(&changed).await, fresh, "{changed}");
        }
        assert_eq!(
            account.left(&format!("{strategy} 10/60 seconds")).await,
            left,
            "the same period in another notation"
        );
        let other = if strategy == "fixed-window" { "moving-window" } else { "fixed-window" };
        assert_eq!(account.left(&format!("{other} 10/minute")).await, 10);
        let moved = account.under(&format!("1000/day; {text}"));
        assert_eq!(moved.peek(&Key::from("a")).await.unwrap().statuses()[1].remaining(), fresh, "{text}");
    }
}

#[tokio::test]
async fn policies_with_other_names_do_not_share_states() {
    let account = Account::new();
    account.spend("10/minute", 8).await;
    let key = Key::from("a");
    for other in [policy("10/minute"), policy("10/minute").with_name("Api"), policy("10/minute").with_name("api-1")] {
        let limiter = RateLimiter::with_storage(other, account.0.clone());
        assert_eq!(limiter.peek(&key).await.unwrap().remaining(), 10);
    }
    for (text, left) in [("20/minute", 20), ("10/minute", 10)] {
        let unnamed = RateLimiter::with_storage(policy(text), account.0.clone());
        assert_eq!(unnamed.peek(&key).await.unwrap().remaining(), left);
        let _ = unnamed.hit(&key).await.unwrap();
    }
}

#[tokio::test]
async fn unchanged_limits_keep_their_state() {
    let account = Account::new();
    account.spend("fixed-window 10/minute; moving-window 100/day", 7).await;
    let limits = account.under("fixed-window 10/second; moving-window 200/day");
    let decision = limits.peek(&Key::from("a")).await.unwrap();
    let left: Vec<u32> = decision.statuses().iter().map(tower_ratelimit::strategy::Status::remaining).collect();
    assert_eq!(left, [10, 193]);
}

/// A client spends everything under the first quota, then the second quota decides.
const CHANGED: [(&str, &str); 6] = [
    ("token-bucket 10/minute burst 20", "token-bucket 100/minute burst 20"),
    ("token-bucket 10/minute burst 10", "token-bucket 600/minute burst 10"),
    ("token-bucket 10/minute burst 20", "token-bucket 10/minute burst 10"),
    ("token-bucket 7/minute burst 20", "token-bucket 100/minute burst 11"),
    ("leaky-bucket 10/minute queue 19", "leaky-bucket 100/minute queue 19"),
    ("leaky-bucket 10/minute queue 19", "leaky-bucket 10/minute queue 3"),
];

/// Guards against this defect: 181 consecutive refusals have a `retry_after` of 0.6 s, and the
/// client is admitted after 108.6 s.
#[tokio::test]
async fn retry_after_of_a_bucket_is_exact_after_its_quota_changed() {
    let micro = Duration::from_micros(1);
    for (before, after) in CHANGED {
        let (account, key) = (Account::new(), Key::from("a"));
        account.spend(before, account.left(before).await).await;
        account.1.advance(Duration::from_millis(50));
        let limiter = account.under(after);
        let fresh = Key::from("fresh");
        assert!(limiter.hit_with_cost(&fresh, limiter.policy().limits()[0].capacity()).await.unwrap().is_admitted());
        let longest = limiter.peek(&fresh).await.unwrap().retry_after().unwrap();
        let promised = limiter.peek(&key).await.unwrap().retry_after().unwrap();
        assert!(promised <= longest, "{before} -> {after}: {promised:?}, an empty bucket refuses for {longest:?}");
        let quarter = micro * u32::try_from(promised.as_micros() / 4).unwrap();
        for step in 1..=3 {
            account.1.advance(quarter);
            let refused = limiter.hit(&key).await.unwrap().retry_after();
            assert_eq!(refused, Some(promised.saturating_sub(quarter * step)), "{before} -> {after}, step {step}");
        }
        account.1.advance(promised.saturating_sub(quarter * 3 + micro));
        assert_eq!(limiter.peek(&key).await.unwrap().retry_after(), Some(micro), "{before} -> {after}");
        account.1.advance(micro);
        assert!(limiter.hit(&key).await.unwrap().is_admitted(), "{before} -> {after}");
    }
}

/// Two quotas that decide on one key in turn, as in a rolling deployment: the one that takes longer
/// to refill, the other one, and the larger amount per minute, which is that of the other one.
const IN_TURN: [(&str, &str, u32); 4] = [
    ("token-bucket 10/minute burst 30", "token-bucket 10/minute burst 20", 10),
    ("token-bucket 10/minute burst 20", "token-bucket 100/minute burst 20", 100),
    ("leaky-bucket 10/minute queue 29", "leaky-bucket 10/minute queue 19", 10),
    ("leaky-bucket 10/minute queue 19", "leaky-bucket 100/minute queue 19", 100),
];

/// Guards against this defect: each hit under the quota that refills sooner forgives the debt that
/// only the other one owes, and a client spends 140 units in the first minute instead of 40.
#[tokio::test]
async fn quotas_in_turn_admit_no_more_than_the_larger_one() {
    for (slow, fast, per_minute) in IN_TURN {
        let (account, unit) = (Account::new(), Duration::from_secs(60) / per_minute);
        let capacity = account.left(slow).await;
        account.spend(slow, capacity).await;
        let mut admitted = capacity;
        for round in 1..=10 {
            account.1.advance(unit);
            for text in [fast, slow] {
                while account.under(text).hit(&Key::from("a")).await.unwrap().is_admitted() {
                    admitted += 1;
                }
            }
            let expected = capacity + round - 1..=capacity + round + 1;
            assert!(expected.contains(&admitted), "{slow} and {fast}: {admitted} units in round {round}");
        }
    }
}

/// Guards against this defect: the first hit after a pause forgives the rest of the debt.
#[tokio::test]
async fn hit_on_a_full_bucket_keeps_the_debt_of_the_other_quota() {
    for (slow, fast, _) in IN_TURN {
        let (account, key) = (Account::new(), Key::from("a"));
        account.spend(slow, account.left(slow).await).await;
        let limiter = account.under(fast);
        let capacity = limiter.policy().limits()[0].capacity();
        let until_full = limiter.peek_with_cost(&key, capacity).await.unwrap().retry_after().unwrap();
        account.1.advance(until_full);
        let owed = account.left(slow).await;
        assert_eq!(account.left(fast).await, capacity, "{fast}");
        account.spend(fast, 1).await;
        assert_eq!(account.left(fast).await, capacity - 1, "{fast}");
        let left = account.left(slow).await;
        assert!((owed.saturating_sub(2)..=owed).contains(&left), "{slow} after {fast}: {left} instead of {owed}");
    }
}

#[tokio::test]
async fn debt_of_the_other_quota_delays_no_refill() {
    for (slow, fast, per_minute) in IN_TURN {
        let (account, unit) = (Account::new(), Duration::from_secs(60) / per_minute);
        account.spend(slow, account.left(slow).await).await;
        for round in 0..40 {
            let refused = account.under(fast).hit(&Key::from("a")).await.unwrap();
            let wait = refused.retry_after().unwrap();
            assert!(wait <= unit, "{fast} after {slow}: {wait:?} in round {round}");
            account.1.advance(wait);
            account.spend(fast, 1).await;
        }
        account.1.advance(Duration::from_secs(180));
        let capacity = account.under(fast).policy().limits()[0].capacity();
        assert_eq!(account.left(fast).await, capacity, "{fast}");
    }
}

#[tokio::test]
async fn alternating_quotas_do_not_reduce_the_wait() {
    let account = Account::new();
    let mut admitted = 0;
    for _ in 0..100 {
        for text in ["token-bucket 10/minute burst 30", "token-bucket 10/minute burst 20"] {
            admitted += u32::from(account.under(text).hit(&Key::from("a")).await.unwrap().is_admitted());
        }
    }
    assert_eq!(admitted, 30);
}

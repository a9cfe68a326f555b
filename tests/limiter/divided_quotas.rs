//! The part of a policy for one of several replicas.

use std::num::NonZeroU32;
use std::time::Duration;

use common::{EVERY_STRATEGY, policy};
use proptest::prelude::{Just, any, prop_assert, prop_assert_eq, prop_oneof, proptest};
use tower_ratelimit::strategy::{Divided, Strategy};
use tower_ratelimit::{FixedWindow, LeakyBucket, Limit, Policy, Quota, TokenBucket};

fn divide(text: &str, replicas: u32) -> String {
    policy(text).divide(NonZeroU32::new(replicas).unwrap()).unwrap().to_string()
}

#[test]
fn divided_amount_burst_and_queue_are_at_least_one() {
    assert_eq!(divide("fixed-window 10/minute", 3), "fixed-window 3/minute");
    assert_eq!(divide("fixed-window 10/minute", 10), "fixed-window 1/minute");
    assert_eq!(divide("fixed-window 10/minute", 11), "fixed-window 1/minute");
    assert_eq!(divide("fixed-window 10/minute", u32::MAX), "fixed-window 1/minute");
    assert_eq!(divide("token-bucket 10/second burst 50", 4), "token-bucket 2/second burst 12");
    assert_eq!(divide("token-bucket 10/second burst 3", 4), "token-bucket 2/second burst 1");
    assert_eq!(divide("leaky-bucket 10/second queue 20", 3), "leaky-bucket 3/second queue 6");
    assert_eq!(divide("leaky-bucket 10/second queue 2", 3), "leaky-bucket 3/second queue 1");
    // A queue of 0 stays 0.
    assert_eq!(divide("leaky-bucket 10/second queue 0", 3), "leaky-bucket 3/second queue 0");
    assert_eq!(divide("leaky-bucket 10/second", 3), "leaky-bucket 3/second queue 3");
    for text in EVERY_STRATEGY {
        assert_eq!(divide(text, 1), policy(text).to_string());
        assert_eq!(policy(text).divide(NonZeroU32::new(2).unwrap()).unwrap().limits()[0].quota().amount(), 1, "{text}");
    }
}

#[test]
fn divided_policy_keeps_its_names_and_identity() {
    let three = NonZeroU32::new(3).unwrap();
    for text in ["10/minute", "\"free\": \"a\" 9/minute; fixed-window 12/day; shadow leaky-bucket 7/second"] {
        let whole = policy(text);
        let part = whole.divide(three).unwrap();
        assert_ne!(part, whole);
        let together = |policy: &Policy| -> Vec<Policy> {
            let shadows = policy.shadows().iter().cloned();
            std::iter::once(policy.clone()).chain(shadows).collect()
        };
        for (part, whole) in together(&part).iter().zip(together(&whole)) {
            assert_eq!((part.name(), part.identity()), (whole.name(), whole.identity()));
            assert_eq!((part.digest(), part.limit_digests()), (whole.digest(), whole.limit_digests()));
            for position in 0..whole.limits().len() {
                assert_eq!(part.limit_name(position), whole.limit_name(position));
            }
        }
        assert_eq!(part.shadows().len(), whole.shadows().len());
    }
    let shadow = policy("10/minute; shadow 9/minute").divide(three).unwrap();
    assert_eq!(shadow.shadows()[0].limits()[0].capacity(), 3);
}

/// Accepts only even amounts, and divides its extra units too.
#[derive(Clone, Debug)]
struct Even {
    extra: u32,
}

impl Strategy for Even {
    fn name(&self) -> &'static str {
        "even"
    }

    fn validate(&self, quota: &Quota) -> Result<(), tower_ratelimit::ConfigError> {
        if quota.amount().is_multiple_of(2) {
            Ok(())
        } else {
            Err(tower_ratelimit::ConfigError::new("write an even one"))
        }
    }

    fn capacity(&self, quota: &Quota) -> u32 {
        quota.amount() + self.extra
    }

    common::decides_like_a_fixed_window!();

    fn divide(&self, quota: &Quota, replicas: NonZeroU32) -> Option<Divided> {
        Some(Divided::new(Self { extra: self.extra / replicas }, quota.divide(replicas)))
    }
}

#[test]
fn custom_strategy_divides_itself_and_may_reject_the_result() {
    let whole = Policy::new(Even { extra: 10 }, Quota::per_minute(20));
    assert_eq!(whole.divide(NonZeroU32::new(5).unwrap()).unwrap().limits()[0].capacity(), 4 + 2);
    let error = whole.divide(NonZeroU32::new(4).unwrap()).unwrap_err();
    assert_eq!(error.to_string(), "write an even one");
}

proptest! {
    /// Every built-in limit can be divided. The parts together do not exceed the limit if there is
    /// a unit for each replica. The fixed window stands for all windows, because they divide only
    /// the quota.
    #[test]
    fn every_built_in_limit_can_be_divided(
        amount in prop_oneof![1..=20_u32, any::<u32>()],
        micros in prop_oneof![1..=1_u64 << 40, Just(1 << 52), 1_u64 << 50..=1 << 52],
        more in prop_oneof![0..=20_u32, any::<u32>()],
        replicas in prop_oneof![1..=20_u32, 1..=u32::MAX],
    ) {
        let replicas = NonZeroU32::new(replicas).unwrap();
        let Ok(quota) = Quota::try_per(amount, Duration::from_micros(micros)) else { return Ok(()) };
        let bucket = quota.try_burst(more).and_then(|quota| Limit::try_new(TokenBucket::new(), quota));
        let queue = Limit::try_new(LeakyBucket::new().queue(more), quota);
        let lazy = Limit::try_new(LeakyBucket::new(), quota);
        for limit in [Limit::try_new(FixedWindow::new(), quota), bucket, queue, lazy].into_iter().flatten() {
            let whole = Policy::from(limit);
            let part = whole.divide(replicas).map_err(|error| {
                proptest::test_runner::TestCaseError::fail(format!("{whole} by {replicas}: {error}"))
            })?;
            let (whole, part) = (&whole.limits()[0], &part.limits()[0]);
            prop_assert_eq!(part.quota().period(), whole.quota().period());
            let most = |whole: u32| (whole / replicas).max(1);
            prop_assert_eq!(part.quota().amount(), most(amount));
            prop_assert!(part.quota().burst_size().unwrap_or(1) <= most(more));
            prop_assert!(part.capacity() >= 1 && part.capacity() <= whole.capacity());
        }
    }
}

//! Law 8, and what of law 10 can be told by it.

use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::{Just, Strategy as Generator};
use proptest::test_runner::{Config, TestCaseError};
use proptest::{prop_assert, prop_assert_eq, prop_oneof};

use super::Model;
use super::desk::{Desk, runtime};
use super::laws::run_some;
use crate::storage::{Clock, ManualClock, StorageRequest, Summary};
use crate::{Decision, Key, Limit, Op, Policy, Storage};

#[derive(Clone, Copy, Debug)]
enum Action {
    Decide(Op, Cost),
    HitAtOnce(Cost),
    RefundLast,
    Clear,
}

#[derive(Clone, Copy, Debug)]
enum Cost {
    Units(u32),
    /// The policy's capacity, less so many thousandths of it; or one unit more than it.
    Capacity(u32),
}

impl Cost {
    fn units(self, policy: &Policy) -> u32 {
        let capacity = policy.limits().iter().map(Limit::capacity).min().unwrap_or(1);
        match self {
            Self::Units(units) => units,
            Self::Capacity(0) => capacity.saturating_add(1),
            Self::Capacity(less) => {
                capacity - u32::try_from(u64::from(capacity) * u64::from(less - 1) / 1_000).unwrap_or(0)
            }
        }
    }
}

/// Law 8: a storage with this clock decides like the model, on random scripts of hits, peeks, refunds and clears over
/// several keys and policies, which do not mix.
///
/// `make` is called for each script, inside of a runtime of tokio's, and returns an empty storage that reads the clock it is given.
///
/// # Panics
///
/// When they differ; the message has the smallest script.
pub fn decides_like_the_model<St: Storage>(policies: &[Policy], make: impl Fn(ManualClock) -> St) {
    decides_like_the_model_in(Config::default().cases, policies, make);
}

/// [`decides_like_the_model`] with this many random scripts.
pub(super) fn decides_like_the_model_in<St: Storage>(
    scripts: u32,
    policies: &[Policy],
    make: impl Fn(ManualClock) -> St,
) {
    like_the_model("8: it decides like the model", scripts, policies, &make);
}

/// Law 10: policies of one name that differ in strategy, period or the place of a limit are decided side by side, each as if the
/// others were not there; what is the same in both they share.
///
/// `make` is as in [`decides_like_the_model`].
///
/// # Panics
///
/// When they mix, or one loses what it has because of another; the message has the smallest script.
pub fn policies_of_one_name_share_only_what_is_the_same<St: Storage>(make: impl Fn(ManualClock) -> St) {
    policies_of_one_name_in(Config::default().cases, make);
}

/// [`policies_of_one_name_share_only_what_is_the_same`] with this many random scripts.
pub(super) fn policies_of_one_name_in<St: Storage>(scripts: u32, make: impl Fn(ManualClock) -> St) {
    let policies: Vec<Policy> = [
        "fixed-window 3 per 7 seconds",
        "fixed-window 5 per 7 seconds",
        "fixed-window 3 per 8 seconds",
        "elastic-window 3 per 7 seconds",
        "moving-window 3 per 7 seconds",
        "token-bucket 3 per 7 seconds; fixed-window 3 per 7 seconds",
    ]
    .into_iter()
    .map(|text| text.parse().and_then(|policy: Policy| policy.try_with_name("tier")).expect("a policy"))
    .collect();
    like_the_model("10: policies of one name share only what is the same", scripts, &policies, &make);
}

fn like_the_model<St: Storage>(
    law: &'static str,
    scripts: u32,
    policies: &[Policy],
    make: &impl Fn(ManualClock) -> St,
) {
    let runtime = runtime();
    let costs =
        |least: u32| prop_oneof![9 => (least..=3).prop_map(Cost::Units), 1 => (0..=999_u32).prop_map(Cost::Capacity)];
    let actions = prop_oneof![
        12 => costs(1).prop_map(|cost| Action::Decide(Op::Hit, cost)),
        6 => costs(0).prop_map(Action::HitAtOnce),
        3 => costs(0).prop_map(|cost| Action::Decide(Op::Peek, cost)),
        2 => Just(Action::RefundLast),
        1 => Just(Action::Clear),
    ];
    let waits = prop_oneof![3 => Just(0_u64), 3 => 1..=1_000_000_u64, 1 => 1..=100_000_000_u64];
    let steps = vec((waits, 0..policies.len(), 0..3_u64, actions), 1..80);
    run_some(law, scripts, &steps, |steps| {
        let desk = Desk::new(law, &runtime, make);
        let mut model = Model::default();
        let mut last: Option<(&Policy, Key, Decision)> = None;
        for (wait, policy, key, action) in steps {
            desk.clock.advance(Duration::from_micros(wait));
            let (policy, key, now) = (&policies[policy], Key::from(key), desk.clock.now());
            match action {
                Action::Decide(op, cost) => {
                    let cost = cost.units(policy);
                    let decision = desk.try_decide(policy, &key, op, cost).map_err(TestCaseError::fail)?;
                    prop_assert_eq!(&decision, &model.decide(policy, &key, op, cost, now));
                    last = Some((policy, key, decision));
                }
                Action::HitAtOnce(cost) => {
                    let cost = cost.units(policy);
                    let mut shown = Summary::default();
                    let admitted =
                        desk.storage.try_admit(StorageRequest::new(policy, &key, Op::Hit, cost), Some(&mut shown));
                    let expected = model.decide(policy, &key, Op::Hit, cost, now);
                    if admitted {
                        prop_assert!(expected.is_admitted() && expected.delay().is_zero());
                        prop_assert_eq!(shown, Summary { at: expected.at(), limit: *expected.shown() });
                    } else {
                        // It has taken nothing.
                        let decision = desk.try_decide(policy, &key, Op::Hit, cost).map_err(TestCaseError::fail)?;
                        prop_assert_eq!(&decision, &expected);
                    }
                    last = Some((policy, key, expected));
                }
                Action::RefundLast => {
                    if let Some((policy, key, decision)) = last.take() {
                        desk.try_refund(policy, &key, &decision).map_err(TestCaseError::fail)?;
                        model.refund(policy, &key, &decision, now);
                    }
                }
                Action::Clear => {
                    desk.try_clear(policy, &key).map_err(TestCaseError::fail)?;
                    model.clear(policy, &key);
                }
            }
        }
        Ok(())
    });
}

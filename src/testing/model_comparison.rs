//! Laws that compare a storage with the model.

use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::{Just, Strategy as Generator};
use proptest::test_runner::{Config, TestCaseError};
use proptest::{prop_assert_eq, prop_oneof};

use super::Model;
use super::harness::{Harness, MakeStorage, runtime};
use super::strategy::run_some;
use crate::decision::Decision;
use crate::key::Key;
use crate::policy::{Limit, Op, Policy};
use crate::storage::{AnyStorage, Clock, ManualClock, Storage, StorageRequest, Summary};

#[derive(Clone, Copy, Debug)]
enum Action {
    Decide(Op, Cost),
    TryAdmit(Cost),
    Charge(Cost, u32),
    SettleLast(Actual),
    Clear,
}

/// The actual cost of a hit.
#[derive(Clone, Copy, Debug)]
enum Actual {
    Nothing,
    /// The units that the hit has spent, less this many, but at least 1.
    Less(Cost),
    /// The units that the hit has spent, plus this many.
    More(Cost),
}

impl Actual {
    fn units(self, policy: &Policy, decision: &Decision) -> u32 {
        match self {
            Self::Nothing => 0,
            Self::Less(units) => decision.cost().saturating_sub(units.units(policy)).max(1),
            Self::More(units) => decision.cost().saturating_add(units.units(policy)),
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Cost {
    Units(u32),
    /// `Capacity(n)` is the capacity of the policy, less `n - 1` thousandths of it. `Capacity(0)`
    /// is the capacity plus one unit.
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

/// Checks law 8 of [`StorageLaws`](super::StorageLaws): a storage decides like the [`Model`].
///
/// Runs random scripts of hits, peeks, charges, settlements and clears on several keys and on
/// `policies`. The environment variable `PROPTEST_CASES` sets the number of scripts, which defaults
/// to 256. `make` is called for each script, inside a tokio runtime. It must return an empty
/// storage that uses the given clock.
///
/// # Panics
///
/// Panics if a decision differs, or if the storage fails. The message contains the smallest script
/// that fails. Also panics if `policies` is empty, or if it is called inside a tokio runtime,
/// because it starts its own.
pub fn decides_like_the_model<St: Storage>(policies: &[Policy], make: impl Fn(ManualClock) -> St) {
    decides_like_the_model_in(Config::default().cases, policies, &|clock| AnyStorage::new(make(clock)));
}

/// [`decides_like_the_model`] with this many random scripts.
pub(super) fn decides_like_the_model_in(scripts: u32, policies: &[Policy], make: &MakeStorage<'_>) {
    like_the_model("8: decisions equal the model's", scripts, policies, make);
}

/// Checks law 10 of [`StorageLaws`](super::StorageLaws) for policies with the same name: they share
/// the states of equal limits, and no others.
///
/// Limits are equal if they have the same strategy, period and position. `make` and the number of
/// random scripts are as in [`decides_like_the_model`].
///
/// # Panics
///
/// Panics if policies share the states of different limits, if they do not share those of equal
/// limits, or if the storage fails. The message contains the smallest script that fails. Also
/// panics if it is called inside a tokio runtime, because it starts its own.
pub fn policies_of_one_name_share_only_equal_limits<St: Storage>(make: impl Fn(ManualClock) -> St) {
    policies_of_one_name_in(Config::default().cases, &|clock| AnyStorage::new(make(clock)));
}

/// [`policies_of_one_name_share_only_equal_limits`] with this many random scripts.
pub(super) fn policies_of_one_name_in(scripts: u32, make: &MakeStorage<'_>) {
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
    like_the_model("10: policies with the same name share only equal limits", scripts, &policies, make);
}

fn like_the_model(law: &'static str, scripts: u32, policies: &[Policy], make: &MakeStorage<'_>) {
    let runtime = runtime();
    let costs =
        |least: u32| prop_oneof![9 => (least..=3).prop_map(Cost::Units), 1 => (0..=999_u32).prop_map(Cost::Capacity)];
    let actions = prop_oneof![
        12 => costs(1).prop_map(|cost| Action::Decide(Op::Hit, cost)),
        6 => costs(0).prop_map(Action::TryAdmit),
        3 => costs(0).prop_map(|cost| Action::Decide(Op::Peek, cost)),
        2 => (costs(0), 1..=3_u32).prop_map(|(cost, times)| Action::Charge(cost, times)),
        2 => Just(Action::SettleLast(Actual::Nothing)),
        2 => costs(1).prop_map(Actual::Less).prop_map(Action::SettleLast),
        2 => costs(0).prop_map(Actual::More).prop_map(Action::SettleLast),
        1 => Just(Action::Clear),
    ];
    let waits = prop_oneof![3 => Just(0_u64), 3 => 1..=1_000_000_u64, 1 => 1..=100_000_000_u64];
    let steps = vec((waits, 0..policies.len(), 0..3_u64, actions), 1..80);
    run_some(law, scripts, &steps, |steps| {
        let harness = Harness::new(law, &runtime, make);
        let mut model = Model::default();
        let mut last: Option<(&Policy, Key, Decision)> = None;
        for (wait, policy, key, action) in steps {
            harness.clock.advance(Duration::from_micros(wait));
            let (policy, key, now) = (&policies[policy], Key::from(key), harness.clock.now());
            match action {
                Action::Decide(op, cost) => {
                    let cost = cost.units(policy);
                    let decision = harness.try_decide(policy, &key, op, cost).map_err(TestCaseError::fail)?;
                    prop_assert_eq!(&decision, &model.decide(policy, &key, op, cost, now));
                    last = Some((policy, key, decision));
                }
                Action::TryAdmit(cost) => {
                    let cost = cost.units(policy);
                    let decision = try_admit_like_the_model(&harness, &mut model, policy, &key, cost)
                        .map_err(TestCaseError::fail)?;
                    last = Some((policy, key, decision));
                }
                Action::Charge(cost, times) => {
                    let units = cost.units(policy).saturating_mul(times);
                    let decision = harness.try_decide(policy, &key, Op::Charge, units).map_err(TestCaseError::fail)?;
                    prop_assert_eq!(&decision, &model.decide(policy, &key, Op::Charge, units, now));
                    last = Some((policy, key, decision));
                }
                Action::SettleLast(actual) => {
                    if let Some((policy, key, decision)) = last.take() {
                        let actual = actual.units(policy, &decision);
                        harness.try_settle(policy, &key, &decision, actual).map_err(TestCaseError::fail)?;
                        model.settle(policy, &key, &decision, actual, now);
                    }
                }
                Action::Clear => {
                    harness.try_clear(policy, &key).map_err(TestCaseError::fail)?;
                    model.clear(policy, &key);
                }
            }
        }
        Ok(())
    });
}

/// Sends a hit as callers of [`Storage::try_admit`] do. Returns the decision of the model, or an
/// error if the storage does not decide like it.
pub(super) fn try_admit_like_the_model(
    harness: &Harness<'_>,
    model: &mut Model,
    policy: &Policy,
    key: &Key,
    cost: u32,
) -> Result<Decision, String> {
    let (request, mut shown) = (StorageRequest::new(policy, key, Op::Hit, cost), Summary::default());
    let is_admitted = harness.storage.try_admit(request, Some(&mut shown));
    let expected = model.decide(policy, key, Op::Hit, cost, harness.clock.now());
    if is_admitted && !(expected.is_admitted() && expected.delay().is_zero()) {
        return Err(format!("{policy}: `try_admit` admitted {cost} units, but {expected:?} is expected"));
    }
    let is_refused = !is_admitted && shown.refusal(&request).is_some();
    let summary = Summary { at: expected.at(), limit: *expected.shown() };
    if (is_admitted || is_refused) && shown != summary {
        return Err(format!(
            "{policy}: `try_admit` of {cost} units returned {is_admitted} and {shown:?}, but {summary:?} is expected"
        ));
    }
    if !is_admitted {
        // `try_admit` has changed nothing, so the next decision equals the model's.
        let decision = harness.try_decide(policy, key, Op::Hit, cost)?;
        if decision != expected {
            return Err(format!(
                "{policy}, {cost} units after `try_admit`: the decision is {decision:?}, but {expected:?} is expected"
            ));
        }
    }
    Ok(expected)
}

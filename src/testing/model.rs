//! The model of a storage, and its comparison with a storage on random scripts.

use std::collections::HashMap;
use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::{Just, Strategy as Generator};
use proptest::prop_oneof;
use proptest::test_runner::{Config, TestCaseError};

use super::harness::{Harness, MakeStorage, parsed, runtime};
use super::strategy::run_some;
use crate::decision::Decision;
use crate::key::Key;
use crate::policy::{Limit, Member, Op, Policy};
use crate::quota::DAY;
use crate::storage::{AnyStorage, Clock, ManualClock, Storage, StorageRequest, Summary};
use crate::strategy::State;
use crate::time::Timestamp;

/// The reference implementation of a storage: a map of states in memory, without a clock.
///
/// A state belongs to the [identity](Policy::identity) of a policy, a key, and the
/// [digest](Policy::limit_digests) of a limit. Limits that differ in strategy, period or position
/// in the policy have separate states.
#[derive(Clone, Debug, Default)]
pub struct Model(HashMap<(String, Key, u32), State>);

impl Model {
    /// Decides on `cost` units of the key at the time `now`, like
    /// [`Storage::decide`](crate::Storage::decide).
    pub fn decide(&mut self, policy: &Policy, key: &Key, op: Op, cost: u32, now: Timestamp) -> Decision {
        self.with_states(policy, key, |states| policy.decide(states, now, op, cost))
    }

    /// Decides on several keys together at the time `now`, like
    /// [`Storage::decide_all`](crate::Storage::decide_all). The members must have different states.
    pub fn decide_all(&mut self, members: &[StorageRequest<'_>], now: Timestamp) -> Vec<Decision> {
        let names: Vec<Vec<_>> = members.iter().map(|member| Self::names(member.policy, member.key)).collect();
        let load = |names: &Vec<_>| names.iter().map(|name| self.0.remove(name).unwrap_or_default()).collect();
        let mut states: Vec<Vec<State>> = names.iter().map(load).collect();
        let loaded = members.iter().zip(&mut states).map(|(member, states)| {
            let StorageRequest { policy, op, cost, .. } = *member;
            Member { policy, states, now, op, cost }
        });
        let decisions = Policy::decide_all(&mut loaded.collect::<Vec<_>>());
        self.0.extend(names.into_iter().flatten().zip(states.into_iter().flatten()));
        decisions
    }

    /// Corrects the cost of a hit to `actual` units, like [`Policy::settle`]. `decision` is the
    /// decision on that hit, and `now` is the time of the correction.
    pub fn settle(&mut self, policy: &Policy, key: &Key, decision: &Decision, actual: u32, now: Timestamp) {
        self.with_states(policy, key, |states| policy.settle(states, now, decision, actual));
    }

    /// Removes the states of the key in all limits of the policy.
    pub fn clear(&mut self, policy: &Policy, key: &Key) {
        self.with_states(policy, key, |states| states.fill(State::Fresh));
    }

    fn with_states<T>(&mut self, policy: &Policy, key: &Key, change: impl FnOnce(&mut [State]) -> T) -> T {
        let names = Self::names(policy, key);
        let mut states: Vec<State> = names.iter().map(|name| self.0.remove(name).unwrap_or_default()).collect();
        let answer = change(&mut states);
        self.0.extend(names.into_iter().zip(states));
        answer
    }

    fn names(policy: &Policy, key: &Key) -> Vec<(String, Key, u32)> {
        let name = |digest: &u32| (policy.identity().to_owned(), key.clone(), *digest);
        policy.limit_digests().iter().map(name).collect()
    }
}

/// A storage and the model, which get the same requests. The methods compare the decisions.
pub(super) struct Compared<'a, 'r> {
    pub(super) harness: &'a Harness<'r>,
    pub(super) model: Model,
}

impl<'a, 'r> Compared<'a, 'r> {
    pub(super) fn new(harness: &'a Harness<'r>) -> Self {
        Self { harness, model: Model::default() }
    }

    fn now(&self) -> Timestamp {
        self.harness.clock.now()
    }

    pub(super) fn decide(&mut self, policy: &Policy, key: &Key, op: Op, cost: u32) -> Result<Decision, String> {
        let decision = self.harness.try_decide(policy, key, op, cost)?;
        let expected = self.model.decide(policy, key, op, cost, self.now());
        if decision == expected {
            return Ok(decision);
        }
        Err(format!("{policy}, {op:?} of {cost} units: the decision is {decision:?}, but {expected:?} is expected"))
    }

    /// Decides on several keys together.
    pub(super) fn decide_all(&mut self, members: &[StorageRequest<'_>]) -> Result<Vec<Decision>, String> {
        let decisions = self.harness.try_decide_all(members)?;
        let expected = self.model.decide_all(members, self.now());
        if decisions == expected {
            return Ok(decisions);
        }
        Err(format!("{members:?}: the decisions are {decisions:?}, but {expected:?} are expected"))
    }

    /// Sends a hit as callers of [`Storage::try_admit`] do. Returns the decision of the model.
    pub(super) fn try_admit(&mut self, policy: &Policy, key: &Key, cost: u32) -> Result<Decision, String> {
        let (request, mut shown) = (StorageRequest::new(policy, key, Op::Hit, cost), Summary::default());
        let is_admitted = self.harness.storage.try_admit(request, Some(&mut shown));
        let expected = self.model.decide(policy, key, Op::Hit, cost, self.now());
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
            let decision = self.harness.try_decide(policy, key, Op::Hit, cost)?;
            if decision != expected {
                return Err(format!(
                    "{policy}, {cost} units after `try_admit`: the decision is {decision:?}, but {expected:?} is expected"
                ));
            }
        }
        Ok(expected)
    }

    pub(super) fn settle(
        &mut self,
        policy: &Policy,
        key: &Key,
        decision: &Decision,
        actual: u32,
    ) -> Result<(), String> {
        self.harness.try_settle(policy, key, decision, actual)?;
        self.model.settle(policy, key, decision, actual, self.now());
        Ok(())
    }

    pub(super) fn clear(&mut self, policy: &Policy, key: &Key) -> Result<(), String> {
        self.harness.try_clear(policy, key)?;
        self.model.clear(policy, key);
        Ok(())
    }
}

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

/// Checks law 10 for policies with the same name: they share the states of equal limits, and no
/// others. Limits are equal if they have the same strategy, period and position.
pub(super) fn policies_share_equal_limits(scripts: u32, policies: &[Policy], make: &MakeStorage<'_>) {
    like_the_model("10: policies with the same name share only equal limits", scripts, policies, make);
}

/// Policies with the same name, some of them with equal limits.
pub(super) fn of_one_name() -> [Policy; 6] {
    [
        "fixed-window 3 per 7 seconds",
        "fixed-window 5 per 7 seconds",
        "fixed-window 3 per 8 seconds",
        "elastic-window 3 per 7 seconds",
        "moving-window 3 per 7 seconds",
        "token-bucket 3 per 7 seconds; fixed-window 3 per 7 seconds",
    ]
    .map(|text| parsed(text).with_name("tier"))
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
    let waits = prop_oneof![
        9 => Just(0_u64),
        9 => 1..=1_000_000_u64,
        3 => 1..=100_000_000_u64,
        1 => 1..=40 * DAY,
    ];
    let steps = vec((waits, 0..policies.len(), 0..3_u64, actions), 1..80);
    run_some(law, scripts, &steps, |steps| {
        let harness = Harness::new(law, &runtime, make);
        let mut compared = Compared::new(&harness);
        let mut last: Option<(&Policy, Key, Decision)> = None;
        for (wait, policy, key, action) in steps {
            harness.clock.advance(Duration::from_micros(wait));
            let (policy, key) = (&policies[policy], Key::from(key));
            let decided = match action {
                Action::Decide(op, cost) => compared.decide(policy, &key, op, cost.units(policy)).map(Some),
                Action::TryAdmit(cost) => compared.try_admit(policy, &key, cost.units(policy)).map(Some),
                Action::Charge(cost, times) => {
                    compared.decide(policy, &key, Op::Charge, cost.units(policy).saturating_mul(times)).map(Some)
                }
                Action::SettleLast(actual) => last.take().map_or(Ok(None), |(policy, key, decision)| {
                    compared.settle(policy, &key, &decision, actual.units(policy, &decision)).map(|()| None)
                }),
                Action::Clear => compared.clear(policy, &key).map(|()| None),
            };
            if let Some(decision) = decided.map_err(TestCaseError::fail)? {
                last = Some((policy, key, decision));
            }
        }
        Ok(())
    });
}

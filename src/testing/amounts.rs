//! Laws of a storage for costs of all sizes, for many limits, and for `try_admit`.

use std::time::Duration;

use super::Model;
use super::harness::Harness;
use super::model_comparison::try_admit_like_the_model;
use super::sequential::{Inputs, parsed};
use crate::decision::Decision;
use crate::key::Key;
use crate::policy::{Op, Policy};
use crate::storage::{Clock, Storage};

/// Policies with one limit each, which admit costs of more than 31 bits if the strategy allows it.
const LARGE: [&str; 8] = [
    "fixed-window 4294967295/day",
    "fixed-window-aligned 4294967295/day",
    "elastic-window 4294967295/day",
    "moving-window 4294967295/day",
    "4294967295/day",
    "sliding-window-counter-aligned 4294967295/day",
    "token-bucket 4294967295/day",
    "leaky-bucket 4000000000/day queue 4000000000",
];

/// Policies for settlements, one for each kind of state.
const SETTLED: [&str; 3] = ["fixed-window 4294967295/day", "moving-window 900/hour", "token-bucket 4294967295/day"];

/// The numbers of units by which settled hits differ from their estimated cost.
const DIFFERENCES: [u32; 19] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 16, 31, 64, 100, 255, 1_000, 65_535, 65_536, 16_777_216];

impl Inputs<'_> {
    pub(super) fn large_hits_take_their_cost(&self) {
        let harness = self.harness("8: decisions equal the model's, for large costs");
        for policy in supported(&harness, LARGE) {
            let mut script = Script::new(&harness, &policy, policy.identity());
            for cost in [65_536, 1, 65_535, 1 << 24, 1 << 31, u32::MAX, 1_000_000_000] {
                script.compare(Op::Hit, cost);
            }
        }
    }

    pub(super) fn large_charges_are_spent(&self) {
        let harness = self.harness("of settling: a charge is spent, however large");
        for policy in self.policies.iter().cloned().chain(supported(&harness, LARGE)) {
            let capacity = policy.limits()[0].capacity();
            for (number, units) in [capacity.saturating_add(1), 65_536, 1 << 31, u32::MAX].into_iter().enumerate() {
                let mut script = Script::new(&harness, &policy, &format!("{} {number}", policy.identity()));
                script.compare(Op::Charge, units);
                script.compare(Op::Peek, 1);
            }
        }
    }

    pub(super) fn settled_hits_have_any_actual_cost(&self) {
        let harness = self.harness("of settling: a settled hit has its actual cost, however large");
        for policy in supported(&harness, SETTLED) {
            let mut script = Script::new(&harness, &policy, policy.identity());
            for units in DIFFERENCES {
                // The next hit shows the units that this settlement leaves.
                for (cost, actual) in [(units + 1, 1), (1, units + 1)] {
                    if script.remaining() > units {
                        script.settle(cost, actual);
                    }
                }
            }
            script.compare(Op::Peek, 1);
        }
    }

    /// Checks law 8 with more limits than common policies have.
    pub(super) fn many_limits_are_kept(&self) {
        let harness = self.harness("8: decisions equal the model's, with many limits");
        let limits = (1..=20).map(|minutes| format!("fixed-window 4 per {minutes} minutes")).collect::<Vec<_>>();
        for policy in supported(&harness, [limits.join("; ").as_str()]) {
            let mut script = Script::new(&harness, &policy, "k");
            for _ in 0..6 {
                harness.clock.advance(Duration::from_secs(50));
                script.compare(Op::Hit, 1);
            }
            script.settle(1, 3);
            script.compare(Op::Charge, 2);
            script.compare(Op::Peek, 1);
        }
    }

    pub(super) fn try_admit_decides_like_the_model(&self) {
        let harness = self.harness("of `try_admit`: its result and its summary are those of a hit");
        let several = supported(&harness, ["fixed-window 3 per 7 seconds; token-bucket 3 per 7 seconds burst 5"]);
        for policy in self.policies.iter().cloned().chain(several) {
            let (key, mut model) = (Key::from(policy.identity()), Model::default());
            for cost in [1, 0, 2, 1, 1, 3, 1, 100, 0, 1] {
                let compared = try_admit_like_the_model(&harness, &mut model, &policy, &key, cost);
                let decision = harness.unwrap_or_panic(compared);
                let wait = decision.retry_after().filter(|_| cost == 3).unwrap_or(Duration::from_millis(1));
                harness.clock.advance(wait);
            }
        }
    }
}

fn supported<'a>(harness: &Harness<'_>, policies: impl IntoIterator<Item = &'a str>) -> Vec<Policy> {
    let policies = policies.into_iter().map(parsed);
    policies.filter(|policy| harness.storage.validate(policy).is_ok()).collect()
}

/// Requests for one key, which the model decides too.
struct Script<'a, 'r> {
    harness: &'a Harness<'r>,
    policy: &'a Policy,
    key: Key,
    model: Model,
}

impl<'a, 'r> Script<'a, 'r> {
    fn new(harness: &'a Harness<'r>, policy: &'a Policy, key: &str) -> Self {
        Self { harness, policy, key: Key::from(key), model: Model::default() }
    }

    /// Checks that the decision equals the model's.
    fn compare(&mut self, op: Op, cost: u32) {
        let _ = self.decide(op, cost);
    }

    fn decide(&mut self, op: Op, cost: u32) -> Decision {
        let (policy, now) = (self.policy, self.harness.clock.now());
        let decision = self.harness.unwrap_or_panic(self.harness.try_decide(policy, &self.key, op, cost));
        let expected = self.model.decide(policy, &self.key, op, cost, now);
        self.harness.check(decision == expected, || {
            format!("{policy}, {op:?} of {cost} units: the decision is {decision:?}, but {expected:?} is expected")
        });
        decision
    }

    fn settle(&mut self, cost: u32, actual: u32) {
        let hit = self.decide(Op::Hit, cost);
        self.harness.settle(self.policy, &self.key, &hit, actual);
        self.model.settle(self.policy, &self.key, &hit, actual, self.harness.clock.now());
    }

    fn remaining(&mut self) -> u32 {
        self.model.decide(self.policy, &self.key, Op::Peek, 1, self.harness.clock.now()).remaining()
    }
}

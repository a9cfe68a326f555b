//! Laws of a storage with fixed scripts of requests, which the model decides too: refunds,
//! settlements, and inputs of unusual size.

use std::time::Duration;

use super::harness::{Harness, Inputs};
use super::model::Compared;
use crate::decision::Decision;
use crate::key::Key;
use crate::policy::{Op, Policy};

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

/// Requests for one key. Each method panics if the storage does not decide like the model.
struct Script<'a, 'r> {
    compared: Compared<'a, 'r>,
    policy: &'a Policy,
    key: Key,
}

impl<'a, 'r> Script<'a, 'r> {
    fn new(harness: &'a Harness<'r>, policy: &'a Policy, key: impl Into<Key>) -> Self {
        Self { compared: Compared::new(harness), policy, key: key.into() }
    }

    fn decide(&mut self, op: Op, cost: u32) -> Decision {
        let decided = self.compared.decide(self.policy, &self.key, op, cost);
        self.compared.harness.unwrap_or_panic(decided)
    }

    fn hit(&mut self, cost: u32) -> Decision {
        self.decide(Op::Hit, cost)
    }

    fn peek(&mut self) {
        let _ = self.decide(Op::Peek, 1);
    }

    fn settle(&mut self, hit: &Decision, actual: u32) {
        let settled = self.compared.settle(self.policy, &self.key, hit, actual);
        self.compared.harness.unwrap_or_panic(settled);
    }

    /// Settles a hit, and peeks.
    fn hit_and_settle(&mut self, cost: u32, actual: u32) {
        let hit = self.hit(cost);
        self.settle(&hit, actual);
        self.peek();
    }

    fn clear(&mut self) {
        let cleared = self.compared.clear(self.policy, &self.key);
        self.compared.harness.unwrap_or_panic(cleared);
    }

    fn advance(&self, time: Duration) {
        self.compared.harness.clock.advance(time);
    }
}

pub(super) fn refunds_return_the_units(inputs: &Inputs<'_>, harness: &Harness<'_>) {
    for policy in &inputs.policies {
        let mut script = Script::new(harness, policy, policy.identity());
        let (first, second) = (script.hit(1), script.hit(2));
        script.settle(&second, 0);
        script.peek();
        let refused = script.hit(100);
        script.settle(&refused, 0);
        script.peek();
        script.clear();
        script.advance(Duration::from_millis(1));
        let _ = script.hit(1);
        // A hit before the clear.
        script.settle(&first, 0);
        script.peek();
        let expired = script.hit(1);
        script.advance(3 * policy.limits()[0].quota().period());
        let _ = script.hit(1);
        script.settle(&expired, 0);
        script.peek();
    }
}

pub(super) fn settled_hits_have_their_actual_cost(inputs: &Inputs<'_>, harness: &Harness<'_>) {
    for policy in inputs.all_policies() {
        let mut script = Script::new(harness, policy, policy.identity());
        let capacity = policy.limits()[0].capacity();
        for (cost, actual) in [(2, 1), (2, 3), (1, capacity + 2), (3, 0)] {
            script.clear();
            script.advance(Duration::from_millis(1));
            script.hit_and_settle(cost, actual);
        }
        let _ = script.decide(Op::Charge, capacity);
        script.peek();
    }
}

pub(super) fn large_hits_take_their_cost(_: &Inputs<'_>, harness: &Harness<'_>) {
    for policy in &harness.supported(LARGE) {
        let mut script = Script::new(harness, policy, policy.identity());
        for cost in [65_536, 1, 65_535, 1 << 24, 1 << 31, u32::MAX, 1_000_000_000] {
            let _ = script.hit(cost);
        }
    }
}

pub(super) fn large_charges_are_spent(inputs: &Inputs<'_>, harness: &Harness<'_>) {
    for policy in inputs.policies.iter().chain(&harness.supported(LARGE)) {
        let capacity = policy.limits()[0].capacity();
        for (number, units) in [capacity.saturating_add(1), 65_536, 1 << 31, u32::MAX].into_iter().enumerate() {
            let mut script = Script::new(harness, policy, format!("{} {number}", policy.identity()));
            let _ = script.decide(Op::Charge, units);
            script.peek();
        }
    }
}

pub(super) fn settled_hits_have_any_actual_cost(_: &Inputs<'_>, harness: &Harness<'_>) {
    for policy in &harness.supported(SETTLED) {
        let mut script = Script::new(harness, policy, policy.identity());
        for units in DIFFERENCES {
            for (cost, actual) in [(units + 1, 1), (1, units + 1)] {
                if script.decide(Op::Peek, 1).remaining() > units {
                    script.hit_and_settle(cost, actual);
                }
            }
        }
    }
}

pub(super) fn try_admit_decides_like_the_model(inputs: &Inputs<'_>, harness: &Harness<'_>) {
    let several = harness.supported(["fixed-window 3 per 7 seconds; token-bucket 3 per 7 seconds burst 5"]);
    for policy in inputs.policies.iter().chain(&several) {
        let (key, mut compared) = (Key::from(policy.identity()), Compared::new(harness));
        for cost in [1, 0, 2, 1, 1, 3, 1, 100, 0, 1] {
            let decision = harness.unwrap_or_panic(compared.try_admit(policy, &key, cost));
            let wait = decision.retry_after().filter(|_| cost == 3).unwrap_or(Duration::from_millis(1));
            harness.clock.advance(wait);
        }
    }
}

/// Hits a key under policies that keep different numbers of units, and share their states.
pub(super) fn kept_units_are_left_to_others(inputs: &Inputs<'_>, harness: &Harness<'_>) {
    for policy in inputs.all_policies() {
        let keeping = |units| {
            let mut limits = policy.limits().iter().map(|limit| limit.clone().try_keep(units).ok());
            let first = Policy::from(limits.next()??);
            let kept = limits.try_fold(first, |kept, limit| Some(kept.with(limit?)))?;
            let kept = match policy.name() {
                Some(name) => kept.with_name(name),
                None => kept,
            };
            harness.supports(&kept).then_some(kept)
        };
        let (Some(one), Some(two)) = (keeping(1), keeping(2)) else { continue };
        let (key, mut compared) = (Key::from(policy.identity()), Compared::new(harness));
        let mut hit = |policy: &Policy, op, cost| {
            let decided = compared.decide(policy, &key, op, cost);
            harness.unwrap_or_panic(decided)
        };
        let mut refused = |keeping: &Policy| {
            while hit(keeping, Op::Hit, 1).is_admitted() {}
            hit(keeping, Op::Peek, 1).remaining()
        };
        let left = [refused(&two), refused(&one), refused(policy)];
        harness.check(left == [2, 1, 0], || format!("{two}, then {one} and {policy} leave {left:?} units"));
        // A cost that only fits without the kept units, and one that is too large.
        for (keeping, cost) in [(policy, 1), (&two, 1), (&one, 1), (&two, 3), (&one, 1 << 20), (policy, 1)] {
            let peek = hit(keeping, Op::Peek, cost);
            if let Some(wait) = peek.retry_after() {
                harness.clock.advance(wait.saturating_sub(Duration::from_micros(1)));
                let early = hit(keeping, Op::Peek, cost);
                harness.check(early.is_refused(), || format!("{keeping} admits {cost} earlier than after {wait:?}"));
                harness.clock.advance(Duration::from_micros(1));
            }
            let _ = hit(keeping, Op::Hit, cost);
        }
        let charged = hit(&two, Op::Charge, 3);
        let settled = compared.settle(&two, &key, &charged, 0);
        harness.unwrap_or_panic(settled);
        harness.clock.advance(3 * policy.limits()[0].quota().period());
        let spent = harness.unwrap_or_panic(compared.decide(&two, &key, Op::Hit, 1));
        let settled = compared.settle(&two, &key, &spent, 0);
        harness.unwrap_or_panic(settled);
        let _ = harness.unwrap_or_panic(compared.decide(policy, &key, Op::Peek, 1));
        // Refusals on the fast path report the same numbers.
        for (keeping, cost) in [(&two, 1), (&one, 2), (policy, 1), (&two, 1), (policy, 1)] {
            let _ = harness.unwrap_or_panic(compared.try_admit(keeping, &key, cost));
        }
    }
}

/// Checks law 8 with more limits than common policies have.
pub(super) fn many_limits_are_kept(_: &Inputs<'_>, harness: &Harness<'_>) {
    let limits = (1..=20).map(|minutes| format!("fixed-window 4 per {minutes} minutes")).collect::<Vec<_>>();
    for policy in &harness.supported([limits.join("; ").as_str()]) {
        let mut script = Script::new(harness, policy, "k");
        for _ in 0..6 {
            script.advance(Duration::from_secs(50));
            let _ = script.hit(1);
        }
        script.hit_and_settle(1, 3);
        let _ = script.decide(Op::Charge, 2);
        script.peek();
    }
}

/// Checks law 8 with a log of hundreds of entries.
pub(super) fn long_logs_are_kept(inputs: &Inputs<'_>, harness: &Harness<'_>) {
    for policy in &harness.supported(["moving-window 900 per hour"]) {
        let (mut script, entries) = (Script::new(harness, policy, "k"), inputs.scripts.clamp(80, 300));
        let mut middle: Option<Decision> = None;
        for entry in 0..2 * entries {
            // The first half of the log expires while the second half is written.
            let seconds = if entry < entries { 5 } else { 3_600 / u64::from(entries) };
            script.advance(Duration::from_secs(seconds));
            let hit = script.hit(1 + entry % 3);
            if entry == entries / 2 {
                middle = Some(hit);
            } else if entry == entries
                && let Some(hit) = middle.take()
            {
                script.settle(&hit, 0);
            }
        }
        let _ = script.decide(Op::Peek, 900);
    }
}

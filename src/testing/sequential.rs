//! Laws of a storage without concurrency, each with a short script.

use std::time::{Duration, Instant};

use tokio::runtime::Runtime;

use super::Model;
use super::harness::{Harness, MakeStorage};
use crate::decision::Decision;
use crate::key::Key;
use crate::policy::{Op, Policy};
use crate::storage::Clock;
use crate::strategy::Status;

/// The inputs of the laws that are checked without concurrency.
pub(super) struct Inputs<'a> {
    pub(super) runtime: &'a Runtime,
    pub(super) make: &'a MakeStorage<'a>,
    /// Policies with one limit each.
    pub(super) policies: &'a [Policy],
    /// A policy with several limits, or none if the storage does not support it.
    pub(super) several: &'a [Policy],
    /// The number of random scripts of laws 8 and 10. Some laws here do less if it is small,
    /// because the storage is slow.
    pub(super) scripts: u32,
}

/// The duration of the check that the storage removes no state early in real time.
const REAL_TIME: Duration = Duration::from_millis(250);

impl Inputs<'_> {
    pub(super) fn harness(&self, law: &'static str) -> Harness<'_> {
        Harness::new(law, self.runtime, self.make)
    }

    pub(super) fn refusals_take_no_units(&self) {
        let harness = self.harness("1: a refusal takes no units, from any limit");
        for narrow in self.policies {
            let key = Key::from(narrow.identity());
            let policy = narrow.limits().iter().cloned().fold(parsed("moving-window 90 per 7 seconds"), Policy::with);
            let _ = harness.exhaust(&policy, &key);
            let before = remaining(&harness.peek(&policy, &key, 1));
            for cost in [1, 91] {
                let too_much = harness.hit(&policy, &key, cost);
                harness.check(too_much.is_refused(), || format!("{policy} has no units left, but admits {cost}"));
            }
            let after = remaining(&harness.peek(&policy, &key, 1));
            harness.check(before == after, || {
                format!("{policy}: remaining units are {before:?}, but {after:?} after refusals")
            });
        }
    }

    pub(super) fn waits_are_exact(&self) {
        let harness = self.harness("3: waits are exact, by the clock of the storage");
        for policy in self.policies {
            let key = Key::from(policy.identity());
            let refusal = harness.exhaust(policy, &key);
            let now = harness.clock.now();
            harness
                .check(refusal.at() == now, || format!("decided at {:?}, but the clock is at {now:?}", refusal.at()));
            let wait = refusal.retry_after().unwrap_or_default();
            harness.clock.advance(wait.saturating_sub(Duration::from_micros(1)));
            let early = harness.peek(policy, &key, 1);
            harness.check(early.is_refused(), || format!("{policy} returned a wait of {wait:?}, but admits earlier"));
            harness.clock.advance(Duration::from_micros(1));
            let then = harness.peek(policy, &key, 1);
            harness.check(then.is_admitted(), || format!("{policy} returned a wait of {wait:?}, but refuses after it"));
        }
    }

    pub(super) fn hits_take_their_cost(&self) {
        let harness = self.harness("5: a hit takes its cost");
        for policy in self.policies {
            let key = Key::from(policy.identity());
            let room = harness.peek(policy, &key, 1).remaining();
            for (cost, left) in [(0, room), (1, room - 1), (room, room - 1), (room - 1, 0), (0, 0), (1, 0)] {
                let before = harness.peek(policy, &key, cost);
                let hit = harness.hit(policy, &key, cost);
                harness.check(hit.is_admitted() == (cost <= before.remaining()), || {
                    format!("{policy} has {} units left, and the decision on {cost} is {hit:?}", before.remaining())
                });
                harness.check(hit.cost() == cost, || {
                    format!("the cost of the request is {cost}, but of the decision {}", hit.cost())
                });
                let now_left = harness.peek(policy, &key, 1).remaining();
                harness.check(now_left == left, || {
                    format!("{policy} has {now_left} units left after {cost}, but {left} are expected")
                });
            }
        }
    }

    pub(super) fn peeks_change_nothing(&self) {
        let harness = self.harness("5: a peek predicts the hit and changes nothing");
        for policy in self.policies {
            let key = Key::from(policy.identity());
            let _ = harness.hit(policy, &key, 1);
            let first = harness.peek(policy, &key, 2);
            for _ in 0..5 {
                let again = harness.peek(policy, &key, 2);
                harness.check(again.remaining() == first.remaining(), || {
                    format!("{policy}: the first peek is {first:?}, and a later one {again:?}")
                });
            }
            let hit = harness.hit(policy, &key, 2);
            harness.check(hit.is_admitted() == first.is_admitted(), || {
                format!("{policy}: the peek is {first:?}, but the hit {hit:?}")
            });
        }
    }

    pub(super) fn clock_change_grants_no_units(&self) {
        let harness = self.harness("6: a clock that goes back grants no units");
        let start = harness.clock.now();
        for policy in self.policies {
            let key = Key::from(policy.identity());
            let period = policy.limits()[0].quota().period_micros();
            harness.clock.set(start);
            let _ = harness.exhaust(policy, &key);
            for back in [1, period / 2, period, 3 * period] {
                harness.clock.set(start.minus(back));
                let left = harness.peek(policy, &key, 1).remaining();
                harness.check(left == 0, || {
                    format!("{policy} has no units left, but {left} with the clock {back} us back")
                });
            }
        }
    }

    pub(super) fn no_state_is_removed_early(&self) {
        let harness = self.harness("11: no state is removed early");
        let mut model = Model::default();
        let long = ["fixed-window 2 per 45 days", "3/year", "elastic-window 2/month", "token-bucket 5 per 300 days"];
        let policies: Vec<Policy> = self.policies.iter().cloned().chain(long.map(parsed)).collect();
        for policy in &policies {
            let key = Key::from(policy.identity());
            let _ = harness.exhaust(policy, &key);
            while model.decide(policy, &key, Op::Hit, 1, harness.clock.now()).is_admitted() {}
            let step = Duration::from_micros(policy.limits()[0].quota().period_micros() / 16);
            for _ in 0..40 {
                let got = harness.peek(policy, &key, 1).remaining();
                let expected = model.decide(policy, &key, Op::Peek, 1, harness.clock.now()).remaining();
                harness
                    .check(got <= expected, || format!("{policy} has {got} units left, but {expected} are expected"));
                harness.clock.advance(step);
            }
        }
        self.no_state_is_removed_early_in_real_time();
    }

    /// Checks law 11 in real time, because a storage may expire states by another clock than the
    /// given one.
    fn no_state_is_removed_early_in_real_time(&self) {
        let harness = self.harness("11: no state is removed early, in real time");
        let (policy, key) = (parsed("fixed-window 1 per 2 seconds"), Key::from("k"));
        let (started, _) = (Instant::now(), harness.exhaust(&policy, &key));
        while started.elapsed() < REAL_TIME {
            let left = harness.peek(&policy, &key, 1).remaining();
            let passed = started.elapsed();
            harness.check(left == 0, || format!("a state that expires after 2 s was removed after {passed:?}"));
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub(super) fn refunds_return_the_units(&self) {
        let harness = self.harness("of refunds: a refund returns exactly the units of the hit");
        let mut model = Model::default();
        for policy in self.policies {
            let key = Key::from(policy.identity());
            let hit = |cost, model: &mut Model| {
                let _ = model.decide(policy, &key, Op::Hit, cost, harness.clock.now());
                harness.hit(policy, &key, cost)
            };
            let agree = |model: &mut Model, when: &str| {
                let (got, expected) =
                    (harness.peek(policy, &key, 1), model.decide(policy, &key, Op::Peek, 1, harness.clock.now()));
                harness.check(got.remaining() == expected.remaining(), || {
                    format!(
                        "{policy} has {} units left {when}, but {} are expected",
                        got.remaining(),
                        expected.remaining()
                    )
                });
            };
            let back = |decision: &Decision, model: &mut Model| {
                model.settle(policy, &key, decision, 0, harness.clock.now());
                harness.refund(policy, &key, decision);
            };
            let (first, second) = (hit(1, &mut model), hit(2, &mut model));
            back(&second, &mut model);
            agree(&mut model, "after a refund of 2");
            let refused = hit(100, &mut model);
            back(&refused, &mut model);
            agree(&mut model, "after a refund of a refusal");
            harness.clear(policy, &key);
            model.clear(policy, &key);
            harness.clock.advance(Duration::from_millis(1));
            let _ = hit(1, &mut model);
            back(&first, &mut model);
            agree(&mut model, "after a refund of a hit before a clear");
            let late = hit(1, &mut model);
            harness.clock.advance(3 * policy.limits()[0].quota().period());
            let _ = hit(1, &mut model);
            back(&late, &mut model);
            agree(&mut model, "after a refund of an expired hit");
        }
    }
}

fn remaining(decision: &Decision) -> Vec<u32> {
    decision.limits().iter().map(Status::remaining).collect()
}

pub(super) fn parsed(text: &str) -> Policy {
    text.parse().expect("a policy")
}

//! The laws of a storage that one caller can tell, each by a short script.

use std::time::{Duration, Instant};

use tokio::runtime::Runtime;

use super::Model;
use super::desk::Desk;
use crate::storage::{Clock, ManualClock};
use crate::strategy::Status;
use crate::{Decision, Key, Op, Policy, Storage};

/// What a law is tried with.
pub(super) struct Trial<'a, M> {
    pub(super) runtime: &'a Runtime,
    pub(super) make: &'a M,
    /// Of one limit each.
    pub(super) policies: &'a [Policy],
    /// How many random scripts other laws are tried with: fewer where a storage is slow.
    pub(super) scripts: u32,
}

/// For how long a storage is watched that is to remember for seconds.
const WATCHED: Duration = Duration::from_millis(250);

impl<St: Storage, M: Fn(ManualClock) -> St> Trial<'_, M> {
    pub(super) fn desk(&self, law: &'static str) -> Desk<'_, St> {
        Desk::new(law, self.runtime, self.make)
    }

    pub(super) fn a_refusal_takes_nothing(&self) {
        let desk = self.desk("1: a refusal takes nothing, from any limit");
        for narrow in self.policies {
            let key = Key::from(narrow.identity());
            let policy = narrow.limits().iter().cloned().fold(parsed("moving-window 90 per 7 seconds"), Policy::with);
            let _ = desk.exhaust(&policy, &key);
            let before = remaining(&desk.peek(&policy, &key, 1));
            for cost in [1, 91] {
                let too_much = desk.hit(&policy, &key, cost);
                desk.must(too_much.is_refused(), || format!("{policy} has nothing left, and {cost} are admitted"));
            }
            let after = remaining(&desk.peek(&policy, &key, 1));
            desk.must(before == after, || format!("of {policy} remained {before:?}, and after refusals {after:?}"));
        }
    }

    pub(super) fn waits_are_tight(&self) {
        let desk = self.desk("3: waits are tight, by the clock that the storage was given");
        for policy in self.policies {
            let key = Key::from(policy.identity());
            let refusal = desk.exhaust(policy, &key);
            let now = desk.clock.now();
            desk.must(refusal.at() == now, || format!("decided at {:?}, and the clock says {now:?}", refusal.at()));
            let wait = refusal.retry_after().unwrap_or_default();
            desk.clock.advance(wait.saturating_sub(Duration::from_micros(1)));
            let early = desk.peek(policy, &key, 1);
            desk.must(early.is_refused(), || format!("{policy} said {wait:?}, and admits before"));
            desk.clock.advance(Duration::from_micros(1));
            let then = desk.peek(policy, &key, 1);
            desk.must(then.is_admitted(), || format!("{policy} said {wait:?}, and refuses then"));
        }
    }

    pub(super) fn hits_cost_what_they_cost(&self) {
        let desk = self.desk("5: a hit takes what it costs");
        for policy in self.policies {
            let key = Key::from(policy.identity());
            let room = desk.peek(policy, &key, 1).remaining();
            for (cost, left) in [(0, room), (1, room - 1), (room, room - 1), (room - 1, 0), (0, 0), (1, 0)] {
                let before = desk.peek(policy, &key, cost);
                let hit = desk.hit(policy, &key, cost);
                desk.must(hit.is_admitted() == (cost <= before.remaining()), || {
                    format!("{policy} has {} left, and {cost} are answered {hit:?}", before.remaining())
                });
                desk.must(hit.cost() == cost, || format!("{cost} were asked for, and {} answered", hit.cost()));
                let now_left = desk.peek(policy, &key, 1).remaining();
                desk.must(now_left == left, || format!("{policy} has {now_left} left after {cost}, and not {left}"));
            }
        }
    }

    pub(super) fn a_peek_changes_nothing(&self) {
        let desk = self.desk("5: a peek predicts the hit and changes nothing");
        for policy in self.policies {
            let key = Key::from(policy.identity());
            let _ = desk.hit(policy, &key, 1);
            let first = desk.peek(policy, &key, 2);
            for _ in 0..5 {
                let again = desk.peek(policy, &key, 2);
                desk.must(again.remaining() == first.remaining(), || {
                    format!("{policy}: {first:?}, and when asked again {again:?}")
                });
            }
            let hit = desk.hit(policy, &key, 2);
            desk.must(hit.is_admitted() == first.is_admitted(), || format!("{policy}: {first:?}, and then {hit:?}"));
        }
    }

    pub(super) fn a_clock_that_goes_back_grants_nothing(&self) {
        let desk = self.desk("6: a clock that goes back grants nothing");
        let start = desk.clock.now();
        for policy in self.policies {
            let key = Key::from(policy.identity());
            let period = policy.limits()[0].quota().period_micros();
            desk.clock.set(start);
            let _ = desk.exhaust(policy, &key);
            for back in [1, period / 2, period, 3 * period] {
                desk.clock.set(start.minus(back));
                let left = desk.peek(policy, &key, 1).remaining();
                desk.must(left == 0, || format!("{policy} has nothing left, and {left} when it is {back} us earlier"));
            }
        }
    }

    pub(super) fn keys_and_policies_do_not_mix(&self) {
        let desk = self.desk("10: keys and policies do not mix");
        let long = "x".repeat(300);
        let mut keys: Vec<Key> =
            ["", "a", "A", "a b", "ab", "b", "b|c", "c", "a|b", "*", "%7C", "1.2.3.4", "\n", &long]
                .map(Key::from)
                .into();
        keys.extend([
            Key::everybody(),
            Key::from(1_u64),
            Key::from(1_u64 << 32),
            Key::from((1_u64 << 32) + 1),
            Key::from(std::net::Ipv4Addr::new(1, 2, 3, 4)),
            Key::from(format!("{long}y")),
            Key::join([&Key::from("a"), &Key::from("bc")]),
            Key::join([&Key::from("ab"), &Key::from("c")]),
        ]);
        let names = ["a", "A", "a|b", "a|t:b", "ab", "x y", &long].map(|name| parsed("2/day").with_name(name));
        let policies: Vec<Policy> = names.into_iter().chain([parsed("2/day"), parsed("3/day")]).collect();
        for (number, (policy, key)) in
            policies.iter().flat_map(|policy| keys.iter().map(move |key| (policy, key))).enumerate()
        {
            let left = desk.peek(policy, key, 1);
            desk.must(left.remaining() == left.capacity(), || {
                format!("{key} of {policy} is number {number}, and somebody else has spent what is its")
            });
            let _ = desk.hit(policy, key, 2);
        }
    }

    pub(super) fn nothing_is_forgotten_early(&self) {
        let desk = self.desk("11: nothing is forgotten early");
        let mut model = Model::default();
        let long = ["fixed-window 2 per 45 days", "3/year", "elastic-window 2/month", "token-bucket 5 per 300 days"];
        let policies: Vec<Policy> = self.policies.iter().cloned().chain(long.map(parsed)).collect();
        for policy in &policies {
            let key = Key::from(policy.identity());
            let _ = desk.exhaust(policy, &key);
            while model.decide(policy, &key, Op::Hit, 1, desk.clock.now()).is_admitted() {}
            let step = Duration::from_micros(policy.limits()[0].quota().period_micros() / 16);
            for _ in 0..40 {
                let got = desk.peek(policy, &key, 1).remaining();
                let expected = model.decide(policy, &key, Op::Peek, 1, desk.clock.now()).remaining();
                desk.must(got <= expected, || format!("{policy} has {expected} left, and {got} are told"));
                desk.clock.advance(step);
            }
        }
        self.remembers_for_as_long_as_it_takes();
    }

    /// In case it goes by another clock when it throws things away.
    fn remembers_for_as_long_as_it_takes(&self) {
        let desk = self.desk("11: nothing is forgotten early, also when time really passes");
        let (policy, key) = (parsed("fixed-window 1 per 2 seconds"), Key::from("k"));
        let (started, _) = (Instant::now(), desk.exhaust(&policy, &key));
        while started.elapsed() < WATCHED {
            let left = desk.peek(&policy, &key, 1).remaining();
            let passed = started.elapsed();
            desk.must(left == 0, || format!("what is to be kept for two seconds is gone after {passed:?}"));
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub(super) fn a_clear_forgets(&self) {
        let desk = self.desk("of clearing: the key is forgotten, and no other");
        for policy in self.policies {
            let [key, other] =
                ["cleared", "kept"].map(|text| Key::join([&Key::from(text), &Key::from(policy.identity())]));
            let second_handle = policy.clone().with_name("elsewhere");
            let fresh = desk.peek(policy, &key, 1).remaining();
            for (policy, key) in [(policy, &key), (policy, &other), (&second_handle, &key)] {
                let _ = desk.exhaust(policy, key);
            }
            desk.clear(policy, &key);
            let left = [(policy, &key), (policy, &other), (&second_handle, &key)]
                .map(|(policy, key)| desk.peek(policy, key, 1).remaining());
            desk.must(left[0] == fresh, || format!("{policy} has {} of {fresh} left after a clear", left[0]));
            desk.must(left[1] == 0, || format!("{policy}: another key was cleared too"));
            desk.must(left[2] == 0, || format!("{policy}: the key was cleared in another policy too"));
            desk.clear(policy, &Key::from("never seen"));
        }
    }

    pub(super) fn a_refund_gives_back_what_the_hit_took(&self) {
        let desk = self.desk("of refunds: what the hit took is given back, and no more");
        let mut model = Model::default();
        for policy in self.policies {
            let key = Key::from(policy.identity());
            let hit = |cost, model: &mut Model| {
                let _ = model.decide(policy, &key, Op::Hit, cost, desk.clock.now());
                desk.hit(policy, &key, cost)
            };
            let agree = |model: &mut Model, when: &str| {
                let (got, expected) =
                    (desk.peek(policy, &key, 1), model.decide(policy, &key, Op::Peek, 1, desk.clock.now()));
                desk.must(got.remaining() == expected.remaining(), || {
                    format!("{policy} has {} left {when}, and not {}", got.remaining(), expected.remaining())
                });
            };
            let back = |decision: &Decision, model: &mut Model| {
                model.refund(policy, &key, decision, desk.clock.now());
                desk.refund(policy, &key, decision);
            };
            let (first, second) = (hit(1, &mut model), hit(2, &mut model));
            back(&second, &mut model);
            agree(&mut model, "after a refund of 2");
            let refused = hit(100, &mut model);
            back(&refused, &mut model);
            agree(&mut model, "after a refund of a refusal");
            desk.clear(policy, &key);
            model.clear(policy, &key);
            desk.clock.advance(Duration::from_millis(1));
            let _ = hit(1, &mut model);
            back(&first, &mut model);
            agree(&mut model, "after a refund of a hit before a clear");
            let late = hit(1, &mut model);
            desk.clock.advance(3 * policy.limits()[0].quota().period());
            let _ = hit(1, &mut model);
            back(&late, &mut model);
            agree(&mut model, "after a refund of a hit that was forgotten");
        }
    }
}

fn remaining(decision: &Decision) -> Vec<u32> {
    decision.limits().iter().map(Status::remaining).collect()
}

pub(super) fn parsed(text: &str) -> Policy {
    text.parse().expect("a policy")
}

//! Laws of a storage without concurrency, each with a short script.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::time::{Duration, Instant};

use super::harness::{Harness, Inputs, ROUNDS, of_one_unit, parsed};
use super::model::Model;
use crate::decision::Decision;
use crate::key::Key;
use crate::policy::{Op, Policy};
use crate::storage::Clock;
use crate::strategy::Status;
use crate::time::{Timestamp, micros};

/// The duration of the check that the storage removes no state early in real time.
const REAL_TIME: Duration = Duration::from_millis(250);

pub(super) fn hits_take_their_cost(inputs: &Inputs<'_>, harness: &Harness<'_>) {
    for policy in &inputs.policies {
        let key = Key::from(policy.identity());
        let room = harness.remaining(policy, &key);
        for (cost, left) in [(0, room), (1, room - 1), (room, room - 1), (room - 1, 0), (0, 0), (1, 0)] {
            let before = harness.peek(policy, &key, cost);
            let hit = harness.hit(policy, &key, cost);
            harness.check(hit.is_admitted() == (cost <= before.remaining()), || {
                format!("{policy} has {} units left, and the decision on {cost} is {hit:?}", before.remaining())
            });
            harness.check(hit.cost() == cost, || {
                format!("the cost of the request is {cost}, but of the decision {}", hit.cost())
            });
            let now_left = harness.remaining(policy, &key);
            harness.check(now_left == left, || {
                format!("{policy} has {now_left} units left after {cost}, but {left} are expected")
            });
        }
    }
}

pub(super) fn peeks_change_nothing(inputs: &Inputs<'_>, harness: &Harness<'_>) {
    for policy in &inputs.policies {
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

pub(super) fn refusals_take_no_units(inputs: &Inputs<'_>, harness: &Harness<'_>) {
    for narrow in &inputs.policies {
        let key = Key::from(narrow.identity());
        let policy = narrow.limits().iter().cloned().fold(parsed("moving-window 90 per 7 seconds"), Policy::with);
        if !harness.supports(&policy) {
            continue;
        }
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

pub(super) fn waits_are_exact(inputs: &Inputs<'_>, harness: &Harness<'_>) {
    for policy in &inputs.policies {
        let key = Key::from(policy.identity());
        let refusal = harness.exhaust(policy, &key);
        let now = harness.clock.now();
        harness.check(refusal.at() == now, || format!("decided at {:?}, but the clock is at {now:?}", refusal.at()));
        let wait = refusal.retry_after().unwrap_or_default();
        harness.clock.advance(wait.saturating_sub(Duration::from_micros(1)));
        let early = harness.peek(policy, &key, 1);
        harness.check(early.is_refused(), || format!("{policy} returned a wait of {wait:?}, but admits earlier"));
        harness.clock.advance(Duration::from_micros(1));
        let then = harness.peek(policy, &key, 1);
        harness.check(then.is_admitted(), || format!("{policy} returned a wait of {wait:?}, but refuses after it"));
    }
}

pub(super) fn clock_change_grants_no_units(inputs: &Inputs<'_>, harness: &Harness<'_>) {
    let start = harness.clock.now();
    for policy in &inputs.policies {
        let key = Key::from(policy.identity());
        let period = policy.limits()[0].quota().period_micros();
        harness.clock.set(start);
        let _ = harness.exhaust(policy, &key);
        for back in [1, period / 2, period, 3 * period] {
            harness.clock.set(start.minus(back));
            let left = harness.remaining(policy, &key);
            harness
                .check(left == 0, || format!("{policy} has no units left, but {left} with the clock {back} us back"));
        }
    }
}

pub(super) fn no_state_is_removed_early(inputs: &Inputs<'_>, harness: &Harness<'_>) {
    let mut model = Model::default();
    let long = ["fixed-window 2 per 45 days", "3/year", "elastic-window 2/month", "token-bucket 5 per 300 days"];
    let policies: Vec<Policy> = inputs.policies.iter().cloned().chain(harness.supported(long)).collect();
    for policy in &policies {
        let key = Key::from(policy.identity());
        let _ = harness.exhaust(policy, &key);
        while model.decide(policy, &key, Op::Hit, 1, harness.clock.now()).is_admitted() {}
        let step = Duration::from_micros(policy.limits()[0].quota().period_micros() / 16);
        for _ in 0..40 {
            let got = harness.remaining(policy, &key);
            let expected = model.decide(policy, &key, Op::Peek, 1, harness.clock.now()).remaining();
            harness.check(got <= expected, || format!("{policy} has {got} units left, but {expected} are expected"));
            harness.clock.advance(step);
        }
    }
}

/// Checks law 11 in real time, because a storage may expire states by another clock than the
/// given one.
pub(super) fn no_state_is_removed_early_in_real_time(_: &Inputs<'_>, harness: &Harness<'_>) {
    const PERIOD: Duration = Duration::from_secs(2);
    let Some(policy) = of_one_unit(&harness.storage, " per 2 seconds") else { return };
    // A new key after each pause of the machine that lasts as long as the state.
    for number in 0..ROUNDS {
        let key = Key::from(format!("k{number}"));
        let (started, _) = (Instant::now(), harness.exhaust(&policy, &key));
        loop {
            let asked = started.elapsed();
            let left = harness.remaining(&policy, &key);
            let passed = started.elapsed();
            if passed >= PERIOD {
                break;
            }
            harness.check(left == 0, || format!("a state that expires after 2 s was removed after {passed:?}"));
            if asked >= REAL_TIME {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    harness.check(false, || format!("in {ROUNDS} rounds, the storage was too slow to decide within 2 s after a hit"));
}

/// Checks law 11 at times at which counters of 32 bits, milliseconds or seconds may overflow.
pub(super) fn no_state_is_removed_around_powers_of_two(inputs: &Inputs<'_>, harness: &Harness<'_>) {
    let start = harness.clock.now();
    for policy in harness.supported(["fixed-window 2 per 45 days", "moving-window 2 per 45 days"]) {
        let key = Key::from(policy.identity());
        harness.clock.set(start);
        let until = start.plus(harness.exhaust(&policy, &key).retry_after().map_or(0, micros));
        for now in around_powers_of_two(start, until, inputs.scripts) {
            harness.clock.set(now);
            let left = harness.remaining(&policy, &key);
            harness.check(left == 0, || {
                format!("{policy} is removed {} us after a hit, {} us early", now.since(start), until.since(now))
            });
        }
    }
}

pub(super) fn keys_and_policies_are_independent(_: &Inputs<'_>, harness: &Harness<'_>) {
    let [Some(policy), Some(hourly)] = ["/day", "/hour"].map(|per| of_one_unit(&harness.storage, per)) else { return };
    let (daily, policy) = (policy.clone(), policy.with_name("policy"));
    let keys = many_keys();
    // In the second round, all units are spent, so each key is stored under its own name.
    for is_first in [true, false] {
        for (number, key) in keys.iter().enumerate() {
            let hit = harness.hit(&policy, key, 1);
            harness.check(hit.is_admitted() == is_first, || {
                let before = if is_first { "never been hit" } else { "spent its unit" };
                format!("{key} (number {number}) has {before}, but the decision is {hit:?}")
            });
        }
    }
    let (long, forty) = ("x".repeat(300), "x".repeat(40));
    let names = ["a", "A", " a", "a ", "a|b", "a|t:b", "ab", "x y", &forty, &long].map(str::to_owned);
    let longer = [&forty, &long].map(|name| format!("{name}y"));
    let policies = names.into_iter().chain(longer).map(|name| daily.clone().with_name(name));
    let policies: Vec<Policy> = policies.chain([daily.clone(), hourly]).collect();
    let keys = ["a", "b", "b|c", "c", "a|b", "t:b"].map(Key::from);
    for (policy, key) in policies.iter().flat_map(|policy| keys.iter().map(move |key| (policy, key))) {
        let hit = harness.hit(policy, key, 1);
        harness.check(hit.is_admitted(), || {
            format!("{key} of {:?} has never been hit, but is refused: {hit:?}", policy.identity())
        });
    }
}

pub(super) fn clears_remove_one_key(inputs: &Inputs<'_>, harness: &Harness<'_>) {
    for policy in inputs.all_policies() {
        let [key, other] = ["cleared", "kept"].map(|text| Key::join([&Key::from(text), &Key::from(policy.identity())]));
        let other_policy = policy.clone().with_name("other policy");
        let fresh = harness.remaining(policy, &key);
        for (policy, key) in [(policy, &key), (policy, &other), (&other_policy, &key)] {
            let _ = harness.exhaust(policy, key);
        }
        harness.clear(policy, &key);
        let left = [(policy, &key), (policy, &other), (&other_policy, &key)]
            .map(|(policy, key)| harness.remaining(policy, key));
        harness.check(left[0] == fresh, || format!("{policy} has {} of {fresh} units left after a clear", left[0]));
        harness.check(left[1] == 0, || format!("{policy}: another key was cleared"));
        harness.check(left[2] == 0, || format!("{policy}: the key was cleared in another policy"));
        harness.clear(policy, &Key::from("unknown key"));
    }
}

/// Does nothing if the storage does not support [`Storage::clear_all`].
pub(super) fn clear_all_removes_all_keys(inputs: &Inputs<'_>, harness: &Harness<'_>) {
    if !harness.clear_all() {
        return;
    }
    let keys = ["a", "b"].map(Key::from);
    let all = || inputs.policies.iter().flat_map(|policy| keys.iter().map(move |key| (policy, key)));
    let first: Vec<u32> = all().map(|(policy, key)| harness.hit(policy, key, 1).remaining()).collect();
    for (policy, key) in all() {
        let _ = harness.exhaust(policy, key);
    }
    let _ = harness.clear_all();
    let again: Vec<u32> = all().map(|(policy, key)| harness.hit(policy, key, 1).remaining()).collect();
    harness.check(first == again, || {
        format!("the units left after a first hit are {first:?}, but {again:?} after `clear_all` and a hit")
    });
}

fn remaining(decision: &Decision) -> Vec<u32> {
    decision.statuses().iter().map(Status::remaining).collect()
}

/// Returns times between `start` and `until`. For each of them, the time since `start` or the time
/// to `until` is close to a power of two, or the time itself is close to a multiple of one. With
/// few scripts, only the common sizes of counters are used.
fn around_powers_of_two(start: Timestamp, until: Timestamp, scripts: u32) -> Vec<Timestamp> {
    let powers =
        (10..42).filter(|power| scripts >= 256 || [16, 24, 31, 32, 41].contains(power)).map(|power| 1_u64 << power);
    let mut instants = Vec::new();
    for power in powers {
        let next = Timestamp::from_micros(start.as_micros().next_multiple_of(power));
        for at in [start.plus(power), until.minus(power), next] {
            instants.extend([at.minus(500), at.minus(1), at, at.plus(1), at.plus(500)]);
        }
    }
    instants.retain(|&at| start <= at && at < until);
    instants.sort();
    instants
}

/// Returns keys that a storage may confuse.
fn many_keys() -> Vec<Key> {
    let [long, longer] = [300, 2_000].map(|len| "x".repeat(len));
    let texts = ["", "a", "A", " a", "a ", "a b", "ab", "a\0", "t:a", "a|b", "*", "%7C", "1", "1.2.3.4", "\n"];
    let unicode = ["\u{e9}", "\u{c9}", "e\u{301}", "\u{fffd}"];
    let mut keys: Vec<Key> = texts.into_iter().chain(unicode).chain([&*long, &longer]).map(Key::from).collect();
    // Not UTF-8. A lossy conversion turns each of these bytes into the same character.
    keys.extend([&[0xff][..], &[0xfe], &[0xc3], &[b'a', 0xff], &[b'a', 0xfe]].map(Key::from));
    keys.extend([1, 0xfe, 0xff, 1 << 32, (1 << 32) + 1, u64::MAX].map(Key::from));
    keys.extend([&long, &longer].map(|long| Key::from(format!("{long}y"))));
    keys.extend([
        Key::global(),
        Key::from(Ipv4Addr::new(1, 2, 3, 4)),
        Key::from(Ipv4Addr::new(1, 2, 3, 254)),
        Key::from(Ipv4Addr::new(1, 2, 3, 255)),
        Key::from(Ipv6Addr::LOCALHOST),
        Key::join([&Key::from("a")]),
        Key::join([&Key::from("a"), &Key::from("bc")]),
        Key::join([&Key::from("ab"), &Key::from("c")]),
    ]);
    keys
}

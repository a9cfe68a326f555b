//! Laws of a storage for changes while states exist: a new quota, or a clock that goes back.

use std::time::Duration;

use super::harness::{Harness, Inputs, parsed};
use crate::decision::Decision;
use crate::key::Key;
use crate::policy::{Op, Policy};
use crate::storage::Clock;
use crate::time::{Timestamp, micros};

/// Pairs of limits: before and after a change of the policy. The second one decides on states of
/// the first. Elastic windows are missing, because their refusals change the state and peeks do
/// not.
const CHANGED: [(&str, &str); 10] = [
    ("token-bucket 10/minute burst 20", "token-bucket 100/minute burst 20"),
    ("token-bucket 7/minute burst 20", "token-bucket 7/minute burst 10"),
    ("token-bucket 7/minute burst 20", "token-bucket 70/minute burst 30"),
    ("leaky-bucket 10/minute queue 19", "leaky-bucket 100/minute queue 19"),
    ("fixed-window 10/minute", "fixed-window 3/minute"),
    ("moving-window 10/minute", "moving-window 3/minute"),
    ("10/minute", "3/minute"),
    ("sliding-window-counter-aligned 10/minute", "sliding-window-counter-aligned 3/minute"),
    ("calendar 10/week", "calendar 3/week"),
    ("calendar 10/week", "calendar 10/week from thursday"),
];

/// Pairs of limits: before and after the quota was raised. A charge of 100 units is a debt under the
/// first one.
const RAISED: [(&str, &str); 5] = [
    ("token-bucket 10/minute", "token-bucket 100/minute"),
    ("token-bucket 10/minute burst 20", "token-bucket 30/minute burst 20"),
    ("token-bucket 7/minute burst 20", "token-bucket 7/minute burst 100"),
    ("leaky-bucket 10/minute queue 9", "leaky-bucket 100/minute queue 99"),
    ("fixed-window 10/minute", "fixed-window 100/minute"),
];

/// Checks law 12. After a change, a bucket also must not refuse for longer than a bucket of the
/// new quota of which all units are spent.
pub(super) fn waits_are_exact_after_quota_change(_: &Inputs<'_>, harness: &Harness<'_>) {
    each_change(harness, &CHANGED, "changed", |[before, after], [key, other], what| {
        spend_all(harness, before, key);
        harness.clock.advance(Duration::from_millis(50));
        let wait = waits_are_exact(harness, after, key, Op::Peek, what);
        harness.clear(after, other);
        let buckets = before.limits()[0].strategy().name().ends_with("bucket");
        let empty = spend_all(harness, after, other);
        harness.check(!buckets || wait <= micros(empty) + micros(empty) / 100, || {
            format!("{what} refuses for {wait} us, but an empty bucket only for {empty:?}")
        });
    });
    each_change(harness, &RAISED, "raised", |[before, after], [key, other], what| {
        let _ = harness.charge(before, key, 100);
        harness.clock.advance(Duration::from_millis(50));
        let wait = harness.peek(after, key, 1).retry_after().unwrap_or_default();
        harness.clear(after, other);
        let empty = spend_all(harness, after, other);
        harness.check(wait <= empty, || {
            format!("{what} refuses a client in debt for {wait:?}, but an exhausted one only for {empty:?}")
        });
    });
}

/// Calls `check` for each pair of limits that the storage supports, with two policies of the same
/// name, two keys, and a text for messages.
fn each_change(
    harness: &Harness<'_>,
    changes: &[(&str, &str)],
    name: &str,
    check: impl Fn([&Policy; 2], [&Key; 2], &str),
) {
    for (before, after) in changes {
        let what = format!("{before}, {name} to {after},");
        let [before, after] = [before, after].map(|text| parsed(text).with_name(name));
        let [key, other] = [&what, "another key"].map(|text| Key::from(text.to_owned()));
        if harness.supports(&before) && harness.supports(&after) {
            check([&before, &after], [&key, &other], &what);
        }
    }
}

/// A storage whose time stands still until the clock has caught up would refuse new keys for as
/// long as the clock went back.
pub(super) fn time_goes_back_with_the_clock(inputs: &Inputs<'_>, harness: &Harness<'_>) {
    let (start, back) = (harness.clock.now(), Duration::from_secs(3_600));
    for policy in &inputs.policies {
        let [before, after] = ["before", "after"].map(|when| Key::from(format!("{} {when}", policy.identity())));
        harness.clock.set(start);
        let _ = harness.hit(policy, &before, 1);
        harness.clock.set(start.minus(micros(back)));
        let (wait, now) = (spend_all(harness, policy, &after), harness.clock.now());
        let refusal = harness.hit(policy, &after, 1);
        harness.check(refusal.at() == now, || {
            format!("{policy}, a new key {back:?} back: decided at {:?}, but the clock is at {now:?}", refusal.at())
        });
        harness.clock.advance(wait.max(refusal.retry_after().unwrap_or_default()));
        harness.check(harness.peek(policy, &after, 1).is_admitted(), || {
            format!("{policy}, a new key {back:?} back: returned a wait of {wait:?}, but refuses after it")
        });
    }
}

pub(super) fn waits_are_exact_after_clock_change(inputs: &Inputs<'_>, harness: &Harness<'_>) {
    let start = harness.clock.now();
    for policy in &inputs.policies {
        let period = policy.limits()[0].quota().period_micros();
        for back in [period / 2, 3 * period] {
            let key = Key::from(format!("{} {back} us back", policy.identity()));
            harness.clock.set(start);
            spend_all(harness, policy, &key);
            // Lets a storage cache the refusal.
            harness
                .check(harness.hit(policy, &key, 1).is_refused(), || format!("{policy} admits more units than it has"));
            harness.clock.set(start.minus(back));
            let what = format!("{policy}, {back} us back,");
            let wait = waits_are_exact(harness, policy, &key, Op::Hit, &what);
            harness.check(wait <= 3 * period, || format!("{what} refuses for {wait} us"));
        }
    }
}

/// Spends all units in one hit. Returns the time until one more unit is admitted.
fn spend_all(harness: &Harness<'_>, policy: &Policy, key: &Key) -> Duration {
    let room = harness.remaining(policy, key);
    let hit = harness.hit(policy, key, room);
    harness.check(hit.is_admitted(), || format!("{policy} has {room} units, but refuses them"));
    harness.peek(policy, key, 1).retry_after().unwrap_or_default()
}

/// Checks that a refused key is admitted exactly after its wait. Returns the wait in microseconds.
fn waits_are_exact(harness: &Harness<'_>, policy: &Policy, key: &Key, op: Op, what: &str) -> u64 {
    let look = || if op == Op::Hit { harness.hit(policy, key, 1) } else { harness.peek(policy, key, 1) };
    let first = look();
    harness.check(first.is_refused(), || format!("{what} has no units left, but admits a hit"));
    let wait = first.retry_after().map_or(0, micros);
    let mut promised = end_of(&first);
    for part in [4, 2] {
        harness.clock.set(first.at().plus(wait / part));
        let again = look();
        if policy.limits()[0].strategy().counts_refusals() {
            promised = end_of(&again);
        }
        harness.check(again.is_refused() && end_of(&again) == promised, || {
            format!("{what} returned a wait of {wait} us, but {} us later {:?}", wait / part, again.retry_after())
        });
    }
    harness.clock.set(promised.minus(1));
    harness.check(harness.peek(policy, key, 1).is_refused(), || {
        format!("{what} returned a wait of {wait} us, but admits earlier")
    });
    harness.clock.set(promised);
    let then = harness.peek(policy, key, 1);
    harness.check(then.is_admitted(), || {
        format!("{what} returned a wait of {wait} us, and then {:?}", then.retry_after())
    });
    wait
}

/// Returns the instant at which the `retry_after` of a refusal ends.
fn end_of(refusal: &Decision) -> Timestamp {
    refusal.at().plus(refusal.retry_after().map_or(0, micros))
}

//! Laws of a storage about changes while its states live on: another quota, a clock that is put back.

use std::time::Duration;

use super::desk::Desk;
use super::one_by_one::{Trial, parsed};
use crate::storage::{Clock, ManualClock};
use crate::time::micros;
use crate::{Decision, Key, Op, Policy, Storage, Timestamp};

/// Quotas of one name, the second of which decides after the first. There is no elastic window, of which a peek says what
/// a hit would.
const CHANGED: [(&str, &str); 8] = [
    ("token-bucket 10/minute burst 20", "token-bucket 100/minute burst 20"),
    ("token-bucket 7/minute burst 20", "token-bucket 7/minute burst 10"),
    ("token-bucket 7/minute burst 20", "token-bucket 70/minute burst 30"),
    ("leaky-bucket 10/minute queue 19", "leaky-bucket 100/minute queue 19"),
    ("fixed-window 10/minute", "fixed-window 3/minute"),
    ("moving-window 10/minute", "moving-window 3/minute"),
    ("10/minute", "3/minute"),
    ("sliding-window-counter-aligned 10/minute", "sliding-window-counter-aligned 3/minute"),
];

impl<St: Storage, M: Fn(ManualClock) -> St> Trial<'_, M> {
    /// An empty bucket of the new quota refuses for as long as the old one's may.
    pub(super) fn a_changed_quota_keeps_waits_tight(&self) {
        let desk = self.desk("12: waits are tight after a quota has changed");
        for (before, after) in CHANGED {
            let what = format!("{before}, changed to {after}");
            let [before, after] = [before, after].map(|text| parsed(text).with_name("changed"));
            let [key, other] = [&what, "another key"].map(|text| Key::from(text.to_owned()));
            if desk.storage.validate(&before).is_err() {
                continue;
            }
            spend_all(&desk, &before, &key);
            desk.clock.advance(Duration::from_millis(50));
            let wait = waits_stay_tight(&desk, &after, &key, Op::Peek, &what);
            desk.clear(&after, &other);
            let buckets = before.limits()[0].strategy().name().ends_with("bucket");
            let empty = spend_all(&desk, &after, &other);
            desk.must(!buckets || wait <= micros(empty) + micros(empty) / 100, || {
                format!("{what} refuses for {wait} us, and an empty bucket for {empty:?}")
            });
        }
    }

    pub(super) fn a_clock_that_goes_back_keeps_waits_tight(&self) {
        let desk = self.desk("6: waits are tight after a clock has gone back");
        let start = desk.clock.now();
        for policy in self.policies {
            let period = policy.limits()[0].quota().period_micros();
            for back in [period / 2, 3 * period] {
                let key = Key::from(format!("{} {back} us back", policy.identity()));
                desk.clock.set(start);
                spend_all(&desk, policy, &key);
                // A storage may cache the refusal.
                desk.must(desk.hit(policy, &key, 1).is_refused(), || format!("{policy} admits one hit too many"));
                desk.clock.set(start.minus(back));
                let what = format!("{policy}, {back} us back,");
                let wait = waits_stay_tight(&desk, policy, &key, Op::Hit, &what);
                desk.must(wait <= 3 * period, || format!("{what} refuses for {wait} us"));
            }
        }
    }
}

/// Spends all that remains in one hit. Returns for how long one more unit would be refused.
fn spend_all<St: Storage>(desk: &Desk<'_, St>, policy: &Policy, key: &Key) -> Duration {
    let room = desk.peek(policy, key, 1).remaining();
    let hit = desk.hit(policy, key, room);
    desk.must(hit.is_admitted(), || format!("{policy} has {room} left, and refuses them"));
    desk.peek(policy, key, 1).retry_after().unwrap_or_default()
}

/// Looks at a key that is refused until it is admitted. Returns for how long that is, in microseconds.
fn waits_stay_tight<St: Storage>(desk: &Desk<'_, St>, policy: &Policy, key: &Key, op: Op, what: &str) -> u64 {
    let look = || if op == Op::Hit { desk.hit(policy, key, 1) } else { desk.peek(policy, key, 1) };
    let first = look();
    desk.must(first.is_refused(), || format!("{what} has nothing left, and admits a hit"));
    let wait = first.retry_after().map_or(0, micros);
    let mut promised = end_of(&first);
    for part in [4, 2] {
        desk.clock.set(first.at().plus(wait / part));
        let again = look();
        if policy.limits()[0].strategy().counts_refusals() {
            promised = end_of(&again);
        }
        desk.must(again.is_refused() && end_of(&again) == promised, || {
            format!("{what} said {wait} us, and {} us later {:?}", wait / part, again.retry_after())
        });
    }
    desk.clock.set(promised.minus(1));
    desk.must(desk.peek(policy, key, 1).is_refused(), || format!("{what} said {wait} us, and admits before"));
    desk.clock.set(promised);
    let then = desk.peek(policy, key, 1);
    desk.must(then.is_admitted(), || format!("{what} said {wait} us, and then {:?}", then.retry_after()));
    wait
}

/// When a refused hit is admitted, as the refusal says.
fn end_of(refusal: &Decision) -> Timestamp {
    refusal.at().plus(refusal.retry_after().map_or(0, micros))
}

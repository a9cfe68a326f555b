//! The law of slots that processes share.

use std::time::Duration;

use super::harness::{Harness, Inputs, parsed};
use crate::key::Key;
use crate::storage::{Claim, Clock, Ledger, Storage};

const TIME_TO_LIVE: Duration = Duration::from_secs(600);
const MICROSECOND: Duration = Duration::from_micros(1);
const CLAIMS: u64 = 300;
const SLOTS: u64 = 6;

/// Claims of several processes, some of them late or repeated, are granted as by the pure function.
pub(super) fn slots_are_granted_like_the_ledger(_: &Inputs<'_>, harness: &Harness<'_>) {
    let Some(store) = harness.storage.slots() else { return };
    let policy = parsed("\"slots\": 1/second");
    let keys = [Key::from("a"), Key::from("b")];
    let mut ledgers = [Ledger::default(), Ledger::default()];
    let mut state = 20_261_125_u64;
    let mut below = |limit: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % limit
    };
    let mut count = |limit: u64| u32::try_from(below(limit)).unwrap_or(u32::MAX);
    for number in 1..=CLAIMS {
        // Many claims arrive when others end, or a microsecond before or after that.
        let step = TIME_TO_LIVE * count(6) / 10 + MICROSECOND * count(3);
        harness.clock.advance(step.saturating_sub(MICROSECOND));
        let at = count(2) as usize;
        let (least, first, others) = (count(3), count(3), count(3));
        let claim = Claim {
            process: count(4).into(),
            // One in four is late.
            sequence: if count(4) == 0 { number.saturating_sub(5) } else { number },
            least,
            first: least + first,
            most: least + first + others,
            slots: count(SLOTS),
            time_to_live: TIME_TO_LIVE,
        };
        let expected = ledgers[at].claim(harness.clock.now(), &claim);
        let granted = harness.claim(&*store, &policy, &keys[at], claim);
        harness
            .check(granted == expected, || format!("{claim:?} is granted {granted:?}, but {expected:?} is expected"));
    }
}

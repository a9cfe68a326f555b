//! Laws of a storage for large inputs: long logs, many keys, and times around powers of two.

use std::time::Duration;

use tokio::runtime::Runtime;
use tokio::task::JoinSet;

use super::Model;
use super::harness::failed;
use super::sequential::{Inputs, parsed};
use crate::decision::Decision;
use crate::key::Key;
use crate::policy::{Op, Policy};
use crate::storage::{AnyStorage, Clock, Storage, StorageRequest};
use crate::time::Timestamp;

/// The number of concurrent tasks.
const TASKS: u32 = 8;

impl Inputs<'_> {
    /// Checks law 11 at times at which counters of 32 bits, milliseconds or seconds may overflow.
    pub(super) fn no_state_is_removed_around_powers_of_two(&self) {
        let harness = self.harness("11: no state is removed early, around powers of two");
        let start = harness.clock.now();
        for policy in ["fixed-window 2 per 45 days", "moving-window 2 per 45 days"].map(parsed) {
            if harness.storage.validate(&policy).is_err() {
                continue;
            }
            let key = Key::from(policy.identity());
            harness.clock.set(start);
            let until = start.plus(micros_of(&harness.exhaust(&policy, &key)));
            for now in around_powers_of_two(start, until, self.scripts) {
                harness.clock.set(now);
                let left = harness.peek(&policy, &key, 1).remaining();
                harness.check(left == 0, || {
                    format!("{policy} is removed {} us after a hit, {} us early", now.since(start), until.since(now))
                });
            }
        }
    }

    /// Checks law 8 with a log of hundreds of entries.
    pub(super) fn long_logs_are_kept(&self) {
        let harness = self.harness("8: decisions equal the model's, with a long log");
        let policy = parsed("moving-window 900 per hour");
        if harness.storage.validate(&policy).is_err() {
            return;
        }
        let (key, mut model, entries) = (Key::from("k"), Model::default(), self.scripts.clamp(80, 300));
        let mut middle: Option<Decision> = None;
        for entry in 0..2 * entries {
            // The first half of the log expires while the second half is written.
            harness.clock.advance(Duration::from_secs(if entry < entries { 5 } else { 3_600 / u64::from(entries) }));
            let (cost, now) = (1 + entry % 3, harness.clock.now());
            let (got, expected) = (harness.hit(&policy, &key, cost), model.decide(&policy, &key, Op::Hit, cost, now));
            harness.check(got == expected, || differ(&policy, entry, &got, &expected));
            if entry == entries / 2 {
                middle = Some(got);
            } else if entry == entries
                && let Some(hit) = middle.take()
            {
                harness.refund(&policy, &key, &hit);
                model.settle(&policy, &key, &hit, 0, now);
            }
        }
        let (got, now) = (harness.peek(&policy, &key, 900), harness.clock.now());
        let expected = model.decide(&policy, &key, Op::Peek, 900, now);
        harness.check(got == expected, || differ(&policy, 2 * entries, &got, &expected));
    }
}

fn differ(policy: &Policy, entry: u32, got: &Decision, expected: &Decision) -> String {
    let [got, expected] = [got, expected].map(|decision| (decision.remaining(), decision.retry_after()));
    format!("{policy}, hit {entry}: remaining and retry_after are {got:?}, but {expected:?} is expected")
}

fn micros_of(refusal: &Decision) -> u64 {
    refusal.retry_after().map_or(0, crate::time::micros)
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

/// Checks law 10 with many keys. If a storage identifies keys by a hash of 32 bits, some of these
/// keys collide.
pub(super) fn many_keys_are_independent(runtime: &Runtime, scripts: u32, storage: &AnyStorage) {
    let keys = u64::from(scripts.min(256)).pow(4) / 25_600;
    let each = u32::try_from(keys).unwrap_or(0) / TASKS;
    let policy = parsed("fixed-window 1/day");
    runtime.block_on(async {
        let mut all = JoinSet::new();
        for task in 0..TASKS {
            let (storage, policy) = (storage.clone(), policy.clone());
            all.spawn(async move {
                for number in 0..each {
                    let key = Key::from(format!("client {task}-{number}"));
                    let hit = storage.decide(StorageRequest::new(&policy, &key, Op::Hit, 1)).await.map_err(failed);
                    let hit = hit.unwrap_or_else(|error| panic!("law 10: {error}"));
                    let is_first = hit.is_admitted() || hit.is_storage_full() || hit.is_contended();
                    assert!(is_first, "law 10: keys are independent: {key} has never been hit, but its unit is spent");
                }
            });
        }
        while let Some(ended) = all.join_next().await {
            ended.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()));
        }
    });
}

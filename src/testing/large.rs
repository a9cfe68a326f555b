//! Laws of a storage that small numbers do not break: long logs, many hits, many keys, instants around powers of two.

use std::time::Duration;

use tokio::runtime::Runtime;
use tokio::task::JoinSet;

use super::Model;
use super::desk::failed;
use super::one_by_one::{Trial, parsed};
use crate::storage::{Clock, ManualClock, StorageRequest};
use crate::{Decision, Key, Op, Policy, Storage, Timestamp};

/// Hits of as many keys at once.
const TASKS: u32 = 8;

impl<St: Storage, M: Fn(ManualClock) -> St> Trial<'_, M> {
    /// Law 11 where numbers of 32 bits, milliseconds and seconds begin anew.
    pub(super) fn nothing_is_forgotten_around_powers_of_two(&self) {
        let desk = self.desk("11: nothing is forgotten early, around powers of two");
        let start = desk.clock.now();
        for policy in ["fixed-window 2 per 45 days", "moving-window 2 per 45 days"].map(parsed) {
            if desk.storage.validate(&policy).is_err() {
                continue;
            }
            let key = Key::from(policy.identity());
            desk.clock.set(start);
            let until = start.plus(micros_of(&desk.exhaust(&policy, &key)));
            for now in around_powers_of_two(start, until, self.scripts) {
                desk.clock.set(now);
                let left = desk.peek(&policy, &key, 1).remaining();
                desk.must(left == 0, || {
                    format!("{policy} is forgotten {} us after a hit, {} us early", now.since(start), until.since(now))
                });
            }
        }
    }

    /// Law 8 on a log of hundreds of entries.
    pub(super) fn long_logs_are_kept(&self) {
        let desk = self.desk("8: it decides like the model, on a long log");
        let policy = parsed("moving-window 900 per hour");
        if desk.storage.validate(&policy).is_err() {
            return;
        }
        let (key, mut model, entries) = (Key::from("k"), Model::default(), self.scripts.clamp(80, 300));
        let mut middle: Option<Decision> = None;
        for entry in 0..2 * entries {
            // The first half of the log expires while the second one is written.
            desk.clock.advance(Duration::from_secs(if entry < entries { 5 } else { 3_600 / u64::from(entries) }));
            let (cost, now) = (1 + entry % 3, desk.clock.now());
            let (got, expected) = (desk.hit(&policy, &key, cost), model.decide(&policy, &key, Op::Hit, cost, now));
            desk.must(got == expected, || differ(&policy, entry, &got, &expected));
            if entry == entries / 2 {
                middle = Some(got);
            } else if entry == entries
                && let Some(hit) = middle.take()
            {
                desk.refund(&policy, &key, &hit);
                model.refund(&policy, &key, &hit, now);
            }
        }
        let (got, now) = (desk.peek(&policy, &key, 900), desk.clock.now());
        let expected = model.decide(&policy, &key, Op::Peek, 900, now);
        desk.must(got == expected, || differ(&policy, 2 * entries, &got, &expected));
    }
}

fn differ(policy: &Policy, entry: u32, got: &Decision, expected: &Decision) -> String {
    let [got, expected] = [got, expected].map(|decision| (decision.remaining(), decision.retry_after()));
    format!("{policy}, hit {entry}: remaining and retry_after are {got:?}, and not {expected:?}")
}

fn micros_of(refusal: &Decision) -> u64 {
    refusal.retry_after().map_or(0, crate::time::micros)
}

/// Instants between the two at which the time since the first, the time until the second, or the time itself is about
/// a power of two. With few scripts only powers at which machines count anew.
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

/// Law 10: as many keys have a state each. If a storage tells keys apart by a number of 32 bits, two of these have one.
pub(super) fn many_keys_do_not_mix<St: Storage>(runtime: &Runtime, scripts: u32, storage: &St) {
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
                    assert!(
                        is_first,
                        "law 10: keys do not mix: {key} has never been hit, and another key has spent its unit"
                    );
                }
            });
        }
        while let Some(ended) = all.join_next().await {
            ended.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()));
        }
    });
}

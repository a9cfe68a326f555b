use std::sync::atomic::Ordering;

use super::Shared;
use super::shard::{LOG, Shard};
use super::slot::Slot;
use super::usage::{Size, log_bytes};
use crate::Timestamp;
use crate::strategy::Log;

/// The number of slots that a sweep looks at: side by side they cost little more than one.
const SLOTS: usize = 64;

/// The most logs that a sweep frees, since freeing memory takes longer than removing a slot.
const MOST_LOGS: usize = 1_024;

/// What a sweep has removed.
#[derive(Debug, Default)]
pub(super) struct Swept {
    freed: Size,
    /// The end of the shard was reached.
    is_at_end: bool,
    /// The logs, to be freed when the shard is unlocked.
    #[expect(clippy::vec_box, reason = "unboxing would free memory while the shard is locked")]
    logs: Vec<Box<Log>>,
}

impl Shared {
    /// Sweeps a part of the next shard.
    pub(super) fn sweep(&self, now: Timestamp) {
        let number = self.sweeping.load(Ordering::Relaxed) % self.shards.len();
        // Another thread's decision or sweep goes first.
        let Some(mut shard) = self.try_lock(number) else { return };
        let swept = shard.sweep(now);
        drop(shard);
        self.usage.settle(swept.freed, Size::default());
        if swept.is_at_end {
            self.sweeping.store(number + 1, Ordering::Relaxed);
        }
        drop(swept.logs);
    }
}

impl Shard {
    /// Looks at a few slots and removes the expired ones. If many have expired, as after a flood of
    /// keys, it removes those of the whole shard in one pass, which takes less time for each.
    fn sweep(&mut self, now: Timestamp) -> Swept {
        let mut swept = Swept::default();
        for _ in 0..SLOTS {
            if self.swept >= self.table.slots() {
                self.swept = 0;
                swept.is_at_end = true;
                break;
            }
            match self.table.get(self.swept) {
                Some(slot) if slot.is_expired(now) => self.sweep_slot(*slot, &mut swept),
                _ => self.swept += 1,
            }
            if swept.freed.slots == SLOTS / 4 {
                self.sweep_all(now, &mut swept);
                break;
            }
        }
        if swept.freed.slots > 0 {
            self.tidy();
        }
        swept
    }

    fn sweep_slot(&mut self, slot: Slot, swept: &mut Swept) {
        let log = self.remove(self.swept);
        swept.count(log);
        swept.freed.keys += usize::from(self.table.run(slot.hash).is_empty());
    }

    /// Removes all expired states of the shard, or those that have the first few logs.
    fn sweep_all(&mut self, now: Timestamp, swept: &mut Swept) {
        let keys = self.table.keys();
        let Self { table, logs, .. } = self;
        let mut first_left = None;
        table.retain(|slot| {
            if !slot.is_expired(now) {
                return true;
            }
            let has_log = slot.limit & LOG != 0;
            if has_log && swept.logs.len() >= MOST_LOGS {
                first_left = first_left.or(Some(slot.hash));
                return true;
            }
            swept.count(if has_log { logs.remove(slot.first) } else { None });
            false
        });
        swept.freed.keys += keys - self.table.keys();
        swept.is_at_end = first_left.is_none();
        self.swept = first_left.map_or(0, |hash| self.table.place(hash));
    }
}

impl Swept {
    /// Counts a slot and its log.
    fn count(&mut self, log: Option<Box<Log>>) {
        self.freed.slots += 1;
        if let Some(log) = log {
            self.freed.logs += log_bytes(&log);
            self.logs.push(log);
        }
    }
}

use std::sync::atomic::Ordering;

use super::MemoryInner;
use super::shard::{LOG, Shard};
use super::size::{Size, log_bytes};
use super::slot::Slot;
use crate::strategy::Log;
use crate::time::Timestamp;

/// The number of slots that a sweep visits. They are adjacent, so many cost little more than one.
const SLOTS: usize = 64;

/// The maximum number of logs that a sweep frees. Freeing memory takes longer than removing a slot.
const MAX_LOGS: usize = 1_024;

/// The result of a sweep.
#[derive(Debug, Default)]
pub(super) struct Swept {
    freed: Size,
    /// `true` if the end of the shard was reached.
    is_at_end: bool,
    /// The removed logs. They are freed after the shard is unlocked.
    #[expect(clippy::vec_box, reason = "unboxing would free memory while the shard is locked")]
    logs: Vec<Box<Log>>,
}

impl MemoryInner {
    /// Sweeps a part of the next shard.
    pub(super) fn sweep(&self, now: Timestamp) {
        let number = self.sweeping.load(Ordering::Relaxed) % self.shards.len();
        // A sweep never waits for a lock.
        let Some(mut shard) = self.shards[number].try_lock() else { return };
        let swept = shard.sweep(now);
        drop(shard);
        self.usage.settle(swept.freed, Size::default());
        #[cfg(feature = "metrics")]
        self.usage.publish();
        if swept.is_at_end {
            self.sweeping.store(number + 1, Ordering::Relaxed);
        }
        drop(swept.logs);
    }
}

impl Shard {
    /// Visits a few slots and removes the expired ones. If many of them have expired, as after a
    /// flood of keys, it removes all expired states of the shard in one pass. This takes less time
    /// per state.
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

    /// Removes all expired states of the shard, up to the maximum number of logs.
    fn sweep_all(&mut self, now: Timestamp, swept: &mut Swept) {
        let keys = self.table.keys();
        let Self { table, logs, .. } = self;
        let mut first_left = None;
        table.retain(|slot| {
            if !slot.is_expired(now) {
                return true;
            }
            let has_log = slot.limit & LOG != 0;
            if has_log && swept.logs.len() >= MAX_LOGS {
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
    /// Adds a removed slot and its log.
    fn count(&mut self, log: Option<Box<Log>>) {
        self.freed.slots += 1;
        if let Some(log) = log {
            self.freed.logs += log_bytes(&log);
            self.logs.push(log);
        }
    }
}

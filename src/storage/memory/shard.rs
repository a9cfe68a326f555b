//! One part of the storage, and its sweep.

use std::mem;
use std::ops::Range;

use slab::Slab;

use super::size::{Size, log_bytes};
use super::slot::TableSlot;
use super::table::StateTable;
use super::time::StorageClock;
use crate::policy::SHADOW;
use crate::strategy::{Log, State, Status};
use crate::time::Timestamp;

/// One part of the storage: the states of the keys that hash to it.
///
/// The fields that every hit uses come first. They share a cache line with the lock.
#[derive(Debug, Default)]
#[repr(C)]
pub(super) struct Shard {
    pub(super) table: StateTable,
    /// The latest time of a decision in this shard.
    latest: Timestamp,
    hits: u32,
    /// A slot has the index of its log. A log is taken out while a hit on its key is decided.
    logs: Slab<Option<Box<Log>>>,
    /// The slot at which the next sweep starts.
    swept: usize,
}

/// The keyed hash of a key under a policy. An attacker cannot provoke collisions.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct KeyHash {
    pub(super) hash: u64,
    pub(super) rest: u32,
}

impl KeyHash {
    /// Returns the value of [`TableSlot::limit_hash`] for a limit with this digest, without the bit [`LOG`].
    pub(super) fn limit_hash(self, digest: u32) -> u32 {
        (self.rest ^ digest) & !(LOG | SHADOW) | (digest & SHADOW)
    }
}

/// The bit of [`TableSlot::limit_hash`] for a state that is a log. The slot's `first` is the index of the
/// log.
pub(super) const LOG: u32 = 1;

impl Shard {
    /// Returns the time of the decision. `read` is the time before the lock was taken, because
    /// reading the clock under the lock would hold it longer. If another thread has decided at a
    /// later time since, the clock is read again. So the time of a shard goes back only if the
    /// clock does.
    #[inline]
    pub(super) fn time(&mut self, read: Timestamp, clock: &StorageClock) -> Timestamp {
        self.latest = if read < self.latest { clock.now_again() } else { read };
        self.latest
    }

    /// Returns the slots of a key.
    #[inline]
    pub(super) fn run(&self, key: KeyHash) -> Range<usize> {
        self.table.run(key.hash)
    }

    /// Returns the indices of a key's states and copies of them, in the order of the policy's
    /// limits, if all of them exist and are small.
    #[inline(always)]
    pub(super) fn small_states<const N: usize>(
        &self,
        key: KeyHash,
        digests: &[u32; N],
    ) -> Option<([usize; N], [State; N])> {
        let (mut places, mut states) = ([0; N], [const { State::Fresh }; N]);
        for i in 0..N {
            let (place, slot) = self.table.find(key.hash, key.limit_hash(digests[i]))?;
            (places[i], states[i]) = (place, slot.state());
        }
        Some((places, states))
    }

    /// Moves the states of a key out of its slots, in the order of the policy's limits. Returns the
    /// size of the key, without the logs of limits that the policy does not have.
    #[inline]
    pub(super) fn load(&mut self, run: Range<usize>, key: KeyHash, digests: &[u32], states: &mut [State]) -> Size {
        let mut size = Size { keys: usize::from(!run.is_empty()), slots: run.len(), logs: 0 };
        for (state, &digest) in states.iter_mut().zip(digests) {
            let Some(index) = self.find(run.clone(), key.limit_hash(digest)) else { continue };
            let slot = self.table.get_mut(index);
            if slot.limit_hash & LOG == 0 {
                *state = slot.state();
            } else if let Some(log) = self.logs[slot.first as usize].take() {
                size.logs += log_bytes(&log);
                *state = State::Log(log);
            }
        }
        size
    }

    /// Writes the states of a key back to its slots. `statuses` are those of its limits, or `None`
    /// if the states have not changed. Returns the new size of the key, without the logs of limits
    /// that the policy does not have.
    pub(super) fn save(
        &mut self,
        mut run: Range<usize>,
        key: KeyHash,
        digests: &[u32],
        states: &mut [State],
        now: Timestamp,
        statuses: Option<&[Status]>,
    ) -> Size {
        let mut logs = 0;
        for (position, (state, &digest)) in states.iter_mut().zip(digests).enumerate() {
            let digest = key.limit_hash(digest);
            let index = match self.find(run.clone(), digest) {
                Some(index) if state.until() > now => index,
                None if state.until() > now => {
                    let index = self.table.insert(TableSlot::new(key.hash, digest, state.until()));
                    run = self.run(key);
                    index
                }
                Some(index) => {
                    drop(self.remove(index));
                    run = self.run(key);
                    continue;
                }
                None => continue,
            };
            if let Some(statuses) = statuses {
                self.table.get_mut(index).set_admits_before(state.until(), now, &statuses[position]);
            }
            logs += self.write(index, state);
        }
        Size { keys: usize::from(!run.is_empty()), slots: run.len(), logs }
    }

    /// Writes a state into its slot. Returns the bytes of its log.
    #[inline]
    fn write(&mut self, index: usize, state: &mut State) -> usize {
        let slot = self.table.get_mut(index);
        slot.until = state.until();
        match mem::take(state) {
            State::Fresh => 0,
            State::Counts { amounts: [first, second], .. } => {
                if slot.limit_hash & LOG != 0 {
                    drop(self.logs.remove(slot.first as usize));
                    slot.limit_hash &= !LOG;
                }
                (slot.first, slot.second) = (first, second);
                0
            }
            State::Log(log) => {
                let bytes = log_bytes(&log);
                if slot.limit_hash & LOG == 0 {
                    slot.limit_hash |= LOG;
                    slot.first = log_index(self.logs.insert(None));
                }
                self.logs[slot.first as usize] = Some(log);
                bytes
            }
        }
    }

    /// Returns `true` if storing the refusal of a hit would change nothing: the state that was loaded
    /// from this run is not ahead of the clock, and its slot refuses unless units remain.
    pub(super) fn keeps(
        &self,
        run: Range<usize>,
        key: KeyHash,
        digest: u32,
        state: &State,
        now: Timestamp,
        remaining: u32,
    ) -> bool {
        let may_change = match state {
            State::Fresh => false,
            State::Counts { .. } => true,
            State::Log(log) => log.newest().is_some_and(|newest| newest > now),
        };
        let refuses = |index| self.table.slot(index).admits_before < f32::INFINITY;
        !may_change && (remaining > 0 || self.find(run, key.limit_hash(digest)).is_some_and(refuses))
    }

    /// Returns the number of slots of the table.
    #[cfg(test)]
    pub(super) fn slots(&self) -> usize {
        self.table.slots()
    }

    /// Removes the states of a key for these limits. Returns the freed size.
    pub(super) fn clear(&mut self, key: KeyHash, digests: &[u32]) -> Size {
        let mut freed = Size::default();
        for &digest in digests {
            if let Some(index) = self.find(self.run(key), key.limit_hash(digest)) {
                let log = self.remove(index);
                freed.slots += 1;
                freed.logs += log.map_or(0, |log| log_bytes(&log));
            }
        }
        freed.keys = usize::from(freed.slots > 0 && self.run(key).is_empty());
        self.tidy();
        freed
    }

    /// Removes all keys. Returns their size.
    pub(super) fn reset(&mut self) -> Size {
        let logs = (0..self.table.slots()).filter_map(|index| self.log(index)).map(log_bytes).sum();
        let freed = Size { keys: self.table.keys(), slots: self.table.used_mut().count(), logs };
        *self = Self { latest: self.latest, ..Self::default() };
        freed
    }

    /// Removes the states in these slots, which belong to one key. Returns their size.
    pub(super) fn evict(&mut self, start: usize, end: usize) -> Size {
        let mut freed = Size { keys: 1, slots: end - start, logs: 0 };
        for index in (start..end).rev() {
            freed.logs += self.remove(index).map_or(0, |log| log_bytes(&log));
        }
        self.tidy();
        freed
    }

    /// Releases unused memory after states were removed.
    fn tidy(&mut self) {
        self.table.shrink();
        let logs = self.logs.len();
        if self.logs.capacity() > 64 && logs < self.logs.capacity() / 8 * 3 {
            let mut smaller = Slab::with_capacity(logs + logs / 3);
            for slot in self.table.used_mut().filter(|slot| slot.limit_hash & LOG != 0) {
                slot.first = log_index(smaller.insert(self.logs.remove(slot.first as usize)));
            }
            self.logs = smaller;
        }
    }

    /// Counts a decision. Returns the number of decisions.
    #[inline]
    pub(super) fn count_hit(&mut self) -> u32 {
        self.hits = self.hits.wrapping_add(1);
        self.hits
    }

    fn log(&self, index: usize) -> Option<&Log> {
        let slot = self.table.get(index)?;
        if slot.limit_hash & LOG == 0 { None } else { self.logs[slot.first as usize].as_deref() }
    }

    #[inline]
    fn find(&self, mut run: Range<usize>, limit_hash: u32) -> Option<usize> {
        run.find(|&index| self.table.get(index).is_some_and(|slot| slot.limit_hash & !LOG == limit_hash))
    }

    /// Removes the state at `index`. Returns its log.
    fn remove(&mut self, index: usize) -> Option<Box<Log>> {
        let TableSlot { limit_hash, first, .. } = *self.table.slot(index);
        self.table.remove(index);
        if limit_hash & LOG == 0 { None } else { self.logs.remove(first as usize) }
    }

    /// Visits a few slots and removes the expired ones. If many of them have expired, as after a
    /// flood of keys, it removes all expired states of the shard in one pass. This takes less time
    /// per state.
    pub(super) fn sweep(&mut self, now: Timestamp) -> Swept {
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

    fn sweep_slot(&mut self, slot: TableSlot, swept: &mut Swept) {
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
            let has_log = slot.limit_hash & LOG != 0;
            if has_log && swept.logs.len() >= MAX_LOGS {
                first_left = first_left.or(Some(slot.hash));
                return true;
            }
            swept.count(if has_log { logs.remove(slot.first as usize) } else { None });
            false
        });
        swept.freed.keys += keys - self.table.keys();
        swept.is_at_end = first_left.is_none();
        self.swept = first_left.map_or(0, |hash| self.table.place(hash));
    }
}

/// The number of slots that a sweep visits. They are adjacent, so many cost little more than one.
const SLOTS: usize = 64;

/// The maximum number of logs that a sweep frees. Freeing memory takes longer than removing a slot.
const MAX_LOGS: usize = 1_024;

/// The result of a sweep.
#[derive(Debug, Default)]
pub(super) struct Swept {
    pub(super) freed: Size,
    /// `true` if the end of the shard was reached.
    pub(super) is_at_end: bool,
    /// The removed logs. They are freed after the shard is unlocked.
    #[expect(clippy::vec_box, reason = "unboxing would free memory while the shard is locked")]
    pub(super) logs: Vec<Box<Log>>,
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

/// Returns the index of a log as a slot stores it.
fn log_index(index: usize) -> u32 {
    u32::try_from(index).expect("fewer than 2^32 logs")
}

use std::ops::Range;

use slab::Slab;

use super::table::{Slot, Table};
use crate::Timestamp;
use crate::strategy::{Log, State, Status};

/// One part of the storage: the states of the keys that hash to it.
#[derive(Debug, Default)]
pub(super) struct Shard {
    table: Table,
    logs: Slab<Log>,
    /// Hits until the next sweep.
    pub(super) until_sweep: u32,
    /// Where the next sweep begins.
    swept: usize,
}

/// A key under a policy: a keyed hash, so that nobody outside can aim at a collision.
#[derive(Clone, Copy, Debug)]
pub(super) struct KeyHash {
    pub(super) hash: u64,
    pub(super) rest: u32,
}

impl KeyHash {
    fn limit(self, digest: u32) -> u32 {
        (self.rest ^ digest) & !LOG
    }
}

/// The bit of [`Slot::limit`] that says that the state is a log, kept at the index that stands in the first amount.
const LOG: u32 = 1;

/// How many keys are looked at for one to make room.
const LOOKS: usize = 8;

/// What can be done about a storage that is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Room {
    /// The states in these slots can go.
    Take(usize, usize),
    /// Nothing can: of the keys that were looked at, the first one is admitted again after so many microseconds.
    Crowded(u64),
    /// There are no other keys here.
    Alone,
}

impl Shard {
    /// Moves the states of a key out, in the order of the policy's limits. Returns the weight of the key.
    pub(super) fn load(&mut self, key: KeyHash, digests: &[u32], states: &mut [State]) -> usize {
        let run = self.table.run(key.hash);
        if run.is_empty() {
            return 0;
        }
        let weight = self.weight(run.clone());
        for (state, &digest) in states.iter_mut().zip(digests) {
            if let Some(index) = self.find(run.clone(), key.limit(digest)) {
                let Slot { limit, until, amounts, .. } = *self.table.get_mut(index);
                *state = if limit & LOG == 0 {
                    State::Counts { until, amounts }
                } else {
                    State::Log(std::mem::take(&mut self.logs[amounts[0] as usize]))
                };
            }
        }
        weight
    }

    /// Puts the states of a key back. `statuses` say from when on each admits again, where that is known.
    /// Returns the weight of the key.
    pub(super) fn save(
        &mut self,
        key: KeyHash,
        digests: &[u32],
        states: &mut [State],
        now: Timestamp,
        statuses: Option<&[Status]>,
    ) -> usize {
        for (position, (state, &digest)) in states.iter_mut().zip(digests).enumerate() {
            let told = statuses.map(|statuses| &statuses[position]);
            self.put(key, key.limit(digest), std::mem::take(state), now, told);
        }
        self.weight(self.table.run(key.hash))
    }

    fn put(&mut self, key: KeyHash, limit: u32, state: State, now: Timestamp, told: Option<&Status>) {
        let found = self.find(self.table.run(key.hash), limit);
        let until = state.until();
        if until <= now {
            if let Some(index) = found {
                self.remove(index);
            }
            return;
        }
        let mut slot = match found {
            Some(index) => *self.table.get_mut(index),
            None => Slot { hash: key.hash, limit, admits_before: f32::INFINITY, ..Slot::default() },
        };
        if let Some(status) = told {
            slot.admits_before = admits_before(until, now, status);
        }
        slot.until = until;
        match state {
            State::Log(log) if slot.limit & LOG == 0 => {
                slot.limit |= LOG;
                slot.amounts = [u32::try_from(self.logs.insert(log)).unwrap_or(u32::MAX), 0];
            }
            State::Log(log) => self.logs[slot.amounts[0] as usize] = log,
            State::Counts { amounts, .. } => {
                if slot.limit & LOG != 0 {
                    self.logs.remove(slot.amounts[0] as usize);
                    slot.limit &= !LOG;
                }
                slot.amounts = amounts;
            }
            State::Fresh => {}
        }
        match found {
            Some(index) => *self.table.get_mut(index) = slot,
            None => self.table.insert(slot),
        }
    }

    /// Forgets a key. Returns the weight it had.
    pub(super) fn clear(&mut self, key: KeyHash, digests: &[u32]) -> usize {
        let before = self.weight(self.table.run(key.hash));
        for &digest in digests {
            if let Some(index) = self.find(self.table.run(key.hash), key.limit(digest)) {
                self.remove(index);
            }
        }
        before - self.weight(self.table.run(key.hash))
    }

    /// Looks at a few keys near `hash`, but not at it, for one to make room: one that has expired, else the one that
    /// is forgotten soonest of those that would be admitted.
    pub(super) fn look_for_room(&self, hash: u64, now: Timestamp) -> Room {
        let start = self.table.run(hash).end;
        let mut best: Option<(Timestamp, usize, usize)> = None;
        let mut soonest = u64::MAX;
        let mut index = start;
        let mut seen = 0;
        let mut wrapped = false;
        while seen < LOOKS {
            if index >= self.table.slots() {
                if wrapped {
                    break;
                }
                wrapped = true;
                index = 0;
            }
            if wrapped && index >= start {
                break;
            }
            let Some(first) = self.table.get(index) else {
                index += 1;
                continue;
            };
            let run = self.table.run(first.hash);
            index = run.end.max(index + 1);
            if first.hash == hash {
                continue;
            }
            seen += 1;
            let slots = || run.clone().filter_map(|index| self.table.get(index));
            let until = slots().map(|slot| slot.until).max().unwrap_or_default();
            let refuses_for = slots().map(|slot| slot.refuses_for(now)).max().unwrap_or(0);
            if until <= now {
                return Room::Take(run.start, run.end);
            }
            if refuses_for > 0 {
                soonest = soonest.min(refuses_for);
            } else if best.is_none_or(|(earliest, ..)| until < earliest) {
                best = Some((until, run.start, run.end));
            }
        }
        match best {
            Some((_, start, end)) => Room::Take(start, end),
            None if seen == 0 => Room::Alone,
            None => Room::Crowded(soonest),
        }
    }

    /// Removes the states in these slots, all of one key. Returns the weight it had.
    pub(super) fn evict(&mut self, start: usize, end: usize) -> usize {
        let weight = self.weight(start..end);
        for index in (start..end).rev() {
            self.remove(index);
        }
        weight
    }

    /// Looks at up to `slots` slots and removes what has expired. Returns the weight removed, and whether the end was
    /// reached.
    pub(super) fn sweep(&mut self, slots: usize, now: Timestamp) -> (usize, bool) {
        let mut freed = 0;
        for _ in 0..slots {
            if self.swept >= self.table.slots() {
                self.swept = 0;
                self.table.shrink();
                return (freed, true);
            }
            match self.table.get(self.swept) {
                Some(slot) if slot.is_expired(now) => {
                    let hash = slot.hash;
                    let before = self.weight(self.table.run(hash));
                    self.remove(self.swept);
                    freed += before - self.weight(self.table.run(hash));
                }
                _ => self.swept += 1,
            }
        }
        (freed, false)
    }

    /// One for a key, and more for its logs.
    fn weight(&self, run: Range<usize>) -> usize {
        let logs = run.clone().map(|index| self.log(index).map_or(0, weight_of_log)).sum::<usize>();
        usize::from(!run.is_empty()) + logs
    }

    fn log(&self, index: usize) -> Option<&Log> {
        let slot = self.table.get(index)?;
        (slot.limit & LOG != 0).then(|| &self.logs[slot.amounts[0] as usize])
    }

    fn find(&self, mut run: Range<usize>, limit: u32) -> Option<usize> {
        run.find(|&index| self.table.get(index).is_some_and(|slot| slot.limit & !LOG == limit))
    }

    fn remove(&mut self, index: usize) {
        let Slot { limit, amounts, .. } = *self.table.get_mut(index);
        if limit & LOG != 0 {
            self.logs.remove(amounts[0] as usize);
        }
        self.table.remove(index);
    }
}

/// What a log weighs beside its key: as much as a key for every 128 bytes.
fn weight_of_log(log: &Log) -> usize {
    log.room() / 8
}

/// How long before `until` one unit is admitted again, rounded down to what an `f32` can say: rather said to refuse a little
/// too long than to be evicted while it does.
fn admits_before(until: Timestamp, now: Timestamp, status: &Status) -> f32 {
    if status.remaining() > 0 {
        return f32::INFINITY;
    }
    #[allow(clippy::cast_precision_loss)] // what is lost is rounded down
    let before = until.since(now).saturating_sub(status.reset_after_micros()) as f32;
    before.next_down().max(0.0)
}

use std::mem;
use std::ops::Range;

use slab::Slab;

use super::slot::Slot;
use super::table::Table;
use super::time::Time;
use crate::Timestamp;
use crate::policy::SHADOW;
use crate::strategy::{Log, State, Status};

/// One part of the storage: the states of the keys that hash to it.
///
/// What every hit needs stands first, on one cache line with the lock.
#[derive(Debug, Default)]
#[repr(C)]
pub(super) struct Shard {
    pub(super) table: Table,
    /// The latest instant at which something was decided here.
    latest: Timestamp,
    hits: u32,
    logs: Slab<Option<Box<Log>>>,
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
    pub(super) fn limit(self, digest: u32) -> u32 {
        (self.rest ^ digest) & !(LOG | SHADOW) | (digest & SHADOW)
    }
}

/// The bit of [`Slot::limit`] that says that the state is a log, kept at the index that stands in the first amount.
pub(super) const LOG: u32 = 1;

/// A hit out of so many sweeps, and so many slots at a time: what is side by side costs little more than one.
pub(super) const SWEEP_EVERY: u32 = 16;
const SWEEP_SLOTS: usize = 64;

impl Shard {
    /// The time to decide at. The clock was read before the lock was taken, to hold that shortly; if somebody else has
    /// decided at a later instant since, it is read again, so that the time of one key's states goes back only if the clock
    /// does.
    #[inline]
    pub(super) fn time(&mut self, read: Timestamp, clock: &Time) -> Timestamp {
        self.latest = if read < self.latest { clock.now() } else { read };
        self.latest
    }

    /// The slots of a key.
    #[inline]
    pub(super) fn run(&self, key: KeyHash) -> Range<usize> {
        self.table.run(key.hash)
    }

    /// Where the states of a key are, in the order of the policy's limits, when all are there and small.
    #[inline(always)]
    pub(super) fn known<const N: usize>(&self, key: KeyHash, digests: &[u32; N]) -> Option<[usize; N]> {
        let mut places = [0; N];
        for i in 0..N {
            places[i] = self.table.find(key.hash, key.limit(digests[i]))?;
        }
        Some(places)
    }

    #[inline(always)]
    pub(super) fn copies<const N: usize>(&self, places: [usize; N]) -> [Slot; N] {
        let mut slots = [Slot::default(); N];
        for i in 0..N {
            slots[i] = *self.table.slot(places[i]);
        }
        slots
    }

    /// Writes the states of these slots to where they were copied from.
    #[inline(always)]
    pub(super) fn write_back<const N: usize>(&mut self, places: [usize; N], slots: &[Slot; N]) {
        for i in 0..N {
            self.table.get_mut(places[i]).copy_state(&slots[i]);
        }
    }

    /// The slot of a state, when it is there and small.
    #[inline(always)]
    pub(super) fn small(&mut self, key: KeyHash, digest: u32) -> Option<&mut Slot> {
        let index = self.table.find(key.hash, key.limit(digest))?;
        Some(self.table.get_mut(index))
    }

    /// Moves the states of a key out of its slots, in the order of the policy's limits. Returns what they weigh.
    #[inline]
    pub(super) fn load(&mut self, run: Range<usize>, key: KeyHash, digests: &[u32], states: &mut [State]) -> usize {
        let mut weight = usize::from(!run.is_empty());
        for (state, &digest) in states.iter_mut().zip(digests) {
            let Some(index) = self.find(run.clone(), key.limit(digest)) else { continue };
            let slot = self.table.get_mut(index);
            if slot.limit & LOG == 0 {
                *state = slot.state();
            } else if let Some(log) = self.logs[slot.first as usize].take() {
                weight += weight_of_log(&log);
                *state = State::Log(log);
            }
        }
        weight
    }

    /// Puts the states of a key back into its slots. `said` is what their limits say of them, if they may have changed.
    /// Returns what they weigh now.
    pub(super) fn save(
        &mut self,
        mut run: Range<usize>,
        key: KeyHash,
        digests: &[u32],
        states: &mut [State],
        now: Timestamp,
        said: Option<&[Status]>,
    ) -> usize {
        let mut logs = 0;
        for (position, (state, &digest)) in states.iter_mut().zip(digests).enumerate() {
            let digest = key.limit(digest);
            let index = match self.find(run.clone(), digest) {
                Some(index) if state.until() > now => index,
                None if state.until() > now => {
                    let index = self.table.insert(Slot::new(key.hash, digest, state.until()));
                    run = self.run(key);
                    index
                }
                Some(index) => {
                    self.remove(index);
                    run = self.run(key);
                    continue;
                }
                None => continue,
            };
            if let Some(said) = said {
                self.table.get_mut(index).say(state.until(), now, &said[position]);
            }
            logs += self.write(index, state);
        }
        usize::from(!run.is_empty()) + logs
    }

    /// Writes a state into its slot. Returns what its log weighs.
    #[inline]
    fn write(&mut self, index: usize, state: &mut State) -> usize {
        let slot = self.table.get_mut(index);
        slot.until = state.until();
        match mem::take(state) {
            State::Fresh => 0,
            State::Counts { amounts: [first, second], .. } => {
                if slot.limit & LOG != 0 {
                    self.logs.remove(slot.first as usize);
                    slot.limit &= !LOG;
                }
                (slot.first, slot.second) = (first, second);
                0
            }
            State::Log(log) => {
                let weight = weight_of_log(&log);
                if slot.limit & LOG == 0 {
                    slot.limit |= LOG;
                    slot.first = u32::try_from(self.logs.insert(None)).expect("fewer than 2^32 logs");
                }
                self.logs[slot.first as usize] = Some(log);
                weight
            }
        }
    }

    /// How many slots its table has.
    #[cfg(test)]
    pub(super) fn slots(&self) -> usize {
        self.table.slots()
    }

    /// Forgets a key. Returns the weight it had.
    pub(super) fn clear(&mut self, key: KeyHash, digests: &[u32]) -> usize {
        let before = self.weight(self.run(key));
        for &digest in digests {
            if let Some(index) = self.find(self.run(key), key.limit(digest)) {
                self.remove(index);
            }
        }
        before - self.weight(self.run(key))
    }

    /// Forgets all keys. Returns how many there were, and their weight.
    pub(super) fn reset(&mut self) -> (u64, usize) {
        let (mut keys, mut weight, mut index) = (0, 0, 0);
        while index < self.table.slots() {
            let Some(slot) = self.table.get(index) else {
                index += 1;
                continue;
            };
            let run = self.table.run(slot.hash);
            index = run.end;
            keys += 1;
            weight += self.weight(run);
        }
        *self = Self { latest: self.latest, ..Self::default() };
        (keys, weight)
    }

    /// Removes the states in these slots, all of one key. Returns the weight it had.
    pub(super) fn evict(&mut self, start: usize, end: usize) -> usize {
        let weight = self.weight(start..end);
        for index in (start..end).rev() {
            self.remove(index);
        }
        weight
    }

    /// Counts a hit. Whether it is one that sweeps.
    #[inline]
    pub(super) fn is_sweep_due(&mut self) -> bool {
        self.hits = self.hits.wrapping_add(1);
        self.hits.is_multiple_of(SWEEP_EVERY)
    }

    /// Looks at a few slots and removes what has expired. Returns the weight removed, and whether the end was reached.
    pub(super) fn sweep(&mut self, now: Timestamp) -> (usize, bool) {
        let mut freed = 0;
        for _ in 0..SWEEP_SLOTS {
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
        if slot.limit & LOG == 0 { None } else { self.logs[slot.first as usize].as_deref() }
    }

    #[inline]
    fn find(&self, mut run: Range<usize>, limit: u32) -> Option<usize> {
        run.find(|&index| self.table.get(index).is_some_and(|slot| slot.limit & !LOG == limit))
    }

    fn remove(&mut self, index: usize) {
        let Slot { limit, first, .. } = *self.table.get_mut(index);
        if limit & LOG != 0 {
            self.logs.remove(first as usize);
        }
        self.table.remove(index);
    }
}

/// What a log weighs beside its key: as much as a key for every 128 bytes.
fn weight_of_log(log: &Log) -> usize {
    log.bytes() / 128
}

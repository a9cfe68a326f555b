//! The slots of small states, and the table in which a shard keeps them.

use std::ops::Range;

use crate::policy::{Limit, SHADOW};
use crate::strategy::{Outcome, State, Status};
use crate::time::Timestamp;

/// A hash table of small states, sorted by hash, with linear probing.
///
/// Equal hashes are adjacent, so the states of a key are one range, and a lookup ends at the first
/// larger hash. The table grows by an eighth, which wastes less memory than doubling.
#[derive(Debug, Default)]
#[repr(C)]
pub(super) struct StateTable {
    slots: Box<[TableSlot]>,
    /// The number of slots over which hashes are spread. The slots after them take the overflow.
    spread: usize,
    used: usize,
}

/// The number of slots after the spread, for the overflow of the last hashes.
const TAIL: usize = 16;

/// The spread from which a table uses 7/8 of its slots. A smaller one uses half of them, because the
/// processor cannot predict where a lookup in a fuller table ends. With 1,000 keys, a hit takes 6 %
/// less time, and a new key a quarter fewer instructions.
const SMALL: usize = 64;

/// The number of used slots at which a table grows.
#[inline]
fn capacity(spread: usize) -> usize {
    if spread < SMALL { spread / 2 } else { spread - spread / 8 }
}

impl StateTable {
    /// Returns the number of slots, including vacant ones.
    pub(super) fn slots(&self) -> usize {
        self.slots.len()
    }

    #[inline]
    pub(super) fn get(&self, index: usize) -> Option<&TableSlot> {
        self.slots.get(index).filter(|slot| !slot.is_vacant())
    }

    #[inline]
    pub(super) fn slot(&self, index: usize) -> &TableSlot {
        &self.slots[index]
    }

    /// Returns the slots from `index` on, including vacant ones.
    #[inline]
    pub(super) fn from(&self, index: usize) -> &[TableSlot] {
        &self.slots[index..]
    }

    #[inline]
    pub(super) fn get_mut(&mut self, index: usize) -> &mut TableSlot {
        &mut self.slots[index]
    }

    /// Returns the slots of all states with this hash. The range is empty if there are none, and
    /// starts where one would be inserted.
    #[inline]
    pub(super) fn run(&self, hash: u64) -> Range<usize> {
        let start = self.place(hash);
        let mut end = start;
        while self.get(end).is_some_and(|slot| slot.hash == hash) {
            end += 1;
        }
        start..end
    }

    /// Returns the slot of this limit, and its index.
    #[inline]
    pub(super) fn find(&self, hash: u64, limit: u32) -> Option<(usize, &TableSlot)> {
        let mut index = self.home(hash);
        loop {
            let slot = self.get(index)?;
            if slot.hash == hash && slot.limit == limit {
                return Some((index, slot));
            }
            if slot.hash > hash {
                return None;
            }
            index += 1;
        }
    }

    /// Returns the index for a state with this hash: after all smaller hashes, before all equal
    /// ones.
    #[inline]
    pub(super) fn place(&self, hash: u64) -> usize {
        let mut place = self.home(hash);
        while self.get(place).is_some_and(|slot| slot.hash < hash) {
            place += 1;
        }
        place
    }

    /// Inserts a state before the others of its key. Returns its index.
    pub(super) fn insert(&mut self, slot: TableSlot) -> usize {
        self.insert_at(self.place(slot.hash), slot)
    }

    /// Inserts a state at its [place](Self::place). Returns its index, which differs if the table
    /// has grown.
    pub(super) fn insert_at(&mut self, mut place: usize, slot: TableSlot) -> usize {
        if self.used >= capacity(self.spread) {
            place = self.grow(slot.hash);
        }
        loop {
            if let Some(gap) = self.slots[place..].iter().position(TableSlot::is_vacant) {
                self.put(place, place + gap, slot);
                return place;
            }
            place = self.grow(slot.hash);
        }
    }

    /// Inserts a state at its [place](Self::place), and removes the one at `victim`, which must not
    /// be before that place. `gap` is the first vacant slot between the place and the victim, if
    /// any.
    pub(super) fn replace(&mut self, place: usize, gap: Option<usize>, victim: usize, slot: TableSlot) {
        match gap {
            Some(gap) if gap < victim => {
                self.put(place, gap, slot);
                self.remove(victim);
            }
            _ => {
                self.used -= 1;
                self.put(place, victim, slot);
            }
        }
    }

    /// Writes a state to its place. The slots between the place and the gap move by one.
    fn put(&mut self, place: usize, gap: usize, slot: TableSlot) {
        self.slots.copy_within(place..gap, place + 1);
        self.slots[place] = slot;
        self.used += 1;
    }

    /// Doubles a small table, and grows a large one by an eighth. Returns the place of a state with
    /// this hash.
    #[cold]
    fn grow(&mut self, hash: u64) -> usize {
        let more = if self.spread < SMALL { self.spread.max(4) } else { self.spread / 8 };
        self.resize(self.spread + more);
        self.place(hash)
    }

    /// Removes the state at `index`. The displaced states after it move back by one.
    pub(super) fn remove(&mut self, index: usize) {
        let next = index + 1;
        let moving = self.slots[next..]
            .iter()
            .zip(next..)
            .take_while(|(slot, at)| !slot.is_vacant() && self.home(slot.hash) < *at)
            .count();
        self.slots.copy_within(next..next + moving, index);
        self.slots[index + moving] = TableSlot::default();
        self.used -= 1;
    }

    /// Shrinks a large table if less than 73 % of it is used, so that a state takes about 40 bytes.
    pub(super) fn shrink(&mut self) {
        if self.spread > 64 && self.used < self.spread * 73 / 100 {
            self.resize(self.used + self.used / 4);
        }
    }

    /// Removes the states for which `keep` returns `false`.
    pub(super) fn retain(&mut self, mut keep: impl FnMut(&TableSlot) -> bool) {
        let mut removed = 0;
        for slot in self.slots.iter_mut().filter(|slot| !slot.is_vacant()) {
            if !keep(slot) {
                *slot = TableSlot::default();
                removed += 1;
            }
        }
        // Moves the remaining states to their places.
        self.used -= removed;
        self.resize(self.spread.min((self.used + self.used / 4).max(64)));
    }

    /// Returns the number of different hashes.
    pub(super) fn keys(&self) -> usize {
        let hashes = || self.slots.iter().filter(|slot| !slot.is_vacant()).map(|slot| slot.hash);
        let equal = hashes().zip(hashes().skip(1)).filter(|(hash, next)| hash == next).count();
        self.used - equal
    }

    /// Returns the slots that are not vacant.
    pub(super) fn used_mut(&mut self) -> impl Iterator<Item = &mut TableSlot> {
        self.slots.iter_mut().filter(|slot| !slot.is_vacant())
    }

    /// Returns the first slot for states with this hash. Smaller hashes can displace them to later
    /// slots.
    #[inline]
    fn home(&self, hash: u64) -> usize {
        #[allow(clippy::cast_possible_truncation)] // less than `spread`
        let home = ((u128::from(hash) * self.spread as u128) >> 64) as usize;
        home
    }

    /// Moves all states, in order, to a new table with this spread.
    fn resize(&mut self, spread: usize) {
        self.spread = spread;
        let mut slots = Vec::with_capacity(spread + TAIL);
        for slot in self.slots.iter().filter(|slot| !slot.is_vacant()) {
            let index = self.home(slot.hash).max(slots.len());
            slots.resize(index, TableSlot::default());
            slots.push(*slot);
        }
        slots.resize(slots.len().max(spread + TAIL), TableSlot::default());
        self.slots = slots.into_boxed_slice();
    }
}

/// One state of one key. A small state, which is a [`State::Counts`], fits into the slot. A log
/// does not, so its slot has the index of the log.
///
/// The slot is vacant if `until` is the epoch, because such a state has expired.
///
/// Fields that a strategy writes one after the other are not adjacent. Otherwise the compiler would
/// merge their loads, and a merged load of recently written parts stalls (store-to-load forwarding
/// fails).
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct TableSlot {
    pub(super) hash: u64,
    /// The first amount of the state, or the index of its log.
    pub(super) first: u32,
    /// The rest of the key's hash, combined with the limit's digest, and the bits `LOG` and
    /// `SHADOW`.
    pub(super) limit: u32,
    pub(super) until: Timestamp,
    /// The second amount.
    pub(super) second: u32,
    /// The time from the next available unit to `until`, in microseconds, rounded down. Infinite if
    /// a unit remained after the last update, and for shadow limits.
    pub(super) admits_before: f32,
}

impl TableSlot {
    pub(super) fn new(hash: u64, limit: u32, until: Timestamp) -> Self {
        Self { hash, first: 0, limit, until, second: 0, admits_before: f32::INFINITY }
    }

    /// Returns the state, which must be small.
    #[inline]
    pub(super) fn state(&self) -> State {
        State::Counts { until: self.until, amounts: [self.first, self.second] }
    }

    /// Returns `true` if the state is small and has not expired.
    #[inline]
    pub(super) fn can_hold(state: &State, now: Timestamp) -> bool {
        matches!(*state, State::Counts { until, .. } if until > now)
    }

    /// Writes the state after a hit. Ignores a state without counts. The caller has checked that
    /// the state [has not expired](Self::can_hold).
    #[inline]
    pub(super) fn update(&mut self, state: &State, now: Timestamp, limit: &Limit, outcome: Outcome) {
        let State::Counts { until, amounts: [first, second] } = *state else { return };
        match outcome {
            Outcome::Spent { .. } => self.admits_before = f32::INFINITY,
            // `admits_before` stays the same, unless the quota has changed since the last unit was
            // spent.
            Outcome::Refused if self.refuses(state) => return,
            Outcome::SpentLast { .. } | Outcome::Refused => {
                self.set_admits_before(until, now, &limit.check(state, now, 1));
            }
        }
        (self.until, self.first, self.second) = (until, first, second);
    }

    /// Stores the time at which the state admits a hit again. `until` is the state's expiry. A
    /// shadow limit refuses nothing.
    #[inline]
    pub(super) fn set_admits_before(&mut self, until: Timestamp, now: Timestamp, status: &Status) {
        let is_shadow = self.limit & SHADOW != 0;
        self.admits_before = if is_shadow { f32::INFINITY } else { Self::admits_before(until, now, status) };
    }

    /// Computes [`admits_before`](Self#structfield.admits_before) from a status. Rounds down to the
    /// next `f32`: the state may then count as refusing for a little too long, but is never evicted
    /// while it refuses.
    #[inline]
    fn admits_before(until: Timestamp, now: Timestamp, status: &Status) -> f32 {
        if status.remaining() > 0 {
            return f32::INFINITY;
        }
        #[allow(clippy::cast_precision_loss)] // rounded down below
        let before = until.since(now).saturating_sub(status.reset_after_micros()) as f32;
        before.next_down().max(0.0)
    }

    /// Returns `true` if the slot has this state, and the state has no units left.
    #[inline]
    pub(super) fn refuses(&self, state: &State) -> bool {
        self.admits_before < f32::INFINITY && self.state() == *state
    }

    #[inline]
    pub(super) fn is_vacant(&self) -> bool {
        self.until == Timestamp::EPOCH
    }

    #[inline]
    pub(super) fn is_expired(&self, now: Timestamp) -> bool {
        self.until <= now
    }

    /// Returns the time from which the slot can be evicted. Slots of shadow limits can be evicted
    /// at any time.
    #[inline]
    pub(super) fn evictable_from(&self) -> Timestamp {
        if self.limit & SHADOW != 0 { Timestamp::EPOCH } else { self.until }
    }

    /// Returns the time in microseconds until a hit of one unit is admitted, or 0 if the slot does
    /// not refuse such a hit.
    #[inline]
    pub(super) fn refuses_for(&self, now: Timestamp) -> u64 {
        if self.admits_before == f32::INFINITY {
            return 0;
        }
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // saturates, and is never negative
        let admits_before = self.admits_before as u64;
        self.until.since(now).saturating_sub(admits_before)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(hash: u64, limit: u32) -> TableSlot {
        TableSlot::new(hash, limit, Timestamp::from_micros(1))
    }

    #[test]
    fn refuses_for_is_the_time_until_a_unit_is_available() {
        let (now, until) = (Timestamp::from_micros(1_000), Timestamp::from_micros(1_500));
        let full_until_the_end = TableSlot { until, ..TableSlot::default() };
        assert_eq!(full_until_the_end.refuses_for(now), 500);
        assert_eq!(TableSlot { admits_before: 100.0, ..full_until_the_end }.refuses_for(now), 400);
        assert_eq!(TableSlot { admits_before: f32::INFINITY, ..full_until_the_end }.refuses_for(now), 0);
    }

    /// Compares the table with a sorted set after random inserts, removals and replacements.
    #[test]
    fn table_equals_a_sorted_set() {
        for max_hash in [u64::MAX, u64::MAX / 64, 3] {
            let mut table = StateTable::default();
            let mut model = std::collections::BTreeSet::new();
            let mut random = 1_u64;
            for _ in 0..20_000 {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let hash = (random >> 40).wrapping_mul(0x9E37_79B9_7F4A_7C15) % max_hash;
                let limit = (random >> 33) as u32 & 3;
                let found = table.find(hash, limit).map(|(index, _)| index);
                assert_eq!(found.is_some(), model.contains(&(hash, limit)));
                match found {
                    Some(index) => {
                        table.remove(index);
                        model.remove(&(hash, limit));
                        table.shrink();
                    }
                    // Replaces one of the next 20 slots, if one of them is used.
                    None if random >> 62 == 3 => {
                        let place = table.place(hash);
                        let Some(victim) = (place..place + 20).find(|&at| table.get(at).is_some()) else { continue };
                        let gap = (place..victim).find(|&at| table.get(at).is_none());
                        let TableSlot { hash: its, limit: its_limit, .. } = *table.slot(victim);
                        table.replace(place, gap, victim, slot(hash, limit));
                        assert!(model.remove(&(its, its_limit)) && model.insert((hash, limit)));
                    }
                    None if random >> 63 == 0 || model.len() < 100 => {
                        table.insert(slot(hash, limit));
                        model.insert((hash, limit));
                    }
                    None => {}
                }
                assert_eq!(table.used, model.len());
            }
            let hashes: Vec<_> =
                (0..table.slots()).filter_map(|index| table.get(index)).map(|slot| slot.hash).collect();
            assert!(hashes.is_sorted() && hashes.len() == model.len());
        }
    }

    #[test]
    fn table_shrinks_after_removals() {
        let spread = |hash: u64| hash.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let mut table = StateTable::default();
        for hash in 0..1_000 {
            table.insert(slot(spread(hash), 0));
        }
        let full = table.slots();
        for hash in 0..1_000 {
            table.remove(table.find(spread(hash), 0).unwrap().0);
            table.shrink();
            let most = (table.used * 100 / 73).max(64) + 2 * TAIL;
            assert!(table.slots() <= most, "{} slots for {}", table.slots(), table.used);
        }
        assert!(table.slots() < full / 8, "{} of {full}", table.slots());
    }

    #[test]
    fn retained_states_are_found() {
        let mut table = StateTable::default();
        for hash in 0..1_000_u64 {
            table.insert(slot(hash.wrapping_mul(0x9E37_79B9_7F4A_7C15), 0));
            table.insert(slot(hash.wrapping_mul(0x9E37_79B9_7F4A_7C15), 4));
        }
        assert_eq!(table.keys(), 1_000);
        table.retain(|slot| slot.limit == 0 && slot.hash.is_multiple_of(3));
        assert_eq!(table.keys(), table.used);
        for hash in (0..1_000_u64).map(|hash| hash.wrapping_mul(0x9E37_79B9_7F4A_7C15)) {
            assert_eq!(table.find(hash, 0).is_some(), hash.is_multiple_of(3));
            assert!(table.find(hash, 4).is_none());
        }
        assert!(table.slots() < 500);
    }
}

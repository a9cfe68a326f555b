//! The table in which a shard keeps the slots of its states.

use std::ops::Range;

use super::slot::TableSlot;

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
    pub(super) fn find(&self, hash: u64, limit_hash: u32) -> Option<(usize, &TableSlot)> {
        let mut index = self.home(hash);
        loop {
            let slot = self.get(index)?;
            if slot.hash == hash && slot.limit_hash == limit_hash {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::time::Timestamp;

    fn slot(hash: u64, limit: u32) -> TableSlot {
        TableSlot::new(hash, limit, Timestamp::from_micros(1))
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
                        let TableSlot { hash: its, limit_hash: its_limit, .. } = *table.slot(victim);
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
        table.retain(|slot| slot.limit_hash == 0 && slot.hash.is_multiple_of(3));
        assert_eq!(table.keys(), table.used);
        for hash in (0..1_000_u64).map(|hash| hash.wrapping_mul(0x9E37_79B9_7F4A_7C15)) {
            assert_eq!(table.find(hash, 0).is_some(), hash.is_multiple_of(3));
            assert!(table.find(hash, 4).is_none());
        }
        assert!(table.slots() < 500);
    }
}

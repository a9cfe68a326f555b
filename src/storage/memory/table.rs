use std::ops::Range;

use super::slot::Slot;

/// A table of small states, ordered by where their keys hash to, with gaps: linear probing in hash order.
///
/// Equal hashes stand side by side, so the states of one key are one run, and a lookup ends at the first larger hash. It
/// grows by an eighth, so that it is never much larger than what it holds: a table that doubles is half empty half of
/// the time.
#[derive(Debug, Default)]
#[repr(C)]
pub(super) struct Table {
    slots: Box<[Slot]>,
    /// Hashes are spread over the first `spread` slots; those behind take what overflows.
    spread: usize,
    used: usize,
}

/// Slots beyond the spread, so that the last hashes have somewhere to overflow to.
const TAIL: usize = 16;

impl Table {
    /// How many slots there are, vacant ones too.
    pub(super) fn slots(&self) -> usize {
        self.slots.len()
    }

    #[inline]
    pub(super) fn get(&self, index: usize) -> Option<&Slot> {
        self.slots.get(index).filter(|slot| !slot.is_vacant())
    }

    #[inline]
    pub(super) fn slot(&self, index: usize) -> &Slot {
        &self.slots[index]
    }

    /// The slots from here on, vacant ones too.
    #[inline]
    pub(super) fn from(&self, index: usize) -> &[Slot] {
        &self.slots[index..]
    }

    #[inline]
    pub(super) fn get_mut(&mut self, index: usize) -> &mut Slot {
        &mut self.slots[index]
    }

    /// The slots of all states whose key has this hash, empty where it would go.
    #[inline]
    pub(super) fn run(&self, hash: u64) -> Range<usize> {
        let start = self.place(hash);
        let mut end = start;
        while self.get(end).is_some_and(|slot| slot.hash == hash) {
            end += 1;
        }
        start..end
    }

    /// Where the state of this limit stands.
    #[inline]
    pub(super) fn find(&self, hash: u64, limit: u32) -> Option<usize> {
        let mut index = self.home(hash);
        loop {
            let slot = self.get(index)?;
            if slot.hash == hash && slot.limit == limit {
                return Some(index);
            }
            if slot.hash > hash {
                return None;
            }
            index += 1;
        }
    }

    /// Where a state with this hash would go: behind all smaller hashes, at the front of its key's run.
    #[inline]
    pub(super) fn place(&self, hash: u64) -> usize {
        let mut place = self.home(hash);
        while self.get(place).is_some_and(|slot| slot.hash < hash) {
            place += 1;
        }
        place
    }

    /// Adds a state at the front of its key's run. Returns where.
    pub(super) fn insert(&mut self, slot: Slot) -> usize {
        self.insert_at(self.place(slot.hash), slot)
    }

    /// Adds a state at its [place](Self::place). Returns where that is now, for the table may have grown.
    pub(super) fn insert_at(&mut self, mut place: usize, slot: Slot) -> usize {
        if self.used >= self.spread - self.spread / 8 {
            place = self.grow(slot.hash);
        }
        loop {
            if let Some(gap) = self.slots[place..].iter().position(Slot::is_vacant) {
                self.put(place, place + gap, slot);
                return place;
            }
            place = self.grow(slot.hash);
        }
    }

    /// Adds a state at its [place](Self::place) and removes the one at `victim`, which is not before it. `gap` is the first
    /// vacant slot that is not before the place, if there is one before the victim.
    pub(super) fn replace(&mut self, place: usize, gap: Option<usize>, victim: usize, slot: Slot) {
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

    /// Puts a state at its place; those from there to the gap move over.
    fn put(&mut self, place: usize, gap: usize, slot: Slot) {
        self.slots.copy_within(place..gap, place + 1);
        self.slots[place] = slot;
        self.used += 1;
    }

    /// Grows by an eighth. Returns the place of a state with this hash.
    #[cold]
    fn grow(&mut self, hash: u64) -> usize {
        self.resize(self.spread + self.spread / 8 + 4);
        self.place(hash)
    }

    /// Removes the state at `index`; those behind it that are not where they hash to move up.
    pub(super) fn remove(&mut self, index: usize) {
        let behind = index + 1;
        let moving = self.slots[behind..]
            .iter()
            .zip(behind..)
            .take_while(|(slot, at)| !slot.is_vacant() && self.home(slot.hash) < *at)
            .count();
        self.slots.copy_within(behind..behind + moving, index);
        self.slots[index + moving] = Slot::default();
        self.used -= 1;
    }

    /// Gives memory back if a quarter of it is vacant, so that what is stored takes about 40 bytes for
    /// each state.
    pub(super) fn shrink(&mut self) {
        if self.spread > 64 && self.used < self.spread * 73 / 100 {
            self.resize(self.used + self.used / 4);
        }
    }

    /// Removes the states that `stays` is false for.
    pub(super) fn retain(&mut self, mut stays: impl FnMut(&Slot) -> bool) {
        let mut removed = 0;
        for slot in self.slots.iter_mut().filter(|slot| !slot.is_vacant()) {
            if !stays(slot) {
                *slot = Slot::default();
                removed += 1;
            }
        }
        // Those that are left move to where they hash to.
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
    pub(super) fn used_mut(&mut self) -> impl Iterator<Item = &mut Slot> {
        self.slots.iter_mut().filter(|slot| !slot.is_vacant())
    }

    #[inline]
    fn home(&self, hash: u64) -> usize {
        #[allow(clippy::cast_possible_truncation)] // less than `spread`
        let home = ((u128::from(hash) * self.spread as u128) >> 64) as usize;
        home
    }

    /// Moves all states, in order, to a table spread over `spread` slots.
    fn resize(&mut self, spread: usize) {
        self.spread = spread;
        let mut slots = Vec::with_capacity(spread + TAIL);
        for slot in self.slots.iter().filter(|slot| !slot.is_vacant()) {
            let index = self.home(slot.hash).max(slots.len());
            slots.resize(index, Slot::default());
            slots.push(*slot);
        }
        slots.resize(slots.len().max(spread + TAIL), Slot::default());
        self.slots = slots.into_boxed_slice();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Timestamp;

    fn slot(hash: u64, limit: u32) -> Slot {
        Slot::new(hash, limit, Timestamp::from_micros(1))
    }

    /// Everything that was inserted and not removed is found, in order, whatever the order of events.
    #[test]
    fn holds_what_a_sorted_map_holds() {
        for crowding in [u64::MAX, u64::MAX / 64, 3] {
            let mut table = Table::default();
            let mut model = std::collections::BTreeSet::new();
            let mut random = 1_u64;
            for _ in 0..20_000 {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let hash = (random >> 40).wrapping_mul(0x9E37_79B9_7F4A_7C15) % crowding;
                let limit = (random >> 33) as u32 & 3;
                let found = table.find(hash, limit);
                assert_eq!(found.is_some(), model.contains(&(hash, limit)));
                match found {
                    Some(index) => {
                        table.remove(index);
                        model.remove(&(hash, limit));
                        table.shrink();
                    }
                    // In the place of a neighbour behind it, if there is one near.
                    None if random >> 62 == 3 => {
                        let place = table.place(hash);
                        let Some(victim) = (place..place + 20).find(|&at| table.get(at).is_some()) else { continue };
                        let gap = (place..victim).find(|&at| table.get(at).is_none());
                        let Slot { hash: its, limit: its_limit, .. } = *table.slot(victim);
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
    fn gives_memory_back() {
        let spread = |hash: u64| hash.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let mut table = Table::default();
        for hash in 0..1_000 {
            table.insert(slot(spread(hash), 0));
        }
        let full = table.slots();
        for hash in 0..1_000 {
            table.remove(table.find(spread(hash), 0).unwrap());
            table.shrink();
            let most = (table.used * 100 / 73).max(64) + 2 * TAIL;
            assert!(table.slots() <= most, "{} slots for {}", table.slots(), table.used);
        }
        assert!(table.slots() < full / 8, "{} of {full}", table.slots());
    }

    #[test]
    fn retain_keeps_the_others_findable() {
        let mut table = Table::default();
        for hash in 0..1_000_u64 {
            table.insert(slot(hash.wrapping_mul(0x9E37_79B9_7F4A_7C15), 0));
            table.insert(slot(hash.wrapping_mul(0x9E37_79B9_7F4A_7C15), 4));
        }
        assert_eq!(table.keys(), 1_000);
        table.retain(|slot| slot.limit == 0 && slot.hash.is_multiple_of(3));
        assert_eq!(table.keys(), table.used);
        for hash in (0..1_000_u64).map(|hash| hash.wrapping_mul(0x9E37_79B9_7F4A_7C15)) {
            assert_eq!(table.find(hash, 0).is_some(), hash.is_multiple_of(3));
            assert_eq!(table.find(hash, 4), None);
        }
        assert!(table.slots() < 500);
    }
}

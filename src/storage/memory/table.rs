use std::ops::Range;

use crate::strategy::{Outcome, Part, State};
use crate::{Limit, Timestamp};

/// A table of small states, ordered by where their keys hash to, with gaps: linear probing in hash order.
///
/// Equal hashes stand side by side, so the states of one key are one run, and a lookup ends at the first larger hash. It
/// grows by an eighth, so that it is never much larger than what it holds: a table that doubles is half empty half of
/// the time.
#[derive(Debug, Default)]
#[repr(C)]
pub(super) struct Table {
    slots: Vec<Slot>,
    /// Hashes are spread over the first `spread` slots; those behind take what overflows.
    spread: usize,
    used: usize,
}

/// One state of one key. Vacant when `until` is the epoch: such a state says nothing.
///
/// What a strategy writes one after the other does not stand side by side here: the compiler would move it in one piece,
/// and a piece of what was written in parts a moment ago has to wait until the parts have arrived in the cache.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct Slot {
    pub(super) hash: u64,
    /// The first amount of the state; if it is a log, where that is.
    pub(super) first: u32,
    /// The rest of the key's hash, mixed with which limit this is the state of.
    pub(super) limit: u32,
    pub(super) until: Timestamp,
    /// The second amount.
    pub(super) second: u32,
    /// How long before `until` a hit would be admitted again, in microseconds rounded down.
    pub(super) admits_before: f32,
}

impl Slot {
    pub(super) fn new(hash: u64, limit: u32, until: Timestamp) -> Self {
        Self { hash, first: 0, limit, until, second: 0, admits_before: f32::INFINITY }
    }

    /// The small state in this slot.
    #[inline]
    pub(super) fn state(&self) -> State {
        State::Counts { until: self.until, amounts: [self.first, self.second] }
    }

    /// Writes a small state. Whether that could be done: what is forgotten is to be removed, and a log stands elsewhere.
    #[inline]
    pub(super) fn update(&mut self, state: &State, now: Timestamp, limit: &Limit, part: Part) -> bool {
        let State::Counts { until, amounts: [first, second] } = *state else { return false };
        if until <= now {
            return false;
        }
        match part {
            None => return true,
            Some(Outcome::Spent { .. }) => self.admits_before = f32::INFINITY,
            Some(Outcome::Refused) if (self.until, self.first, self.second) == (until, first, second) => return true,
            Some(Outcome::SpentLast { .. } | Outcome::Refused) => {
                self.admits_before = Self::admits_before(state, now, limit);
            }
        }
        (self.until, self.first, self.second) = (until, first, second);
        true
    }

    /// How long before it is forgotten a state admits one unit again, rounded down to what an `f32` can say: rather said to
    /// refuse a little too long than to be evicted while it does.
    #[cold]
    pub(super) fn admits_before(state: &State, now: Timestamp, limit: &Limit) -> f32 {
        let status = limit.check(state, now, 1);
        if status.remaining() > 0 {
            return f32::INFINITY;
        }
        #[allow(clippy::cast_precision_loss)] // what is lost is rounded down
        let before = state.until().since(now).saturating_sub(status.reset_after_micros()) as f32;
        before.next_down().max(0.0)
    }

    /// Whether it holds this state, which has nothing left to spend.
    #[inline]
    pub(super) fn refuses(&self, state: &State) -> bool {
        self.admits_before < f32::INFINITY && self.state() == *state
    }

    fn is_vacant(&self) -> bool {
        self.until == Timestamp::EPOCH
    }

    pub(super) fn is_expired(&self, now: Timestamp) -> bool {
        self.until <= now
    }

    /// How long until a hit is admitted, 0 when it would be now.
    pub(super) fn refuses_for(&self, now: Timestamp) -> u64 {
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // saturates, and is never negative
        let admits_before = self.admits_before as u64;
        self.until.since(now).saturating_sub(admits_before)
    }
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

    /// Gives memory back when most of it is vacant.
    pub(super) fn shrink(&mut self) {
        if self.spread > 64 && self.used < self.spread / 4 {
            self.resize(self.spread / 2);
        }
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
        self.slots = slots;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let mut table = Table::default();
        for hash in 0..1_000 {
            table.insert(slot(hash << 54, 0));
        }
        let full = table.slots();
        for hash in 0..1_000 {
            table.remove(table.find(hash << 54, 0).unwrap());
            table.shrink();
        }
        assert!(table.slots() < full / 8, "{} of {full}", table.slots());
    }

    #[test]
    fn says_how_long_it_refuses() {
        let (now, until) = (Timestamp::from_micros(1_000), Timestamp::from_micros(1_500));
        let full_until_the_end = Slot { until, ..Slot::default() };
        assert_eq!(full_until_the_end.refuses_for(now), 500);
        assert_eq!(Slot { admits_before: 100.0, ..full_until_the_end }.refuses_for(now), 400);
        assert_eq!(Slot { admits_before: f32::INFINITY, ..full_until_the_end }.refuses_for(now), 0);
    }
}

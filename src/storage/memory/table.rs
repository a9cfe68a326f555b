use std::ops::Range;

use crate::Timestamp;
use crate::strategy::{State, Status};

/// A table of small states, ordered by where their keys hash to, with gaps: linear probing in hash order.
///
/// Equal hashes stand side by side, so the states of one key are one run, and a lookup ends at the first larger hash. It
/// grows by an eighth, so that it is never much larger than what it holds: a table that doubles is half empty half of
/// the time.
#[derive(Debug, Default)]
pub(super) struct Table {
    slots: Vec<Slot>,
    /// Hashes are spread over the first `spread` slots; those behind take what overflows.
    spread: usize,
    used: usize,
}

/// One state of one key. Vacant when `until` is the epoch: such a state says nothing.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Slot {
    pub(super) hash: u64,
    /// The rest of the key's hash, mixed with which limit this is the state of.
    pub(super) limit: u32,
    /// How long before `until` a hit would be admitted again, in microseconds rounded down.
    pub(super) admits_before: f32,
    pub(super) until: Timestamp,
    pub(super) amounts: [u32; 2],
}

impl Slot {
    pub(super) fn new(hash: u64, limit: u32, until: Timestamp) -> Self {
        Self { hash, limit, admits_before: f32::INFINITY, until, amounts: [0; 2] }
    }

    /// The small state in this slot.
    #[inline]
    pub(super) fn state(&self) -> State {
        State::Counts { until: self.until, amounts: self.amounts }
    }

    /// Writes a small state. Whether that could be done: what is forgotten is to be removed, and a log stands elsewhere.
    #[inline]
    pub(super) fn update(&mut self, state: &State, now: Timestamp, told: &Status) -> bool {
        match *state {
            State::Counts { until, amounts } if until > now => {
                (self.until, self.amounts) = (until, amounts);
                self.admits_before = Self::admits_before(until, now, told);
                true
            }
            _ => false,
        }
    }

    /// How long before `until` one unit is admitted again, rounded down to what an `f32` can say: rather said to refuse a
    /// little too long than to be evicted while it does.
    #[inline]
    pub(super) fn admits_before(until: Timestamp, now: Timestamp, status: &Status) -> f32 {
        if status.remaining() > 0 {
            return f32::INFINITY;
        }
        #[allow(clippy::cast_precision_loss)] // what is lost is rounded down
        let before = until.since(now).saturating_sub(status.reset_after_micros()) as f32;
        before.next_down().max(0.0)
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
    pub(super) fn get_mut(&mut self, index: usize) -> &mut Slot {
        &mut self.slots[index]
    }

    /// The slots of all states whose key has this hash, empty where it would go.
    #[inline]
    pub(super) fn run(&self, hash: u64) -> Range<usize> {
        let mut start = self.home(hash);
        while self.get(start).is_some_and(|slot| slot.hash < hash) {
            start += 1;
        }
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

    /// Adds a state at the front of its key's run. Returns where.
    pub(super) fn insert(&mut self, slot: Slot) -> usize {
        if self.used >= self.spread - self.spread / 8 {
            self.resize(self.spread + self.spread / 8 + 4);
        }
        loop {
            let index = self.run(slot.hash).start;
            if let Some(gap) = self.slots[index..].iter().position(Slot::is_vacant) {
                self.slots.copy_within(index..index + gap, index + 1);
                self.slots[index] = slot;
                self.used += 1;
                return index;
            }
            self.resize(self.spread + self.spread / 8 + 4);
        }
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

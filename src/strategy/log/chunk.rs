use std::ops::Deref;

use super::varint::{self, Reader};
use crate::time::Timestamp;

/// An instant, and the running total of units including those at this instant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) at: Timestamp,
    pub(super) total: u64,
}

/// A sequence of encoded [entries](super::varint). A chunk whose data is a `Vec` can grow.
#[derive(Clone, Debug, Default)]
pub(super) struct Chunk<Data> {
    /// The running total before the first entry.
    pub(super) before: u64,
    /// The instant to which the time of the first entry is relative.
    pub(super) base: Timestamp,
    /// The instant of the last entry.
    pub(super) last: Timestamp,
    pub(super) data: Data,
}

impl<Data: Deref<Target = [u8]>> Chunk<Data> {
    /// Iterates over the entries, with their running totals in the whole log.
    pub(super) fn entries(&self) -> impl Iterator<Item = Entry> + '_ {
        let (mut at, mut total) = (self.base, self.before);
        Reader(&self.data).map(move |(micros, units)| {
            at = at.plus(micros);
            total += units;
            Entry { at, total }
        })
    }

    /// Removes up to `units` from the entry at `at`. Returns the changed chunk and the number of
    /// removed units, or `None` if there is no such entry.
    pub(super) fn without(&self, at: Timestamp, units: u64) -> Option<(Chunk<Vec<u8>>, u64)> {
        let mut entries: Vec<_> = self.entries().collect();
        let taken = take_back(&mut entries, self.before, at, units);
        (taken > 0).then(|| (Chunk::of(self.before, &entries), taken))
    }
}

impl Chunk<Vec<u8>> {
    pub(super) fn new(before: u64) -> Self {
        Self { before, ..Self::default() }
    }

    /// Encodes entries.
    pub(super) fn of(before: u64, entries: &[Entry]) -> Self {
        let mut chunk = Self::new(before);
        let mut total = before;
        for entry in entries {
            chunk.push(entry.at, entry.total - total);
            total = entry.total;
        }
        chunk
    }

    #[inline]
    pub(super) fn push(&mut self, at: Timestamp, units: u64) {
        if self.data.is_empty() {
            (self.base, self.last) = (at, at);
        }
        let growth = self.growth();
        if growth > 0 {
            self.data.reserve_exact(growth);
        }
        varint::push(&mut self.data, at.since(self.last), units);
        self.last = at;
    }

    /// Returns the number of bytes that pushing another entry allocates.
    #[inline]
    pub(super) fn growth(&self) -> usize {
        let has_room = self.data.capacity() - self.data.len() >= varint::LONGEST;
        if has_room { 0 } else { (self.data.len() / 4).max(64) }
    }

    pub(super) fn sealed(self) -> Chunk<Box<[u8]>> {
        let Self { before, base, last, data } = self;
        Chunk { before, base, last, data: data.into_boxed_slice() }
    }
}

/// Removes up to `units` from the entry at `at`, if there is one, and removes the entry if it
/// becomes empty. `before` is the running total before the entries. Returns the number of removed
/// units.
fn take_back(entries: &mut Vec<Entry>, before: u64, at: Timestamp, units: u64) -> u64 {
    let Ok(index) = entries.binary_search_by_key(&at, |entry| entry.at) else { return 0 };
    let before = index.checked_sub(1).map_or(before, |last| entries[last].total);
    let taken = units.min(entries[index].total - before);
    for entry in &mut entries[index..] {
        entry.total -= taken;
    }
    if entries[index].total == before {
        entries.remove(index);
    }
    taken
}

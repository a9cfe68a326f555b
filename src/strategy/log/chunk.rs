//! A chunk of a long log: encoded entries.

use std::collections::VecDeque;
use std::ops::Deref;

use crate::time::Timestamp;

/// An instant, and the running total of units including those at this instant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) at: Timestamp,
    pub(super) total: u64,
}

/// A sequence of encoded [entries](Reader). A chunk whose data is a `Vec` can grow.
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

    /// Moves entries from the front to the end of `ring`, until it has `most` entries. While the ring
    /// is empty, skips entries for which the predicate is `true`, and sets `before` to the running
    /// total after them. Returns the number of bytes of all these entries, which the caller removes
    /// from the data.
    pub(super) fn move_first(
        &mut self,
        ring: &mut VecDeque<Entry>,
        most: usize,
        before: &mut u64,
        predicate: impl Fn(&Entry) -> bool,
    ) -> usize {
        let (mut at, mut total) = (self.base, self.before);
        let mut reader = Reader(&self.data);
        while ring.len() < most
            && let Some((micros, units)) = reader.next()
        {
            (at, total) = (at.plus(micros), total + units);
            let entry = Entry { at, total };
            if ring.is_empty() && predicate(&entry) {
                *before = total;
            } else {
                ring.push_back(entry);
            }
        }
        let moved = self.data.len() - reader.0.len();
        (self.base, self.before) = (at, total);
        moved
    }

    /// Removes up to `units` from the entry at `at`. Returns the changed chunk and the number of
    /// removed units, or `None` if no entry is at `at`.
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
        encode(&mut self.data, at.since(self.last), units);
        self.last = at;
    }

    /// Returns the number of bytes that pushing another entry allocates.
    #[inline]
    pub(super) fn growth(&self) -> usize {
        let has_room = self.data.capacity() - self.data.len() >= LONGEST_ENTRY;
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

/// The maximum length of an entry in bytes.
pub(super) const LONGEST_ENTRY: usize = 1 + 8 + 10;

/// The flag of the first byte for units other than 1.
const UNITS: u8 = 0x80;

/// The number of bits of the time in the first byte.
const LOW_BITS: u32 = 4;

/// The number of bytes for the other bits of the time, indexed by their three-bit code.
const LENGTHS: [usize; 8] = [0, 1, 2, 3, 4, 5, 6, 8];

/// Returns the length of an entry of one unit that is `micros` microseconds after the previous one.
pub(super) fn encoded_len(micros: u64) -> usize {
    let mut data = Vec::new();
    encode(&mut data, micros, 1);
    data.len()
}

/// Appends an entry that is `micros` microseconds after the previous one.
#[inline]
fn encode(data: &mut Vec<u8>, micros: u64, units: u64) {
    let high = micros >> LOW_BITS;
    let bytes = (u64::BITS - high.leading_zeros()).div_ceil(8);
    let code = if bytes > 6 { 7 } else { bytes };
    #[allow(clippy::cast_possible_truncation)] // 7 bits and a flag
    let first = (micros & 0xf) as u8 | (code as u8) << LOW_BITS | if units == 1 { 0 } else { UNITS };
    data.push(first);
    data.extend_from_slice(&high.to_le_bytes()[..LENGTHS[code as usize]]);
    if units != 1 {
        push_units(data, units);
    }
}

#[allow(clippy::cast_possible_truncation)] // low bits
fn push_units(data: &mut Vec<u8>, mut units: u64) {
    while units > 0x7f {
        data.push(units as u8 | 0x80);
        units >>= 7;
    }
    data.push(units as u8);
}

/// Decodes the entries of a chunk in order.
///
/// An entry is the time since the entry before it, in microseconds, and its units. The first byte
/// holds the low four bits of the time, the number of bytes that hold its other bits, and a flag
/// for units other than 1. Such units follow, with seven bits in each byte.
///
/// An entry of one unit takes at most four bytes if the time is at most 268 seconds, and five bytes
/// if it is at most 19 hours.
#[derive(Clone, Debug)]
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn units(&mut self) -> u64 {
        let (mut units, mut shift) = (0, 0);
        while let Some((&byte, rest)) = self.0.split_first() {
            self.0 = rest;
            units |= u64::from(byte & 0x7f) << shift;
            shift += 7;
            if byte & 0x80 == 0 {
                break;
            }
        }
        units
    }
}

impl Iterator for Reader<'_> {
    /// The microseconds since the previous entry, and the units.
    type Item = (u64, u64);

    #[inline]
    fn next(&mut self) -> Option<(u64, u64)> {
        let (&first, rest) = self.0.split_first()?;
        let (high, rest) = rest.split_at_checked(LENGTHS[usize::from(first >> LOW_BITS & 7)])?;
        let high = high.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte));
        self.0 = rest;
        let units = if first & UNITS == 0 { 1 } else { self.units() };
        Some((high << LOW_BITS | u64::from(first & 0xf), units))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_decoded_as_they_were_encoded() {
        let around = |bits: u32| [(1 << bits) - 1, 1 << bits, (1 << bits) + 1];
        let numbers: Vec<u64> = (1..63).flat_map(around).chain([0, u64::MAX]).collect();
        let entries: Vec<_> =
            numbers.iter().flat_map(|&micros| numbers.iter().map(move |&units| (micros, units))).collect();
        let mut data = Vec::new();
        for &(micros, units) in &entries {
            let before = data.len();
            encode(&mut data, micros, units);
            assert!(data.len() - before <= LONGEST_ENTRY, "{micros} {units}");
        }
        assert!(Reader(&data).eq(entries));
    }

    #[test]
    fn entries_of_one_unit_take_at_most_four_bytes_up_to_268_seconds_and_five_up_to_19_hours() {
        for (micros, bytes) in [(15, 1), (1_000_000, 3), (268_000_000, 4), (269_000_000, 5), (19 * 3_600_000_000, 5)] {
            let mut data = Vec::new();
            encode(&mut data, micros, 1);
            assert_eq!(data.len(), bytes);
        }
    }
}

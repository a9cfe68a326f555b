//! The encoded part of a long log: a list of chunks of entries.

use std::collections::VecDeque;
use std::mem;

use super::chunk::{Chunk, Entry, LONGEST_ENTRY, encoded_len};
use crate::time::Timestamp;

// A chunk has a sixteenth of the size of the log, within these bounds. Smaller chunks reduce the
// time to decode one. Larger chunks reduce the length of the list, which a refund has to update.

/// The minimum size of a chunk in bytes.
const LEAST: usize = 128;

/// The maximum size of a chunk in bytes.
pub(super) const MOST: usize = 1_024;

/// The size in bytes of a chunk in the list, without its data.
const LISTED: usize = mem::size_of::<Chunk<Box<[u8]>>>();

/// Encoded [entries](Entry) in chunks, so that no operation touches all of them.
///
/// An operation decodes few chunks, or a part of one. A refund also changes one number in each later
/// chunk.
#[derive(Clone, Debug)]
pub(super) struct Chunks {
    /// The chunks that no longer grow. A refund can shrink a chunk, and removes a chunk that
    /// becomes empty.
    sealed: VecDeque<Chunk<Box<[u8]>>>,
    /// The total number of bytes of data in the sealed chunks.
    bytes: usize,
    /// The chunk that grows. It may be empty.
    open: Chunk<Vec<u8>>,
    /// The running total before the last entry.
    before_last: u64,
    /// The last entry. It is in no chunk, because units may be added to it.
    last: Entry,
}

/// Returns the first entry for which the predicate is `false`, and the running total before it.
fn find(
    mut before: u64,
    entries: impl Iterator<Item = Entry>,
    predicate: impl Fn(&Entry) -> bool,
) -> Option<(u64, Entry)> {
    for entry in entries {
        if !predicate(&entry) {
            return Some((before, entry));
        }
        before = entry.total;
    }
    None
}

impl Chunks {
    /// Creates chunks from the first entry and the running total before it.
    pub(super) fn new(before: u64, first: Entry) -> Self {
        let open = Chunk::new(before);
        Self { sealed: VecDeque::new(), bytes: 0, open, before_last: before, last: first }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = Entry> + '_ {
        self.sealed.iter().flat_map(Chunk::entries).chain(self.open.entries()).chain([self.last])
    }

    #[inline]
    pub(super) fn last(&self) -> Entry {
        self.last
    }

    /// Returns the number of allocated bytes.
    #[inline]
    pub(super) fn bytes(&self) -> usize {
        self.bytes + self.open.data.capacity() + self.sealed.capacity() * LISTED + mem::size_of::<Self>()
    }

    /// Estimates the bytes of a log with `entries` entries at intervals of `micros` microseconds,
    /// including the ring.
    pub(super) fn full_bytes(entries: usize, micros: u64) -> usize {
        let entry = encoded_len(micros);
        let data = entries * entry;
        let chunk = (data / 16).clamp(LEAST, MOST);
        let first = chunk / entry * mem::size_of::<Entry>();
        mem::size_of::<Self>() + first + data + data.div_ceil(chunk) * LISTED
    }

    /// Returns the maximum number of bytes that another entry allocates.
    pub(super) fn growth(&self) -> usize {
        let seals = self.open.data.len() + LONGEST_ENTRY >= self.sealed_at();
        self.open.growth() + if seals { 64 + self.list_growth() * LISTED } else { 0 }
    }

    fn list_growth(&self) -> usize {
        if self.sealed.len() < self.sealed.capacity() { 0 } else { 4 + self.sealed.len() / 8 }
    }

    /// Returns the length at which the open chunk is sealed.
    #[inline]
    fn sealed_at(&self) -> usize {
        (self.bytes / 16).clamp(LEAST, MOST)
    }

    /// Returns the running total after the sealed chunk at this index.
    fn total_after(&self, number: usize) -> u64 {
        self.sealed.get(number + 1).map_or(self.open.before, |next| next.before)
    }

    /// Returns the number of leading sealed chunks in which the predicate is `true` for all
    /// entries.
    fn leading(&self, predicate: impl Fn(&Entry) -> bool) -> usize {
        let (mut from, mut to) = (0, self.sealed.len());
        while from < to {
            let middle = from.midpoint(to);
            if predicate(&Entry { at: self.sealed[middle].last, total: self.total_after(middle) }) {
                from = middle + 1;
            } else {
                to = middle;
            }
        }
        from
    }

    /// Returns the first entry for which the predicate is `false`, and the running total before it.
    fn find(&self, predicate: impl Fn(&Entry) -> bool) -> Option<(u64, Entry)> {
        let number = self.leading(&predicate);
        match self.sealed.get(number) {
            Some(chunk) => find(chunk.before, chunk.entries(), predicate),
            None => find(self.open.before, self.open.entries().chain([self.last]), predicate),
        }
    }

    #[inline(never)]
    pub(super) fn total_before(&self, predicate: impl Fn(&Entry) -> bool) -> u64 {
        self.find(predicate).map_or(self.last.total, |(before, _)| before)
    }

    #[inline(never)]
    pub(super) fn first_not(&self, predicate: impl Fn(&Entry) -> bool) -> Option<Entry> {
        self.find(predicate).map(|(_, entry)| entry)
    }

    /// Removes the leading sealed chunks in which the predicate is `true` for all entries.
    pub(super) fn drop_leading(&mut self, predicate: impl Fn(&Entry) -> bool) {
        let number = self.leading(predicate);
        self.bytes -= self.sealed.drain(..number).map(|chunk| chunk.data.len()).sum::<usize>();
        self.shrink_list();
    }

    /// Moves the first entries for which the predicate is `false` to `ring`, which is empty, until it
    /// has `most` entries. Removes those before them. Returns the running total before the first entry
    /// of the ring, and `true` if no entries remain here. Then the ring has room for another entry.
    ///
    /// Only a part of a chunk is decoded, so the ring never takes more memory than before, except in a
    /// clone.
    pub(super) fn move_first(
        &mut self,
        ring: &mut VecDeque<Entry>,
        most: usize,
        predicate: impl Fn(&Entry) -> bool,
    ) -> (u64, bool) {
        ring.reserve_exact(most);
        let mut before = self.sealed.front().map_or(self.open.before, |first| first.before);
        while ring.len() < most
            && let Some(first) = self.sealed.front_mut()
        {
            let moved = first.move_first(ring, most, &mut before, &predicate);
            self.bytes -= moved;
            if moved == first.data.len() {
                self.sealed.pop_front();
            } else {
                first.data = Box::from(&first.data[moved..]);
            }
        }
        self.shrink_list();
        if ring.len() < most {
            let moved = self.open.move_first(ring, most, &mut before, &predicate);
            self.open.data.drain(..moved);
        }
        if ring.len() + 1 >= most {
            return (before, false);
        }
        if !(ring.is_empty() && predicate(&self.last)) {
            ring.push_back(self.last);
        }
        (before, true)
    }

    /// Returns `true` if there are at most `most` entries.
    pub(super) fn is_short(&self, most: usize) -> bool {
        self.sealed.is_empty() && self.open.data.len() < most && self.iter().count() <= most
    }

    /// Shrinks the list if the log was much longer.
    fn shrink_list(&mut self) {
        if self.sealed.capacity() > 16 && self.sealed.len() < self.sealed.capacity() / 4 {
            self.sealed.shrink_to(self.sealed.len() * 2);
        }
    }

    /// Lowers the running totals of all entries, after entries before them were removed.
    pub(super) fn lower(&mut self, units: u64) {
        self.lower_from(0, units);
    }

    /// Lowers the running totals of all entries from the sealed chunk at index `number` on.
    fn lower_from(&mut self, number: usize, units: u64) {
        for chunk in self.sealed.range_mut(number..) {
            chunk.before -= units;
        }
        self.open.before -= units;
        self.before_last -= units;
        self.last.total -= units;
    }

    /// Removes the entries after `now`. Returns `true` if none remain.
    pub(super) fn drop_after(&mut self, now: Timestamp) -> bool {
        if self.last.at <= now {
            return false;
        }
        let number = self.leading(|entry| entry.at <= now);
        let (before, mut entries) = match self.sealed.get(number) {
            Some(chunk) => (chunk.before, chunk.entries().collect::<Vec<_>>()),
            None => (self.open.before, self.open.entries().collect()),
        };
        entries.retain(|entry| entry.at <= now);
        self.bytes -= self.sealed.drain(number..).map(|chunk| chunk.data.len()).sum::<usize>();
        self.reopen(before, &entries)
    }

    /// Replaces the open chunk and the last entry by these entries, or by those of the last sealed
    /// chunk if `entries` is empty. Returns `true` if no entries remain.
    fn reopen(&mut self, before: u64, entries: &[Entry]) -> bool {
        if let Some((last, others)) = entries.split_last() {
            self.open = Chunk::of(before, others);
            self.before_last = others.last().map_or(before, |entry| entry.total);
            self.last = *last;
            return false;
        }
        let Some(chunk) = self.sealed.pop_back() else { return true };
        self.bytes -= chunk.data.len();
        self.reopen(chunk.before, &chunk.entries().collect::<Vec<_>>())
    }

    /// Removes up to `units` from the entry at `at`, if there is one. Returns `true` if no entries
    /// remain.
    pub(super) fn take_back(&mut self, at: Timestamp, units: u64) -> bool {
        if at == self.last.at {
            self.last.total -= units.min(self.last.total - self.before_last);
            let has_left = self.last.total == self.before_last;
            return has_left && self.reopen(self.open.before, &self.open.entries().collect::<Vec<_>>());
        }
        let number = self.leading(|entry| entry.at < at);
        if let Some(chunk) = self.sealed.get_mut(number) {
            let Some((rest, taken)) = chunk.without(at, units) else { return false };
            self.bytes = self.bytes - chunk.data.len() + rest.data.len();
            *chunk = rest.sealed();
            self.lower_from(number + 1, taken);
            self.merge(number);
            self.merge(number.saturating_sub(1));
        } else if let Some((rest, taken)) = self.open.without(at, units) {
            self.open = rest;
            self.before_last -= taken;
            self.last.total -= taken;
        }
        false
    }

    /// Merges a sealed chunk with the next one if both are nearly empty, so that refunds do not
    /// leave a long list of small chunks. Removes the chunk if it is empty.
    fn merge(&mut self, number: usize) {
        let len = |number: usize| self.sealed.get(number).map(|chunk| chunk.data.len());
        match (len(number), len(number + 1)) {
            (Some(0), _) => {
                self.sealed.remove(number);
            }
            (Some(here), Some(next)) if here + next < LEAST => {
                if let Some(next) = self.sealed.remove(number + 1) {
                    let chunk = &mut self.sealed[number];
                    let entries: Vec<_> = chunk.entries().chain(next.entries()).collect();
                    *chunk = Chunk::of(chunk.before, &entries).sealed();
                    self.bytes = self.bytes - here - next.data.len() + chunk.data.len();
                }
            }
            _ => {}
        }
        self.shrink_list();
    }

    /// Raises the running total to `total` at an instant that is not before the last entry.
    #[inline(never)]
    pub(super) fn append(&mut self, at: Timestamp, total: u64) {
        if self.last.at == at {
            self.last.total = total;
            return;
        }
        self.open.push(self.last.at, self.last.total - self.before_last);
        self.before_last = self.last.total;
        self.last = Entry { at, total };
        if self.open.data.len() >= self.sealed_at() {
            self.seal();
        }
    }

    fn seal(&mut self) {
        let growth = self.list_growth();
        if growth > 0 {
            self.sealed.reserve_exact(growth);
        }
        let full = mem::replace(&mut self.open, Chunk::new(self.before_last)).sealed();
        self.bytes += full.data.len();
        self.sealed.push_back(full);
    }
}

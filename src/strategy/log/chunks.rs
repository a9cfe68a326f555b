use std::collections::VecDeque;
use std::mem;

use super::entries::Entry;
use crate::Timestamp;

/// The number of entries of a chunk.
///
/// A refund rewrites up to one chunk and one number for each later chunk. For a log of a million
/// entries the two are about equal.
pub(super) const CHUNK: usize = 1_024;

/// Entries in chunks of a fixed capacity, so that neither growth nor a refund touches all of them.
///
/// Between calls no chunk is empty. The methods that return an entry panic if there is no chunk.
#[derive(Clone, Debug)]
pub(super) struct Chunks {
    chunks: VecDeque<Chunk>,
}

#[derive(Clone, Debug)]
struct Chunk {
    /// The running total before the first entry. The totals of the entries start from it.
    before: u64,
    entries: Vec<Entry>,
}

impl Chunk {
    fn new(before: u64) -> Self {
        Self { before, entries: Vec::with_capacity(CHUNK) }
    }

    /// An entry of this chunk with its running total in the whole log.
    fn entry(&self, index: usize) -> Entry {
        let Entry { at, total } = self.entries[index];
        Entry { at, total: self.before + total }
    }

    fn last(&self) -> Entry {
        self.entry(self.entries.len() - 1)
    }

    fn push(&mut self, at: Timestamp, total: u64) {
        if self.entries.len() == self.entries.capacity() {
            // A clone has no more room than it has entries.
            self.entries.reserve_exact(CHUNK - self.entries.len());
        }
        self.entries.push(Entry { at, total: total - self.before });
    }

    /// The running total in front of this entry, in this chunk.
    fn total_before(&self, index: usize) -> u64 {
        index.checked_sub(1).map_or(0, |last| self.entries[last].total)
    }

    /// Removes up to `units` from the entry at `at`. Returns how many.
    fn take_back(&mut self, at: Timestamp, units: u64) -> u64 {
        let Ok(index) = self.entries.binary_search_by_key(&at, |entry| entry.at) else { return 0 };
        let before = self.total_before(index);
        let taken = units.min(self.entries[index].total - before);
        for entry in &mut self.entries[index..] {
            entry.total -= taken;
        }
        if self.entries[index].total == before {
            self.entries.remove(index);
        }
        taken
    }
}

impl Chunks {
    /// A first chunk for the entries after a running total of `before`. It has to get one.
    pub(super) fn after(before: u64) -> Self {
        Self { chunks: VecDeque::from([Chunk::new(before)]) }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = Entry> + '_ {
        self.chunks.iter().flat_map(|chunk| (0..chunk.entries.len()).map(|index| chunk.entry(index)))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.chunks.is_empty()
    }

    pub(super) fn is_single(&self) -> bool {
        self.chunks.len() == 1
    }

    pub(super) fn last(&self) -> Entry {
        self.chunks[self.chunks.len() - 1].last()
    }

    /// The number of entries that fit into the memory that is allocated, with that of the list of
    /// chunks.
    pub(super) fn room(&self) -> usize {
        const LISTED: usize = mem::size_of::<Chunk>() / mem::size_of::<Entry>();
        self.chunks.len() * CHUNK + self.chunks.capacity() * LISTED
    }

    /// Returns `true` if one entry more takes a new chunk.
    pub(super) fn is_full(&self) -> bool {
        self.chunks.back().is_none_or(|last| last.entries.len() == CHUNK)
    }

    /// Where the first entry is that does not satisfy `is_so`: the number of its chunk and its index
    /// there. Behind the last chunk if all do.
    fn find(&self, is_so: impl Fn(&Entry) -> bool) -> (usize, usize) {
        let number = self.chunks.partition_point(|chunk| is_so(&chunk.last()));
        let index = self.chunks.get(number).map_or(0, |chunk| {
            let whole = |entry: &Entry| Entry { at: entry.at, total: chunk.before + entry.total };
            chunk.entries.partition_point(|entry| is_so(&whole(entry)))
        });
        (number, index)
    }

    #[inline(never)]
    pub(super) fn total_before(&self, is_so: impl Fn(&Entry) -> bool) -> u64 {
        let (number, index) = self.find(is_so);
        self.chunks.get(number).map_or_else(|| self.last().total, |chunk| chunk.before + chunk.total_before(index))
    }

    #[inline(never)]
    pub(super) fn first_not(&self, is_so: impl Fn(&Entry) -> bool) -> Option<Entry> {
        let (number, index) = self.find(is_so);
        self.chunks.get(number).map(|chunk| chunk.entry(index))
    }

    /// Removes the leading chunks of which all entries satisfy `is_so`. Returns the number of
    /// entries that do in the first chunk that is left.
    pub(super) fn drop_leading(&mut self, is_so: impl Fn(&Entry) -> bool) -> usize {
        let (number, index) = self.find(is_so);
        self.chunks.drain(..number);
        index
    }

    /// Takes out the entries of the first chunk. Running totals start anew with it.
    pub(super) fn pop_first(&mut self) -> Vec<Entry> {
        let Some(first) = self.chunks.pop_front() else { return Vec::new() };
        self.lower(first.before);
        // The list of a log that was long once gives its memory back.
        if self.chunks.capacity() > 16 && self.chunks.len() < self.chunks.capacity() / 4 {
            self.chunks.shrink_to(self.chunks.len() * 2);
        }
        first.entries
    }

    /// Lowers the running totals of all entries, of which something in front was removed.
    pub(super) fn lower(&mut self, units: u64) {
        for chunk in &mut self.chunks {
            chunk.before -= units;
        }
    }

    /// Removes the entries after `now`.
    pub(super) fn drop_after(&mut self, now: Timestamp) {
        let (number, index) = self.find(|entry| entry.at <= now);
        self.chunks.truncate(number + usize::from(index > 0));
        if let Some(last) = self.chunks.get_mut(number) {
            last.entries.truncate(index);
        }
    }

    /// Removes up to `units` from the entry at `at`, if there is one.
    pub(super) fn take_back(&mut self, at: Timestamp, units: u64) {
        let (number, _) = self.find(|entry| entry.at < at);
        let Some(chunk) = self.chunks.get_mut(number) else { return };
        let taken = chunk.take_back(at, units);
        for later in self.chunks.range_mut(number + 1..) {
            later.before -= taken;
        }
        self.merge(number);
        self.merge(number.saturating_sub(1));
    }

    /// Merges a chunk with the one behind it if together they fill less than half a chunk, so that
    /// many refunds do not leave a long list of nearly empty chunks. Removes it if it is empty.
    fn merge(&mut self, number: usize) {
        let len = |number: usize| self.chunks.get(number).map(|chunk| chunk.entries.len());
        match (len(number), len(number + 1)) {
            (Some(0), _) => {
                self.chunks.remove(number);
            }
            (Some(here), Some(next)) if here + next < CHUNK / 2 => {
                if let Some(next) = self.chunks.remove(number + 1) {
                    for index in 0..next.entries.len() {
                        let Entry { at, total } = next.entry(index);
                        self.chunks[number].push(at, total);
                    }
                }
            }
            _ => {}
        }
    }

    /// Raises the running total at the end to `total`, at an instant that is not before the last
    /// entry.
    #[inline(never)]
    pub(super) fn append(&mut self, at: Timestamp, total: u64) {
        if self.is_full() {
            let last = self.last();
            if last.at != at {
                self.chunks.push_back(Chunk::new(last.total));
            }
        }
        let number = self.chunks.len() - 1;
        let chunk = &mut self.chunks[number];
        match chunk.entries.last_mut() {
            Some(last) if last.at == at => last.total = total - chunk.before,
            _ => chunk.push(at, total),
        }
    }
}

use std::collections::VecDeque;
use std::mem;

use super::chunks::Chunks;
use crate::Timestamp;

/// A ring of more entries than this is split into chunks.
pub(super) const LONGEST_RING: usize = 128;

/// The number of entries that stay in the ring when it is split.
const FIRST: usize = 32;

/// An instant and the running total of units up to and with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) at: Timestamp,
    pub(super) total: u64,
}

/// The entries of a log, oldest first.
///
/// Up to [`LONGEST_RING`] entries are one ring, whose capacity doubles. A longer log has a ring for
/// its oldest entries only, and the later ones as bytes in chunks, which take a quarter of the memory.
/// It becomes one ring again when half as many entries are left. A short log stays a ring because a
/// hit on a ring needs fewer instructions.
#[derive(Clone, Debug, Default)]
pub(super) struct Entries {
    /// The running total before the first entry.
    dropped: u64,
    /// The oldest entries. Empty only if the log is.
    ring: VecDeque<Entry>,
    /// The entries after the ring. They are boxed, so a short log takes one word for them.
    chunks: Option<Box<Chunks>>,
}

impl Entries {
    /// The instants, rising, and the units at each.
    pub(super) fn iter(&self) -> impl Iterator<Item = (Timestamp, u32)> + '_ {
        let mut before = self.dropped;
        let later = self.chunks.iter().flat_map(|chunks| chunks.iter());
        self.ring.iter().copied().chain(later).map(move |entry| {
            #[allow(clippy::cast_possible_truncation)] // pushed as a u32
            let units = (entry.total - before) as u32;
            before = entry.total;
            (entry.at, units)
        })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.ring.is_empty()
    }

    #[inline]
    pub(super) fn first_at(&self) -> Option<Timestamp> {
        self.ring.front().map(|first| first.at)
    }

    #[inline]
    pub(super) fn last_at(&self) -> Option<Timestamp> {
        match &self.chunks {
            None => self.ring.back().map(|last| last.at),
            Some(chunks) => Some(chunks.last().at),
        }
    }

    /// The running total up to the last entry.
    #[inline]
    pub(super) fn total(&self) -> u64 {
        match &self.chunks {
            None => self.ring.back().map_or(self.dropped, |last| last.total),
            Some(chunks) => chunks.last().total,
        }
    }

    /// The bytes that are allocated.
    #[inline]
    pub(super) fn bytes(&self) -> usize {
        self.ring.capacity() * mem::size_of::<Entry>() + self.chunks.as_ref().map_or(0, |chunks| chunks.bytes())
    }

    /// About the bytes of so many entries that are spread over `period` microseconds.
    pub(super) fn full_bytes(entries: usize, period: u64) -> usize {
        if entries <= LONGEST_RING {
            return entries.max(4).next_power_of_two() * mem::size_of::<Entry>();
        }
        Chunks::full_bytes(entries, period / entries as u64)
    }

    /// The most bytes that one entry more allocates.
    #[inline]
    pub(super) fn growth(&self) -> usize {
        match &self.chunks {
            None if self.ring.len() < self.ring.capacity() => 0,
            None if self.ring.len() < LONGEST_RING => self.ring.capacity().max(4) * mem::size_of::<Entry>(),
            // The ring becomes shorter by more than the chunks take.
            None => 0,
            Some(chunks) => chunks.growth(),
        }
    }

    /// The running total before the first entry that does not satisfy `is_so`, which holds for the
    /// entries in front of it and for none behind it.
    #[inline]
    pub(super) fn total_before(&self, is_so: impl Fn(&Entry) -> bool) -> u64 {
        let index = self.leading(&is_so);
        if index == self.ring.len()
            && let Some(chunks) = &self.chunks
        {
            return chunks.total_before(is_so);
        }
        index.checked_sub(1).map_or(self.dropped, |last| self.ring[last].total)
    }

    /// The instant of the first entry that does not satisfy `is_so`.
    #[inline]
    pub(super) fn first_not(&self, is_so: impl Fn(&Entry) -> bool) -> Option<Timestamp> {
        let index = self.leading(&is_so);
        match self.ring.get(index) {
            Some(entry) => Some(entry.at),
            None => Some(self.chunks.as_ref()?.first_not(is_so)?.at),
        }
    }

    /// The number of leading entries of the ring that satisfy `is_so`. Nearly always the first few
    /// decide, because each hit drops the expired entries. Otherwise it is a binary search.
    #[inline]
    fn leading(&self, is_so: impl Fn(&Entry) -> bool) -> usize {
        const FEW: usize = 4;
        for index in 0..FEW {
            if !self.ring.get(index).is_some_and(&is_so) {
                return index;
            }
        }
        self.ring.partition_point(is_so)
    }

    /// Removes the leading entries that satisfy `is_so`.
    #[inline]
    pub(super) fn drop_leading(&mut self, is_so: impl Fn(&Entry) -> bool) {
        let mut leading = self.leading(&is_so);
        if self.chunks.is_some() {
            leading = self.drop_chunks(leading, is_so);
        }
        self.drop_from_ring(leading);
    }

    /// Removes the leading chunks of which all entries satisfy `is_so`. `leading` entries of the
    /// ring do. Returns the number of those that do in the ring that is left.
    #[inline(never)]
    fn drop_chunks(&mut self, mut leading: usize, is_so: impl Fn(&Entry) -> bool) -> usize {
        if leading == self.ring.len()
            && let Some(chunks) = &mut self.chunks
        {
            chunks.drop_leading(&is_so);
            self.next_chunk();
            leading = self.leading(is_so);
        }
        // Half of the ring's length, so that a log whose length varies a little does not change its
        // form at each hit.
        let most = (LONGEST_RING / 2).saturating_sub(self.ring.len());
        if let Some(chunks) = self.chunks.take_if(|chunks| chunks.is_short(most)) {
            self.ring.extend(chunks.iter());
        }
        leading
    }

    #[inline]
    fn drop_from_ring(&mut self, leading: usize) {
        if let Some(last) = leading.checked_sub(1) {
            self.dropped = self.ring[last].total;
            if leading == 1 {
                self.ring.pop_front();
            } else {
                self.ring.drain(..leading);
            }
        }
        if self.ring.is_empty() {
            self.dropped = 0;
        }
        // A log that was long once gives its memory back. A ring in front of chunks is never pushed to.
        let (least, room) = if self.chunks.is_some() { (2, 1) } else { (4, 2) };
        if self.ring.capacity() > 16 && self.ring.len() < self.ring.capacity() / least {
            self.ring.shrink_to(self.ring.len() * room);
        }
    }

    /// Makes the entries of the first chunk the ring, in place of the ring that has no entries to
    /// keep. Running totals start anew with it.
    fn next_chunk(&mut self) {
        self.dropped = 0;
        self.ring.clear();
        if let Some(chunks) = &mut self.chunks
            && chunks.move_first(&mut self.ring)
        {
            self.chunks = None;
        }
    }

    /// Removes the entries after `now`.
    #[cold]
    pub(super) fn drop_after(&mut self, now: Timestamp) {
        self.chunks.take_if(|chunks| chunks.drop_after(now));
        self.ring.truncate(self.ring.partition_point(|entry| entry.at <= now));
    }

    /// Removes up to `units` from the entry at `at`, if there is one.
    pub(super) fn take_back(&mut self, at: Timestamp, units: u64) {
        if let Some(chunks) = &mut self.chunks
            && self.ring.back().is_none_or(|last| last.at < at)
        {
            if chunks.take_back(at, units) {
                self.chunks = None;
            }
            return;
        }
        let Ok(index) = self.ring.binary_search_by_key(&at, |entry| entry.at) else { return };
        let before = index.checked_sub(1).map_or(self.dropped, |last| self.ring[last].total);
        let taken = units.min(self.ring[index].total - before);
        for entry in self.ring.range_mut(index..) {
            entry.total -= taken;
        }
        if self.ring[index].total == before {
            self.ring.remove(index);
        }
        if let Some(chunks) = &mut self.chunks {
            chunks.lower(taken);
            if self.ring.is_empty() {
                self.next_chunk();
            }
        }
    }

    /// Raises the running total at the end of the log to `total`, at an instant that is not before
    /// the last entry.
    #[inline]
    pub(super) fn append(&mut self, at: Timestamp, total: u64) {
        if let Some(chunks) = &mut self.chunks {
            return chunks.append(at, total);
        }
        let len = self.ring.len();
        match self.ring.back_mut() {
            Some(last) if last.at == at => last.total = total,
            _ if len < LONGEST_RING => self.ring.push_back(Entry { at, total }),
            _ => self.split().append(at, total),
        }
    }

    /// Moves all entries of the ring but the oldest into chunks.
    #[cold]
    fn split(&mut self) -> &mut Chunks {
        let mut chunks = Chunks::new(self.ring[FIRST - 1].total, self.ring[FIRST]);
        for entry in self.ring.range(FIRST + 1..) {
            chunks.append(entry.at, entry.total);
        }
        self.ring.truncate(FIRST);
        self.ring.shrink_to_fit();
        self.chunks.insert(Box::new(chunks))
    }
}

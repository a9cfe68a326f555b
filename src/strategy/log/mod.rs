//! The log of a moving window: a ring of entries, and chunks of encoded entries after it.
//!
//! After a charge, a log may hold more entries than its limit has units. Merging the oldest ones
//! would be wrong after a refund, so the log grows. A storage with a maximum value size then fails
//! to settle, and the estimate stays.
//!
//! A log of up to 128 entries stays a ring, because a hit on a ring needs fewer instructions than
//! one on chunks. In chunks, a log of 1,000 or more entries takes at most six bytes for each.
//!
//! The ring before chunks has room for 32 entries, and is filled again when all of them have
//! expired. A whole chunk can be larger: the logs of a full storage would grow by a third when their
//! clients return, because a storage does not check the growth of a log whose oldest entry expires.

mod chunk;
mod chunks;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::mem;

use self::chunk::Entry;
use self::chunks::Chunks;
use crate::time::Timestamp;

/// A log of admitted units, the state of a [`MovingWindow`](super::MovingWindow). It has one entry
/// for each instant at which units were admitted, with the running total.
///
/// A decision finds the oldest entry that is not expired by a binary search, and subtracts running
/// totals. It takes little longer on ten thousand entries than on ten.
///
/// A log of up to 128 entries is a ring, with 16 bytes per entry. In a longer log, only the oldest
/// entries are in the ring. The others are encoded in chunks, as differences, which take about four
/// bytes each if hits are at most two minutes apart. The whole log is a ring again when its length
/// has fallen below 32. Adding an entry, or refunding an old one, touches only a part of the log.
///
/// ```
/// use tower_ratelimit::Timestamp;
/// use tower_ratelimit::strategy::Log;
///
/// let until = Timestamp::from_micros(90);
/// let entries = [(Timestamp::from_micros(10), 2), (Timestamp::from_micros(30), 1)];
/// let log = Log::from_entries(until, entries);
/// assert!(log.entries().eq(entries));
/// ```
#[derive(Clone, Debug, Default)]
pub struct Log {
    until: Timestamp,
    entries: Entries,
}

impl Log {
    /// Creates a log from instants and the units admitted at each, for storages that decode logs.
    ///
    /// `until` is the instant from which the log has no effect: one period after the newest entry.
    /// The entries can be in any order. Entries of 0 units are skipped.
    pub fn from_entries(until: Timestamp, entries: impl IntoIterator<Item = (Timestamp, u32)>) -> Self {
        let mut sorted: Vec<_> = entries.into_iter().collect();
        sorted.sort_by_key(|&(at, _)| at);
        let mut log = Self { until, ..Self::default() };
        for (at, units) in sorted {
            log.push(at, units);
        }
        log
    }

    /// Iterates over the instants, in rising order, and the units admitted at each.
    pub fn entries(&self) -> impl Iterator<Item = (Timestamp, u32)> + '_ {
        self.entries.iter()
    }

    /// Returns the instant from which the log has no effect.
    pub fn until(&self) -> Timestamp {
        self.until
    }

    /// Returns the size of the log in bytes, including its allocations.
    #[inline]
    pub fn bytes(&self) -> usize {
        mem::size_of::<Self>() + self.entries.bytes()
    }

    /// Estimates the bytes of a log with `entries` entries that are spread over `period`
    /// microseconds.
    pub(crate) fn full_bytes(entries: u32, period: u64) -> usize {
        mem::size_of::<Self>() + Entries::full_bytes(entries as usize, period)
    }

    /// Returns the maximum number of bytes that a hit at `now` adds to the log:
    ///
    /// - 0 if the hit needs no new entry, if there is room for an entry, or if an expired entry
    ///   makes room.
    /// - Otherwise, a ring doubles its capacity, and a longer log grows by a part of a chunk.
    ///
    /// In a log of more than 128 entries, an expired entry may make less room than the new one takes.
    /// So the log can grow by a part of a chunk although the result is 0.
    #[inline]
    pub fn growth_at(&self, now: Timestamp) -> usize {
        let growth = self.entries.growth();
        if growth == 0 {
            return 0;
        }
        match (self.entries.last_at(), self.oldest_expires_at()) {
            (Some(last), Some(expiry)) if last == now || expiry <= now => 0,
            _ => growth,
        }
    }

    /// Returns the instant at which the oldest entry expires, or `None` for an empty log.
    #[inline]
    pub(crate) fn oldest_expires_at(&self) -> Option<Timestamp> {
        Some(self.entries.first_at()?.plus(self.until.since(self.entries.last_at()?)))
    }

    /// Returns the instant of the newest entry, or `None` for an empty log.
    pub(crate) fn newest(&self) -> Option<Timestamp> {
        self.entries.last_at()
    }

    /// Returns the number of units that were added less than `period` microseconds before `now`.
    pub(super) fn active(&self, now: Timestamp, period: u64) -> u64 {
        self.entries.total() - self.entries.total_before(|entry| now.since(entry.at) >= period)
    }

    /// Returns the instant at which the active units fall to `units`, or `None` for an empty log.
    pub(super) fn falls_to(&self, units: u64, now: Timestamp, period: u64) -> Option<Timestamp> {
        let leaving = self.entries.total().saturating_sub(units);
        let at = self.entries.first_not(|entry| entry.total < leaving)?;
        // An entry ahead of now counts as made now, because the clock has gone back.
        Some(at.min(now).plus(period))
    }

    /// Returns `true` if an entry is later than `now`, because the clock has gone back.
    #[inline]
    pub(super) fn is_ahead_of(&self, now: Timestamp) -> bool {
        self.entries.last_at().is_some_and(|last| last > now)
    }

    /// Drops entries that are at least `period` old. Returns `true` if entries remain.
    pub(super) fn expire(&mut self, now: Timestamp, period: u64) -> bool {
        self.entries.drop_leading(|entry| now.since(entry.at) >= period);
        !self.entries.is_empty()
    }

    /// Drops entries that are at least `period` old, and adds units at `now`.
    pub(super) fn add(&mut self, now: Timestamp, period: u64, units: u32) {
        self.entries.drop_leading(|entry| now.since(entry.at) >= period);
        if self.entries.last_at().is_some_and(|last| last > now) {
            // Moves entries that are ahead of now to now.
            let total = self.entries.total();
            self.entries.drop_after(now);
            self.entries.append(now, total);
        }
        self.push(now, units);
        self.until = now.plus(period);
    }

    /// Removes up to `units` that were added at `at`. Returns `true` if entries remain.
    pub(super) fn take_back(&mut self, at: Timestamp, period: u64, units: u32) -> bool {
        self.entries.take_back(at, units.into());
        self.until = self.entries.last_at().map_or(Timestamp::EPOCH, |last| last.plus(period));
        !self.entries.is_empty()
    }

    #[inline]
    fn push(&mut self, at: Timestamp, units: u32) {
        if units > 0 {
            self.entries.append(at, self.entries.total().saturating_add(u64::from(units)));
        }
    }
}

/// Compares the end and the entries.
impl PartialEq for Log {
    fn eq(&self, other: &Self) -> bool {
        self.until == other.until && self.entries().eq(other.entries())
    }
}

impl Eq for Log {}

/// The maximum length of the ring. A longer log is split into a ring and chunks.
const LONGEST_RING: usize = 128;

/// The number of entries that stay in the ring after a split, and the maximum length of a ring before
/// chunks.
const FIRST: usize = 32;

/// The entries of a log, oldest first.
///
/// Up to [`LONGEST_RING`] entries are a ring, whose capacity doubles. A longer log has a ring for
/// its oldest entries only, up to [`FIRST`]. The later ones are encoded in chunks, which take a
/// quarter of the memory. The log becomes a ring again when the ring has room for all entries and
/// another one, so it does not grow. Short logs are rings because a hit on a ring is faster.
#[derive(Clone, Debug, Default)]
struct Entries {
    /// The running total before the first entry.
    dropped: u64,
    /// The oldest entries. Empty only if the log is empty.
    ring: VecDeque<Entry>,
    /// The entries after the ring. Boxed, so that a short log spends only one word on them.
    chunks: Option<Box<Chunks>>,
}

impl Entries {
    /// Iterates over the instants, in rising order, and the units at each.
    fn iter(&self) -> impl Iterator<Item = (Timestamp, u32)> + '_ {
        let mut before = self.dropped;
        let later = self.chunks.iter().flat_map(|chunks| chunks.iter());
        self.ring.iter().copied().chain(later).map(move |entry| {
            #[allow(clippy::cast_possible_truncation)] // it was a u32
            let units = (entry.total - before) as u32;
            before = entry.total;
            (entry.at, units)
        })
    }

    #[cfg(test)]
    fn is_ring(&self) -> bool {
        self.chunks.is_none()
    }

    fn is_empty(&self) -> bool {
        self.ring.is_empty()
    }

    #[inline]
    fn first_at(&self) -> Option<Timestamp> {
        self.ring.front().map(|first| first.at)
    }

    #[inline]
    fn last_at(&self) -> Option<Timestamp> {
        match &self.chunks {
            None => self.ring.back().map(|last| last.at),
            Some(chunks) => Some(chunks.last().at),
        }
    }

    /// Returns the running total after the last entry.
    #[inline]
    fn total(&self) -> u64 {
        match &self.chunks {
            None => self.ring.back().map_or(self.dropped, |last| last.total),
            Some(chunks) => chunks.last().total,
        }
    }

    /// Returns the number of allocated bytes.
    #[inline]
    fn bytes(&self) -> usize {
        self.ring.capacity() * mem::size_of::<Entry>() + self.chunks.as_ref().map_or(0, |chunks| chunks.bytes())
    }

    /// Estimates the bytes of a log with `entries` entries that are spread over `period`
    /// microseconds.
    fn full_bytes(entries: usize, period: u64) -> usize {
        if entries <= LONGEST_RING {
            return entries.max(4).next_power_of_two() * mem::size_of::<Entry>();
        }
        Chunks::full_bytes(entries, period / entries as u64)
    }

    /// Returns the maximum number of bytes that another entry allocates.
    #[inline]
    fn growth(&self) -> usize {
        match &self.chunks {
            None if self.ring.len() < self.ring.capacity() => 0,
            None if self.ring.len() < LONGEST_RING => self.ring.capacity().max(4) * mem::size_of::<Entry>(),
            // The next entry splits the log: the ring shrinks by more than the chunks take.
            None => 0,
            Some(chunks) => chunks.growth(),
        }
    }

    /// Returns the running total before the first entry for which the predicate is `false`. The
    /// predicate must be `false` for all later entries.
    #[inline]
    fn total_before(&self, predicate: impl Fn(&Entry) -> bool) -> u64 {
        let index = self.leading(&predicate);
        if index == self.ring.len()
            && let Some(chunks) = &self.chunks
        {
            return chunks.total_before(predicate);
        }
        index.checked_sub(1).map_or(self.dropped, |last| self.ring[last].total)
    }

    /// Returns the instant of the first entry for which the predicate is `false`. The predicate
    /// must be `false` for all later entries.
    #[inline]
    fn first_not(&self, predicate: impl Fn(&Entry) -> bool) -> Option<Timestamp> {
        let index = self.leading(&predicate);
        match self.ring.get(index) {
            Some(entry) => Some(entry.at),
            None => Some(self.chunks.as_ref()?.first_not(predicate)?.at),
        }
    }

    /// Returns the number of leading entries of the ring for which the predicate is `true`.
    ///
    /// Each hit drops the expired entries, so the result is usually small. So the first few entries
    /// are scanned before a binary search.
    #[inline]
    fn leading(&self, predicate: impl Fn(&Entry) -> bool) -> usize {
        const FEW: usize = 4;
        for index in 0..FEW {
            if !self.ring.get(index).is_some_and(&predicate) {
                return index;
            }
        }
        self.ring.partition_point(predicate)
    }

    /// Removes the leading entries for which the predicate is `true`.
    #[inline]
    fn drop_leading(&mut self, predicate: impl Fn(&Entry) -> bool) {
        let mut leading = self.leading(&predicate);
        if self.chunks.is_some() {
            leading = self.drop_chunks(leading, predicate);
        }
        self.drop_from_ring(leading);
    }

    /// Removes the leading entries of the chunks for which the predicate is `true`, if it is `true`
    /// for the whole ring. `leading` is the number of leading entries of the ring for which it is
    /// `true`. Returns that number for the new ring.
    #[inline(never)]
    fn drop_chunks(&mut self, mut leading: usize, predicate: impl Fn(&Entry) -> bool) -> usize {
        if leading == self.ring.len()
            && let Some(chunks) = &mut self.chunks
        {
            chunks.drop_leading(&predicate);
            self.refill_ring(predicate);
            leading = 0;
        }
        // The ring has room for these entries and the next one. That is a quarter of the maximum
        // length, so a log whose length varies a little is not converted at each hit.
        let most = (FIRST - 1).saturating_sub(self.ring.len());
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
        // Shrinks a log that was much longer. A ring before chunks keeps its capacity, because it is
        // filled again.
        if self.ring.capacity() > 16 && self.ring.len() < self.ring.capacity() / 4 && self.chunks.is_none() {
            self.ring.shrink_to(self.ring.len() * 2);
        }
    }

    /// Replaces the ring by the first entries of the chunks for which the predicate is `false`.
    fn refill_ring(&mut self, predicate: impl Fn(&Entry) -> bool) {
        self.ring.clear();
        if let Some(chunks) = &mut self.chunks {
            let (before, is_empty) = chunks.move_first(&mut self.ring, FIRST, predicate);
            self.dropped = before;
            if is_empty {
                self.chunks = None;
            }
        }
    }

    /// Removes the entries after `now`.
    #[cold]
    fn drop_after(&mut self, now: Timestamp) {
        self.chunks.take_if(|chunks| chunks.drop_after(now));
        self.ring.truncate(self.ring.partition_point(|entry| entry.at <= now));
    }

    /// Removes up to `units` from the entry at `at`, if there is one.
    fn take_back(&mut self, at: Timestamp, units: u64) {
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
                self.refill_ring(|_| false);
            }
        }
    }

    /// Raises the running total to `total` at an instant that is not before the last entry.
    #[inline]
    fn append(&mut self, at: Timestamp, total: u64) {
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

    /// Moves all but the oldest entries of the ring into chunks.
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

mod chunk;
mod chunks;
mod entries;
#[cfg(test)]
mod tests;
mod varint;

use std::mem;

use self::entries::Entries;
use crate::time::Timestamp;

/// A log of admitted units, the state of a [`MovingWindow`](super::MovingWindow). It has one entry
/// for each instant at which units were admitted, with the running total.
///
/// A decision is a binary search over the running totals. It takes little longer on ten thousand
/// entries than on ten.
///
/// A log of up to 128 entries is a ring, with 16 bytes per entry. In a longer log, only the oldest
/// entries are in the ring. The others are encoded in chunks, as differences, which take about four
/// bytes each if hits are at most two minutes apart. The whole log is a ring again when its length
/// has fallen to 64. Adding an entry, or refunding an old one, touches only a part of the log.
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

    /// Returns the bytes of the log, including its allocations.
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
    /// The result does not include the memory for decoding a chunk, up to 17 KiB, when the oldest
    /// entries of a longer log expire.
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

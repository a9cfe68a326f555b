mod chunk;
mod chunks;
mod entries;
#[cfg(test)]
mod tests;
mod varint;

use std::mem;

use self::entries::Entries;
use crate::Timestamp;

/// When units were admitted: one entry for each instant, with the running total up to it.
///
/// A binary search over the running totals finds the units of any span, so a decision on a log of
/// ten thousand entries costs little more than one on a log of ten.
///
/// Up to 128 entries are a ring of 16 bytes each. The later entries of a longer log are encoded as
/// differences, in chunks. They take about four bytes each where hits are up to two minutes apart.
/// Neither growth nor a refund of an old entry touches all of a log.
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
    /// The log with these instants and the units admitted at each, for a storage that reads back what it wrote.
    /// `until` is the instant from which all of it is forgotten. Entries out of order are put in order.
    pub fn from_entries(until: Timestamp, entries: impl IntoIterator<Item = (Timestamp, u32)>) -> Self {
        let mut sorted: Vec<_> = entries.into_iter().collect();
        sorted.sort_by_key(|&(at, _)| at);
        let mut log = Self { until, ..Self::default() };
        for (at, units) in sorted {
            log.push(at, units);
        }
        log
    }

    /// The instants, rising, and the units admitted at each.
    pub fn entries(&self) -> impl Iterator<Item = (Timestamp, u32)> + '_ {
        self.entries.iter()
    }

    /// The instant from which all of it is forgotten.
    pub fn until(&self) -> Timestamp {
        self.until
    }

    /// Returns the number of bytes that the log has allocated.
    #[inline]
    pub fn bytes(&self) -> usize {
        mem::size_of::<Self>() + self.entries.bytes()
    }

    /// Returns about how many bytes a log of so many entries takes that are spread over `period`
    /// microseconds.
    pub(crate) fn full_bytes(entries: u32, period: u64) -> usize {
        mem::size_of::<Self>() + Entries::full_bytes(entries as usize, period)
    }

    /// Returns the most bytes by which a hit at `now` makes the log larger: 0 if there is room for an
    /// entry, or an expired one to drop for it.
    ///
    /// While each hit drops an entry, a long log returns as much as it takes, but may do so up to one
    /// chunk later. A chunk is a sixteenth of the log, at least 128 bytes and at most 1,024.
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

    /// Returns the instant at which the oldest entry expires, `None` for an empty log.
    #[inline]
    pub(crate) fn oldest_expires_at(&self) -> Option<Timestamp> {
        Some(self.entries.first_at()?.plus(self.until.since(self.entries.last_at()?)))
    }

    /// Units that are younger than `period`.
    pub(super) fn active(&self, now: Timestamp, period: u64) -> u64 {
        self.entries.total() - self.entries.total_before(|entry| now.since(entry.at) >= period)
    }

    /// When the entry leaves after which at most `units` are left; `None` for an empty log.
    pub(super) fn falls_to(&self, units: u64, now: Timestamp, period: u64) -> Option<Timestamp> {
        let leaving = self.entries.total().saturating_sub(units);
        let at = self.entries.first_not(|entry| entry.total < leaving)?;
        // An entry ahead of now was written by a clock that has gone back: it counts as made now.
        Some(at.min(now).plus(period))
    }

    /// Returns `true` if an entry is later than `now`: the clock has gone back since.
    #[inline]
    pub(super) fn is_ahead_of(&self, now: Timestamp) -> bool {
        self.entries.last_at().is_some_and(|last| last > now)
    }

    /// Drops what is at least `period` old at `now`. Returns `true` if anything is left.
    pub(super) fn expire(&mut self, now: Timestamp, period: u64) -> bool {
        self.entries.drop_leading(|entry| now.since(entry.at) >= period);
        !self.entries.is_empty()
    }

    /// Adds units at `now`, after dropping what is at least `period` old.
    pub(super) fn add(&mut self, now: Timestamp, period: u64, units: u32) {
        self.entries.drop_leading(|entry| now.since(entry.at) >= period);
        if self.entries.last_at().is_some_and(|last| last > now) {
            // Entries ahead of now count as made now, from here on.
            let total = self.entries.total();
            self.entries.drop_after(now);
            self.entries.append(now, total);
        }
        self.push(now, units);
        self.until = now.plus(period);
    }

    /// Takes back up to `units` that were added at `at`. Returns `true` if anything is left.
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

/// Equal when the same units were admitted at the same instants.
impl PartialEq for Log {
    fn eq(&self, other: &Self) -> bool {
        self.until == other.until && self.entries().eq(other.entries())
    }
}

impl Eq for Log {}

use std::collections::VecDeque;

use crate::Timestamp;

/// When units were admitted: one entry for each instant, with the running total up to it.
///
/// Running totals let the units of any span be found by halving, so deciding on a log of ten thousand entries costs
/// little more than on one of ten.
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
    /// The running total before the first entry.
    dropped: u64,
    entries: VecDeque<Entry>,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    at: Timestamp,
    /// Units admitted up to and with this entry.
    total: u64,
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
        let before = std::iter::once(self.dropped).chain(self.entries.iter().map(|entry| entry.total));
        self.entries.iter().zip(before).map(|(entry, before)| {
            #[allow(clippy::cast_possible_truncation)] // pushed as a u32
            let units = (entry.total - before) as u32;
            (entry.at, units)
        })
    }

    /// The instant from which all of it is forgotten.
    pub fn until(&self) -> Timestamp {
        self.until
    }

    /// How many entries there is room for: what it weighs in memory, 16 bytes each.
    pub fn room(&self) -> usize {
        self.entries.capacity()
    }

    /// Whether a hit at `now` takes more memory: there is no room for an entry, and none to drop for it.
    pub fn grows_at(&self, now: Timestamp) -> bool {
        let (Some(first), Some(last)) = (self.entries.front(), self.entries.back()) else { return true };
        let period = self.until.since(last.at);
        self.entries.len() == self.entries.capacity() && now.since(first.at) < period && last.at != now
    }

    /// All units ever admitted.
    fn total(&self) -> u64 {
        self.entries.back().map_or(self.dropped, |last| last.total)
    }

    /// The number of leading entries that are at least `period` old.
    fn expired(&self, now: Timestamp, period: u64) -> usize {
        self.leading(|entry| now.since(entry.at) >= period)
    }

    /// How many entries there are in front of the first of which this is not so. Nearly always it is among the first few, for
    /// each hit drops what has left; else it is found by halving.
    #[inline]
    fn leading(&self, is_so: impl Fn(&Entry) -> bool) -> usize {
        const FEW: usize = 4;
        let few = self.entries.iter().take(FEW).take_while(|entry| is_so(entry)).count();
        if few < FEW { few } else { self.entries.partition_point(is_so) }
    }

    /// Units that are younger than `period`.
    pub(super) fn active(&self, now: Timestamp, period: u64) -> u64 {
        let before = self.expired(now, period).checked_sub(1).map_or(self.dropped, |last| self.entries[last].total);
        self.total() - before
    }

    /// When the entry leaves after which at most `units` are left; `None` for an empty log.
    pub(super) fn falls_to(&self, units: u64, now: Timestamp, period: u64) -> Option<Timestamp> {
        let leaving = self.total().saturating_sub(units);
        let index = self.leading(|entry| entry.total < leaving);
        // An entry ahead of now was written by a clock that has gone back: it counts as made now.
        self.entries.get(index).map(|entry| entry.at.min(now).plus(period))
    }

    /// Adds units at `now`, after dropping what is at least `period` old.
    pub(super) fn add(&mut self, now: Timestamp, period: u64, units: u32) {
        self.forget(self.expired(now, period));
        let total = self.total();
        while self.entries.back().is_some_and(|last| last.at > now) {
            self.entries.pop_back();
        }
        if self.total() < total {
            // Entries ahead of now count as made now, from here on.
            self.append(now, total);
        }
        self.push(now, units);
        self.until = now.plus(period);
    }

    /// Takes back up to `units` that were added at `at`. Whether anything is left.
    pub(super) fn take_back(&mut self, at: Timestamp, period: u64, units: u32) -> bool {
        if let Ok(index) = self.entries.binary_search_by_key(&at, |entry| entry.at) {
            let before = index.checked_sub(1).map_or(self.dropped, |last| self.entries[last].total);
            let taken = u64::from(units).min(self.entries[index].total - before);
            for entry in self.entries.range_mut(index..) {
                entry.total -= taken;
            }
            if self.entries[index].total == before {
                self.entries.remove(index);
            }
        }
        self.until = self.entries.back().map_or(Timestamp::EPOCH, |last| last.at.plus(period));
        !self.entries.is_empty()
    }

    fn forget(&mut self, leading: usize) {
        if let Some(last) = leading.checked_sub(1) {
            self.dropped = self.entries[last].total;
            if leading == 1 {
                self.entries.pop_front();
            } else {
                self.entries.drain(..leading);
            }
        }
        if self.entries.is_empty() {
            self.dropped = 0;
        }
        // A log that was long once gives its memory back.
        if self.entries.capacity() > 16 && self.entries.len() < self.entries.capacity() / 4 {
            self.entries.shrink_to(self.entries.len() * 2);
        }
    }

    fn push(&mut self, at: Timestamp, units: u32) {
        if units > 0 {
            self.append(at, self.total().saturating_add(u64::from(units)));
        }
    }

    fn append(&mut self, at: Timestamp, total: u64) {
        match self.entries.back_mut() {
            Some(last) if last.at == at => last.total = total,
            _ => self.entries.push_back(Entry { at, total }),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_that_was_long_gives_its_memory_back() {
        let mut log = Log::default();
        for at in 0..1_000 {
            log.add(Timestamp::from_micros(at), 2_000, 1);
        }
        assert!(log.room() >= 1_000);
        log.add(Timestamp::from_micros(2_998), 2_000, 1);
        assert!(log.room() < 16, "room for {} of {:?}", log.room(), log);
    }
}

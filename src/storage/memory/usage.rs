//! The current size of a storage, its statistics and its metrics.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

#[cfg(feature = "metrics")]
use self::published::Published;
use super::size::{Bounds, Need, Size};

/// The kind of key that must be evicted before a hit can be stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lack {
    /// Any key.
    Room,
    /// A key that has a log.
    LogRoom,
}

/// The current size of a storage.
#[derive(Debug, Default)]
pub(super) struct MemoryUsage {
    keys: AtomicUsize,
    slots: AtomicUsize,
    logs: AtomicUsize,
    /// The number of keys that were evicted before they expired.
    evicted: AtomicU64,
    #[cfg(feature = "metrics")]
    published: Published,
}

impl MemoryUsage {
    pub(super) fn size(&self) -> Size {
        let load = |count: &AtomicUsize| count.load(Ordering::Relaxed);
        Size { keys: load(&self.keys), slots: load(&self.slots), logs: load(&self.logs) }
    }

    /// Replaces the size `before` by the size `after`.
    #[inline]
    pub(super) fn resize(&self, before: Size, after: Size) {
        for (count, before, after) in [
            (&self.keys, before.keys, after.keys),
            (&self.slots, before.slots, after.slots),
            (&self.logs, before.logs, after.logs),
        ] {
            if before != after {
                count.fetch_add(after.wrapping_sub(before), Ordering::Relaxed);
            }
        }
        #[cfg(feature = "metrics")]
        if before.keys != after.keys {
            self.published.keys_changed(self.size().keys);
        }
    }

    /// Adds a key with one small state.
    #[inline]
    pub(super) fn add_small(&self) {
        self.keys.fetch_add(1, Ordering::Relaxed);
        self.slots.fetch_add(1, Ordering::Relaxed);
        #[cfg(feature = "metrics")]
        self.published.keys_changed(self.size().keys);
    }

    /// Counts a key that was evicted before it expired.
    pub(super) fn count_evicted(&self) {
        let evicted = self.evicted.fetch_add(1, Ordering::Relaxed) + 1;
        #[cfg(feature = "metrics")]
        self.published.evicted_changed(evicted);
        let _ = evicted;
    }

    /// Returns the number of keys that were evicted before they expired.
    pub(super) fn evicted(&self) -> u64 {
        self.evicted.load(Ordering::Relaxed)
    }

    /// Publishes the metrics.
    #[cfg(feature = "metrics")]
    pub(super) fn publish(&self) {
        self.published.all(self.size().keys, self.evicted());
    }

    /// Returns the kind of key to evict before a hit can be stored, or `None` if there is room.
    ///
    /// The need is not empty, so it includes bytes. It may include no key: one key above the bound,
    /// for example because hits run at the same time, must not refuse hits of stored keys.
    #[inline]
    pub(super) fn lack(&self, bounds: Bounds, need: &Need) -> Option<Lack> {
        let used = self.size();
        if need.size.logs > 0 && used.logs + need.size.logs > bounds.logs_for(need.longest) {
            return Some(Lack::LogRoom);
        }
        let lacks_keys = need.size.keys > 0 && used.keys + need.size.keys > bounds.keys;
        let is_full = lacks_keys || used.bytes() + need.size.bytes() > bounds.bytes;
        is_full.then_some(Lack::Room)
    }

    /// Returns `true` if a hit must not evict others, because it makes a long log grow.
    pub(super) fn must_not_evict(bounds: Bounds, need: &Need) -> bool {
        need.size.keys == 0 && bounds.is_long(need.longest)
    }
}

/// Room that counts as used until this value is dropped, also if a custom strategy panics.
pub(super) struct ReservedRoom<'a> {
    usage: &'a MemoryUsage,
    size: Size,
}

impl<'a> ReservedRoom<'a> {
    pub(super) fn new(usage: &'a MemoryUsage) -> Self {
        Self { usage, size: Size::default() }
    }

    pub(super) fn add(&mut self, size: Size) {
        self.usage.resize(Size::default(), size);
        self.size = self.size.plus(size);
    }
}

impl Drop for ReservedRoom<'_> {
    fn drop(&mut self) {
        self.usage.resize(self.size, Size::default());
    }
}

/// The size of a [`MemoryStorage`](crate::MemoryStorage), and counts of evictions and of hits that
/// found no room. A charge counts as a hit. Returned by
/// [`MemoryStorage::stats`](crate::MemoryStorage::stats).
///
/// With the feature `metrics`, memory storages export these metrics. Each is the total over all
/// memory storages of the process:
///
/// | metric | field |
/// |---|---|
/// | gauge `ratelimit_memory_keys` | [`keys`](Self::keys) |
/// | counter `ratelimit_memory_evictions_total` | [`evicted`](Self::evicted) |
/// | counter `ratelimit_memory_full_total`, label `outcome` = `refused` | [`newcomers_refused`](Self::newcomers_refused) |
/// | counter `ratelimit_memory_full_total`, label `outcome` = `admitted` | [`newcomers_admitted`](Self::newcomers_admitted) |
/// | counter `ratelimit_memory_full_total`, label `outcome` = `log_refused` | [`logs_refused`](Self::logs_refused) |
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryStats {
    /// The number of stored keys, including expired keys that are not removed yet. A key counts
    /// once for each policy.
    pub keys: usize,
    /// The number of bytes of all states, including logs.
    pub bytes: usize,
    /// The part of [`bytes`](Self::bytes) that the logs of moving windows take.
    pub log_bytes: usize,
    /// The number of keys that were evicted before they expired. An evicted key starts again with
    /// all its units.
    pub evicted: u64,
    /// The number of hits of new keys that were refused because the storage was full. See
    /// [`OnFull::Refuse`](super::OnFull::Refuse).
    pub newcomers_refused: u64,
    /// The number of hits of new keys that were admitted without being stored, because the storage
    /// was full. See [`OnFull::Admit`](super::OnFull::Admit).
    pub newcomers_admitted: u64,
    /// The number of hits of stored keys that were refused because there was no room, in most cases
    /// because the log of the key could not grow.
    pub logs_refused: u64,
}

/// Counts the hits that found no room.
#[derive(Debug, Default)]
pub(super) struct Counts {
    newcomers_refused: AtomicU64,
    newcomers_admitted: AtomicU64,
    logs_refused: AtomicU64,
}

impl Counts {
    pub(super) fn admitted(&self) {
        self.newcomers_admitted.fetch_add(1, Ordering::Relaxed);
        report("admitted");
    }

    pub(super) fn refused(&self, is_new: bool) {
        let (counter, outcome) =
            if is_new { (&self.newcomers_refused, "refused") } else { (&self.logs_refused, "log_refused") };
        counter.fetch_add(1, Ordering::Relaxed);
        report(outcome);
    }

    pub(super) fn stats(&self, size: Size, evicted: u64) -> MemoryStats {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        MemoryStats {
            keys: size.keys,
            bytes: size.bytes(),
            log_bytes: size.logs,
            evicted,
            newcomers_refused: load(&self.newcomers_refused),
            newcomers_admitted: load(&self.newcomers_admitted),
            logs_refused: load(&self.logs_refused),
        }
    }
}

#[cfg(feature = "metrics")]
fn report(outcome: &'static str) {
    metrics::counter!("ratelimit_memory_full_total", "outcome" => outcome).increment(1);
}

#[cfg(not(feature = "metrics"))]
const fn report(_: &'static str) {}

/// The metrics of a memory storage.
#[cfg(feature = "metrics")]
mod published {
    use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

    /// The gauge of the keys in all memory storages of the process.
    const KEYS: &str = "ratelimit_memory_keys";

    /// The counter of the keys that were evicted before they expired.
    const EVICTIONS: &str = "ratelimit_memory_evictions_total";

    /// The values that a storage has published so far. Other storages share the gauge, so each storage
    /// publishes differences.
    #[derive(Debug, Default)]
    pub(super) struct Published {
        keys: AtomicUsize,
        evicted: AtomicU64,
    }

    impl Published {
        /// Publishes the number of keys if it has changed by more than a sixteenth. A metric costs more
        /// than a decision, and the next sweep publishes smaller changes.
        pub(super) fn keys_changed(&self, keys: usize) {
            let published = self.keys.load(Ordering::Relaxed);
            if keys.abs_diff(published) > keys / 16 {
                self.keys(keys);
            }
        }

        /// Publishes the number of evictions if it has changed by more than a sixteenth.
        pub(super) fn evicted_changed(&self, evicted: u64) {
            let published = self.evicted.load(Ordering::Relaxed);
            if evicted.saturating_sub(published) > evicted / 16 {
                self.evicted(evicted);
            }
        }

        /// Publishes all numbers.
        pub(super) fn all(&self, keys: usize, evicted: u64) {
            self.keys(keys);
            self.evicted(evicted);
        }

        fn keys(&self, keys: usize) {
            let before = self.keys.swap(keys, Ordering::Relaxed);
            if keys > before {
                metrics::gauge!(KEYS).increment(as_f64(keys - before));
            } else if keys < before {
                metrics::gauge!(KEYS).decrement(as_f64(before - keys));
            }
        }

        fn evicted(&self, evicted: u64) {
            let before = self.evicted.fetch_max(evicted, Ordering::Relaxed);
            if evicted > before {
                metrics::counter!(EVICTIONS).increment(evicted - before);
            }
        }
    }

    #[expect(clippy::cast_precision_loss, reason = "a storage has less than 2^52 keys")]
    fn as_f64(keys: usize) -> f64 {
        keys as f64
    }

    /// Subtracts the keys of a dropped storage from the gauge.
    impl Drop for Published {
        fn drop(&mut self) {
            self.keys(0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Guards against this defect: one key above the bound refuses each client whose long log grows.
    #[test]
    fn hits_of_stored_keys_do_not_depend_on_the_bound_of_keys() {
        let (usage, bounds) = (MemoryUsage::default(), Bounds { keys: 300, bytes: 1 << 20 });
        usage.resize(Size::default(), Size { keys: 301, slots: 301, logs: 4_000 });
        let growth = Need { size: Size { keys: 0, slots: 0, logs: 64 }, longest: 4_064 };
        assert!(MemoryUsage::must_not_evict(bounds, &growth));
        assert_eq!(usage.lack(bounds, &growth), None);
        assert_eq!(usage.lack(bounds, &Need { size: Size { keys: 0, slots: 1, logs: 0 }, longest: 0 }), None);
        assert_eq!(usage.lack(bounds, &Need::SMALL), Some(Lack::Room));
        let too_many_bytes = Need { size: Size { keys: 0, slots: 1 << 20, logs: 0 }, longest: 0 };
        assert_eq!(usage.lack(bounds, &too_many_bytes), Some(Lack::Room));
    }

    #[test]
    fn reserved_room_is_free_again_after_a_drop() {
        let usage = MemoryUsage::default();
        usage.add_small();
        let mut reserved = ReservedRoom::new(&usage);
        reserved.add(Size::SMALL);
        reserved.add(Size { keys: 0, slots: 1, logs: 100 });
        assert_eq!(usage.size(), Size { keys: 2, slots: 3, logs: 100 });
        drop(reserved);
        assert_eq!(usage.size(), Size::SMALL);
    }
}

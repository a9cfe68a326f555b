//! The metrics of a memory storage (feature `metrics`).

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

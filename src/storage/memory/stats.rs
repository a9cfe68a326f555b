use std::sync::atomic::{AtomicU64, Ordering};

use super::size::Size;

/// The size of a [`MemoryStorage`](crate::MemoryStorage), and counts of evictions and of hits that
/// found no room. Returned by [`MemoryStorage::stats`](crate::MemoryStorage::stats).
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

use std::sync::atomic::{AtomicU64, Ordering};

use super::size::Size;

/// The usage of a [`MemoryStorage`](crate::MemoryStorage), and the number of hits that found no
/// room.
///
/// With the feature `metrics`, [`keys`](Self::keys) is also exported as the gauge
/// `ratelimit_memory_keys`, and [`evicted`](Self::evicted) as the counter
/// `ratelimit_memory_evictions_total`. [`newcomers_refused`](Self::newcomers_refused),
/// [`newcomers_admitted`](Self::newcomers_admitted) and [`logs_refused`](Self::logs_refused) are
/// exported as the counter `ratelimit_memory_full_total`, with the label `outcome` set to
/// `refused`, `admitted` and `log_refused`, respectively.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryStats {
    /// The number of stored keys. A key counts once for each policy.
    pub keys: usize,
    /// The number of bytes of all states, including logs.
    pub bytes: usize,
    /// The number of bytes of the logs of moving windows.
    pub log_bytes: usize,
    /// The number of keys that were evicted before they expired. Their clients have all units
    /// again.
    pub evicted: u64,
    /// The number of hits of new keys that were refused because the storage was full.
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

//! Locks and atomics: those of std, or those of loom when `scripts/loom` checks its models.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LockResult, PoisonError};

#[cfg(all(test, tower_ratelimit_loom))]
pub(crate) mod race;

#[cfg(tower_ratelimit_loom)]
pub(crate) use loom::sync::{Mutex, MutexGuard, atomic};
#[cfg(not(tower_ratelimit_loom))]
pub(crate) use std::sync::{Mutex, MutexGuard, atomic};

/// Returns the guard of a lock, even if a thread has panicked while it held the lock.
///
/// All locks of the crate may be used after a panic: the code that holds them calls nothing that
/// panics, or leaves the data in order if it does.
pub(crate) fn unpoisoned<G>(locked: LockResult<G>) -> G {
    locked.unwrap_or_else(PoisonError::into_inner)
}

/// The number of calls in progress, or of callers that wait. Clones share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Gauge(Arc<AtomicUsize>);

/// Counts in a [`Gauge`] until it is dropped.
#[derive(Debug)]
pub(crate) struct Counted {
    gauge: Gauge,
    count: usize,
}

impl Gauge {
    pub(crate) fn count(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }

    /// Adds `count`. Returns `None` if the number is `limit` or more already, so it can exceed the
    /// limit by less than `count`.
    pub(crate) fn enter(&self, count: usize, limit: usize) -> Option<Counted> {
        let before = self.0.fetch_add(count, Ordering::Relaxed);
        let counted = Counted { gauge: self.clone(), count };
        (before < limit).then_some(counted)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.gauge.0.fetch_sub(self.count, Ordering::Relaxed);
    }
}

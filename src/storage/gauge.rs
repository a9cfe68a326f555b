//! The number of calls in progress on a storage.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The number of calls in progress, or of callers that wait. Clones share it.
#[derive(Clone, Debug, Default)]
pub(super) struct Gauge(Arc<AtomicUsize>);

/// Counts in a [`Gauge`] until it is dropped.
#[derive(Debug)]
pub(super) struct Counted {
    gauge: Gauge,
    count: usize,
}

impl Gauge {
    #[cfg(any(feature = "redis", feature = "memcached", feature = "etcd", feature = "postgres"))]
    pub(super) fn count(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }

    /// Adds `count`. Returns `None` if the number is `limit` or more already, so it can exceed the
    /// limit by less than `count`.
    pub(super) fn enter(&self, count: usize, limit: usize) -> Option<Counted> {
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

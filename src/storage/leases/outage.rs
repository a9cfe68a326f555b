//! Detects that the storage no longer answers this node.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counts failed requests for units, over all keys. During an outage, each request is for the units
/// of one hit instead of a slice.
#[derive(Debug, Default)]
pub(super) struct Outage {
    failures: AtomicU64,
    /// The value of `failures` when the latest successful request was sent.
    ended: AtomicU64,
}

impl Outage {
    /// Returns the number of failures so far. A request reads it before it is sent.
    pub(super) fn failures(&self) -> u64 {
        self.failures.load(Ordering::SeqCst)
    }

    pub(super) fn failed(&self) {
        self.failures.fetch_add(1, Ordering::SeqCst);
    }

    /// Records the success of a request that was sent when the failure count was `failures`. If the
    /// count has grown since, the success does not prove that the storage has recovered.
    pub(super) fn answered(&self, failures: u64) {
        self.ended.fetch_max(failures, Ordering::SeqCst);
    }

    pub(super) fn is_on(&self) -> bool {
        self.ended.load(Ordering::SeqCst) < self.failures()
    }
}

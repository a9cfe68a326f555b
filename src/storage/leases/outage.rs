//! Detects that the storage has stopped answering this node.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counts failed requests for units, of all keys. While it [is on](Self::is_on), no key asks for a
/// slice.
#[derive(Debug, Default)]
pub(super) struct Outage {
    failures: AtomicU64,
    /// The failures before the latest request that succeeded was sent.
    ended: AtomicU64,
}

impl Outage {
    /// The failures so far. A request notes them when it is sent.
    pub(super) fn failures(&self) -> u64 {
        self.failures.load(Ordering::SeqCst)
    }

    pub(super) fn failed(&self) {
        self.failures.fetch_add(1, Ordering::SeqCst);
    }

    /// Records the answer to a request that was sent after `failures`. A request from before the
    /// latest failure says nothing about the time after it.
    pub(super) fn answered(&self, failures: u64) {
        self.ended.fetch_max(failures, Ordering::SeqCst);
    }

    pub(super) fn is_on(&self) -> bool {
        self.ended.load(Ordering::SeqCst) < self.failures()
    }
}

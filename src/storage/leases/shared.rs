//! The leases of all keys.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::entry::LeaseEntry;
use super::outage::Outage;
use crate::key::Key;
use crate::policy::Policy;
use crate::storage::counters::Counters;
use crate::storage::key_table::{Table, TableKey};
use crate::storage::{AnyStorage, Clock};

/// The state that all handles share.
pub(super) struct LeaseTable {
    pub(super) inner: AnyStorage,
    pub(super) table: Table<LeaseEntry>,
    pub(super) counters: Counters,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) slice: u32,
    pub(super) max_keys: usize,
    pub(super) outage: Outage,
    /// `true` after [`close`](super::Leases::close): no more slices are taken.
    pub(super) closed: AtomicBool,
}

impl LeaseTable {
    pub(super) fn new(inner: AnyStorage, slice: u32, max_keys: usize, clock: Arc<dyn Clock>) -> Self {
        let (table, counters) = (Table::new(max_keys), Counters::new("ratelimit_leases_total"));
        Self {
            inner,
            table,
            counters,
            clock,
            slice,
            max_keys,
            outage: Outage::default(),
            closed: AtomicBool::new(false),
        }
    }

    /// Returns the table key. Policies with the same identity share an entry if their first limits
    /// share states.
    pub(super) fn place(&self, policy: &Policy, key: &Key) -> TableKey {
        self.table.place(policy, policy.limit_digests().first().copied().unwrap_or_default(), key)
    }

    /// Returns the number of keys with a lease whose window has not ended.
    pub(super) fn len(&self) -> usize {
        let now = self.clock.now();
        self.table.count(|entry| entry.lease.as_ref().is_some_and(|lease| lease.is_live(now)))
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    /// Cleans up after a worker that was dropped before it ended. Its callers get an error, because
    /// their jobs are dropped here. If a request for units was in flight (`is_requesting`), the
    /// storage may have counted it.
    pub(super) fn abandon(&self, place: TableKey, is_requesting: bool) {
        if is_requesting {
            self.outage.failed();
        }
        let mut bucket = self.table.lock(place);
        let waiting = bucket.find().map(|entry| {
            entry.is_uncertain |= is_requesting;
            entry.end_worker();
            std::mem::take(&mut entry.waiting)
        });
        drop(bucket);
        drop(waiting);
    }
}

/// Drops the key's lease when it is dropped. The future of a clear that does not wait for the
/// worker holds it until it completes or is dropped, because a lease of that time may be older than
/// the clear.
pub(super) struct InvalidateOnDrop {
    shared: Arc<LeaseTable>,
    place: TableKey,
}

impl InvalidateOnDrop {
    pub(super) fn new(shared: &Arc<LeaseTable>, policy: &Policy, key: &Key) -> Self {
        Self { shared: Arc::clone(shared), place: shared.place(policy, key) }
    }
}

impl Drop for InvalidateOnDrop {
    fn drop(&mut self) {
        if let Some(entry) = self.shared.table.lock(self.place).find() {
            entry.forget();
        }
    }
}

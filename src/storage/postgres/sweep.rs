//! The deletion of expired rows.
//!
//! An index on `expires_at` would make every hit write to two indexes, and would prevent heap-only
//! updates. Four pages hold at least as many rows as 8 writes add.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use super::link::Link;
use super::table::{Query, Statement, number};
use crate::time::Timestamp;

/// The number of writes between two sweeps.
const WRITES: u32 = 8;

/// The number of pages that a sweep reads. They hold at least as many rows as [`WRITES`] writes can
/// add, because PostgreSQL moves or compresses texts of more than 2 kB. So the table is searched
/// faster than it grows.
const PAGES: i64 = 4;

/// Deletes expired rows, a few pages of the table at a time. That needs no index. One storage and its
/// clones share it.
pub(super) struct Sweep {
    writes: AtomicU32,
    /// The next page. The statement takes the remainder by the number of pages.
    page: AtomicI64,
    is_running: AtomicBool,
}

impl Default for Sweep {
    /// Creates a sweep that starts at a random page, so that processes sweep different pages.
    fn default() -> Self {
        let first = Timestamp::wall_clock().as_micros() % 1_000_003;
        let page = AtomicI64::new(i64::try_from(first).unwrap_or(0));
        Self { writes: AtomicU32::new(0), page, is_running: AtomicBool::new(false) }
    }
}

impl Sweep {
    /// Counts a write. Starts a sweep in a background task after every [`WRITES`] writes, unless
    /// one is running.
    pub(super) fn after_write(self: &Arc<Self>, link: &Link, timeout: Duration) {
        if !self.writes.fetch_add(1, Ordering::Relaxed).wrapping_add(1).is_multiple_of(WRITES)
            || self.is_running.swap(true, Ordering::Relaxed)
        {
            return;
        }
        let (sweep, link) = (SweepGuard(Arc::clone(self)), link.clone());
        tokio::spawn(async move {
            let page = sweep.0.page.fetch_add(PAGES, Ordering::Relaxed);
            // The error is ignored: a later write sweeps again, and hits report an outage.
            let query = Query::new(Statement::Sweep, [number(page), number(PAGES)]);
            let _ = link.query(query, Instant::now() + timeout).await;
            drop(sweep);
        });
    }
}

/// Marks the sweep as ended when it is dropped, even by a runtime that shuts down.
struct SweepGuard(Arc<Sweep>);

impl Drop for SweepGuard {
    fn drop(&mut self) {
        self.0.is_running.store(false, Ordering::Relaxed);
    }
}

//! Deletes expired rows, a few pages of the table at a time. That needs no index.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use super::link::Link;
use super::query::Query;
use super::table::Statement;

/// The number of writes between two sweeps.
const WRITES: u32 = 8;

/// The number of pages that a sweep reads. They hold at least as many rows as [`WRITES`] writes can
/// add, because PostgreSQL moves or compresses texts of more than 2 kB. So the table is searched
/// faster than it grows.
const PAGES: i64 = 4;

/// The state of the sweeps of one storage and its clones.
#[derive(Debug)]
pub(super) struct Sweep {
    writes: AtomicU32,
    /// The next page. The statement takes the remainder by the number of pages.
    page: AtomicI64,
    is_running: AtomicBool,
}

impl Sweep {
    /// Creates a sweep that starts at page `first`. Each process should pass a different number, so
    /// that the processes sweep different pages.
    pub(super) fn new(first: i64) -> Self {
        Self { writes: AtomicU32::new(0), page: AtomicI64::new(first), is_running: AtomicBool::new(false) }
    }

    /// Counts a write. Starts a sweep in a background task after every [`WRITES`] writes, unless
    /// one is running.
    pub(super) fn after_write(self: &Arc<Self>, link: &Link, timeout: Duration) {
        if !(self.writes.fetch_add(1, Ordering::Relaxed) + 1).is_multiple_of(WRITES)
            || self.is_running.swap(true, Ordering::Relaxed)
        {
            return;
        }
        let (sweep, link) = (Running(Arc::clone(self)), link.clone());
        tokio::spawn(async move {
            let page = sweep.0.page.fetch_add(PAGES, Ordering::Relaxed);
            // The error is ignored: a later write sweeps again, and hits report an outage.
            let query = Query::new(Statement::Sweep, [page.into(), PAGES.into()]);
            let _ = link.query(query, Instant::now() + timeout).await;
            drop(sweep);
        });
    }
}

/// Marks the sweep as ended when it is dropped, even by a runtime that shuts down.
struct Running(Arc<Sweep>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.is_running.store(false, Ordering::Relaxed);
    }
}

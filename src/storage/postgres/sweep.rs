//! The deletion of expired rows.
//!
//! An index on `expires_at` would make every hit write to two indexes, and would prevent heap-only
//! updates. Four pages hold at least as many rows as 8 writes add.

use std::sync::atomic::{AtomicI64, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::Instant;

use super::link::Link;
use super::table::{Query, Statement, number};
use crate::sync::unpoisoned;
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
    /// The deadline of the last sweep, if it is still running. After that, another one can begin: the
    /// runtime of this one may not be running.
    running: Mutex<Option<Instant>>,
}

impl Default for Sweep {
    /// Creates a sweep that starts at a random page, so that processes sweep different pages.
    fn default() -> Self {
        let first = Timestamp::wall_clock().as_micros() % 1_000_003;
        let page = AtomicI64::new(i64::try_from(first).unwrap_or(0));
        Self { writes: AtomicU32::new(0), page, running: Mutex::default() }
    }
}

impl Sweep {
    /// Counts a write. Starts a sweep in a background task after every [`WRITES`] writes, unless
    /// one is running.
    pub(super) fn after_write(self: &Arc<Self>, link: &Link, timeout: Duration) {
        if !self.writes.fetch_add(1, Ordering::Relaxed).wrapping_add(1).is_multiple_of(WRITES) {
            return;
        }
        let Some(running) = self.begin(timeout) else { return };
        let link = link.clone();
        tokio::spawn(async move {
            let page = running.of.page.fetch_add(PAGES, Ordering::Relaxed);
            // The error is ignored: a later write sweeps again, and hits report an outage.
            let query = Query::new(Statement::Sweep, [number(page), number(PAGES)]);
            let _ = link.query(query, running.until).await;
            drop(running);
        });
    }

    fn begin(self: &Arc<Self>, timeout: Duration) -> Option<RunningSweep> {
        let (now, mut running) = (Instant::now(), unpoisoned(self.running.lock()));
        if running.is_some_and(|until| now < until) {
            return None;
        }
        let until = now + timeout;
        *running = Some(until);
        Some(RunningSweep { of: Arc::clone(self), until })
    }
}

/// Marks the sweep as ended when it is dropped, even by a runtime that shuts down.
struct RunningSweep {
    of: Arc<Sweep>,
    until: Instant,
}

impl Drop for RunningSweep {
    fn drop(&mut self) {
        unpoisoned(self.of.running.lock()).take_if(|until| *until == self.until);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Guards against this defect: a sweep on a runtime that nothing drives ends all later ones.
    #[tokio::test(start_paused = true)]
    async fn sweep_that_stalls_is_replaced_after_its_deadline() {
        let (sweep, timeout) = (Arc::new(Sweep::default()), Duration::from_secs(1));
        let stalled = sweep.begin(timeout).unwrap();
        assert!(sweep.begin(timeout).is_none(), "a sweep is running");
        tokio::time::advance(timeout).await;
        let other = sweep.begin(timeout).unwrap();
        drop(stalled);
        assert!(sweep.begin(timeout).is_none(), "the second one is still running");
        drop(other);
        assert!(sweep.begin(timeout).is_some());
    }
}

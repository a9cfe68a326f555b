//! Rate limiting of log lines during an outage.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

// tokio's instant, because tests pause tokio's clock.
use tokio::time::Instant;

use crate::sync::unpoisoned;

/// Permits one line per interval, and counts the suppressed events.
#[derive(Debug)]
pub(super) struct Throttle {
    interval: Duration,
    counters: Mutex<Counters>,
    /// `true` from the first event until [`ended`](Self::ended) returns the total.
    is_active: AtomicBool,
}

#[derive(Debug, Default)]
struct Counters {
    /// The events since the last line.
    suppressed: u64,
    total: u64,
    last_line: Option<Instant>,
    last_event: Option<Instant>,
}

impl Throttle {
    pub(super) fn new(interval: Duration) -> Self {
        Self { interval, counters: Mutex::default(), is_active: AtomicBool::new(false) }
    }

    /// Counts an event. Returns the number of events since the last line if a line is due.
    pub(super) fn due(&self) -> Option<u64> {
        let now = Instant::now();
        let mut counters = self.counters();
        self.is_active.store(true, Ordering::Relaxed);
        counters.last_event = Some(now);
        counters.total += 1;
        counters.suppressed += 1;
        if counters.last_line.is_some_and(|line| now.duration_since(line) < self.interval) {
            return None;
        }
        counters.last_line = Some(now);
        Some(std::mem::take(&mut counters.suppressed))
    }

    /// Returns the total number of events if the last one was at least one interval ago. Then
    /// restarts the count, so the total is returned only once.
    #[inline]
    pub(super) fn ended(&self) -> Option<u64> {
        if self.is_active.load(Ordering::Relaxed) { self.ended_by_now() } else { None }
    }

    #[cold]
    fn ended_by_now(&self) -> Option<u64> {
        let mut counters = self.counters();
        if counters.last_event?.elapsed() < self.interval || !self.is_active.swap(false, Ordering::Relaxed) {
            return None;
        }
        let total = counters.total;
        *counters = Counters::default();
        Some(total)
    }

    fn counters(&self) -> MutexGuard<'_, Counters> {
        unpoisoned(self.counters.lock())
    }
}

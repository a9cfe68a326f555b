//! Bounds how many lines an outage writes to the log.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

// Follows a paused clock in tests.
use tokio::time::Instant;

/// Lets one line through in each interval, and counts what it holds back.
#[derive(Debug)]
pub(super) struct Throttle {
    interval: Duration,
    counted: Mutex<Counted>,
    /// True from an event until [`ended`](Self::ended) reports the end.
    lasts: AtomicBool,
}

#[derive(Debug, Default)]
struct Counted {
    /// Since the last line.
    held_back: u64,
    in_total: u64,
    line: Option<Instant>,
    newest: Option<Instant>,
}

impl Throttle {
    pub(super) fn new(interval: Duration) -> Self {
        Self { interval, counted: Mutex::default(), lasts: AtomicBool::new(false) }
    }

    /// Counts an event. Returns how often it happened since the last line when a line is due.
    pub(super) fn due(&self) -> Option<u64> {
        let now = Instant::now();
        let mut counted = self.counted();
        self.lasts.store(true, Ordering::Relaxed);
        counted.newest = Some(now);
        counted.in_total += 1;
        counted.held_back += 1;
        if counted.line.is_some_and(|line| now.duration_since(line) < self.interval) {
            return None;
        }
        counted.line = Some(now);
        Some(std::mem::take(&mut counted.held_back))
    }

    /// Returns the total number of events once, when the last one was at least an interval ago.
    #[inline]
    pub(super) fn ended(&self) -> Option<u64> {
        if self.lasts.load(Ordering::Relaxed) { self.ended_by_now() } else { None }
    }

    #[cold]
    fn ended_by_now(&self) -> Option<u64> {
        let mut counted = self.counted();
        if counted.newest?.elapsed() < self.interval || !self.lasts.swap(false, Ordering::Relaxed) {
            return None;
        }
        let in_total = counted.in_total;
        *counted = Counted::default();
        Some(in_total)
    }

    fn counted(&self) -> MutexGuard<'_, Counted> {
        self.counted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

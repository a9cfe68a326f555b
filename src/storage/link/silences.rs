//! When a connection on which nothing is heard is taken for broken.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

use tokio::time::Instant;

/// So many deadlines in a row that passed in silence are the end of a connection.
const ENOUGH: u32 = 3;

/// How many deadlines have passed in silence, and when the last of them.
pub(in crate::storage) struct Silences {
    count: AtomicU32,
    last: Mutex<Instant>,
}

impl Default for Silences {
    fn default() -> Self {
        Self { count: AtomicU32::new(0), last: Mutex::new(Instant::now()) }
    }
}

impl Silences {
    /// Counts a deadline that passed in silence. Many callers at once are one silence: only who asked after the last one
    /// counts.
    pub(in crate::storage) fn is_enough(&self, asked_at: Instant) -> bool {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if asked_at < *last {
            return false;
        }
        *last = Instant::now();
        self.count.fetch_add(1, Ordering::Relaxed) + 1 >= ENOUGH
    }

    /// Something was heard.
    pub(in crate::storage) fn end(&self) {
        // A write would be shared by all who use the connection.
        if self.count.load(Ordering::Relaxed) != 0 {
            self.count.store(0, Ordering::Relaxed);
        }
    }
}

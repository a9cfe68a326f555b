use std::time::Instant;

use crate::time::micros;

/// Measures time with the system's monotonic clock.
#[derive(Debug)]
pub(super) struct Ticks {
    start: Instant,
}

impl Ticks {
    pub(super) fn start() -> Self {
        Self { start: Instant::now() }
    }

    /// Returns the microseconds since the start.
    #[inline]
    pub(super) fn elapsed(&self) -> u64 {
        micros(self.start.elapsed())
    }

    /// Returns `elapsed`: it needs no correction, because it comes from the monotonic clock itself.
    #[allow(clippy::unused_self)] // the same signature as with the tick counter
    pub(super) fn monotonic(&self, elapsed: u64) -> u64 {
        elapsed
    }
}

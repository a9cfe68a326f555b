use std::time::Instant;

use super::wall_time::Source;
use crate::time::micros;

/// Measures time with the system's monotonic clock.
#[derive(Debug)]
pub(super) struct Ticks {
    start: Instant,
}

impl Source for Ticks {
    fn start() -> Self {
        Self { start: Instant::now() }
    }

    #[inline]
    fn elapsed(&self) -> u64 {
        micros(self.start.elapsed())
    }

    /// Returns `elapsed`: it needs no correction, because it comes from the monotonic clock itself.
    fn monotonic(&self, elapsed: u64) -> u64 {
        elapsed
    }
}

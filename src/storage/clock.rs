use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::Timestamp;
use crate::time::micros;

/// What time it is, for a storage that has no server to ask.
pub trait Clock: fmt::Debug + Send + Sync + 'static {
    /// The present instant.
    fn now(&self) -> Timestamp;
}

/// How often the wall clock is looked at, and how far ahead it must be: a second, in microseconds.
const SECOND: u64 = 1_000_000;

/// Monotonic time, counted from the wall clock's time at the start.
///
/// It never goes back. A wall clock that is set back is not followed; one that is more than a second ahead (the machine
/// was asleep) is.
#[derive(Debug)]
pub struct SystemClock {
    ticks: quanta::Clock,
    start: u64,
    /// What to add to the time since `start`.
    offset: AtomicU64,
    /// Time since `start` from which the wall clock is looked at again.
    next_look: AtomicU64,
}

impl SystemClock {
    /// A clock that stands at the wall clock's time.
    pub fn new() -> Self {
        let ticks = quanta::Clock::new();
        let start = ticks.raw();
        let offset = Timestamp::wall_clock().as_micros();
        Self { ticks, start, offset: offset.into(), next_look: SECOND.into() }
    }

    #[cold]
    fn follow_wall_clock(&self, elapsed: u64, wall: Timestamp) {
        self.next_look.store(elapsed.saturating_add(SECOND), Ordering::Relaxed);
        let offset = wall.as_micros().saturating_sub(elapsed);
        if offset > self.offset.load(Ordering::Relaxed).saturating_add(SECOND) {
            self.offset.fetch_max(offset, Ordering::Relaxed);
        }
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Timestamp {
        let elapsed = self.ticks.delta_as_nanos(self.start, self.ticks.raw()) / 1_000;
        if elapsed >= self.next_look.load(Ordering::Relaxed) {
            self.follow_wall_clock(elapsed, Timestamp::wall_clock());
        }
        Timestamp::from_micros(self.offset.load(Ordering::Relaxed)).plus(elapsed)
    }
}

impl Default for SystemClock {
    fn default() -> Self {
        Self::new()
    }
}

/// A clock that stands until it is told to go on, for tests. Clones are the same clock.
///
/// ```
/// use std::time::Duration;
/// use tower_ratelimit::storage::{Clock, ManualClock};
///
/// let clock = ManualClock::default();
/// let before = clock.now();
/// clock.advance(Duration::from_millis(1));
/// assert_eq!(clock.now().since(before), 1_000);
/// ```
#[derive(Clone, Debug)]
pub struct ManualClock(Arc<AtomicU64>);

impl ManualClock {
    /// A clock that stands at `now`.
    pub fn new(now: Timestamp) -> Self {
        Self(Arc::new(now.as_micros().into()))
    }

    /// Moves on by `span`, rounded down to whole microseconds.
    pub fn advance(&self, span: Duration) {
        self.0.fetch_add(micros(span), Ordering::SeqCst);
    }

    /// Moves to `now`, which may be earlier.
    pub fn set(&self, now: Timestamp) {
        self.0.store(now.as_micros(), Ordering::SeqCst);
    }
}

/// A clock that stands at 2024-10-04T00:00:00Z, so that tests give the same numbers every day.
impl Default for ManualClock {
    fn default() -> Self {
        Self::new(Timestamp::from_micros(1_728_000_000 * SECOND))
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Timestamp {
        Timestamp::from_micros(self.0.load(Ordering::SeqCst))
    }
}

/// Follows tokio's time, also when a test has paused it.
///
/// With `#[tokio::test(start_paused = true)]`, sleeping advances it and the delays of a leaky bucket take no time.
#[derive(Debug)]
pub struct TokioClock {
    start: tokio::time::Instant,
    offset: Timestamp,
}

impl TokioClock {
    /// A clock that stands at the wall clock's time and goes on as tokio's does.
    pub fn new() -> Self {
        Self { start: tokio::time::Instant::now(), offset: Timestamp::wall_clock() }
    }
}

impl Default for TokioClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for TokioClock {
    fn now(&self) -> Timestamp {
        self.offset.plus(micros(self.start.elapsed()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn follows_the_wall_clock_only_when_it_is_more_than_a_second_ahead() {
        let clock = SystemClock::new();
        let start = clock.offset.load(Ordering::Relaxed);
        for (wall, expected) in [
            (start - 3_600 * SECOND, start),
            (start + SECOND, start),
            (start + SECOND + 1, start + SECOND + 1),
            (start + 60 * SECOND, start + 60 * SECOND),
            (start, start + 60 * SECOND),
        ] {
            clock.follow_wall_clock(0, Timestamp::from_micros(wall));
            assert_eq!(clock.offset.load(Ordering::Relaxed), expected);
        }
    }

    #[test]
    fn stands_at_the_wall_clocks_time_and_goes_on() {
        let clock = SystemClock::new();
        let first = clock.now();
        assert!(first.since(Timestamp::wall_clock()) < SECOND && Timestamp::wall_clock().since(first) < SECOND);
        while clock.now() == first {}
        assert!(clock.now() > first);
    }
}

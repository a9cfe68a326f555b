#[cfg(feature = "quanta")]
mod counter;
#[cfg(not(feature = "quanta"))]
mod instant;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

#[cfg(feature = "quanta")]
use self::counter::Ticks;
#[cfg(not(feature = "quanta"))]
use self::instant::Ticks;
use crate::Timestamp;
use crate::time::micros;

/// A source of the current time, for a storage without a server clock.
pub trait Clock: fmt::Debug + Send + Sync + 'static {
    /// Returns the current time.
    fn now(&self) -> Timestamp;

    /// Returns the number of seconds by which this clock is ahead of the wall clock. Defaults to 0.
    ///
    /// Decisions are made at the time that [`now`](Self::now) returns. A [`MemoryStorage`]
    /// subtracts these seconds from the times of day in response headers, such as
    /// `X-RateLimit-Reset`.
    ///
    /// [`MemoryStorage`]: crate::MemoryStorage
    fn ahead_of_wall_clock(&self) -> u32 {
        0
    }
}

impl<C: Clock + ?Sized> Clock for Arc<C> {
    fn now(&self) -> Timestamp {
        (**self).now()
    }

    fn ahead_of_wall_clock(&self) -> u32 {
        (**self).ahead_of_wall_clock()
    }
}

/// A second in microseconds. The wall clock is checked once a second, and followed if it is more
/// than a second ahead.
const SECOND: u64 = 1_000_000;

/// Monotonic time that starts at the wall clock's time. The clock of a [`MemoryStorage`].
///
/// With the feature `quanta` (default) it reads the processor's tick counter, which is faster than
/// the system's clock, and corrects the result by the system's monotonic clock once a second.
/// Without the feature it reads the system's monotonic clock ([`std::time::Instant`]).
///
/// If the wall clock is more than a second ahead, for example after the machine was asleep, the
/// next correction follows it. If the wall clock is set back, the time does not follow, because
/// windows would last longer. Times of day in response headers follow the wall clock in both cases.
/// The wall clock is checked once a second.
///
/// The time does not go back, with one exception: readings during a correction may differ by the
/// size of that correction.
///
/// [`MemoryStorage`]: crate::MemoryStorage
#[derive(Debug)]
pub struct SystemClock {
    ticks: Ticks,
    /// The wall clock's time at the start, plus all jumps of the wall clock that were followed.
    epoch: AtomicU64,
    /// The difference between the time and the ticks.
    offset: AtomicU64,
    /// The earliest time that the clock may return, so that a correction does not set it back.
    floor: AtomicU64,
    /// The ticks at the last correction.
    corrected: AtomicU64,
    /// The seconds by which the time was ahead of the wall clock at the last correction.
    ahead: AtomicU32,
}

impl SystemClock {
    /// Creates a clock that starts at the wall clock's time.
    pub fn new() -> Self {
        let ticks = Ticks::start();
        let epoch = Timestamp::wall_clock().as_micros();
        Self {
            ticks,
            epoch: epoch.into(),
            offset: epoch.into(),
            floor: epoch.into(),
            corrected: 0.into(),
            ahead: 0.into(),
        }
    }

    /// Corrects the offset. `ticked` and `monotonic` are the time since the start, counted in ticks
    /// and by the system's monotonic clock.
    #[cold]
    fn correct(&self, ticked: u64, monotonic: u64, wall: Timestamp) {
        self.corrected.store(ticked, Ordering::Relaxed);
        self.floor.fetch_max(self.offset.load(Ordering::Relaxed).saturating_add(ticked), Ordering::Relaxed);
        let behind = wall.since(Timestamp::from_micros(self.epoch.load(Ordering::Relaxed)).plus(monotonic));
        if behind > SECOND {
            self.epoch.store(wall.as_micros().saturating_sub(monotonic), Ordering::Relaxed);
        }
        let now = self.epoch.load(Ordering::Relaxed).saturating_add(monotonic);
        self.offset.store(now.saturating_sub(ticked), Ordering::Relaxed);
        let ahead = Timestamp::from_micros(now).since(wall) / SECOND;
        self.ahead.store(u32::try_from(ahead).unwrap_or(u32::MAX), Ordering::Relaxed);
    }

    #[inline]
    fn at(&self, ticked: u64) -> Timestamp {
        let now = self.offset.load(Ordering::Relaxed).saturating_add(ticked);
        Timestamp::from_micros(now.max(self.floor.load(Ordering::Relaxed)))
    }
}

impl Clock for SystemClock {
    #[inline]
    fn now(&self) -> Timestamp {
        let ticked = self.ticks.elapsed();
        // A counter that restarted is below the last correction. Then the subtraction wraps around,
        // and the clock is corrected too.
        if ticked.wrapping_sub(self.corrected.load(Ordering::Relaxed)) >= SECOND {
            self.correct(ticked, self.ticks.monotonic(ticked), Timestamp::wall_clock());
        }
        self.at(ticked)
    }

    #[inline]
    fn ahead_of_wall_clock(&self) -> u32 {
        self.ahead.load(Ordering::Relaxed)
    }
}

impl Default for SystemClock {
    fn default() -> Self {
        Self::new()
    }
}

/// A clock that changes only by [`advance`](Self::advance) and [`set`](Self::set), for tests.
/// Clones share the time.
///
/// # Examples
///
/// ```
/// use std::time::{Duration, Instant};
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
    /// Creates a clock that shows `now`.
    pub fn new(now: Timestamp) -> Self {
        Self(Arc::new(now.as_micros().into()))
    }

    /// Advances the clock by `span`, rounded down to whole microseconds.
    pub fn advance(&self, span: Duration) {
        self.0.fetch_add(micros(span), Ordering::SeqCst);
    }

    /// Sets the clock to `now`, which may be earlier.
    pub fn set(&self, now: Timestamp) {
        self.0.store(now.as_micros(), Ordering::SeqCst);
    }
}

/// Creates a clock that shows 2024-10-04T00:00:00Z, so that tests are reproducible.
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

/// A clock that follows tokio's time, for tests that pause it.
///
/// With `#[tokio::test(start_paused = true)]`, a sleep advances the clock at once. So the delays of
/// a leaky bucket take no real time.
#[derive(Debug)]
pub struct TokioClock {
    start: tokio::time::Instant,
    offset: Timestamp,
}

impl TokioClock {
    /// Creates a clock that starts at the wall clock's time.
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
        let start = clock.epoch.load(Ordering::Relaxed);
        for (wall, expected) in [
            (start - 3_600 * SECOND, start),
            (start + SECOND, start),
            (start + SECOND + 1, start + SECOND + 1),
            (start + 60 * SECOND, start + 60 * SECOND),
            (start, start + 60 * SECOND),
        ] {
            clock.correct(0, 0, Timestamp::from_micros(wall));
            assert_eq!(clock.at(0).as_micros(), expected);
        }
    }

    /// Field defect: `X-RateLimit-Reset` was an hour off until the restart.
    #[test]
    fn wall_clock_that_is_set_back_changes_only_the_times_of_day() {
        let clock = SystemClock::new();
        let start = clock.epoch.load(Ordering::Relaxed);
        for (wall, time, ahead) in [
            (start + 3_600 * SECOND, start + 3_600 * SECOND, 0),
            (start, start + 3_600 * SECOND, 3_600),
            (start - 60 * SECOND, start + 3_600 * SECOND, 3_660),
            (start + 3_600 * SECOND, start + 3_600 * SECOND, 0),
        ] {
            clock.correct(0, 0, Timestamp::from_micros(wall));
            assert_eq!((clock.at(0).as_micros(), clock.ahead_of_wall_clock()), (time, ahead));
        }
    }

    #[test]
    fn ticks_that_run_fast_or_slow_are_corrected_without_going_back() {
        let clock = SystemClock::new();
        let start = Timestamp::from_micros(clock.epoch.load(Ordering::Relaxed));
        clock.correct(1_000_100, 1_000_000, start);
        assert_eq!(clock.at(1_000_100).since(start), 1_000_100, "the time stops until the true time has caught up");
        assert_eq!(clock.at(1_000_150).since(start), 1_000_100);
        assert_eq!(clock.at(1_000_300).since(start), 1_000_200);
        clock.correct(2_000_000, 2_000_500, start);
        assert_eq!(clock.at(2_000_000).since(start), 2_000_500);
    }

    #[test]
    fn starts_at_the_wall_clocks_time_and_advances() {
        let clock = SystemClock::new();
        let first = clock.now();
        assert!(first.since(Timestamp::wall_clock()) < SECOND && Timestamp::wall_clock().since(first) < SECOND);
        while clock.now() == first {}
        assert!(clock.now() > first);
    }

    #[test]
    fn ticks_that_restart_do_not_move_time() {
        let clock = SystemClock::new();
        let start = Timestamp::from_micros(clock.epoch.load(Ordering::Relaxed));
        clock.correct(5 * SECOND, 5 * SECOND, start);
        clock.correct(0, 5 * SECOND + 100, start);
        assert_eq!(clock.at(0).since(start), 5 * SECOND + 100);
        assert_eq!(clock.at(50).since(start), 5 * SECOND + 150);
    }

    #[test]
    fn ticks_below_the_last_correction_are_corrected() {
        let clock = SystemClock::new();
        clock.corrected.store(60 * SECOND, Ordering::Relaxed);
        clock.now();
        assert!(clock.corrected.load(Ordering::Relaxed) < 60 * SECOND);
    }
}

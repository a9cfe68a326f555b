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

/// What time it is, for a storage that has no server to ask.
pub trait Clock: fmt::Debug + Send + Sync + 'static {
    /// The present instant.
    fn now(&self) -> Timestamp;

    /// Returns how many seconds this clock is ahead of the wall clock. Defaults to 0.
    ///
    /// Decisions are made at the time that [`now`](Self::now) returns. A [`MemoryStorage`] shows times
    /// of day to clients, as in `X-RateLimit-Reset`, by the wall clock.
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

/// How often the wall clock is looked at, and how far ahead it must be: a second, in microseconds.
const SECOND: u64 = 1_000_000;

/// Monotonic time that starts at the wall clock's time. The clock of a [`MemoryStorage`].
///
/// With the feature `quanta` (default) it reads the processor's tick counter, which is faster than
/// the system's clock, and corrects the result by the system's monotonic clock once a second.
/// Without the feature it reads the system's monotonic clock ([`std::time::Instant`]).
///
/// If the wall clock is more than a second ahead, for example after the machine was asleep, the next
/// correction follows it. If the wall clock is set back, the time does not follow, because windows would
/// last longer. The times of day that clients are shown follow the wall clock in both cases. That check
/// too is made once a second.
///
/// The time does not go back, with one exception: two threads that read the clock while it is being
/// corrected may differ by the error that is corrected.
///
/// [`MemoryStorage`]: crate::MemoryStorage
#[derive(Debug)]
pub struct SystemClock {
    ticks: Ticks,
    /// The wall clock's time at the start, plus the jumps ahead that were followed since.
    epoch: AtomicU64,
    /// The difference between the time and the ticks.
    offset: AtomicU64,
    /// The earliest time that the clock may return, so that a correction does not set it back.
    floor: AtomicU64,
    /// The ticks at the last correction.
    corrected: AtomicU64,
    /// How many seconds the time was ahead of the wall clock at the last correction.
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
        // A counter that restarted is below the last correction. The subtraction wraps around then,
        // and so the clock is corrected too.
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

/// A clock that stands until it is told to go on, for tests. Clones are the same clock.
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

    /// Field defect: `X-RateLimit-Reset` an hour off until the restart.
    #[test]
    fn wall_clock_that_was_ahead_for_a_moment_is_followed_back_without_moving_time() {
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
        assert_eq!(clock.at(1_000_100).since(start), 1_000_100, "stands until the true time has caught up");
        assert_eq!(clock.at(1_000_150).since(start), 1_000_100);
        assert_eq!(clock.at(1_000_300).since(start), 1_000_200);
        clock.correct(2_000_000, 2_000_500, start);
        assert_eq!(clock.at(2_000_000).since(start), 2_000_500);
    }

    #[test]
    fn stands_at_the_wall_clocks_time_and_goes_on() {
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

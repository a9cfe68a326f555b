use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
#[cfg(not(feature = "quanta"))]
use std::time::Instant;

use crate::time::Timestamp;
#[cfg(not(feature = "quanta"))]
use crate::time::micros;

/// A second in microseconds. The wall clock is checked once a second, and followed if it is more
/// than a second ahead.
const SECOND: u64 = 1_000_000;

/// A source of monotonic time, in microseconds since its start.
pub(super) trait TickSource {
    fn start() -> Self;

    /// Returns the microseconds since the start.
    fn elapsed(&self) -> u64;

    /// Returns the microseconds since the start, by the system's monotonic clock. `elapsed` is the
    /// latest result of [`elapsed`](Self::elapsed), which the caller corrects.
    fn monotonic(&self, elapsed: u64) -> u64;
}

/// Without the feature `quanta`, the source is the system's monotonic clock. It needs no correction.
#[cfg(not(feature = "quanta"))]
impl TickSource for Instant {
    fn start() -> Self {
        Self::now()
    }

    #[inline]
    fn elapsed(&self) -> u64 {
        micros(Self::elapsed(self))
    }

    fn monotonic(&self, elapsed: u64) -> u64 {
        elapsed
    }
}

/// Monotonic time that starts at the wall clock's time, and follows it if it jumps ahead.
/// [`SystemClock`](super::SystemClock) describes the rules.
#[derive(Debug)]
pub(super) struct WallTime<S> {
    ticks: S,
    /// The wall clock's time at the start, plus all jumps of the wall clock that were followed.
    epoch: AtomicU64,
    /// The microseconds to add to the ticks to get the time.
    offset: AtomicU64,
    /// The earliest time that the clock may return, so that a correction does not set it back.
    floor: AtomicU64,
    /// The ticks at the last correction.
    corrected: AtomicU64,
    /// The seconds by which the time was ahead of the wall clock at the last correction.
    ahead: AtomicU32,
}

impl<S: TickSource> WallTime<S> {
    #[inline]
    pub(super) fn now(&self) -> Timestamp {
        let ticked = self.ticks.elapsed();
        // A counter that restarted is below the last correction. Then the subtraction wraps around,
        // and the clock is corrected too.
        if ticked.wrapping_sub(self.corrected.load(Ordering::Relaxed)) >= SECOND {
            self.correct(ticked, self.ticks.monotonic(ticked), Timestamp::wall_clock());
        }
        self.at(ticked)
    }

    /// Returns the seconds by which the time was ahead of the wall clock at the last correction.
    #[inline]
    pub(super) fn ahead(&self) -> u32 {
        self.ahead.load(Ordering::Relaxed)
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

impl<S: TickSource> Default for WallTime<S> {
    fn default() -> Self {
        let ticks = S::start();
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
}

#[cfg(test)]
mod tests {
    use super::super::Ticks;
    use super::*;

    #[test]
    fn follows_the_wall_clock_only_when_it_is_more_than_a_second_ahead() {
        let clock = WallTime::<Ticks>::default();
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

    /// Guards against this defect: after the wall clock was set back by an hour,
    /// `X-RateLimit-Reset` was an hour off until the process restarted.
    #[test]
    fn wall_clock_that_is_set_back_changes_only_the_times_of_day() {
        let clock = WallTime::<Ticks>::default();
        let start = clock.epoch.load(Ordering::Relaxed);
        for (wall, time, ahead) in [
            (start + 3_600 * SECOND, start + 3_600 * SECOND, 0),
            (start, start + 3_600 * SECOND, 3_600),
            (start - 60 * SECOND, start + 3_600 * SECOND, 3_660),
            (start + 3_600 * SECOND, start + 3_600 * SECOND, 0),
        ] {
            clock.correct(0, 0, Timestamp::from_micros(wall));
            assert_eq!((clock.at(0).as_micros(), clock.ahead()), (time, ahead));
        }
    }

    #[test]
    fn ticks_that_run_fast_or_slow_are_corrected_without_going_back() {
        let clock = WallTime::<Ticks>::default();
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
        let clock = WallTime::<Ticks>::default();
        let first = clock.now();
        assert!(first.since(Timestamp::wall_clock()) < SECOND && Timestamp::wall_clock().since(first) < SECOND);
        while clock.now() == first {}
        assert!(clock.now() > first);
    }

    #[test]
    fn ticks_that_restart_do_not_move_time() {
        let clock = WallTime::<Ticks>::default();
        let start = Timestamp::from_micros(clock.epoch.load(Ordering::Relaxed));
        clock.correct(5 * SECOND, 5 * SECOND, start);
        clock.correct(0, 5 * SECOND + 100, start);
        assert_eq!(clock.at(0).since(start), 5 * SECOND + 100);
        assert_eq!(clock.at(50).since(start), 5 * SECOND + 150);
    }

    #[test]
    fn ticks_below_the_last_correction_are_corrected() {
        let clock = WallTime::<Ticks>::default();
        clock.corrected.store(60 * SECOND, Ordering::Relaxed);
        clock.now();
        assert!(clock.corrected.load(Ordering::Relaxed) < 60 * SECOND);
    }
}

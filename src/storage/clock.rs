use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::Timestamp;
use crate::time::micros;

/// What time it is, for a storage that has no server to ask.
pub trait Clock: fmt::Debug + Send + Sync + 'static {
    /// The present instant.
    fn now(&self) -> Timestamp;
}

impl<C: Clock + ?Sized> Clock for Arc<C> {
    fn now(&self) -> Timestamp {
        (**self).now()
    }
}

/// How often the wall clock is looked at, and how far ahead it must be: a second, in microseconds.
const SECOND: u64 = 1_000_000;

/// Monotonic time, counted from the wall clock's time at the start.
///
/// A wall clock that is set back is not followed; one that is more than a second ahead (the machine
/// was asleep) is. It reads the processor's tick counter, which costs half of asking the system, and corrects that by the
/// system's monotonic clock once a second; time does not go back for that, except that two threads that read it at the
/// very moment may disagree by what a second of ticks was off.
#[derive(Debug)]
pub struct SystemClock {
    ticks: quanta::Clock,
    first_tick: u64,
    /// Microseconds of a tick, in 2^-64.
    micros_per_tick: u64,
    start: Instant,
    /// The wall clock's time at `start`, and what it has been ahead since.
    epoch: AtomicU64,
    /// What to add to the time counted in ticks.
    offset: AtomicU64,
    /// A correction does not make time earlier than this.
    floor: AtomicU64,
    /// Time counted in ticks when it was last corrected.
    corrected: AtomicU64,
}

impl SystemClock {
    /// A clock that stands at the wall clock's time.
    pub fn new() -> Self {
        let ticks = quanta::Clock::new();
        let (first_tick, start) = (ticks.raw(), Instant::now());
        let epoch = Timestamp::wall_clock().as_micros();
        Self {
            micros_per_tick: micros_per_tick(&ticks),
            ticks,
            first_tick,
            start,
            epoch: epoch.into(),
            offset: epoch.into(),
            floor: epoch.into(),
            corrected: 0.into(),
        }
    }

    /// Sets the offset right: `ticked` and `monotonic` are the time since the start, counted in ticks and by the system.
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
        let ticks = self.ticks.raw().saturating_sub(self.first_tick);
        #[allow(clippy::cast_possible_truncation)] // the upper half
        let ticked = ((u128::from(ticks) * u128::from(self.micros_per_tick)) >> 64) as u64;
        // Wrapping, so that ticks that have started again are corrected too.
        if ticked.wrapping_sub(self.corrected.load(Ordering::Relaxed)) >= SECOND {
            self.correct(ticked, micros(self.start.elapsed()), Timestamp::wall_clock());
        }
        self.at(ticked)
    }
}

/// How long a tick takes, in 2^-64 microseconds: what many ticks take, divided. A second of ticks is off by less than a
/// nanosecond for that.
fn micros_per_tick(ticks: &quanta::Clock) -> u64 {
    const MANY: u32 = 40;
    // Nanoseconds of 2^40 ticks, which are 2^24 / 1000 times the microseconds of 2^64 ticks.
    let nanos = u128::from(ticks.delta_as_nanos(0, 1 << MANY));
    u64::try_from((nanos << (u64::BITS - MANY)) / 1_000).unwrap_or(u64::MAX)
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
    fn a_second_of_ticks_is_a_second() {
        let clock = SystemClock::new();
        for ticks in [1_000_000, 3_000_000_000, 1 << 40] {
            let nanos = clock.ticks.delta_as_nanos(0, ticks);
            #[allow(clippy::cast_possible_truncation)]
            let micros = ((u128::from(ticks) * u128::from(clock.micros_per_tick)) >> 64) as u64;
            assert!(micros.abs_diff(nanos / 1_000) <= 1, "{ticks} ticks are {nanos} ns, not {micros} us");
        }
    }

    #[test]
    fn ticks_that_start_again_do_not_move_time() {
        let mut clock = SystemClock::new();
        let before = clock.now();
        clock.first_tick += 1_000_000_000_000_000;
        assert!(clock.now().since(before) < SECOND);
    }
}

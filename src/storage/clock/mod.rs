#[cfg(feature = "quanta")]
mod counter;
mod wall_time;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
#[cfg(not(feature = "quanta"))]
use std::time::Instant as Ticks;

#[cfg(feature = "quanta")]
use self::counter::Ticks;
use self::wall_time::WallTime;
use crate::time::{Timestamp, micros};

/// A source of the current time, for storages and wrappers that do not use a server's clock, and
/// for tests.
///
/// The time should not go back. If it does, clients get no additional units, but may wait longer.
pub trait Clock: fmt::Debug + Send + Sync + 'static {
    /// Returns the current time, counted from the Unix epoch.
    fn now(&self) -> Timestamp;

    /// Returns the whole seconds by which this clock is ahead of the wall clock. Defaults to 0.
    ///
    /// A [`MemoryStorage`] makes decisions at the time that [`now`](Self::now) returns. It
    /// subtracts these seconds from the times of day in response headers, such as
    /// `X-RateLimit-Reset`.
    ///
    /// [`MemoryStorage`]: crate::MemoryStorage
    fn ahead_of_wall_clock(&self) -> u32 {
        0
    }

    /// Returns the longest time by which this clock may lag. Defaults to zero.
    ///
    /// A clock that advances in ticks lags by up to a tick. A [`MemoryStorage`] calls this method
    /// once, when it is built. It adds the result to the `retry_after` of each refusal, and so to
    /// `Retry-After` and to the pushback of gRPC. A client that waits for that time is not refused
    /// again. Other storages do not call this method.
    ///
    /// [`MemoryStorage`]: crate::MemoryStorage
    fn resolution(&self) -> Duration {
        Duration::ZERO
    }
}

impl<C: Clock + ?Sized> Clock for Arc<C> {
    fn now(&self) -> Timestamp {
        (**self).now()
    }

    fn ahead_of_wall_clock(&self) -> u32 {
        (**self).ahead_of_wall_clock()
    }

    fn resolution(&self) -> Duration {
        (**self).resolution()
    }
}

/// A monotonic clock that starts at the wall clock's time. [`MemoryStorage`] uses it by default.
///
/// | feature `quanta` | source of the time |
/// |---|---|
/// | enabled (default) | the processor's tick counter, which is faster to read than the system's clock. It is corrected by the system's monotonic clock |
/// | disabled | the system's monotonic clock ([`std::time::Instant`]) |
///
/// Once a second, a reading compares this clock with the wall clock:
///
/// - If the wall clock is more than a second ahead, for example after the machine was asleep, this
///   clock jumps to its time.
/// - If the wall clock is behind, this clock does not follow it, because windows would last longer.
///
/// Times of day in response headers follow the wall clock in both cases.
///
/// The time does not go back, with one exception: while one thread corrects the clock, the readings
/// of other threads may differ by the size of the correction.
///
/// [`MemoryStorage`]: crate::MemoryStorage
#[derive(Debug, Default)]
pub struct SystemClock(WallTime<Ticks>);

impl SystemClock {
    /// Creates a clock that starts at the wall clock's time.
    pub fn new() -> Self {
        Self::default()
    }
}

impl Clock for SystemClock {
    #[inline]
    fn now(&self) -> Timestamp {
        self.0.now()
    }

    #[inline]
    fn ahead_of_wall_clock(&self) -> u32 {
        self.0.ahead()
    }
}

/// A clock for tests, which changes only by [`advance`](Self::advance) and [`set`](Self::set).
/// Clones share the time. [`ManualClock::default`] starts at 2024-10-04T00:00:00Z.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use tower_ratelimit::storage::{Clock, ManualClock};
///
/// let clock = ManualClock::default();
/// let before = clock.now();
/// clock.advance(Duration::from_millis(1));
/// assert_eq!(clock.now().since(before), 1_000); // microseconds
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

/// Creates a clock that shows 2024-10-04T00:00:00Z. A fixed time makes tests reproducible.
impl Default for ManualClock {
    fn default() -> Self {
        Self::new(Timestamp::from_micros(1_728_000_000_000_000))
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Timestamp {
        Timestamp::from_micros(self.0.load(Ordering::SeqCst))
    }
}

/// A clock for tests that pause tokio's time: it advances with [`tokio::time::Instant`].
///
/// In a test with `#[tokio::test(start_paused = true)]`, tokio skips sleeps, and this clock
/// advances by their durations. So the delays of a leaky bucket take no real time.
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

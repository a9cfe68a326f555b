use std::time::Duration;

#[cfg(target_os = "linux")]
use self::linux::Ticks;
#[cfg(not(target_os = "linux"))]
use super::Ticks;
use super::wall_time::WallTime;
use super::{Clock, Timestamp};

/// A clock like [`SystemClock`](super::SystemClock) that reads the kernel's coarse time, which lags
/// by up to one timer tick.
///
/// It is faster on machines whose time-stamp counter is slow to read, for example some virtual
/// machines. On other machines it is not faster, so measure it on yours.
///
/// A tick is the interval of the kernel's timer interrupt: 1 to 4 milliseconds on most Linux
/// systems, and 10 on some. The clock reads `CLOCK_MONOTONIC_COARSE`, which the kernel updates once
/// per tick. On systems other than Linux, a `CoarseClock` reads the same clock as a `SystemClock`.
///
/// The effects on a [`MemoryStorage`](crate::MemoryStorage):
///
/// - A decision is made at the time of the last tick. So a client may be refused for up to a tick
///   after its units have become available.
/// - Quotas are enforced in the time of this clock. For example, a window of N per second admits at
///   most N in each second of this clock, which may be up to a tick shorter or longer than a real
///   second.
/// - `retry_after` and `Retry-After` are up to a tick longer. The storage adds the
///   [`resolution`](Clock::resolution), so that they are not too short.
///
/// If timer interrupts are delayed, as on an overcommitted virtual machine, the clock lags longer,
/// and `retry_after` can be too short. Do not use it for periods that are not much longer than a
/// tick.
///
/// # Examples
///
/// ```
/// use tower_ratelimit::{MemoryStorage, Quota, RateLimiter};
/// use tower_ratelimit::storage::CoarseClock;
///
/// let storage = MemoryStorage::builder().clock(CoarseClock::new()).build()?;
/// let limiter = RateLimiter::with_storage(Quota::per_minute(60), storage);
/// # Ok::<(), tower_ratelimit::ConfigError>(())
/// ```
#[derive(Debug, Default)]
pub struct CoarseClock(WallTime<Ticks>);

impl CoarseClock {
    /// Creates a clock that starts at the wall clock's time.
    pub fn new() -> Self {
        Self::default()
    }
}

impl Clock for CoarseClock {
    #[inline]
    fn now(&self) -> Timestamp {
        self.0.now()
    }

    #[inline]
    fn ahead_of_wall_clock(&self) -> u32 {
        self.0.ahead()
    }

    fn resolution(&self) -> Duration {
        #[cfg(target_os = "linux")]
        return linux::resolution();
        #[cfg(not(target_os = "linux"))]
        Duration::ZERO
    }
}

#[cfg(target_os = "linux")]
mod linux {
    use std::time::Duration;

    use nix::sys::time::TimeSpec;
    use nix::time::{ClockId, clock_getres, clock_gettime};

    use super::super::wall_time::Source;

    const CLOCK: ClockId = ClockId::CLOCK_MONOTONIC_COARSE;

    /// Measures time with the system's coarse monotonic clock.
    #[derive(Debug)]
    pub(super) struct Ticks {
        start: u64,
    }

    impl Source for Ticks {
        fn start() -> Self {
            Self { start: micros(clock_gettime(CLOCK)) }
        }

        #[inline]
        fn elapsed(&self) -> u64 {
            micros(clock_gettime(CLOCK)).saturating_sub(self.start)
        }

        /// Returns `elapsed`: the coarse clock is the monotonic clock, only rounded down.
        fn monotonic(&self, elapsed: u64) -> u64 {
            elapsed
        }
    }

    /// Returns the length of a tick, rounded up.
    pub(super) fn resolution() -> Duration {
        Duration::from_micros(micros(clock_getres(CLOCK)) + 1)
    }

    /// Converts a reading to whole microseconds. Reading cannot fail, because Linux has had this
    /// clock since 2.6.32.
    #[allow(clippy::cast_sign_loss)] // the clock starts at 0
    #[inline]
    fn micros(time: nix::Result<TimeSpec>) -> u64 {
        time.map_or(0, |time| time.tv_sec() as u64 * 1_000_000 + time.tv_nsec() as u64 / 1_000)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn starts_at_the_wall_clocks_time_and_advances() {
        let clock = CoarseClock::new();
        let (first, wall) = (clock.now(), Timestamp::wall_clock());
        assert!(first.since(wall).max(wall.since(first)) < 1_000_000);
        while clock.now() == first {}
        assert!(clock.now() > first);
    }

    /// Kernels have 100 to 1,000 timer interrupts per second.
    #[cfg(target_os = "linux")]
    #[test]
    fn resolution_is_a_tick() {
        let resolution = CoarseClock::new().resolution();
        assert!((900..=11_000).contains(&resolution.as_micros()), "{resolution:?}");
    }
}

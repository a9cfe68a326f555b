//! Instants: whole microseconds since the unix epoch.

use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// An instant: whole microseconds since the unix epoch.
///
/// Every strategy computes with it, on every storage. Microseconds of our time are below 2^53, so
/// they are exact where numbers are doubles (Lua inside Redis); nanoseconds would not be.
///
/// All arithmetic saturates: no instant and no wait makes it panic or wrap around.
///
/// ```
/// use tower_ratelimit::Timestamp;
///
/// let start = Timestamp::from_micros(1_728_000_000_000_000);
/// assert_eq!(start.plus(60).since(start), 60);
/// assert_eq!(start.since(start.plus(60)), 0);
/// ```
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp(u64);

impl Timestamp {
    /// The unix epoch itself.
    pub const EPOCH: Self = Self(0);

    /// The instant `micros` microseconds after the unix epoch.
    #[inline]
    pub const fn from_micros(micros: u64) -> Self {
        Self(micros)
    }

    /// The wall clock's time, rounded down to a microsecond; the epoch itself if the clock stands before it.
    pub fn wall_clock() -> Self {
        Self(SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, micros))
    }

    /// Microseconds since the unix epoch.
    #[inline]
    pub const fn as_micros(self) -> u64 {
        self.0
    }

    /// Seconds since the unix epoch, rounded up: a client that waits until then has waited long enough.
    pub const fn as_secs_ceil(self) -> u64 {
        self.0.div_ceil(1_000_000)
    }

    /// The instant `micros` microseconds later.
    #[must_use]
    #[inline]
    pub const fn plus(self, micros: u64) -> Self {
        Self(self.0.saturating_add(micros))
    }

    /// The instant `micros` microseconds earlier, at the earliest the epoch.
    #[must_use]
    #[inline]
    pub const fn minus(self, micros: u64) -> Self {
        Self(self.0.saturating_sub(micros))
    }

    /// Microseconds from `earlier` to this instant; 0 when `earlier` is not earlier.
    #[inline]
    pub const fn since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }

    /// The latest multiple of `period` microseconds since the epoch that is not after this instant.
    ///
    /// # Panics
    ///
    /// When `period` is 0.
    #[must_use]
    pub const fn floor_to(self, period: u64) -> Self {
        Self(self.0 - self.0 % period)
    }
}

impl fmt::Debug for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}us", self.0)
    }
}

/// Whole microseconds of a duration, rounded down; the largest number when it does not fit.
pub(crate) fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// Whole seconds of a duration, rounded up.
pub(crate) fn seconds_up(duration: Duration) -> u64 {
    duration.as_secs() + u64::from(duration.subsec_nanos() > 0)
}

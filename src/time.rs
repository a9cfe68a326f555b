//! Timestamps in whole microseconds since the Unix epoch.

use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// An instant in whole microseconds since the Unix epoch.
///
/// All strategies and storages compute with this type. Until the year 2255, timestamps are below
/// 2^53, so they are exact in double-precision numbers, which Lua in Redis uses.
///
/// [`plus`](Self::plus), [`minus`](Self::minus) and [`since`](Self::since) saturate instead of
/// overflowing.
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
    /// The Unix epoch.
    pub const EPOCH: Self = Self(0);

    /// Creates a timestamp from microseconds since the Unix epoch.
    #[inline]
    pub const fn from_micros(micros: u64) -> Self {
        Self(micros)
    }

    /// Returns the time of the system's wall clock, rounded down to a microsecond. A time before
    /// the epoch becomes the epoch.
    #[doc(alias = "now")]
    pub fn wall_clock() -> Self {
        Self(SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, micros))
    }

    /// Returns the microseconds since the Unix epoch.
    #[inline]
    pub const fn as_micros(self) -> u64 {
        self.0
    }

    /// Returns the seconds since the Unix epoch, rounded up, so that a client that waits until then
    /// has waited long enough.
    pub const fn as_secs_ceil(self) -> u64 {
        self.0.div_ceil(1_000_000)
    }

    /// Returns the instant `micros` microseconds later, or the latest instant if that overflows.
    #[must_use]
    #[inline]
    pub const fn plus(self, micros: u64) -> Self {
        Self(self.0.saturating_add(micros))
    }

    /// Returns the instant `micros` microseconds earlier, but never before the epoch.
    #[must_use]
    #[inline]
    pub const fn minus(self, micros: u64) -> Self {
        Self(self.0.saturating_sub(micros))
    }

    /// Returns the microseconds from `earlier` to this instant, or 0 if `earlier` is not earlier.
    #[doc(alias = "duration_since")]
    #[inline]
    pub const fn since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }

    /// Returns this instant, rounded down to a multiple of `period` microseconds since the epoch.
    ///
    /// # Panics
    ///
    /// Panics if `period` is 0.
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

/// Returns the duration in whole microseconds, rounded down. Saturates at `u64::MAX`.
pub(crate) fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// Returns a random duration of whole microseconds between zero and `longest`, for jitter.
pub(crate) fn random_up_to(longest: Duration) -> Duration {
    let longest = micros(longest).min(u64::MAX - 1);
    Duration::from_micros(RandomState::new().hash_one(longest) % (longest + 1))
}

/// Returns the duration in whole seconds, rounded up.
pub(crate) fn seconds_up(duration: Duration) -> u64 {
    duration.as_secs() + u64::from(duration.subsec_nanos() > 0)
}

//! The calendar: the begin and the end of each day, week, month and year.
//!
//! A period begins at local midnight of its first day. If the clock shows this midnight twice, the
//! period begins at the first of the two instants. If the clock skips it, the period begins at the first
//! instant after the gap.

#[cfg(not(feature = "calendar"))]
mod missing;
mod recent;
mod start;
#[cfg(feature = "calendar")]
mod zone;

use std::ops::Range;

#[cfg(not(feature = "calendar"))]
pub(super) use self::missing::Zone;
pub(super) use self::recent::RecentWindows;
pub(super) use self::start::Start;
pub use self::start::Weekday;
#[cfg(feature = "calendar")]
pub(super) use self::zone::Zone;
use crate::error::ConfigError;
use crate::quota::{DAY, MONTH, Quota, WEEK, YEAR};
use crate::time::Timestamp;

/// The error for a name that is not a time zone.
#[derive(Clone, Debug)]
pub(crate) struct UnknownZone {
    /// The reason, and what to do.
    pub(crate) why: &'static str,
    /// The name that was probably meant.
    pub(crate) nearest: Option<String>,
}

/// The unit of a calendar window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unit {
    Day,
    Week,
    Month,
    Year,
}

impl Unit {
    const ALL: [Self; 4] = [Self::Day, Self::Week, Self::Month, Self::Year];

    /// Returns the unit whose nominal duration is the period of the quota.
    #[inline]
    pub(super) fn of(quota: &Quota) -> Option<Self> {
        Self::ALL.into_iter().find(|unit| unit.micros() == quota.period_micros())
    }

    /// Returns the nominal duration in microseconds.
    #[inline]
    const fn micros(self) -> u64 {
        match self {
            Self::Day => DAY,
            Self::Week => WEEK,
            Self::Month => MONTH,
            Self::Year => YEAR,
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Day => "day",
            Self::Week => "week",
            Self::Month => "month",
            Self::Year => "year",
        }
    }

    /// Returns advice on the first day of such a window.
    const fn advice(self) -> &'static str {
        match self {
            Self::Day => "remove \"from\", because every day begins at midnight",
            Self::Week => "use a day of the week, for example \"from sunday\"",
            Self::Month => "use a day of the month, for example \"from 15\"",
            Self::Year => "use a month and a day, for example \"from 04-01\"",
        }
    }
}

/// A calendar with the first day of its weeks, months or years, in a time zone.
#[derive(Clone, Debug, Default)]
pub(super) struct Calendar {
    pub(super) start: Option<Start>,
    /// The time zone. `None` is UTC.
    pub(super) zone: Option<Zone>,
}

impl Calendar {
    /// Checks that the calendar has windows of this unit.
    pub(super) fn check(&self, unit: Unit) -> Result<(), ConfigError> {
        if let Some(start) = self.start
            && start.unit() != unit
        {
            return Err(ConfigError::new(format!("a {} cannot begin on {start}: {}", unit.name(), unit.advice())));
        }
        if cfg!(not(feature = "calendar")) && matches!(unit, Unit::Month | Unit::Year) {
            return Err(ConfigError::new(format!(
                "a calendar window of a {} needs the feature `calendar` of tower-ratelimit: enable it in Cargo.toml, \
                 or use a window of a day or a week",
                unit.name()
            )));
        }
        Ok(())
    }

    /// Returns the window that contains `now`. An instant outside of the years of the calendar is in
    /// a window of the nominal duration.
    pub(super) fn window(&self, unit: Unit, now: Timestamp) -> Range<Timestamp> {
        if (self.zone.is_some() || matches!(unit, Unit::Month | Unit::Year))
            && let Some(window) = Zone::window(self.zone.as_ref(), unit, self.start, now)
        {
            return window;
        }
        // The epoch was a Thursday.
        let monday = 3 + 7 - self.start.map_or(0, Start::days_after_monday);
        let shift = if unit == Unit::Week { u64::from(monday % 7) * DAY } else { 0 };
        let passed = (now.as_micros() % unit.micros() + shift) % unit.micros();
        now.minus(passed)..now.plus(unit.micros() - passed)
    }
}

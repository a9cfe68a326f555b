//! The first day of calendar windows.

use std::fmt;

use super::Unit;
use crate::error::ConfigError;

/// A day of the week, for [`CalendarWindow::first_weekday`](crate::CalendarWindow::first_weekday).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(clippy::exhaustive_enums, reason = "a week has seven days")]
#[expect(missing_docs, reason = "the names say it")]
pub enum Weekday {
    Monday,
    Tuesday,
    Wednesday,
    Thursday,
    Friday,
    Saturday,
    Sunday,
}

impl Weekday {
    /// The days, each with its name in texts.
    pub(crate) const ALL: [(Self, &'static str); 7] = [
        (Self::Monday, "monday"),
        (Self::Tuesday, "tuesday"),
        (Self::Wednesday, "wednesday"),
        (Self::Thursday, "thursday"),
        (Self::Friday, "friday"),
        (Self::Saturday, "saturday"),
        (Self::Sunday, "sunday"),
    ];
}

/// The first day of each week, month or year. Defaults to Monday, the first, and 1 January.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Start {
    Weekday(Weekday),
    Day(u8),
    Date { month: u8, day: u8 },
}

/// The days of each month in a leap year.
const DAYS: [u8; 12] = [31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];

impl Start {
    pub(in super::super) fn day(day: u8) -> Result<Self, ConfigError> {
        match day {
            1..=31 => Ok(Self::Day(day)),
            _ => Err(ConfigError::new(format!("a month has no day {day}: use a number from 1 to 31, for example 15"))),
        }
    }

    pub(in super::super) fn date(month: u8, day: u8) -> Result<Self, ConfigError> {
        let days = usize::from(month).checked_sub(1).and_then(|index| DAYS.get(index));
        if days.is_some_and(|days| (1..=*days).contains(&day)) {
            return Ok(Self::Date { month, day });
        }
        Err(ConfigError::new(format!(
            "no year has the day {month:02}-{day:02}: use a month and a day, for example 04-01 for 1 April"
        )))
    }

    /// Returns the unit of the windows that can begin on such a day.
    pub(super) const fn unit(self) -> Unit {
        match self {
            Self::Weekday(_) => Unit::Week,
            Self::Day(_) => Unit::Month,
            Self::Date { .. } => Unit::Year,
        }
    }

    /// Returns the number of days from Monday to the first day of a week.
    pub(super) const fn days_after_monday(self) -> u8 {
        match self {
            Self::Weekday(weekday) => weekday as u8,
            Self::Day(_) | Self::Date { .. } => 0,
        }
    }

    /// Returns `true` if windows begin on this day anyway.
    pub(in super::super) fn is_default(self) -> bool {
        matches!(self, Self::Weekday(Weekday::Monday) | Self::Day(1) | Self::Date { month: 1, day: 1 })
    }
}

/// Writes the day as in the text of a policy: `sunday`, `15`, `04-01`.
impl fmt::Display for Start {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Weekday(weekday) => f.write_str(Weekday::ALL[*weekday as usize].1),
            Self::Day(day) => write!(f, "{day}"),
            Self::Date { month, day } => write!(f, "{month:02}-{day:02}"),
        }
    }
}

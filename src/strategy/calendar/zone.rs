//! Windows in a time zone, by the crate `jiff`.

use std::fmt;
use std::ops::Range;

use jiff::civil::{Date, Time, date};
use jiff::tz::{AmbiguousOffset, TimeZone, db};
use jiff::{SignedDuration, Timestamp as Instant};
use strsim::damerau_levenshtein;

use super::{Start, Unit, UnknownZone};
use crate::time::Timestamp;

/// The day of the Unix epoch, a Thursday.
const EPOCH: Date = date(1970, 1, 1);

/// The reason why no zone is found.
const NO_DATA: &str =
    "this system has no time zone data: install tzdata, or enable the feature `calendar-bundled` of tower-ratelimit";

/// A time zone of the IANA database, with the data that was installed when it was loaded.
#[derive(Clone)]
pub(in super::super) struct Zone(TimeZone);

impl Zone {
    /// Loads the zone with this name. Upper and lower case are equivalent. Returns `None` for UTC.
    pub(in super::super) fn find(name: &str) -> Result<Option<Self>, UnknownZone> {
        match TimeZone::get(name) {
            Ok(zone) if zone == TimeZone::UTC => Ok(None),
            Ok(zone) if zone.iana_name().is_some() => Ok(Some(Self(zone))),
            _ if db().available().next().is_none() => Err(UnknownZone { why: NO_DATA, nearest: None }),
            _ => Err(UnknownZone { why: "the time zone database has no such zone", nearest: nearest(name) }),
        }
    }

    /// Returns the name as in the database.
    pub(in super::super) fn name(&self) -> &str {
        self.0.iana_name().unwrap_or_default()
    }

    /// Returns the window in this zone, or in UTC, that contains `now`. Returns `None` outside of the
    /// years of the calendar, which end in 9999.
    pub(super) fn window(
        zone: Option<&Self>,
        unit: Unit,
        start: Option<Start>,
        now: Timestamp,
    ) -> Option<Range<Timestamp>> {
        let zone = zone.map_or(TimeZone::UTC, |Self(zone)| zone.clone());
        let now = Instant::from_microsecond(i64::try_from(now.as_micros()).ok()?).ok()?;
        let begin = |number| midnight(&zone, unit.first_day(start, number)?);
        // The local date can be ahead of the window or behind it, because a clock that goes back over
        // midnight shows the old date once more.
        let mut number = unit.number(start, zone.to_datetime(now).date());
        while begin(number)? > now {
            number -= 1;
        }
        while begin(number + 1)? <= now {
            number += 1;
        }
        Some(timestamp(begin(number)?)..timestamp(begin(number + 1)?))
    }
}

/// Returns the instant at which the day begins.
fn midnight(zone: &TimeZone, day: Date) -> Option<Instant> {
    let midnight = zone.to_ambiguous_timestamp(day.to_datetime(Time::midnight()));
    let is_in_gap = matches!(midnight.offset(), AmbiguousOffset::Gap { .. });
    // The earlier one of two, or an instant after the gap.
    let instant = midnight.compatible().ok()?;
    if !is_in_gap {
        return Some(instant);
    }
    let just_after = instant.checked_add(SignedDuration::from_secs(1)).ok()?;
    zone.preceding(just_after).next().map(|transition| transition.timestamp())
}

/// Instants before the epoch count as the epoch.
fn timestamp(instant: Instant) -> Timestamp {
    Timestamp::from_micros(u64::try_from(instant.as_microsecond()).unwrap_or(0))
}

impl Unit {
    /// Returns the number of the window that contains the day, or of the next one. Days and weeks
    /// count from the epoch, months and years from the year 0.
    fn number(self, start: Option<Start>, day: Date) -> i64 {
        let year = i64::from(day.year());
        match self {
            Self::Day => days(day),
            Self::Week => (days(day) - first_weekday(start)).div_euclid(7),
            Self::Month => 12 * year + i64::from(day.month()) - 1,
            Self::Year => year,
        }
    }

    /// Returns the first day of a window. A month or year without the day of `start` begins on the
    /// last day before it.
    fn first_day(self, start: Option<Start>, number: i64) -> Option<Date> {
        let after_epoch = |days: i64| EPOCH.checked_add(SignedDuration::from_hours(days.checked_mul(24)?)).ok();
        let in_month = |year: i64, month: i64, day: u8| {
            let first = Date::new(i16::try_from(year).ok()?, i8::try_from(month).ok()?, 1).ok()?;
            let day = i8::try_from(day).ok()?.min(first.days_in_month());
            Date::new(first.year(), first.month(), day).ok()
        };
        match (self, start) {
            (Self::Day, _) => after_epoch(number),
            (Self::Week, _) => after_epoch(7 * number + first_weekday(start)),
            (Self::Month, Some(Start::Day(day))) => in_month(number.div_euclid(12), number.rem_euclid(12) + 1, day),
            (Self::Month, _) => in_month(number.div_euclid(12), number.rem_euclid(12) + 1, 1),
            (Self::Year, Some(Start::Date { month, day })) => in_month(number, month.into(), day),
            (Self::Year, _) => in_month(number, 1, 1),
        }
    }
}

/// Returns the number of days since the epoch.
fn days(day: Date) -> i64 {
    day.duration_since(EPOCH).as_hours() / 24
}

/// Returns the first day of the first week, in days after the epoch. 1970-01-05 was a Monday.
fn first_weekday(start: Option<Start>) -> i64 {
    4 + start.map_or(0, |start| start.days_after_monday().into())
}

/// Returns the name that was probably meant: the most similar one, of which a quarter of the letters
/// may be wrong. A city without its region, such as `Berlin`, is enough.
fn nearest(name: &str) -> Option<String> {
    let letters = |name: &str| name.replace(' ', "_").to_ascii_lowercase();
    let name = letters(name);
    let zones = db().available().map(|zone| zone.as_str().to_owned());
    let distance = |zone: &str| {
        let zone = letters(zone);
        let city = zone.rsplit_once('/').map_or(&*zone, |(_, city)| city);
        damerau_levenshtein(&name, &zone).min(damerau_levenshtein(&name, city))
    };
    let near = zones.map(|zone| (distance(&zone), zone)).filter(|(distance, _)| 4 * distance <= name.len());
    near.min().map(|(_, zone)| zone)
}

impl fmt::Debug for Zone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// No zone has had such a gap since 1970, but zones can get one.
    #[test]
    fn day_whose_midnight_is_inside_a_gap_begins_after_the_gap() {
        // On the last Saturday of March, the clock goes from 23:30 to 00:30.
        let zone = Zone(TimeZone::posix("AAA0BBB,M3.4.6/23:30,M10.4.6/2").unwrap());
        let gap = Timestamp::from_micros(1_711_236_600_000_000); // 2024-03-23T23:30:00Z
        let hour = 3_600_000_000;
        let window = |now| Zone::window(Some(&zone), Unit::Day, None, now).unwrap();
        assert_eq!(window(gap.minus(1)), gap.minus(47 * hour / 2)..gap);
        assert_eq!(window(gap), gap..gap.plus(47 * hour / 2));
    }
}

use std::fmt;
use std::ops::Range;

use super::calendar::{Calendar, RecentWindows, Start, Unit, UnknownZone, Weekday, Zone};
use super::contract::without_burst;
use super::window::{Window, status};
use super::{Hit, Script, State, Status, Strategy};
use crate::error::ConfigError;
use crate::quota::{DAY, Quota};
use crate::text::Suggested;
use crate::time::Timestamp;

/// Admits at most N units in each day, week, month or year of the calendar.
///
/// The period of the quota selects the unit: [`per_day`](Quota::per_day),
/// [`per_week`](Quota::per_week), [`per_month`](Quota::per_month) or [`per_year`](Quota::per_year).
/// A limit with another period is an error, and so is a first day of another unit, such as a day of
/// the month for a week.
///
/// Windows begin at midnight in a [time zone](Self::in_zone), by default UTC. A week begins on
/// Monday, a month on the first, and a year on 1 January, unless
/// [`first_weekday`](Self::first_weekday), [`first_day`](Self::first_day) or
/// [`first_date`](Self::first_date) selects another day.
///
/// | first day of a window | start of the window |
/// |---|---|
/// | a day on which the clock goes back and shows midnight twice | the first midnight |
/// | a day on which the clock goes forward and skips midnight | the end of the skipped time |
/// | a day that the month does not have | midnight of the last day of the month |
/// | 29 February, which the year does not have | midnight of 28 February |
///
/// So a day can have 23 or 25 hours, and `retry_after` is exact on such days as well. Any span as
/// long as the shortest window can contain up to 2N units: at the end of one window and the start
/// of the next.
///
/// A window that has begun keeps its end, also if the time zone, its data or the first day changes.
///
/// Days and weeks in UTC need no feature. Months, years and time zones need the feature `calendar`,
/// which reads the zone data of the system. With the feature `calendar-bundled`, the program
/// contains zone data for systems that have none.
///
/// In strings: `calendar 50/day in America/New_York`, `calendar 5/week from sunday`,
/// `calendar 1000/month from 15 in Europe/Berlin`, `calendar 9000/year from 04-01`. The guide
/// [Quotas by day and month](crate::guide::quotas_by_day_and_month) has examples.
///
/// ```
/// use std::time::Duration;
/// use tower_ratelimit::storage::ManualClock;
/// use tower_ratelimit::strategy::Weekday;
/// use tower_ratelimit::{CalendarWindow, Key, MemoryStorage, Policy, Quota, RateLimiter};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// // This clock starts at 2024-10-04T00:00:00Z, a Friday.
/// let storage = MemoryStorage::builder().clock(ManualClock::default()).build()?;
/// let weekly = CalendarWindow::new().first_weekday(Weekday::Sunday);
/// let limiter = RateLimiter::with_storage(Policy::new(weekly, Quota::per_week(1)), storage);
/// let alice = Key::from("alice");
///
/// assert!(limiter.hit(&alice).await?.is_admitted());
/// let two_days = Duration::from_secs(2 * 86_400);
/// assert_eq!(limiter.hit(&alice).await?.retry_after(), Some(two_days));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default)]
pub struct CalendarWindow {
    calendar: Calendar,
    recent: RecentWindows,
}

impl CalendarWindow {
    /// The name of the strategy.
    pub(crate) const NAME: &str = "calendar";

    /// Creates a strategy whose windows are days, weeks, months or years in UTC.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the first day of each week. Defaults to Monday.
    #[must_use]
    pub fn first_weekday(self, weekday: Weekday) -> Self {
        self.starting(Start::Weekday(weekday))
    }

    /// Sets the first day of each month, from 1 to 31. A month that is shorter begins on its last
    /// day, and the next one again on this day. Defaults to 1.
    ///
    /// # Errors
    ///
    /// Returns an error for another number.
    pub fn first_day(self, day: u8) -> Result<Self, ConfigError> {
        Ok(self.starting(Start::day(day)?))
    }

    /// Sets the first day of each year, such as 4 and 1 for 1 April. 29 February is 28 February in
    /// years without one. Defaults to 1 January.
    ///
    /// # Errors
    ///
    /// Returns an error if there is no such day.
    pub fn first_date(self, month: u8, day: u8) -> Result<Self, ConfigError> {
        Ok(self.starting(Start::date(month, day)?))
    }

    /// Sets the time zone, by its name in the IANA database, such as `Europe/Berlin`. Defaults to
    /// `UTC`. The policy keeps the zone data that is installed now, until it is created again.
    ///
    /// # Errors
    ///
    /// Returns an error if the database has no such zone, or if there is no database. The message
    /// suggests the most similar name. Without the feature `calendar`, returns an error for every
    /// name except `UTC`.
    ///
    /// ```
    /// use tower_ratelimit::CalendarWindow;
    ///
    /// # #[cfg(feature = "calendar")] {
    /// let error = CalendarWindow::new().in_zone("Europe/Berln").unwrap_err();
    /// assert!(error.to_string().ends_with(r#"did you mean "Europe/Berlin"?"#));
    /// # }
    /// ```
    pub fn in_zone(self, name: &str) -> Result<Self, ConfigError> {
        self.find_zone(name).map_err(|UnknownZone { why, nearest }| {
            let meant = nearest.map_or_else(String::new, |name| format!("; did you mean {}?", Suggested(&name)));
            ConfigError::new(format!("unknown time zone {name:?}: {why}{meant}"))
        })
    }

    /// Like [`in_zone`](Self::in_zone), with the parts of its error.
    pub(crate) fn find_zone(self, name: &str) -> Result<Self, UnknownZone> {
        let calendar = Calendar { zone: Zone::find(name)?, ..self.calendar };
        Ok(Self { calendar, ..Self::default() })
    }

    fn starting(self, start: Start) -> Self {
        let calendar = Calendar { start: Some(start), ..self.calendar };
        Self { calendar, ..Self::default() }
    }

    /// Returns the window that contains `now`.
    #[inline]
    fn window_at(&self, quota: &Quota, now: Timestamp) -> Range<Timestamp> {
        let unit = Unit::of(quota).unwrap_or(Unit::Day);
        self.recent.get(unit, now, || self.calendar.window(unit, now))
    }

    /// Returns the live window.
    ///
    /// A stored end may differ from that of the calendar, because the time zone or the first day has
    /// changed. It counts unless no window can be so long. Then the clock has gone back, and the window
    /// counts as the current one of the calendar.
    #[inline(always)]
    fn live(&self, quota: &Quota, state: &State, now: Timestamp) -> Option<Window> {
        let is_ahead = |until: Timestamp| until.since(now) > longest(quota);
        Window::live(state, now, |until| if is_ahead(until) { self.window_at(quota, now).end } else { until })
    }
}

/// Returns an upper bound of the duration of a window in microseconds. A month has up to 31 days, a
/// year 366, and a change of clocks adds less than a day.
#[inline]
const fn longest(quota: &Quota) -> u64 {
    quota.period_micros() + 2 * DAY
}

impl Strategy for CalendarWindow {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn validate(&self, quota: &Quota) -> Result<(), ConfigError> {
        without_burst(Self::NAME, quota)?;
        let unit = Unit::of(quota).ok_or_else(|| {
            ConfigError::new(format!(
                "the period of \"{quota}\" is not a day, a week, a month or a year: use one of them, \
                 or write \"fixed-window-aligned {quota}\""
            ))
        })?;
        self.calendar.check(unit)
    }

    #[inline(always)]
    fn check(&self, quota: &Quota, state: &State, now: Timestamp, cost: u32) -> Status {
        let (left, count) = Window::left(self.live(quota, state, now), now);
        status(quota, left, count, cost, left)
    }

    #[inline(always)]
    fn spend(&self, quota: &Quota, state: &mut State, now: Timestamp, cost: u32) -> u64 {
        let window = self.live(quota, state, now).unwrap_or_else(|| Window::new(self.window_at(quota, now).end, now));
        window.spend(state, cost)
    }

    #[inline]
    fn refuse(&self, quota: &Quota, state: &mut State, now: Timestamp) {
        if let Some(live) = self.live(quota, state, now) {
            *state = live.store();
        }
    }

    fn refund(&self, quota: &Quota, state: &mut State, now: Timestamp, hit: &Hit, units: u32) {
        if let Some(live) = self.live(quota, state, now).filter(|live| live.end == hit.until) {
            live.refund(state, hit, units);
        }
    }

    fn window(&self, quota: &Quota, now: Timestamp) -> Option<Range<Timestamp>> {
        Some(self.window_at(quota, now))
    }

    /// The arguments contain three windows, because the clock of the server may be in another one than
    /// that of this process.
    fn script(&self, quota: &Quota, now: Timestamp, _: u32) -> Option<Script> {
        let current = self.window_at(quota, now);
        let last = self.window_at(quota, current.start.minus(1));
        let next = self.window_at(quota, current.end);
        let instants = [last.start, current.start, current.end, next.end].map(Timestamp::as_micros);
        let arguments = [&[quota.amount().into(), longest(quota)][..], &instants].concat();
        let sources = &[include_str!("window.lua"), include_str!("calendar_window.lua")];
        Some(Script { name: Self::NAME, sources, arguments, delays: false })
    }

    fn describe(&self, quota: &Quota, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {quota}", Self::NAME)?;
        let Calendar { start, zone } = &self.calendar;
        start.filter(|start| !start.is_default()).map_or(Ok(()), |start| write!(f, " from {start}"))?;
        zone.as_ref().map_or(Ok(()), |zone| write!(f, " in {}", zone.name()))
    }
}

//! Quotas: amounts per period, optionally with a burst.

mod text;

pub(crate) use self::text::{Period, Time, scan_time};

use std::fmt;
use std::num::NonZeroU32;
use std::time::Duration;

use crate::error::ConfigError;
use crate::time::micros;

const MILLISECOND: u64 = 1_000;
const SECOND: u64 = 1_000 * MILLISECOND;
const MINUTE: u64 = 60 * SECOND;
const HOUR: u64 = 60 * MINUTE;
pub(crate) const DAY: u64 = 24 * HOUR;
pub(crate) const WEEK: u64 = 7 * DAY;
pub(crate) const MONTH: u64 = 30 * DAY;
pub(crate) const YEAR: u64 = 365 * DAY;

/// The longest span that strategies can count: 2^52 microseconds, about 142 years.
const LONGEST: u64 = 1 << 52;

/// An amount per period, optionally with a burst: `100/minute`, `10/second burst 20`.
///
/// The constructors are `const`, so an invalid constant does not compile. At run time they panic on
/// an invalid value, such as zero. [`try_per`](Self::try_per), [`try_burst`](Self::try_burst) and
/// parsing return an error instead.
///
/// A quota converts into a [`Policy`](crate::Policy) with
/// [`SlidingWindowCounter`](crate::SlidingWindowCounter), or with
/// [`TokenBucket`](crate::TokenBucket) if it has a burst.
///
/// ```
/// use std::time::Duration;
/// use tower_ratelimit::Quota;
///
/// const LOGIN: Quota = Quota::per_minute(5);
///
/// assert_eq!("5/minute".parse(), Ok(LOGIN));
/// assert_eq!("100 per 2 hours".parse(), Ok(Quota::per(100, Duration::from_secs(7_200))));
/// assert_eq!("10/second burst 20".parse(), Ok(Quota::per_second(10).burst(20)));
/// assert!("0/minute".parse::<Quota>().is_err());
/// ```
///
/// # Text form
///
/// A string consists of the amount, `/` or `per`, the period, and optionally `burst` with a number.
/// The period is a unit of time, with a number before it if the number is not 1. The units of time
/// are `s`, `sec`, `second(s)`, `m`, `min`, `minute(s)`, `h`, `hr`, `hour(s)`, `d`, `day(s)`, `w`,
/// `week(s)`, `month(s)` (30 days), `year(s)` (365 days) and `ms`. Upper and lower case are
/// equivalent.
///
/// [`Display`](fmt::Display) writes a string that parses to the same quota. There are two
/// exceptions, for which the string cannot be parsed:
///
/// - a period that is not a whole number of milliseconds,
/// - a period of more than 2^32 - 1 of the largest unit of time that divides it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Quota {
    amount: u32,
    period: u64,
    burst: Option<u32>,
    // Precomputed, because division is slow.
    /// The refill time of one unit.
    unit: Span,
    /// The refill time of the burst, or else of the amount.
    full: Span,
    /// See [`Span::largest_mark`].
    largest: u32,
}

impl Quota {
    /// Creates a quota of `amount` units per second. `per_second(60)` means 60 units each second.
    ///
    /// # Panics
    ///
    /// Panics if `amount` is 0. [`try_per`](Self::try_per) returns an error instead.
    #[track_caller]
    pub const fn per_second(amount: u32) -> Self {
        Self::of(amount, SECOND)
    }

    /// Creates a quota of `amount` units per minute.
    ///
    /// # Panics
    ///
    /// Panics if `amount` is 0. [`try_per`](Self::try_per) returns an error instead.
    #[track_caller]
    pub const fn per_minute(amount: u32) -> Self {
        Self::of(amount, MINUTE)
    }

    /// Creates a quota of `amount` units per hour.
    ///
    /// # Panics
    ///
    /// Panics if `amount` is 0. [`try_per`](Self::try_per) returns an error instead.
    #[track_caller]
    pub const fn per_hour(amount: u32) -> Self {
        Self::of(amount, HOUR)
    }

    /// Creates a quota of `amount` units per day of 24 hours.
    ///
    /// # Panics
    ///
    /// Panics if `amount` is 0. [`try_per`](Self::try_per) returns an error instead.
    #[track_caller]
    pub const fn per_day(amount: u32) -> Self {
        Self::of(amount, DAY)
    }

    /// Creates a quota of `amount` units per week of 7 days.
    ///
    /// # Panics
    ///
    /// Panics if `amount` is 0. [`try_per`](Self::try_per) returns an error instead.
    #[track_caller]
    pub const fn per_week(amount: u32) -> Self {
        Self::of(amount, WEEK)
    }

    /// Creates a quota of `amount` units per month of 30 days. A
    /// [`CalendarWindow`](crate::CalendarWindow) takes it as a calendar month.
    ///
    /// # Panics
    ///
    /// Panics if `amount` is 0. [`try_per`](Self::try_per) returns an error instead.
    #[track_caller]
    pub const fn per_month(amount: u32) -> Self {
        Self::of(amount, MONTH)
    }

    /// Creates a quota of `amount` units per year of 365 days. A
    /// [`CalendarWindow`](crate::CalendarWindow) takes it as a calendar year.
    ///
    /// # Panics
    ///
    /// Panics if `amount` is 0. [`try_per`](Self::try_per) returns an error instead.
    #[track_caller]
    pub const fn per_year(amount: u32) -> Self {
        Self::of(amount, YEAR)
    }

    /// Creates a quota of `amount` units per `period`, which is rounded down to whole microseconds.
    ///
    /// # Panics
    ///
    /// Panics if `amount` is 0, or if the period is shorter than one microsecond or longer than
    /// 2^52 microseconds (142 years). [`try_per`](Self::try_per) returns an error instead.
    #[track_caller]
    pub const fn per(amount: u32, period: Duration) -> Self {
        let micros = period.as_micros();
        assert!(micros >= 1, "a quota's period must be at least one microsecond");
        assert!(micros <= LONGEST as u128, "a quota's period must be at most 2^52 microseconds (142 years)");
        #[allow(clippy::cast_possible_truncation)] // just checked
        Self::of(amount, micros as u64)
    }

    /// Sets the number of units that can be spent at once. Defaults to the amount. The burst may be
    /// larger or smaller than the amount.
    ///
    /// A quota with a burst uses a [`TokenBucket`](crate::TokenBucket), unless you choose the
    /// strategy. The other built-in strategies reject a burst when the [`Limit`](crate::Limit) is
    /// created.
    ///
    /// ```
    /// use tower_ratelimit::Quota;
    ///
    /// // 10 per second on average, and 50 at once after five idle seconds.
    /// const API: Quota = Quota::per_second(10).burst(50);
    /// ```
    ///
    /// # Panics
    ///
    /// Panics if `burst` is 0, or if an exhausted burst would take more than 2^52 microseconds (142
    /// years) to refill. [`try_burst`](Self::try_burst) returns an error instead.
    #[must_use]
    #[track_caller]
    pub const fn burst(self, burst: u32) -> Self {
        assert!(burst >= 1, "a quota's burst must be at least 1");
        assert!(self.refills_in_time(burst), "a quota's burst must refill within 2^52 microseconds (142 years)");
        self.with_room(burst)
    }

    /// Like [`per`](Self::per), but returns an error instead of panicking.
    ///
    /// # Errors
    ///
    /// Returns an error if `amount` is 0, or if the period is shorter than one microsecond or
    /// longer than 2^52 microseconds (142 years).
    pub fn try_per(amount: u32, period: Duration) -> Result<Self, ConfigError> {
        Self::try_of(amount, micros(period))
    }

    /// Like [`burst`](Self::burst), but returns an error instead of panicking.
    ///
    /// # Errors
    ///
    /// Returns an error if `burst` is 0, or if an exhausted burst would take more than 2^52
    /// microseconds (142 years) to refill.
    pub fn try_burst(self, burst: u32) -> Result<Self, ConfigError> {
        if burst == 0 {
            return Err(ConfigError::new("a burst must be at least 1, for example \"10/second burst 20\""));
        }
        self.check_refill(burst)?;
        Ok(self.with_room(burst))
    }

    /// Returns the part of this quota for one of `replicas`.
    ///
    /// - The period stays the same.
    /// - The amount and the burst are divided and rounded down, but are at least 1. So with more
    ///   replicas than units, all parts together exceed this quota.
    /// - A burst that would then take more than 2^52 microseconds (142 years) to refill is lowered
    ///   to the largest possible one.
    ///
    /// ```
    /// use std::num::NonZeroU32;
    /// use tower_ratelimit::Quota;
    ///
    /// let three = NonZeroU32::new(3).unwrap();
    /// assert_eq!(Quota::per_second(10).burst(50).divide(three), Quota::per_second(3).burst(16));
    /// assert_eq!(Quota::per_minute(2).divide(three), Quota::per_minute(1));
    /// ```
    #[must_use]
    pub fn divide(&self, replicas: NonZeroU32) -> Self {
        let part = |units: u32| (units / replicas).max(1);
        let share = Self::of(part(self.amount), self.period);
        self.burst.map_or(share, |burst| {
            let burst = part(burst).min(share.most_in_time());
            share.with_room(burst)
        })
    }

    /// Returns the number of units per period, at least 1.
    #[inline]
    pub const fn amount(&self) -> u32 {
        self.amount
    }

    /// Returns the period, from one microsecond to 2^52 microseconds (142 years).
    pub const fn period(&self) -> Duration {
        Duration::from_micros(self.period)
    }

    /// Returns the period in microseconds, from 1 to 2^52.
    #[inline]
    pub const fn period_micros(&self) -> u64 {
        self.period
    }

    /// Returns the number of units that can be spent at once, or `None` if the quota has no
    /// [burst](Self::burst).
    #[inline]
    pub const fn burst_size(&self) -> Option<u32> {
        self.burst
    }

    /// Returns the time in which `units` refill.
    #[inline]
    pub(crate) const fn span_of(&self, units: u32) -> Span {
        if units == 1 { self.unit } else { Span::of(self.amount, units as u128 * self.period as u128) }
    }

    /// Returns the time in which the whole capacity refills: the burst, or the amount.
    #[inline]
    pub(crate) const fn full_span(&self) -> Span {
        self.full
    }

    /// Returns the mark of a bucket of which the whole capacity is spent. See
    /// [`Span::largest_mark`].
    #[inline]
    pub(crate) const fn largest_mark(&self) -> u32 {
        self.largest
    }

    /// Checks that `capacity` units refill within 2^52 microseconds (142 years) at the rate of this
    /// quota. A strategy whose [capacity](crate::strategy::Strategy::capacity) is not the amount of
    /// the quota calls this in its [`validate`](crate::strategy::Strategy::validate).
    ///
    /// # Errors
    ///
    /// Returns an error if they refill more slowly. The message contains the largest possible
    /// capacity.
    pub fn check_refill(&self, capacity: u32) -> Result<(), ConfigError> {
        if self.refills_in_time(capacity) {
            return Ok(());
        }
        let fits = self.most_in_time();
        Err(ConfigError::new(format!(
            "{self} refills a capacity of {capacity} too slowly: it would take more than 2^52 microseconds (142 years); \
             use at most {fits}"
        )))
    }

    /// Returns the largest capacity that refills within 2^52 microseconds, at least 1.
    pub(crate) fn most_in_time(&self) -> u32 {
        let fits = u128::from(LONGEST) * u128::from(self.amount) / u128::from(self.period);
        u32::try_from(fits).unwrap_or(u32::MAX)
    }

    const fn refills_in_time(&self, capacity: u32) -> bool {
        capacity as u128 * self.period as u128 <= LONGEST as u128 * self.amount as u128
    }

    #[track_caller]
    const fn of(amount: u32, period: u64) -> Self {
        assert!(amount >= 1, "a quota's amount must be at least 1");
        let unit = Span::of(amount, period as u128);
        let full = Span { micros: period, part: 0 };
        Self { amount, period, burst: None, unit, full, largest: full.largest_mark() }
    }

    const fn with_room(self, burst: u32) -> Self {
        let full = self.span_of(burst);
        Self { burst: Some(burst), full, largest: full.largest_mark(), ..self }
    }

    fn try_of(amount: u32, period: u64) -> Result<Self, ConfigError> {
        let problem = match period {
            _ if amount == 0 => "amount must be at least 1",
            0 => "period must be at least one microsecond",
            1..=LONGEST => return Ok(Self::of(amount, period)),
            _ => "period must be at most 2^52 microseconds (142 years)",
        };
        Err(ConfigError::new(format!("a quota's {problem}, for example \"10/minute\"")))
    }
}

impl fmt::Debug for Quota {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Quota({self})")
    }
}

/// The lowest bit of the shift in the mark of a bucket's state. The bits above it hold the shift.
pub(crate) const MARK_SHIFT: u32 = 26;

/// The lowest bit of the size in the mark of a bucket's state. The bits below it hold the anchor.
pub(crate) const MARK_SIZE: u32 = 16;

/// A time span: whole microseconds, and a fraction in units of 1/N microseconds, where N is the
/// amount of the quota.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Span {
    pub(crate) micros: u64,
    pub(crate) part: u32,
}

impl Span {
    /// Returns the span in whole microseconds, rounded up.
    #[inline]
    pub(crate) const fn micros_up(self) -> u64 {
        self.micros + (self.part > 0) as u64
    }

    /// Returns the largest mark that the state of a bucket can have if the bucket refills in this
    /// span: a shift, the shifted span and an anchor. `strategy::mark` describes the layout.
    #[allow(clippy::cast_possible_truncation)] // 10 bits
    pub(crate) const fn largest_mark(self) -> u32 {
        let span = self.micros_up();
        let shift = (64 - span.leading_zeros()).saturating_sub(MARK_SHIFT - MARK_SIZE);
        shift << MARK_SHIFT | ((span >> shift) as u32) << MARK_SIZE | ((1 << MARK_SIZE) - 1)
    }

    /// Returns the span of `parts` units of 1/`amount` microseconds. Saturates at `u64::MAX`
    /// microseconds.
    #[allow(clippy::cast_possible_truncation)]
    const fn of(amount: u32, parts: u128) -> Self {
        if parts <= u64::MAX as u128 {
            let (parts, amount) = (parts as u64, amount as u64);
            return Self { micros: parts / amount, part: (parts % amount) as u32 };
        }
        let micros = parts / amount as u128;
        let micros = if micros < u64::MAX as u128 { micros as u64 } else { u64::MAX };
        Self { micros, part: (parts % amount as u128) as u32 }
    }
}

use std::fmt;
use std::time::Duration;

use super::status::{LEVEL_SHIFT, MAX_LEVEL, level};
use super::window::status;
use super::{Hit, Outcome, Script, State, Status, Strategy};
use crate::error::{ConfigError, or_panic};
use crate::quota::{Period, Quota, Time};
use crate::time::{Timestamp, micros};

/// Locks a key for a time T when N units, called strikes, have been spent within P. The quota is N
/// per P.
///
/// The first strike starts a window, which ends P later. The hit that spends the N-th strike of a
/// window is still admitted, and starts the lock. All hits are refused until the lock ends.
/// Refusals do not count and do not extend the lock. After it, the key starts without strikes.
///
/// By default, all locks are equally long. With [`escalating`](Self::escalating), each lock is
/// longer than the one before. The number of earlier locks is the level of a key. It is forgotten
/// after a time without a live window or lock, which [`forgetting_after`](Self::forgetting_after)
/// sets.
///
/// If hits are refunded so that fewer than N strikes are left, the lock ends and does not count for
/// the level. [`charge`](crate::RateLimiter::charge) with N units locks a key. While a key is
/// locked, a charge changes nothing. [`clear`](crate::RateLimiter::clear) unlocks the key and
/// removes its level.
///
/// In strings: `lockout 5/10m for 15m`, `lockout 5/10m for 15m x2 up to 1d forget 7d`. With
/// [`by_refusals`](Self::by_refusals): `10/second; lockout 100 refusals/m for 1h`.
///
#[doc = include_str!("../pictures/lockout.svg")]
///
/// ```
/// use std::time::Duration;
/// use tower_ratelimit::storage::ManualClock;
/// use tower_ratelimit::{Key, Lockout, MemoryStorage, Policy, Quota, RateLimiter};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// const MINUTE: Duration = Duration::from_secs(60);
///
/// let lockout = Lockout::lasting(15 * MINUTE).escalating(2, 60 * 24 * MINUTE);
/// let clock = ManualClock::default();
/// let storage = MemoryStorage::builder().clock(clock.clone()).build()?;
/// let limiter = RateLimiter::with_storage(Policy::new(lockout, Quota::per_minute(2)), storage);
/// let alice = Key::from("alice");
///
/// assert!(limiter.hit(&alice).await?.is_admitted());
/// assert!(limiter.hit(&alice).await?.is_admitted());
/// assert_eq!(limiter.hit(&alice).await?.retry_after(), Some(15 * MINUTE));
/// clock.advance(15 * MINUTE);
/// assert!(limiter.hit(&alice).await?.is_admitted());
/// assert!(limiter.hit(&alice).await?.is_admitted());
/// assert_eq!(limiter.hit(&alice).await?.retry_after(), Some(30 * MINUTE));
/// # Ok(())
/// # }
/// ```
#[doc(alias = "ban")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lockout {
    /// The duration of the first lock in microseconds.
    first: u64,
    factor: u32,
    /// The duration of the longest lock in microseconds.
    longest: u64,
    /// The time in microseconds after which the level is forgotten.
    forget: u64,
    by_refusals: bool,
}

/// The longest duration of a lock and of its level: 100 years of 365 days. So all instants are
/// exact in the scripts of Redis, whose integers have 53 bits.
const LONGEST: u64 = 100 * 365 * 86_400 * 1_000_000;

impl Lockout {
    /// The name of the strategy if it counts spent units.
    pub(crate) const BY_HITS: &str = "lockout";

    /// The name of the strategy if it counts refusals.
    pub(crate) const BY_REFUSALS: &str = "lockout-by-refusals";

    /// Creates a strategy whose locks last for `lock`, which is rounded down to whole microseconds.
    ///
    /// # Panics
    ///
    /// Panics if `lock` is shorter than one microsecond or longer than 100 years of 365 days.
    #[track_caller]
    pub fn lasting(lock: Duration) -> Self {
        or_panic(Self::from_micros(micros(lock), 1, None, None, false))
    }

    /// Makes each lock `factor` times as long as the one before, up to `longest`. Levels are
    /// forgotten after `longest`, unless [`forgetting_after`](Self::forgetting_after) is called
    /// later.
    ///
    /// # Panics
    ///
    /// Panics if `factor` is 0, or if `longest` is shorter than the first lock or longer than 100
    /// years of 365 days.
    #[must_use]
    #[track_caller]
    pub fn escalating(self, factor: u32, longest: Duration) -> Self {
        or_panic(Self::from_micros(self.first, factor, Some(micros(longest)), None, self.by_refusals))
    }

    /// Sets the time after the end of a lock or a window after which the level is forgotten.
    /// Defaults to the duration of the longest lock.
    ///
    /// # Panics
    ///
    /// Panics if `quiet` is shorter than one microsecond or longer than 100 years of 365 days.
    #[must_use]
    #[track_caller]
    pub fn forgetting_after(self, quiet: Duration) -> Self {
        let Self { first, factor, longest, by_refusals, .. } = self;
        or_panic(Self::from_micros(first, factor, Some(longest), Some(micros(quiet)), by_refusals))
    }

    /// Counts the refusals by the other limits of the policy instead of the spent units. A hit that
    /// another limit refuses is one strike, whatever its cost. Admitted hits, charges and refunds
    /// change nothing.
    ///
    /// So it locks out a client that continues to send hits although they are refused. It needs
    /// another limit: a limiter or layer with only this limit is rejected when it is built, and so
    /// is a text that begins with it. A [shadow limit](crate::Policy#shadow-limits) cannot count
    /// refusals. The remaining units and the capacity of a decision do not include this limit,
    /// except that nothing remains while it is locked. [IETF fields](crate::Headers::draft11) list
    /// it only while it is locked.
    ///
    /// A hit that waits, as in [`acquire`](crate::RateLimiter::acquire), is one strike for each
    /// attempt that is refused.
    #[must_use]
    pub const fn by_refusals(self) -> Self {
        Self { by_refusals: true, ..self }
    }

    /// Creates the strategy that a text describes. `longest` and `forget` have defaults. All times
    /// are in microseconds.
    pub(crate) fn from_micros(
        first: u64,
        factor: u32,
        longest: Option<u64>,
        forget: Option<u64>,
        by_refusals: bool,
    ) -> Result<Self, ConfigError> {
        let longest = longest.unwrap_or(first);
        checked(first, "a lock")?;
        checked(longest, "the longest lock")?;
        if longest < first {
            return Err(ConfigError::new(format!(
                "the longest lock of {} is shorter than the first one of {}: swap them, or use a longer one, \
                 for example \"x2 up to {}\"",
                Time(longest),
                Time(first),
                Time(first.saturating_mul(2))
            )));
        }
        if factor == 0 {
            return Err(ConfigError::new("a lockout cannot have the factor 0: use 1 or more, for example \"x2\""));
        }
        let forget = checked(forget.unwrap_or(longest), "the time after which a lockout is forgotten")?;
        Ok(Self { first, factor, longest, forget, by_refusals })
    }

    /// Returns the duration of a lock at this level, in microseconds.
    fn length(&self, level: u32) -> u64 {
        let longer = |length: u64, _| length.saturating_mul(self.factor.into()).min(self.longest);
        (0..level).fold(self.first, longer)
    }

    /// Returns the level after a lock at this level.
    fn next(&self, level: u32) -> u32 {
        if self.length(level) >= self.longest { level } else { (level + 1).min(MAX_LEVEL) }
    }

    /// Returns the duration of a window or lock, and the time for which its level is remembered.
    #[inline]
    fn spans(&self, quota: &Quota, level: u32, is_locked: bool) -> (u64, u64) {
        let (span, level) =
            if is_locked { (self.length(level), self.next(level)) } else { (quota.period_micros(), level) };
        (span, if level > 0 { self.forget } else { 0 })
    }

    /// Returns the window or lock at `now`. If none is live, it is a window that starts now, with
    /// the remembered level.
    #[inline]
    fn at(&self, quota: &Quota, state: &State, now: Timestamp) -> Window {
        let fresh = |level| Window { level, ..Window::fresh(now) };
        let State::Counts { until, amounts: [strikes, mark] } = *state else { return fresh(0) };
        if until <= now {
            return fresh(0);
        }
        let (run, level) = (mark % (1 << LEVEL_SHIFT), level(mark));
        // The flag decides, and not the number of strikes: a lock does not end if the amount is
        // raised.
        let is_locked = mark & LOCKED != 0;
        let (span, kept) = self.spans(quota, level, is_locked);
        let start = until.minus(span.saturating_add(kept));
        // A start ahead of now was written before the clock went back.
        let (start, is_ahead) = (start.min(now), start > now);
        let passed = now.since(start);
        if passed < span {
            let followed = mark & FOLLOWED;
            return Window { start, strikes, level, run, is_locked, followed, is_ahead, is_live: true };
        }
        let is_known = passed - span < kept;
        fresh(if !is_known {
            0
        } else if is_locked {
            self.next(level)
        } else {
            level
        })
    }

    /// Returns the microseconds until the end of a window that counts hits and has no level, and
    /// its strikes. It is a faster [`at`](Self::at) for the state that most hits find.
    #[inline(always)]
    fn first_window(&self, quota: &Quota, state: &State, now: Timestamp) -> Option<(u64, u32)> {
        match *state {
            State::Counts { until, amounts: [strikes, mark] } if mark >> LEVEL_SHIFT == 0 && !self.by_refusals => {
                let left = until.since(now);
                (1..=quota.period_micros()).contains(&left).then_some((left, strikes))
            }
            _ => None,
        }
    }

    /// Returns the state of a window or lock.
    #[inline]
    fn state(&self, quota: &Quota, window: Window) -> State {
        let (span, kept) = self.spans(quota, window.level, window.is_locked);
        let until = window.start.plus(span.saturating_add(kept));
        State::Counts { until, amounts: [window.strikes, window.mark()] }
    }

    /// Returns the microseconds until the window or lock ends, or 0 if there are no strikes.
    #[inline]
    fn left(&self, quota: &Quota, window: &Window, now: Timestamp) -> u64 {
        if window.strikes == 0 {
            return 0;
        }
        self.spans(quota, window.level, window.is_locked).0.saturating_sub(now.since(window.start))
    }

    /// Adds strikes, which may start a lock.
    #[inline]
    fn strike(&self, quota: &Quota, state: &mut State, now: Timestamp, window: Window, strikes: u32) {
        let strikes = window.strikes.saturating_add(strikes);
        let is_locked = strikes >= quota.amount();
        let start = if is_locked { now } else { window.start };
        state.replace(self.state(quota, Window { start, strikes, is_locked, ..window }));
    }

    /// Returns the status of a hit, without the lock.
    #[inline]
    fn status(&self, quota: &Quota, window: &Window, now: Timestamp, cost: u32) -> Status {
        let left = self.left(quota, window, now);
        status(quota, left, if window.is_locked { u32::MAX } else { window.strikes }, cost, left)
    }

    /// Returns the status of a lockout by refusals on a hit of `cost` units. `is_refused` is `true`
    /// if the refusal of this hit is in the state.
    fn status_by_refusals(
        &self,
        quota: &Quota,
        window: &Window,
        now: Timestamp,
        cost: u32,
        is_refused: bool,
    ) -> Status {
        let is_new = is_refused && window.is_locked && window.start == now && window.followed == 0;
        // A hit of any cost is one strike.
        let status = self.status(quota, window, now, u32::from(window.is_locked && !is_new && cost > 0));
        let wait = match (window.is_locked, is_refused) {
            (true, _) => self.left(quota, window, now),
            (false, false) if status.remaining() <= 1 => self.length(window.level),
            (false, _) => 0,
        };
        let status = status.uncounted(wait);
        if is_new { status.newly_locked() } else { status }
    }
}

/// A window with its strikes, or a lock.
#[derive(Clone, Copy)]
struct Window {
    /// The instant of the first strike, or the start of the lock.
    start: Timestamp,
    strikes: u32,
    /// The number of earlier locks that count.
    level: u32,
    /// A number that distinguishes the window of the first strike from others. A lock keeps it.
    run: u32,
    is_locked: bool,
    /// [`FOLLOWED`] or 0.
    followed: u32,
    is_live: bool,
    /// `true` if the stored start was ahead of the clock.
    is_ahead: bool,
}

/// The bit of the second amount that a lock by refusals gets with the first refusal after the one
/// that started it.
const FOLLOWED: u32 = 1 << 30;

/// The bit of the second amount that distinguishes a lock from a window.
const LOCKED: u32 = 1 << 31;

/// The number of runs. It is prime, because instants on a regular grid are evenly distributed
/// modulo a prime.
const RUNS: u64 = 16_777_213;

impl Window {
    /// Creates the window that a strike starts now.
    #[inline]
    fn fresh(now: Timestamp) -> Self {
        #[allow(clippy::cast_possible_truncation)] // less than `RUNS`
        let run = (now.as_micros() % RUNS) as u32;
        Self { start: now, strikes: 0, level: 0, run, is_locked: false, followed: 0, is_live: false, is_ahead: false }
    }

    /// Returns the second amount of the state.
    #[inline]
    fn mark(&self) -> u32 {
        let locked = if self.is_locked { LOCKED } else { 0 };
        locked | self.followed | self.level << LEVEL_SHIFT | self.run
    }
}

impl Strategy for Lockout {
    fn name(&self) -> &'static str {
        if self.by_refusals { Self::BY_REFUSALS } else { Self::BY_HITS }
    }

    #[inline(always)]
    fn check(&self, quota: &Quota, state: &State, now: Timestamp, cost: u32) -> Status {
        if let Some((left, strikes)) = self.first_window(quota, state, now) {
            return status(quota, left, strikes, cost, left);
        }
        let window = self.at(quota, state, now);
        let status = if self.by_refusals {
            self.status_by_refusals(quota, &window, now, cost, false)
        } else {
            self.status(quota, &window, now, cost)
        };
        if window.is_locked { status.locked(window.mark()) } else { status }
    }

    fn check_refused(&self, quota: &Quota, state: &State, now: Timestamp, cost: u32) -> Status {
        let window = self.at(quota, state, now);
        if !self.by_refusals {
            return self.check(quota, state, now, cost);
        }
        let status = self.status_by_refusals(quota, &window, now, cost, true);
        if window.is_locked { status.locked(window.mark()) } else { status }
    }

    #[inline]
    fn spend(&self, quota: &Quota, state: &mut State, now: Timestamp, cost: u32) -> u64 {
        if !self.by_refusals {
            let window = self.at(quota, state, now);
            self.strike(quota, state, now, window, cost);
        }
        0
    }

    #[inline]
    fn hit(&self, quota: &Quota, state: &mut State, now: Timestamp, cost: u32) -> Outcome {
        if let Some((_, strikes)) = self.first_window(quota, state, now)
            && cost < quota.amount().saturating_sub(strikes)
            && let State::Counts { amounts, .. } = state
        {
            amounts[0] += cost;
            return Outcome::Spent { delay: 0 };
        }
        let checked = self.check(quota, state, now, cost);
        if !checked.is_admitted() {
            self.refuse(quota, state, now);
            return Outcome::Refused;
        }
        self.spend(quota, state, now, cost);
        Outcome::spent(0, cost < checked.remaining())
    }

    fn charge(&self, quota: &Quota, state: &mut State, now: Timestamp, units: u32) {
        let window = self.at(quota, state, now);
        if !self.by_refusals && !window.is_locked {
            self.strike(quota, state, now, window, units);
        }
    }

    fn refuse(&self, quota: &Quota, state: &mut State, now: Timestamp) {
        let window = self.at(quota, state, now);
        if self.by_refusals && !window.is_locked {
            self.strike(quota, state, now, window, 1);
        } else if window.is_live && (window.is_ahead || self.by_refusals) {
            let followed = if self.by_refusals { FOLLOWED } else { 0 };
            *state = self.state(quota, Window { followed, ..window });
        }
    }

    fn counts_refusals(&self) -> bool {
        self.by_refusals
    }

    fn refund(&self, quota: &Quota, state: &mut State, now: Timestamp, hit: &Hit, units: u32) {
        let window = self.at(quota, state, now);
        let is_same_run = window.run == hit.anchor % (1 << LEVEL_SHIFT);
        if self.by_refusals || !window.is_live || !is_same_run || now >= self.refundable_until(quota, hit) {
            return;
        }
        let strikes = window.strikes.saturating_sub(units);
        let is_locked = window.is_locked && strikes >= quota.amount();
        let refunded = self.state(quota, Window { strikes, is_locked, ..window });
        let is_over = refunded.until() <= now || strikes == 0 && window.level == 0;
        *state = if is_over { State::Fresh } else { refunded };
    }

    fn refundable_until(&self, quota: &Quota, hit: &Hit) -> Timestamp {
        // The state also lasts for the time after which its level is forgotten.
        let (level, began_lock) = (level(hit.anchor), hit.anchor & LOCKED != 0);
        hit.until.minus(self.spans(quota, level, began_lock).1)
    }

    fn script(&self, quota: &Quota, _: Timestamp, _: u32) -> Option<Script> {
        let arguments = vec![
            self.by_refusals.into(),
            quota.amount().into(),
            quota.period_micros(),
            self.first,
            self.factor.into(),
            self.longest,
            self.forget,
        ];
        Some(Script { name: "lockout", sources: &[include_str!("lockout.lua")], arguments, delays: false })
    }

    fn describe(&self, quota: &Quota, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let refusals = if self.by_refusals { " refusals" } else { "" };
        write!(f, "lockout {}{refusals}/{} for {}", quota.amount(), Period(quota.period_micros()), Time(self.first))?;
        if (self.factor, self.longest) != (1, self.first) {
            write!(f, " x{} up to {}", self.factor, Time(self.longest))?;
        }
        if self.forget != self.longest {
            write!(f, " forget {}", Time(self.forget))?;
        }
        Ok(())
    }
}

fn checked(micros: u64, what: &str) -> Result<u64, ConfigError> {
    match micros {
        0 => Err(ConfigError::new(format!("{what} must last for at least one microsecond"))),
        1..=LONGEST => Ok(micros),
        _ => Err(ConfigError::new(format!("{what} must last for at most 100 years of 365 days"))),
    }
}

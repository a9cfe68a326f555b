//! A limit: a quota with its strategy and its name.

use std::fmt::{self, Write};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::num::NonZeroU32;
use std::ops::Range;
use std::sync::Arc;

use crate::error::{ConfigError, or_panic};
use crate::quota::Quota;
use crate::strategy::{
    CalendarWindow, InFlightLimit, Lockout, Outcome, SlidingWindowCounter, State, Status, Strategy, StrategyDyn,
    TokenBucket,
};
use crate::time::Timestamp;

/// The bit of a limit's digest that marks a shadow limit.
pub(crate) const SHADOW: u32 = 2;

/// The bits of a limit's digest that this module and the storages use for flags.
const LOW_BITS: u32 = 3;

/// Returns a different digest for each limit of a policy. Limits with the same digest would share
/// their states, so after a hash collision the later limit gets another hash.
pub(super) fn digests<'a>(limits: impl IntoIterator<Item = &'a Limit>, shadow: bool) -> Vec<u32> {
    let mut digests = Vec::new();
    for (position, limit) in limits.into_iter().enumerate() {
        let flag = if shadow { SHADOW } else { 0 };
        let mut attempts = (0..).map(|attempt| limit.digest(position, attempt) | flag);
        digests.extend(attempts.find(|digest| !digests.contains(digest)));
    }
    digests
}

/// A quota with its strategy, and optionally a name.
///
/// Most policies do not need this type. Use it to give a limit a name such as `daily`, instead of a
/// [default name](crate::Policy::limit_name) such as `free-2`, to [keep](Self::keep) units for
/// other hits, or to add a [shadow limit](crate::Policy::shadow).
///
/// ```
/// use tower_ratelimit::{FixedWindow, Limit, MovingWindow, Policy, Quota};
///
/// let policy = Policy::named("free")
///     .limit(FixedWindow::new(), Quota::per_second(10))
///     .with(Limit::new(MovingWindow::new(), Quota::per_day(10_000)).named("daily"));
/// assert_eq!(policy.limit_name(0), "free-1");
/// assert_eq!(policy.limit_name(1), "daily");
/// ```
#[derive(Clone)]
pub struct Limit {
    strategy: Arc<dyn StrategyDyn>,
    quota: Quota,
    /// The units that have to remain after a hit.
    kept: u32,
    name: Option<Box<str>>,
}

impl Limit {
    /// Creates a limit of `quota` with `strategy`.
    ///
    /// # Panics
    ///
    /// Panics if the strategy does not support the quota. For example, window strategies do not
    /// support a burst. Also panics if the text that a custom strategy writes in
    /// [`describe`](Strategy::describe) is empty or not printable ASCII.
    /// [`try_new`](Self::try_new) returns an error instead.
    #[track_caller]
    pub fn new(strategy: impl Strategy, quota: Quota) -> Self {
        or_panic(Self::try_new(strategy, quota))
    }

    /// Like [`new`](Self::new), but returns an error instead of panicking.
    ///
    /// # Errors
    ///
    /// Returns an error if the strategy does not support the quota, or if a custom strategy writes
    /// the limit as a text that is empty or not printable ASCII.
    pub fn try_new(strategy: impl Strategy, quota: Quota) -> Result<Self, ConfigError> {
        Self::of(Arc::new(strategy), quota)
    }

    pub(super) fn of(strategy: Arc<dyn StrategyDyn>, quota: Quota) -> Result<Self, ConfigError> {
        strategy.validate(&quota)?;
        let limit = Self { strategy, quota, kept: 0, name: None };
        // Header fields report an unnamed policy by the text of its limit.
        checked_name(limit.to_string())?;
        Ok(limit)
    }

    /// Sets the name of the limit. Clients distinguish the limits of a policy by name, so each
    /// limit of a policy needs a different one.
    /// [`Policy::limit_name`](crate::Policy::limit_name) returns the default.
    ///
    /// # Panics
    ///
    /// Panics if the name is empty or not printable ASCII. To get an error instead, parse the
    /// policy from its [text](crate::Policy#impl-FromStr-for-Policy).
    #[must_use]
    #[track_caller]
    pub fn named(self, name: impl Into<String>) -> Self {
        or_panic(self.try_named(name))
    }

    pub(super) fn try_named(self, name: impl Into<String>) -> Result<Self, ConfigError> {
        Ok(Self { name: Some(checked_name(name.into())?), ..self })
    }

    /// Keeps `units` for other hits: a hit is admitted only if at least this many units remain
    /// after it. Use it for batch work that has to leave room for people. Defaults to 0.
    ///
    /// The kept units do not change the [identity](crate::Policy#identity) of a policy. So on one
    /// storage, a policy with kept units and the same policy without them share their states. In
    /// [text](crate::Policy#impl-FromStr-for-Policy): `100/minute keep 20`.
    ///
    /// With kept units:
    ///
    /// - [`remaining`](crate::Decision::remaining) and [`capacity`](crate::Decision::capacity)
    ///   include the kept units, which other hits can spend.
    /// - [`retry_after`](crate::Decision::retry_after) is the time until the cost of the hit and
    ///   the kept units remain.
    /// - A hit whose cost exceeds the capacity minus the kept units is never admitted, so its
    ///   `retry_after` is `None`.
    ///
    /// A hit that costs 0 and a [charge](crate::RateLimiter::charge) do not depend on the kept
    /// units.
    ///
    /// ```
    /// use tower_ratelimit::{Key, Limit, LocalLimiter, MemoryStorage, Policy, Quota};
    ///
    /// let (storage, alice) = (MemoryStorage::new(), Key::from("alice"));
    /// let limit = Limit::from(Quota::per_minute(100));
    /// let people = LocalLimiter::with_storage(limit.clone(), storage.clone());
    /// let batch = LocalLimiter::with_storage(limit.keep(20), storage);
    /// while batch.admit(&alice) {}
    /// // The batch work has spent 80 units.
    /// assert_eq!(people.peek(&alice).remaining(), 20);
    /// assert!(people.admit(&alice));
    /// ```
    ///
    /// # Panics
    ///
    /// Panics if `units` is not less than the [capacity](Self::capacity), because no hit would be
    /// admitted. Also panics if the capacity is 2^32 - 1, or if the limit is a [`Lockout`].
    /// [`try_keep`](Self::try_keep) returns an error instead.
    #[must_use]
    #[track_caller]
    pub fn keep(self, units: u32) -> Self {
        or_panic(self.try_keep(units))
    }

    /// Like [`keep`](Self::keep), but returns an error instead of panicking.
    ///
    /// # Errors
    ///
    /// Returns an error in the cases in which `keep` panics.
    pub fn try_keep(self, units: u32) -> Result<Self, ConfigError> {
        let limit = Self { kept: 0, ..self };
        if units > 0 && limit.locks() {
            let message = format!("\"{limit}\" is a lockout, which keeps no units: remove \"keep {units}\"");
            return Err(ConfigError::new(message));
        }
        let (capacity, most) = (limit.capacity(), limit.capacity().saturating_sub(1));
        if units > most {
            let message =
                format!("\"{limit}\" has {capacity} units and cannot keep {units} of them: keep at most {most}");
            return Err(ConfigError::new(message));
        }
        // The sum of a cost and the kept units saturates, and would fit into this capacity.
        if units > 0 && capacity == u32::MAX {
            let message = format!("\"{limit}\" has too many units to keep some: use at most {most}");
            return Err(ConfigError::new(message));
        }
        Ok(Self { kept: units, ..limit })
    }

    /// Returns the units that have to remain after a hit, which [`keep`](Self::keep) sets.
    pub fn kept(&self) -> u32 {
        self.kept
    }

    /// Returns the limit without kept units.
    pub(super) fn without_kept(&self) -> Self {
        Self { kept: 0, ..self.clone() }
    }

    /// Returns the units that have to remain before a hit of `cost` units, so that it is admitted.
    #[inline]
    pub(crate) const fn needed(&self, cost: u32) -> u32 {
        if cost == 0 { 0 } else { cost.saturating_add(self.kept) }
    }

    /// Returns the part of this limit for one of `replicas`, with the same name.
    pub(super) fn divide(&self, replicas: NonZeroU32) -> Result<Self, ConfigError> {
        let (strategy, quota) = match self.strategy.divide(&self.quota, replicas) {
            Some(share) => (share.strategy, share.quota),
            None => (Arc::clone(&self.strategy), self.quota.divide(replicas)),
        };
        let limit = Self { name: self.name.clone(), ..Self::of(strategy, quota)? };
        // Rounded up, so that the replicas together keep at least as many units.
        let kept = self.kept.div_ceil(replicas.get()).min(limit.capacity().saturating_sub(1));
        Ok(Self { kept, ..limit })
    }

    /// Returns the strategy.
    pub fn strategy(&self) -> &dyn Strategy {
        &*self.strategy
    }

    /// Returns the quota.
    pub fn quota(&self) -> &Quota {
        &self.quota
    }

    /// Returns the name that [`named`](Self::named) or the text form has set, or `None`.
    /// [`Policy::limit_name`](crate::Policy::limit_name) returns the name that clients get.
    pub fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// Returns the maximum number of units that can be spent at one instant: the amount or the
    /// burst of the quota, or one more than the queue length of a leaky bucket.
    pub fn capacity(&self) -> u32 {
        self.strategy.capacity(&self.quota)
    }

    /// Returns the window of a decision with this status, made at `at`, if windows differ in length.
    pub(crate) fn window(&self, status: &Status, at: Timestamp) -> Option<Range<Timestamp>> {
        let window = self.strategy.window(&self.quota, at)?;
        // A window keeps its end if the calendar changes.
        let reset = status.reset_after_micros();
        Some(window.start..if reset > 0 { at.plus(reset) } else { window.end })
    }

    /// Returns the time in which the whole [capacity](Self::capacity) refills, in seconds, rounded
    /// up. For a window that differs from others in length, it is the duration of this window.
    pub(crate) fn window_secs(&self, status: &Status, at: Timestamp) -> u64 {
        if let Some(window) = self.window(status, at) {
            return window.end.since(window.start).div_ceil(1_000_000);
        }
        let quota = self.quota();
        let micros = u128::from(self.capacity()) * u128::from(quota.period_micros());
        let seconds = micros.div_ceil(u128::from(quota.amount()) * 1_000_000);
        u64::try_from(seconds).unwrap_or(u64::MAX)
    }

    /// Returns a hash of the position, strategy and period of this limit, with the flag bits
    /// cleared. The hash distinguishes the states of this limit from those of other limits. After a
    /// collision, a higher `attempt` returns another hash.
    fn digest(&self, position: usize, attempt: u32) -> u32 {
        let mut hasher = DefaultHasher::new();
        (position, self.strategy.name(), self.quota.period_micros()).hash(&mut hasher);
        if attempt > 0 {
            attempt.hash(&mut hasher);
        }
        #[allow(clippy::cast_possible_truncation)]
        let digest = hasher.finish() as u32;
        digest & !LOW_BITS
    }

    /// Returns the status of this limit in a decision that the storage has made itself, for example
    /// by a script on a server.
    ///
    /// `state` is the state of the key after the decision, which was made at the time `now` on
    /// `cost` units. `outcome` is the effect of a hit on this limit, or `None` for a peek.
    pub fn status(&self, state: &State, now: Timestamp, cost: u32, outcome: Option<Outcome>) -> Status {
        let mut status = Status::BLANK;
        self.write_status(state, now, cost, outcome, &mut status);
        status
    }

    #[inline]
    pub(crate) fn check(&self, state: &State, now: Timestamp, cost: u32) -> Status {
        self.strategy.check(&self.quota, state, now, self.needed(cost))
    }

    /// Checks and spends a hit of at least 1 unit, for a policy without other limits.
    #[inline]
    pub(crate) fn hit(&self, state: &mut State, now: Timestamp, cost: u32) -> Outcome {
        if self.kept > 0 && !self.check(state, now, cost).is_admitted() {
            return self.refuse(state, now);
        }
        self.strategy.hit(&self.quota, state, now, cost)
    }

    #[inline]
    pub(super) fn spend(&self, state: &mut State, now: Timestamp, cost: u32) -> Outcome {
        Outcome::Spent { delay: self.strategy.spend(&self.quota, state, now, cost) }
    }

    #[inline]
    pub(super) fn charge(&self, state: &mut State, now: Timestamp, units: u32) {
        self.strategy.charge(&self.quota, state, now, units);
    }

    #[inline]
    pub(crate) fn refuse(&self, state: &mut State, now: Timestamp) -> Outcome {
        self.strategy.refuse(&self.quota, state, now);
        Outcome::Refused
    }

    pub(crate) fn counts_refusals(&self) -> bool {
        self.strategy.counts_refusals()
    }

    /// Returns `true` if all units of this limit are refilled at the same instant, the end of its
    /// window, which spending does not move.
    pub(crate) fn is_fixed_window(&self) -> bool {
        matches!(self.strategy.name(), "fixed-window" | "fixed-window-aligned" | CalendarWindow::NAME)
    }

    /// Returns `true` if this limit is a [`Lockout`].
    pub(crate) fn locks(&self) -> bool {
        matches!(self.strategy.name(), Lockout::BY_HITS | Lockout::BY_REFUSALS)
    }

    /// Returns `true` if this limit counts the requests in flight.
    pub(crate) fn counts_in_flight(&self) -> bool {
        self.strategy.name() == InFlightLimit::NAME
    }

    /// Returns `true` if this limit counts the refusals by the other limits of its policy, so that it
    /// refuses nothing alone.
    pub(crate) fn counts_refusals_of_others(&self) -> bool {
        self.strategy.name() == Lockout::BY_REFUSALS
    }

    /// Writes the status of this limit after the decision into `status`.
    #[inline]
    pub(crate) fn write_status(
        &self,
        state: &State,
        now: Timestamp,
        cost: u32,
        outcome: Option<Outcome>,
        status: &mut Status,
    ) {
        self.strategy.write_status(&self.quota, state, now, self.needed(cost), outcome, status);
    }

    /// Returns the status of a refusal by the storage, which has not called the strategy: nothing
    /// remains for `retry_after` microseconds.
    pub(crate) fn refusal(&self, retry_after: u64) -> Status {
        Status::refused(self.capacity(), 0, retry_after, Some(retry_after))
    }
}

/// Uses [`TokenBucket`] if the quota has a burst, otherwise [`SlidingWindowCounter`].
impl From<Quota> for Limit {
    fn from(quota: Quota) -> Self {
        if quota.burst_size().is_some() {
            Self::new(TokenBucket::new(), quota)
        } else {
            Self::new(SlidingWindowCounter::new(), quota)
        }
    }
}

/// Writes the limit as in the text of a policy: `"daily" moving-window 10000/day keep 500`.
impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(name) = &self.name {
            write!(f, "{} ", Quoted(name))?;
        }
        self.strategy.describe(&self.quota, f)?;
        if self.kept > 0 { write!(f, " keep {}", self.kept) } else { Ok(()) }
    }
}

impl fmt::Debug for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Limit({self})")
    }
}

/// Validates a name: not empty, and valid as a Structured Field string (RFC 9651, section 3.3.3).
pub(super) fn checked_name(name: String) -> Result<Box<str>, ConfigError> {
    if !name.is_empty() && name.bytes().all(|byte| matches!(byte, b' '..=b'~')) {
        return Ok(name.into_boxed_str());
    }
    Err(ConfigError::new(format!(
        "the name {name:?} is not a valid header value: \
         use one or more letters, digits, spaces and ASCII punctuation, for example \"free\""
    )))
}

/// Writes a name in double quotes, as in header fields and in the text of a policy.
pub(super) struct Quoted<'a>(pub(super) &'a str);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_char('"')?;
        for c in self.0.chars() {
            if matches!(c, '"' | '\\') {
                f.write_char('\\')?;
            }
            f.write_char(c)?;
        }
        f.write_char('"')
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_with_colliding_hashes_get_different_digests() {
        let limit = |text: &str| crate::Policy::limits(&text.parse().unwrap())[0].clone();
        let limits = [limit("fixed-window 10/minute"), limit("fixed-window 100/2786174215 ms")];
        assert_eq!(limits[0].digest(0, 0), limits[1].digest(1, 0), "this pair collides");
        for shadow in [false, true] {
            let digests = digests(&limits, shadow);
            assert_ne!(digests[0], digests[1]);
        }
    }
}

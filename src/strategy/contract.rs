//! The contract of a strategy, and what its methods take and return besides states.

use std::fmt;
use std::num::NonZeroU32;
use std::ops::Range;
use std::sync::Arc;

use super::state::{Outcome, State};
use super::status::{Hit, Status};
use crate::error::ConfigError;
use crate::quota::Quota;
use crate::time::Timestamp;

/// An algorithm that spends a quota over time, as a pure function.
///
/// A custom strategy is part of a [`Policy`](crate::Policy), and runs on every storage. The feature
/// `testing` has property tests for it. All durations are in whole microseconds.
///
/// ```
/// use tower_ratelimit::strategy::{Hit, State, Status, Strategy};
/// use tower_ratelimit::{Policy, Quota, Timestamp};
///
/// /// Admits the quota's amount once. Resets one period after the last admitted hit.
/// #[derive(Clone, Debug)]
/// struct Once;
///
/// impl Once {
///     fn spent(quota: &Quota, state: &State, now: Timestamp) -> (u32, u64) {
///         match *state {
///             // After the clock went back, the state counts as written now.
///             State::Counts { until, amounts: [spent, 0] } if until > now => {
///                 (spent, until.since(now).min(quota.period_micros()))
///             }
///             _ => (0, 0),
///         }
///     }
/// }
///
/// impl Strategy for Once {
///     fn name(&self) -> &'static str {
///         "once"
///     }
///
///     fn check(&self, quota: &Quota, state: &State, now: Timestamp, cost: u32) -> Status {
///         let (spent, left) = Self::spent(quota, state, now);
///         let remaining = quota.amount().saturating_sub(spent);
///         if cost <= remaining {
///             Status::admitted(quota.amount(), remaining, left)
///         } else {
///             Status::refused(quota.amount(), remaining, left, (cost <= quota.amount()).then_some(left))
///         }
///     }
///
///     fn spend(&self, quota: &Quota, state: &mut State, now: Timestamp, cost: u32) -> u64 {
///         let (spent, _) = Self::spent(quota, state, now);
///         let until = now.plus(quota.period_micros());
///         *state = State::Counts { until, amounts: [spent.saturating_add(cost), 0] };
///         0
///     }
///
///     fn refuse(&self, quota: &Quota, state: &mut State, now: Timestamp) {
///         if let State::Counts { until, .. } = state {
///             *until = (*until).min(now.plus(quota.period_micros()));
///         }
///     }
///
///     // For brevity, only the latest hit can be refunded.
///     fn refund(&self, _: &Quota, state: &mut State, _: Timestamp, hit: &Hit, units: u32) {
///         if let State::Counts { until, amounts: [spent, 0] } = state
///             && *until == hit.until
///         {
///             *spent = spent.saturating_sub(units);
///         }
///     }
/// }
///
/// let policy = Policy::new(Once, Quota::per_minute(3));
/// # #[cfg(feature = "testing")]
/// # tower_ratelimit::testing::StrategyLaws::new(Once).check();
/// ```
pub trait Strategy: fmt::Debug + Send + Sync + 'static {
    /// Returns the name of the strategy, such as `token-bucket`. Storages identify states by this
    /// name, so all counts start again if it changes. Do not use the name of another strategy.
    fn name(&self) -> &'static str;

    /// Returns the maximum number of units that can be spent at one instant, which
    /// `X-RateLimit-Limit` reports. Defaults to the amount of the quota.
    fn capacity(&self, quota: &Quota) -> u32 {
        quota.amount()
    }

    /// Checks that this strategy supports the quota. A [`Limit`](crate::Limit) calls it when it is
    /// created.
    ///
    /// # Errors
    ///
    /// Returns an error if the quota is not supported. The default implementation rejects quotas
    /// with a burst.
    fn validate(&self, quota: &Quota) -> Result<(), ConfigError> {
        without_burst(self.name(), quota)
    }

    /// Decides a hit of `cost` units without changing the state. The returned numbers are those
    /// before the hit is spent. A strategy that delays hits sets the delay with
    /// [`Status::delayed`].
    ///
    /// The hit is admitted if and only if `cost` is at most the remaining units. So cost 0 is
    /// always admitted. If the limit [keeps](crate::Limit::keep) units, they are included in each
    /// `cost` above 0.
    fn check(&self, quota: &Quota, state: &State, now: Timestamp, cost: u32) -> Status;

    /// Spends `cost` units, and returns the delay of the hit in microseconds. `cost` is at least 1.
    ///
    /// The delay is 0 for most strategies. If it can be more, [`delays`](Self::delays) must return
    /// `true`.
    ///
    /// For a hit, this method is called only after [`check`](Self::check) has admitted the same hit
    /// on the same state. The default implementation of [`charge`](Self::charge) calls it without a
    /// check.
    fn spend(&self, quota: &Quota, state: &mut State, now: Timestamp, cost: u32) -> u64;

    /// Updates the state after the refusal of a hit of at least 1 unit. It is also called if this
    /// limit admits and another limit of the policy refuses. It must not spend units.
    ///
    /// The default implementation does nothing. A strategy overrides it in two cases:
    ///
    /// - Refusals change the state: an [`ElasticWindow`](crate::ElasticWindow) moves its end. Then
    ///   [`counts_refusals`](Self::counts_refusals) must return `true`.
    /// - The state is ahead of `now`, because it was written before the clock went back. It counts
    ///   as written at `now`, and the strategy must store it as such. Otherwise each later decision
    ///   would count it as written at its own time, and `retry_after` would be wrong until the
    ///   clock catches up.
    fn refuse(&self, quota: &Quota, state: &mut State, now: Timestamp) {
        let _ = (quota, state, now);
    }

    /// Returns the status of this limit in the decision on a refused hit, where `state` is the
    /// state after [`refuse`](Self::refuse). Another limit of the policy may have refused the hit.
    /// The default implementation calls [`check`](Self::check).
    ///
    /// Override it if refusals change the state so that a limit can admit a hit and refuse after
    /// the refusal of this hit by another limit.
    #[inline(always)]
    fn check_refused(&self, quota: &Quota, state: &State, now: Timestamp, cost: u32) -> Status {
        self.check(quota, state, now, cost)
    }

    /// Returns `true` if every refusal changes the state. If it returns `false`, which is the
    /// default, a storage may repeat a refusal from a cache without loading the state, as long as
    /// its clock does not go back.
    fn counts_refusals(&self) -> bool {
        false
    }

    /// Returns `true` if [`spend`](Self::spend) can return a delay. Then
    /// [`RateLimiter::acquire`](crate::RateLimiter::acquire) peeks before each hit, so that a hit
    /// whose delay would be too long spends nothing. Defaults to `false`.
    fn delays(&self) -> bool {
        false
    }

    /// Checks a hit of at least 1 unit, and then spends or refuses it. Storages call it for the
    /// only limit of a policy. They also call it for one of several limits if they can undo it.
    ///
    /// The default implementation calls [`check`](Self::check), and then [`spend`](Self::spend) or
    /// [`refuse`](Self::refuse). Override it only if one combined step is faster. The result must
    /// be the same.
    #[inline]
    fn hit(&self, quota: &Quota, state: &mut State, now: Timestamp, cost: u32) -> Outcome {
        hit_in_steps(self, quota, state, now, cost)
    }

    /// Spends `units`, at least 1, even if fewer remain. Then nothing remains until the excess
    /// units are free again. Amounts must saturate instead of overflowing.
    ///
    /// The default implementation calls [`spend`](Self::spend). It is correct if `spend` and
    /// [`check`](Self::check) accept a state in which more than the capacity is spent.
    fn charge(&self, quota: &Quota, state: &mut State, now: Timestamp, units: u32) {
        self.spend(quota, state, now, units);
    }

    /// Refunds `units` of a hit, at least 1 and at most [`Hit::cost`], if the state still contains
    /// the hit. It does nothing otherwise, for example if the key was cleared meanwhile.
    ///
    /// It is called only before [`Hit::until`]. It may set an empty state to [`State::Fresh`].
    fn refund(&self, quota: &Quota, state: &mut State, now: Timestamp, hit: &Hit, units: u32);

    /// Returns the time from which a [refund](Self::refund) of a hit changes nothing, because its units
    /// are free again. Events report a hit that is settled later as
    /// [expired](crate::EventKind::Settled). Defaults to [`Hit::until`].
    ///
    /// Override it if the state is kept after its units are free, as a [lockout](crate::Lockout) keeps
    /// its level. `refund` is called until [`Hit::until`] nevertheless, and must change nothing from this
    /// time on.
    fn refundable_until(&self, quota: &Quota, hit: &Hit) -> Timestamp {
        let _ = quota;
        hit.until
    }

    /// Returns the maximum number of entries in the state's [`Log`](super::Log). Storages compute
    /// the size of a state from it. [Charges](Self::charge) may add more. Defaults to 0, for states
    /// without a log.
    fn log_entries(&self, quota: &Quota) -> u32 {
        let _ = quota;
        0
    }

    /// Returns the part of this limit for one of `replicas`. `None`, which is the default, keeps
    /// the strategy and [divides the quota](Quota::divide). Override it if the strategy has amounts
    /// of its own, such as the queue length of a leaky bucket.
    fn divide(&self, quota: &Quota, replicas: NonZeroU32) -> Option<Divided> {
        let _ = (quota, replicas);
        None
    }

    /// Returns the window that contains `now`, from its first instant to the first instant of the
    /// next one, if windows differ in length and all keys have the same ones. Header fields and the
    /// [usage](crate::Usage) report it. Defaults to `None`.
    fn window(&self, quota: &Quota, now: Timestamp) -> Option<Range<Timestamp>> {
        let _ = (quota, now);
        None
    }

    /// Returns the strategy as a Lua script, with its arguments for a hit of `cost` units. The
    /// Redis storage runs it on the server. Defaults to `None`: if a limit of a policy has no
    /// script, the Redis storage compares and swaps instead, which takes more round trips.
    ///
    /// `now` is the time of this process. The functions of the script get that of the server, which
    /// can be earlier or later.
    fn script(&self, quota: &Quota, now: Timestamp, cost: u32) -> Option<Script> {
        let _ = (quota, now, cost);
        None
    }

    /// Writes the limit as text: the name, the quota, and the options of the strategy. The text
    /// must be printable ASCII and not empty, otherwise a [`Limit`](crate::Limit) cannot be
    /// created.
    ///
    /// # Errors
    ///
    /// Returns the error of the formatter.
    fn describe(&self, quota: &Quota, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {quota}", self.name())
    }
}

/// Returns an error if the quota has a burst.
pub(super) fn without_burst(strategy: &str, quota: &Quota) -> Result<(), ConfigError> {
    match quota.burst_size() {
        None => Ok(()),
        Some(burst) => Err(ConfigError::new(format!(
            "{strategy} does not support a burst, as in \"{quota}\": remove \"burst {burst}\", \
             or write \"token-bucket {quota}\""
        ))),
    }
}

/// The part of a limit that belongs to one of several replicas. See [`Strategy::divide`].
#[derive(Clone, Debug)]
pub struct Divided {
    pub(crate) strategy: Arc<dyn StrategyDyn>,
    pub(crate) quota: Quota,
}

impl Divided {
    /// Creates the part of one replica. `strategy` must have the same [name](Strategy::name) as the
    /// strategy that is being divided, and `quota` the same period as the original quota, because
    /// the part uses the same stored states. This is not checked.
    pub fn new(strategy: impl Strategy, quota: Quota) -> Self {
        Self { strategy: Arc::new(strategy), quota }
    }
}

/// A strategy as a Lua script, for the Redis storage, which decides inside its server. See
/// [`Strategy::script`](super::Strategy::script).
///
/// The sources define the following functions, where `NAME` is the [`name`](Self::name) with `_`
/// instead of `-`. Write them as global functions. The storage declares them as local, because
/// Redis forbids global ones. Declare all other functions as local.
///
/// - `NAME_hit(now, cost, till, a, b, ...)` returns the state after a hit as `till, a, b, delay`,
///   or nothing for a refusal. The `delay` is in microseconds, and used only if
///   [`delays`](Self::delays) is `true`. If the state is ahead of the clock, the function returns
///   `true` as its fifth value. In a refusal, four values of `nil` precede it.
/// - `NAME_refuse(now, till, a, b, ...)` returns the state after a
///   [refusal](super::Strategy::refuse) as `till, a, b`, or nothing if the state does not change.
///   It is called after a hit that a limit of the policy refuses, if the strategy [counts
///   refusals](super::Strategy::counts_refusals) or the fifth value of `NAME_hit` was `true`. The
///   values of a state that has expired are zeros.
/// - `NAME_charge(now, cost, till, a, b, ...)` returns the state after a
///   [charge](super::Strategy::charge) as `till, a, b`.
/// - `NAME_refund(now, cost, till, a, b, hit, ...)` returns the state after a refund of `cost`
///   units of a hit (`hit.at`, `hit.till`, `hit.anchor`) as `till, a, b`, or nothing if the state
///   does not change. A `till` of 0 means that no state is left.
///
/// `till`, `a` and `b` are a [`State::Counts`](super::State::Counts), which may have expired, or
/// zeros for no state. `...` stands for the [`arguments`](Self::arguments).
///
/// The code after a line `-- Only for settling.` is removed from scripts that only decide on hits.
/// All functions must be pure. Numbers are doubles, which are exact up to 2^53.
///
/// A function whose arguments do not cover the time of the server can end with
/// `error('not prepared for ' .. string.format('%.0f', now))`. Then the storage asks the strategy
/// for arguments at that time, and runs the script once more. Nothing has been written by then.
#[derive(Clone, Debug)]
#[expect(clippy::exhaustive_structs, reason = "a strategy fills in every field")]
pub struct Script {
    /// The prefix of the functions. It must differ from those of other strategies. It consists of
    /// ASCII letters, digits and `-`, and starts with a letter. A script with another name is
    /// ignored.
    pub name: &'static str,
    /// The pieces of the Lua source. Each piece comes after the pieces that it uses.
    pub sources: &'static [&'static str],
    /// The numbers that the functions get as their last arguments. They depend on the quota, the
    /// time and the cost. The length must be constant. Numbers above 2^53 are rounded.
    pub arguments: Vec<u64>,
    /// `true` if the script may admit a hit with a delay. Then `NAME_hit` must return the delay.
    pub delays: bool,
}

/// Checks a hit, and then spends or refuses it.
#[inline(always)]
pub(super) fn hit_in_steps<S: Strategy + ?Sized>(
    strategy: &S,
    quota: &Quota,
    state: &mut State,
    now: Timestamp,
    cost: u32,
) -> Outcome {
    let checked = strategy.check(quota, state, now, cost);
    if !checked.is_admitted() {
        strategy.refuse(quota, state, now);
        return Outcome::Refused;
    }
    let delay = strategy.spend(quota, state, now, cost);
    Outcome::spent(delay, cost < checked.remaining())
}

/// An extension of [`Strategy`] that is private to the crate.
pub(crate) trait StrategyDyn: Strategy {
    /// Writes the status after a hit or a peek of `cost` units into `status`. This method is
    /// compiled separately for each strategy, so the numbers are written in place and not copied.
    /// `outcome` is the effect of a hit on the state, or `None` for a peek.
    fn write_status(
        &self,
        quota: &Quota,
        state: &State,
        now: Timestamp,
        cost: u32,
        outcome: Option<Outcome>,
        status: &mut Status,
    );
}

impl<S: Strategy> StrategyDyn for S {
    fn write_status(
        &self,
        quota: &Quota,
        state: &State,
        now: Timestamp,
        cost: u32,
        outcome: Option<Outcome>,
        status: &mut Status,
    ) {
        match outcome {
            None => *status = self.check(quota, state, now, cost),
            Some(Outcome::Refused) => *status = self.check_refused(quota, state, now, cost),
            Some(Outcome::Spent { delay } | Outcome::SpentLast { delay }) => {
                *status = self.check(quota, state, now, 0);
                status.set_spent(delay, state);
            }
        }
    }
}

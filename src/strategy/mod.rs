//! Strategies: the algorithms that spend a quota over time.
//!
//! A [`Strategy`] is a pure function of a quota, a state, an instant and a cost, without a clock or
//! I/O. So it does not depend on the storage. The property tests of the feature `testing` check the
//! following laws:
//!
//! 1. A refusal spends nothing.
//! 2. Expiry is invisible: from the instant [`State::until`] on, a decision on the state equals a
//!    decision on no state.
//! 3. The `retry_after` of a refused hit is exact: after it, a peek is admitted, and one
//!    microsecond earlier, a peek is refused. It is `None` if the cost exceeds the capacity. The
//!    `reset_after` is exact in the same way.
//! 4. A strategy never admits more units than its documentation promises.
//! 5. Spending j and then k units at the same instant equals spending j + k. A peek returns the
//!    verdict and the times of the hit, and changes nothing.
//! 6. A clock that goes back causes no panic and grants no units.
//!     - A stored instant ahead of now counts as now, and the debt of a bucket counts as at most
//!       its capacity. A refusal stores this correction, so `retry_after` is exact from the first
//!       refused hit on.
//!     - The `retry_after` is not longer than after spending the whole capacity. An exception is
//!       the aligned [`SlidingWindowCounter`], whose stored instant counts as the start of the next
//!       bucket. So it adds up to one period.
//!     - A debt that a charge raised above the capacity counts as at most about 1.6 times its size.
//! 7. Strategies accept any state, cost and instant without a panic. A kind of state that the
//!    strategy does not use counts as no state.
//!
//! They also check these laws:
//!
//! - A log has at most [`log_entries`](Strategy::log_entries) entries, unless units were charged.
//! - An immediate refund undoes the hit. Refunds of parts of a hit return at most what the hit has
//!   spent.
//! - A charge is never refused, and `retry_after` is exact above the limit as well.
//! - A settled hit has its actual cost.
//! - After a change of the quota's amount or burst, `retry_after` is exact. If the capacity and the
//!   amount have not become smaller, a client does not wait longer than if it had spent the whole
//!   new quota. This includes a client that a charge has left in debt, if the units that it owes fit
//!   into the new capacity.
//!
//! The built-in strategies compute with integers, without accumulating rounding errors. They count
//! in whole microseconds, or in fractions of one if the period is not a multiple of the amount.

mod divided;
mod elastic_window;
mod fixed_window;
mod gcra;
mod leaky_bucket;
mod log;
mod mark;
mod moving_window;
mod muldiv;
mod outcome;
mod script;
mod sliding_window_counter;
mod state;
mod status;
mod strategy_dyn;
mod token_bucket;

use std::fmt;
use std::num::NonZeroU32;
use std::sync::Arc;

use crate::error::ConfigError;
use crate::quota::Quota;
use crate::time::Timestamp;

pub use self::divided::Divided;
pub use self::elastic_window::ElasticWindow;
pub use self::fixed_window::FixedWindow;
pub use self::leaky_bucket::LeakyBucket;
pub use self::log::Log;
pub use self::moving_window::MovingWindow;
pub use self::outcome::Outcome;
pub use self::script::Script;
pub use self::sliding_window_counter::SlidingWindowCounter;
pub use self::state::State;
pub use self::status::{Hit, Status};
pub(crate) use self::strategy_dyn::{Part, StrategyDyn};
pub use self::token_bucket::TokenBucket;

/// An algorithm that spends a quota over time, as a pure function.
///
/// A custom strategy is part of a [`Policy`](crate::Policy), and runs on every storage except
/// [`Leases`](crate::storage::Leases). The feature `testing` has property tests for it. All durations
/// are in whole microseconds.
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
        match quota.burst_size() {
            None => Ok(()),
            Some(burst) => Err(ConfigError::new(format!(
                "{} does not support a burst, as in \"{quota}\": remove \"burst {burst}\", \
                 or write \"token-bucket {quota}\"",
                self.name()
            ))),
        }
    }

    /// Decides a hit of `cost` units without changing the state. The returned numbers are those
    /// before the hit is spent. A strategy that delays hits sets the delay with
    /// [`Status::delayed`].
    ///
    /// The hit is admitted if and only if `cost` is at most the remaining units. So cost 0 is
    /// always admitted.
    fn check(&self, quota: &Quota, state: &State, now: Timestamp, cost: u32) -> Status;

    /// Spends `cost` units, at least 1. Returns the delay in microseconds, which is 0 for most
    /// strategies.
    ///
    /// For a hit, it is called only after [`check`](Self::check) has admitted the same hit on the
    /// same state. The default implementation of [`charge`](Self::charge) calls it without a check.
    fn spend(&self, quota: &Quota, state: &mut State, now: Timestamp, cost: u32) -> u64;

    /// Updates the state after the refusal of a hit of at least 1 unit. It is also called if this
    /// limit admits and another limit of the policy refuses. It must not spend units.
    ///
    /// The default implementation does nothing. A strategy overrides it in two cases:
    ///
    /// - Refusals change the state: an [`ElasticWindow`] moves its end. Then
    ///   [`counts_refusals`](Self::counts_refusals) must return `true`.
    /// - The state is ahead of `now`, because it was written before the clock went back. It counts
    ///   as written at `now`, and the strategy must store it as such. Otherwise each later decision
    ///   would count it as written at its own time, and `retry_after` would be wrong until the
    ///   clock catches up.
    fn refuse(&self, quota: &Quota, state: &mut State, now: Timestamp) {
        let _ = (quota, state, now);
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
        let checked = self.check(quota, state, now, cost);
        if !checked.is_admitted() {
            self.refuse(quota, state, now);
            return Outcome::Refused;
        }
        let delay = self.spend(quota, state, now, cost);
        Outcome::spent(delay, cost < checked.remaining())
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

    /// Returns the maximum number of entries in the state's [`Log`]. Storages compute the size of a
    /// state from it. [Charges](Self::charge) may add more. Defaults to 0, for states without a
    /// log.
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

    /// Returns the strategy as a Lua script, with its arguments for a hit of `cost` units. The
    /// Redis storage runs it on the server. Defaults to `None`: if a limit of a policy has no
    /// script, the Redis storage compares and swaps instead, which takes more round trips.
    fn script(&self, quota: &Quota, cost: u32) -> Option<Script> {
        let _ = (quota, cost);
        None
    }

    /// Writes the limit as text: the name, the quota, and the options of the strategy. The text
    /// must be printable ASCII, otherwise a [`Limit`](crate::Limit) cannot be created.
    ///
    /// # Errors
    ///
    /// Returns the error of the formatter.
    fn describe(&self, quota: &Quota, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {quota}", self.name())
    }
}

/// Returns the strategy with this name or alias. Upper and lower case are equivalent. The test
/// vectors use the same names.
pub(crate) fn by_name(name: &str) -> Option<Arc<dyn StrategyDyn>> {
    Some(match &*name.to_ascii_lowercase() {
        "fixed-window" | "interval-token-bucket" => Arc::new(FixedWindow::new()),
        "fixed-window-aligned" => Arc::new(FixedWindow::aligned()),
        "elastic-window" => Arc::new(ElasticWindow::new()),
        "moving-window" => Arc::new(MovingWindow::new()),
        "sliding-window-counter" => Arc::new(SlidingWindowCounter::new()),
        "sliding-window-counter-aligned" => Arc::new(SlidingWindowCounter::aligned()),
        "token-bucket" | "gcra" => Arc::new(TokenBucket::new()),
        "leaky-bucket" | "leaky-bucket-queue" => Arc::new(LeakyBucket::new()),
        _ => return None,
    })
}

/// The names that [`by_name`] accepts, without the aliases, for error messages.
pub(crate) const NAMES: [&str; 8] = [
    "fixed-window",
    "fixed-window-aligned",
    "elastic-window",
    "moving-window",
    "sliding-window-counter",
    "sliding-window-counter-aligned",
    "token-bucket",
    "leaky-bucket",
];

/// Returns the low 32 bits of an instant as an anchor, which distinguishes the windows of one key.
#[allow(clippy::cast_possible_truncation)]
#[inline]
const fn low_bits(now: Timestamp) -> u32 {
    now.as_micros() as u32
}

//! The rules that spend a quota over time, one file each.
//!
//! A [`Strategy`] is a pure function of a quota, a state, an instant and a cost: no clock, no I/O. So it runs on every
//! storage, and its laws are checked without one (feature `testing`):
//!
//! 1. A refusal takes nothing.
//! 2. Forgetting is invisible: from the instant [`State::until`] on, deciding on the state and on no state is the same.
//! 3. `retry_after` is tight: a peek is refused a microsecond before it and admitted at it (a peek of an elastic window
//!    excepted). It is absent when the cost can never fit.
//! 4. No more is admitted than the strategy promises.
//! 5. Spending j, then k at the same instant is spending j + k; a peek predicts the hit and changes nothing.
//! 6. A clock that goes back neither panics nor grants. A stored instant ahead of now counts as now, a debt as at most the
//!    full one, and a refusal stores that: from the first refused hit on `retry_after` is tight, and nobody waits for longer
//!    than after spending everything.
//! 7. It is total: any state, any cost, any instant. A state that the strategy cannot have written is a fresh start.
//!
//! The suite has three more. A log is as long as it says (11), a refund at once undoes the hit, and when the quota's amount
//! or burst changes, `retry_after` is tight at every look (12): a raised limit refuses nobody for longer than if all of it
//! had been spent.
//!
//! All rules are exact: they count in whole microseconds, or in fractions of one where a period is no multiple of the
//! amount.

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

use crate::{ConfigError, Quota, Timestamp};

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

/// A rule that spends a quota over time, as a pure function.
///
/// Write one in a file of its own, give it a [`Policy`](crate::Policy), and it runs on every storage; the feature
/// `testing` has the laws it must keep. All spans are whole microseconds.
///
/// ```
/// use tower_ratelimit::strategy::{Hit, State, Status, Strategy};
/// use tower_ratelimit::{Policy, Quota, Timestamp};
///
/// /// Admits the quota's amount once, and nothing more until a period after the last admitted hit.
/// #[derive(Debug)]
/// struct Once;
///
/// impl Once {
///     fn spent(state: &State, now: Timestamp) -> (u32, u64) {
///         match *state {
///             State::Counts { until, amounts: [spent, 0] } if until > now => (spent, until.since(now)),
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
///         let (spent, left) = Self::spent(state, now);
///         let remaining = quota.amount().saturating_sub(spent);
///         if cost <= remaining {
///             Status::admitted(quota.amount(), remaining, left)
///         } else {
///             Status::refused(quota.amount(), remaining, left, (cost <= quota.amount()).then_some(left))
///         }
///     }
///
///     fn spend(&self, quota: &Quota, state: &mut State, now: Timestamp, cost: u32) -> u64 {
///         let (spent, _) = Self::spent(state, now);
///         let until = now.plus(quota.period_micros());
///         *state = State::Counts { until, amounts: [spent.saturating_add(cost), 0] };
///         0
///     }
///
///     fn refund(&self, _: &Quota, state: &mut State, _: Timestamp, hit: &Hit) {
///         if let State::Counts { until, amounts: [spent, 0] } = state
///             && *until == hit.until
///         {
///             *spent = spent.saturating_sub(hit.cost);
///         }
///     }
/// }
///
/// let policy = Policy::new(Once, Quota::per_minute(3));
/// ```
pub trait Strategy: fmt::Debug + Send + Sync + 'static {
    /// Its name in strings and storages. It is stored with the state: never change it.
    fn name(&self) -> &'static str;

    /// The most units that can be spent at one instant: what `X-RateLimit-Limit` shows.
    fn capacity(&self, quota: &Quota) -> u32 {
        quota.amount()
    }

    /// Refuses a quota that this strategy cannot keep. Called when a policy is built.
    ///
    /// # Errors
    ///
    /// Unless overridden, when the quota has a burst.
    fn validate(&self, quota: &Quota) -> Result<(), ConfigError> {
        match quota.burst_size() {
            None => Ok(()),
            Some(burst) => Err(ConfigError::new(format!(
                "{} has no bursts, so \"{quota}\" cannot be kept: leave \"burst {burst}\" out, \
                 or write \"token-bucket {quota}\"",
                self.name()
            ))),
        }
    }

    /// Decides on a hit of `cost` units and changes nothing. The status shows the state as it is.
    ///
    /// Admitted if and only if `cost` is at most the remaining units, so cost 0 always is.
    fn check(&self, quota: &Quota, state: &State, now: Timestamp, cost: u32) -> Status;

    /// Spends `cost` units, at least 1. Called only after [`check`](Self::check) admitted the
    /// same hit on the same state. Returns the microseconds until the hit's turn: 0 unless the strategy makes hits wait.
    fn spend(&self, quota: &Quota, state: &mut State, now: Timestamp, cost: u32) -> u64;

    /// Changes the state after a refusal. Called also when this limit admits and another one of the policy refuses.
    ///
    /// A refusal takes nothing, so this does nothing, with two exceptions:
    ///
    /// - The elastic window moves its end.
    /// - A state that is ahead of `now` was written before the clock went back. It counts as written now, and a strategy
    ///   stores that here: otherwise it would count anew at each look, and `retry_after` would be wrong for as long as
    ///   the clock is behind the state.
    fn refuse(&self, quota: &Quota, state: &mut State, now: Timestamp) {
        let _ = (quota, state, now);
    }

    /// Returns `true` if every refusal changes the state. If it is `false`, a storage may refuse a key from what it
    /// knows, without asking for its state again, as long as its clock does not go back.
    fn counts_refusals(&self) -> bool {
        false
    }

    /// Checks, and spends or refuses: all that a hit of at least 1 unit does to the state of a policy's only limit, and of
    /// one of several where what has been done can be undone. Override it only where it is faster in one go.
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

    /// Gives a hit back, as far as it has not been forgotten: only before [`Hit::until`], which is already checked,
    /// and only into the window it was spent in. A state that has become equal to none may be left as
    /// [`State::Fresh`].
    fn refund(&self, quota: &Quota, state: &mut State, now: Timestamp, hit: &Hit);

    /// How many instants its state's [`Log`] can hold at most; 0 when it keeps none. For storages whose room is bounded.
    fn log_entries(&self, quota: &Quota) -> u32 {
        let _ = quota;
        0
    }

    /// What one of so many has of this limit that divide it between them. `None`, as it is unless overridden, means this strategy
    /// and the [quota's share](Quota::divide): override it where the strategy has amounts of its own, as a leaky bucket has places.
    fn divide(&self, quota: &Quota, replicas: NonZeroU32) -> Option<Divided> {
        let _ = (quota, replicas);
        None
    }

    /// The same rule in Lua, for storages that decide inside their server, with what it has to know to decide on a hit of
    /// `cost` units. Without one they compare and swap, which takes more trips.
    fn script(&self, quota: &Quota, cost: u32) -> Option<Script> {
        let _ = (quota, cost);
        None
    }

    /// Writes the limit as text: the name, the quota, and whatever options make this strategy another one.
    ///
    /// # Errors
    ///
    /// Those of the formatter.
    fn describe(&self, quota: &Quota, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {quota}", self.name())
    }
}

/// The strategies that strings can name, as the vectors do, with their second names. `None` for any other name.
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

/// The names that [`by_name`] knows, for messages.
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

/// The low bits of an instant: an anchor, enough to tell the windows of one key apart.
#[allow(clippy::cast_possible_truncation)]
#[inline]
const fn low_bits(now: Timestamp) -> u32 {
    now.as_micros() as u32
}

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
//!       bucket. So it adds up to one period. Another one is the [`CalendarWindow`], which keeps
//!       the end of a window if a window can be so long.
//!     - A debt that a charge raised above the capacity counts as at most about 1.6 times its size, or
//!       16 times the size of the debt that a larger quota has stored for the key.
//! 7. Strategies accept any state, cost and instant without a panic. A kind of state that the
//!    strategy does not use counts as no state.
//!
//! The property tests also check these laws:
//!
//! - A log has at most [`log_entries`](Strategy::log_entries) entries, unless units were charged.
//! - An immediate refund undoes the hit. Refunds of parts of a hit return at most what the hit has
//!   spent.
//! - A charge is never refused, and `retry_after` is exact above the limit as well.
//! - A settled hit has its actual cost.
//! - After a change of the quota's amount or burst, `retry_after` is exact. If the capacity and the
//!   amount have not become smaller, a client does not wait longer than if it had spent the whole
//!   new quota. This includes a client that a charge has left in debt, if the units that it owes
//!   fit into the new capacity.
//!
//! The built-in strategies compute with integers, without accumulating rounding errors. They count
//! in whole microseconds, or in fractions of one if the period is not a multiple of the amount.

mod arithmetic;
mod calendar;
mod calendar_window;
mod contract;
mod elastic_window;
mod fixed_window;
mod gcra;
mod in_flight;
mod leaky_bucket;
mod lockout;
mod log;
mod mark;
mod moving_window;
mod sliding_window_counter;
mod state;
mod status;
mod token_bucket;
mod window;

use std::sync::Arc;

pub(crate) use self::calendar::UnknownZone;
pub use self::calendar::Weekday;
pub use self::calendar_window::CalendarWindow;
pub(crate) use self::contract::StrategyDyn;
pub use self::contract::{Divided, Script, Strategy};
pub use self::elastic_window::ElasticWindow;
pub use self::fixed_window::FixedWindow;
pub(crate) use self::in_flight::InFlightLimit;
pub use self::leaky_bucket::LeakyBucket;
pub use self::lockout::Lockout;
pub use self::log::Log;
pub use self::moving_window::MovingWindow;
pub use self::sliding_window_counter::SlidingWindowCounter;
pub use self::state::{Outcome, State};
pub use self::status::{Hit, Lock, Status};
pub use self::token_bucket::TokenBucket;

/// Returns the strategy with this name or alias. Upper and lower case are equivalent, and `_` counts
/// as `-`. The test vectors use the same names.
pub(crate) fn by_name(name: &str) -> Option<Arc<dyn StrategyDyn>> {
    Some(match &*name.to_ascii_lowercase().replace('_', "-") {
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

/// The names of all strategies, without the aliases, for error messages.
pub(crate) const NAMES: [&str; 10] = [
    "fixed-window",
    "fixed-window-aligned",
    "elastic-window",
    "moving-window",
    "sliding-window-counter",
    "sliding-window-counter-aligned",
    "token-bucket",
    "leaky-bucket",
    "lockout",
    "calendar",
];

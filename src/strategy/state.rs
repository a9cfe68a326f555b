//! The states of limits, and the effects of hits on them.

use std::mem;

use super::Log;
use crate::time::Timestamp;

/// The stored data of one limit for one key.
///
/// Every state except `Fresh` contains the instant from which it has no effect. A storage may drop
/// it from that instant on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "every storage writes every kind of state")]
pub enum State {
    /// No state: the key is new, or its state has expired.
    #[default]
    Fresh,
    /// An instant and two amounts.
    Counts {
        /// The instant from which the state has no effect.
        until: Timestamp,
        /// Two numbers whose meaning the strategy defines. A refund gets the second one of the hit
        /// as [`Hit::anchor`](super::Hit::anchor).
        amounts: [u32; 2],
    },
    /// The instants of admitted hits, for a [`MovingWindow`](super::MovingWindow).
    Log(Box<Log>),
}

impl State {
    /// Replaces the state. An assignment would call the drop glue, even for a state without a log.
    #[inline(always)]
    pub(crate) fn replace(&mut self, new: Self) {
        mem::replace(self, new).discard();
    }

    /// Drops the state, without a call of the drop glue if the state has no log.
    #[inline(always)]
    pub(crate) fn discard(self) {
        match self {
            Self::Log(log) => drop(log),
            small => mem::forget(small),
        }
    }

    /// Returns the instant from which this state has no effect and may be dropped. This is the
    /// epoch for [`Fresh`](Self::Fresh).
    #[inline]
    pub fn until(&self) -> Timestamp {
        match self {
            Self::Fresh => Timestamp::EPOCH,
            Self::Counts { until, .. } => *until,
            Self::Log(log) => log.until(),
        }
    }
}

/// The effect of a hit on the state of one limit. See [`Strategy::hit`](super::Strategy::hit).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "storages match on every outcome")]
pub enum Outcome {
    /// The hit was refused and has spent nothing.
    Refused,
    /// The hit was admitted. More units may remain.
    Spent {
        /// The delay in microseconds, which is 0 for most strategies.
        delay: u64,
    },
    /// The hit was admitted, and no units remain. A storage can use this to refuse the next hit
    /// without a call of the strategy.
    SpentLast {
        /// The delay in microseconds, which is 0 for most strategies.
        delay: u64,
    },
}

impl Outcome {
    /// Creates the outcome of an admitted hit. `delay` is in microseconds. `more` is `true` if at
    /// least one unit remains.
    #[inline]
    pub const fn spent(delay: u64, more: bool) -> Self {
        if more { Self::Spent { delay } } else { Self::SpentLast { delay } }
    }

    /// Returns `true` if the hit was admitted without a delay.
    #[inline]
    pub const fn is_at_once(&self) -> bool {
        matches!(self, Self::Spent { delay: 0 } | Self::SpentLast { delay: 0 })
    }

    /// Returns `true` if the hit was admitted with a delay.
    #[inline]
    pub const fn is_delayed(&self) -> bool {
        matches!(self, Self::Spent { delay: 1.. } | Self::SpentLast { delay: 1.. })
    }
}

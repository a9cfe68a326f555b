use super::Log;
use crate::Timestamp;

/// What one limit remembers of one key.
///
/// Every state carries the instant from which it can be forgotten: from then on it decides like no state at all, so a
/// storage may drop it at any time after without anybody noticing. What the amounts mean is the strategy's business.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "every storage writes every kind of state")]
pub enum State {
    /// Nothing: a key that was never seen, or has been forgotten.
    #[default]
    Fresh,
    /// An instant and two amounts.
    Counts {
        /// From this instant on the state decides like [`State::Fresh`].
        until: Timestamp,
        /// What the strategy counts.
        amounts: [u32; 2],
    },
    /// When units were admitted (moving window).
    Log(Box<Log>),
}

impl State {
    /// The instant from which this state decides like [`State::Fresh`].
    #[inline]
    pub fn until(&self) -> Timestamp {
        match self {
            Self::Fresh => Timestamp::EPOCH,
            Self::Counts { until, .. } => *until,
            Self::Log(log) => log.until(),
        }
    }
}

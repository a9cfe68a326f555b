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
    /// Creates the outcome of an admitted hit. `more` is `true` if at least one unit remains.
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

/// What a hit has done to a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "storages match on every outcome")]
pub enum Outcome {
    /// It has taken nothing.
    Refused,
    /// It was admitted, and at least one unit remains.
    Spent {
        /// Microseconds until the hit's turn; 0 unless the strategy makes hits wait.
        delay: u64,
    },
    /// It was admitted, and nothing remains.
    SpentLast {
        /// As in [`Spent`](Self::Spent).
        delay: u64,
    },
}

impl Outcome {
    /// Admitted; `more` says whether at least one unit remains.
    #[inline]
    pub const fn spent(delay: u64, more: bool) -> Self {
        if more { Self::Spent { delay } } else { Self::SpentLast { delay } }
    }

    /// Whether the hit was admitted and goes on without waiting.
    #[inline]
    pub const fn is_at_once(&self) -> bool {
        matches!(self, Self::Spent { delay: 0 } | Self::SpentLast { delay: 0 })
    }

    /// Whether the hit was admitted and has to wait.
    #[inline]
    pub const fn is_delayed(&self) -> bool {
        matches!(self, Self::Spent { delay: 1.. } | Self::SpentLast { delay: 1.. })
    }
}

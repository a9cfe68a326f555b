use std::error::Error;
use std::fmt;

use super::Decision;
use crate::time::Timestamp;

/// The reason why the cost of a hit cannot be settled. The stored states are unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SettleError {
    /// The decision is a refusal.
    Refused,
    /// The decision has spent nothing that can be refunded: it is a peek, a hit of cost 0, or a
    /// [charge](crate::RateLimiter::charge).
    NothingSpent,
    /// The decision belongs to a policy with another [identity](crate::Policy::identity).
    OtherPolicy,
    /// The [`Charge`](crate::Charge) is already settled.
    AlreadySettled,
    /// The refund of [`refund_units`](crate::RateLimiter::refund_units) exceeds the units that the
    /// hit has spent.
    #[non_exhaustive]
    TooManyUnits {
        /// The units of the refund.
        units: u32,
        /// The units that the hit has spent.
        spent: u32,
    },
}

impl fmt::Display for SettleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused => f.write_str("cannot settle a refusal: a refused hit has spent nothing"),
            Self::NothingSpent => {
                f.write_str("cannot settle a decision that has spent nothing: settle the decision of a hit")
            }
            Self::OtherPolicy => {
                f.write_str("cannot settle a decision of another policy: use the limiter that decided the hit")
            }
            Self::AlreadySettled => f.write_str("cannot settle a charge twice: it is already settled"),
            Self::TooManyUnits { units, spent } => {
                write!(f, "cannot refund {units} units of a hit that has spent {spent}")
            }
        }
    }
}

impl Error for SettleError {}

impl Decision {
    /// Sets the [digest](crate::Policy::digest) of the policy that decided. A storage that creates
    /// decisions with [`of_limits`](Self::of_limits) or [`of`](Self::of) calls this.
    ///
    /// A [`RateLimiter`](crate::RateLimiter) with another policy then refuses to
    /// [settle](crate::RateLimiter::settle) the decision. A decision without a digest can be
    /// settled by every limiter. A comparison of two decisions ignores their digests.
    pub fn of_policy(self, digest: u128) -> Self {
        Self { policy: PolicyTag::of(digest), ..self }
    }

    /// Sets the policy to that of another decision.
    pub(crate) fn of_same_policy(self, other: &Self) -> Self {
        Self { policy: other.policy, ..self }
    }

    /// Sets the cost.
    pub(crate) fn of_cost(self, cost: u32) -> Self {
        Self { cost, ..self }
    }

    /// Returns `true` if this is the decision on an admitted hit that has spent at least one unit.
    /// Otherwise there is nothing to settle. A later refund does not change the result.
    pub fn has_spent(&self) -> bool {
        self.is_admitted() && self.cost > 0 && self.limits().iter().any(|status| status.until() > Timestamp::EPOCH)
    }

    /// Returns `true` if a refund of this hit at `now` changes nothing, because all of its units are
    /// free again.
    pub(crate) fn has_expired(&self, now: Timestamp) -> bool {
        self.limits().iter().all(|status| status.until() <= now)
    }

    /// Checks that this is a hit whose cost can be settled, and that the policy with this digest
    /// decided it.
    pub(crate) fn check_settle(&self, digest: u128) -> Result<(), SettleError> {
        if self.is_refused() {
            return Err(SettleError::Refused);
        }
        if !self.has_spent() {
            return Err(SettleError::NothingSpent);
        }
        if !self.policy.is_of(digest) {
            return Err(SettleError::OtherPolicy);
        }
        Ok(())
    }
}

/// A part of the digest of the policy that decided. Policies with different identities have the
/// same tag with a probability of 1 in 2^31.
///
/// All tags compare as equal, because not every storage sets them, and the tag must not affect the
/// comparison of decisions.
#[derive(Clone, Copy, Debug)]
pub(super) struct PolicyTag(u32);

impl PolicyTag {
    /// The tag of a decision whose storage set none. Any policy can settle it.
    pub(super) const UNKNOWN: Self = Self(0);

    #[allow(clippy::cast_possible_truncation)]
    #[inline]
    pub(super) fn of(digest: u128) -> Self {
        Self(digest as u32 | 1)
    }

    fn is_of(self, digest: u128) -> bool {
        self.0 == 0 || self.0 == Self::of(digest).0
    }
}

impl PartialEq for PolicyTag {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for PolicyTag {}

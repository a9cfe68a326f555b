//! Hits that bring a key near a limit.

use crate::decision::Decision;
use crate::policy::{Limit, Policy};
use crate::strategy::Status;

/// A share of the capacity of each limit, in millionths.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NearLimit(u32);

impl NearLimit {
    const WHOLE: u32 = 1_000_000;

    /// # Panics
    ///
    /// Panics unless `share` is greater than 0 and at most 1.
    #[track_caller]
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the value is at most `WHOLE`")]
    pub(crate) fn new(share: f64) -> Self {
        assert!(
            share > 0.0 && share <= 1.0,
            "invalid share {share}: write more than 0.0 and at most 1.0, for example 0.8"
        );
        Self((share * f64::from(Self::WHOLE)).round() as u32)
    }

    /// Returns the limits whose share a hit has crossed, with their statuses.
    pub(super) fn crossed<'a>(
        self,
        policy: &'a Policy,
        decision: &'a Decision,
    ) -> impl Iterator<Item = (&'a Limit, &'a Status)> {
        let cost = if decision.is_admitted() { decision.cost() } else { 0 };
        let limits = policy.limits().iter().zip(decision.statuses());
        limits.filter(move |(_, status)| self.is_crossed_by(cost, status))
    }

    /// Returns `true` if an admitted hit of `cost` units has brought the spent units of a limit from
    /// below the share to the share, or beyond it. `status` is the status after the hit.
    ///
    /// The remaining units before the hit were greater by exactly `cost`, because the hit takes place
    /// at one instant. So one hit crosses the share, even if several processes hit the key at once.
    fn is_crossed_by(self, cost: u32, status: &Status) -> bool {
        let capacity = u64::from(status.capacity());
        let share = (capacity * u64::from(self.0)).div_ceil(Self::WHOLE.into()).max(1);
        let spent = capacity.saturating_sub(status.remaining().into());
        status.is_counted() && spent >= share && spent.saturating_sub(cost.into()) < share
    }
}

use super::Decision;
use crate::time::Timestamp;

impl Decision {
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
}

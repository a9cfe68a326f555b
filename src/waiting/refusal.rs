use tokio::time::Instant;

use super::{Attempted, later};
use crate::decision::Decision;
use crate::policy::Policy;
use crate::time::micros;

/// A refusal, and the instant until which it holds.
#[derive(Clone)]
pub(crate) struct Refusal {
    decision: Decision,
    policy: Policy,
    received: Instant,
    /// The instant at which the hit would be admitted. `None` if that is unknown or never.
    end: Option<Instant>,
}

impl Refusal {
    /// Creates a refusal from a decision that the storage has just returned.
    pub(crate) fn new(decision: Decision, policy: Policy) -> Self {
        let received = Instant::now();
        let end = decision.retry_after().map(|wait| later(received, wait));
        Self { decision, policy, received, end }
    }

    /// Returns `true` if the hit would be admitted at the deadline or earlier.
    pub(crate) fn ends_by(&self, deadline: Instant) -> bool {
        self.end.is_some_and(|end| end <= deadline)
    }

    /// Returns the instant until which a hit of this cost is refused, if it is known.
    pub(super) fn end_for(&self, cost: u32) -> Option<Instant> {
        self.end.filter(|_| cost >= self.decision.cost())
    }

    pub(super) fn policy(&self) -> &Policy {
        &self.policy
    }

    pub(super) fn cost(&self) -> u32 {
        self.decision.cost()
    }

    /// Returns a refusal that holds at least until `end`.
    pub(super) fn lasting_until(self, end: Instant) -> Self {
        Self { end: self.end.max(Some(end)), ..self }
    }

    /// Returns the refusal with the waits that are left now.
    pub(super) fn into_attempted(self) -> Attempted {
        let now = Instant::now();
        let mut decision = self.decision.after(now.saturating_duration_since(self.received));
        if let (Some(end), Some(retry_after)) = (self.end, decision.retry_after()) {
            let missing = end.saturating_duration_since(now).saturating_sub(retry_after);
            decision.lengthen_waits(micros(missing));
        }
        Attempted { policy: self.policy, decided: Ok(decision) }
    }
}

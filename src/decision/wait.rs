use std::time::Duration;

use super::{Decision, Verdict};
use crate::strategy::Status;
use crate::time::micros;

impl Decision {
    /// Returns this refusal with the time moved forward by `passed`, as if the key got no other
    /// hits meanwhile. Each `retry_after` becomes shorter, but stays at least one microsecond.
    pub(crate) fn after(mut self, passed: Duration) -> Self {
        let passed = micros(passed);
        self.at = self.at.plus(passed);
        self.statuses.as_mut_slice().iter_mut().for_each(|status| status.pass(passed));
        self
    }

    /// Turns an admission into a refusal, because its delay is longer than `max_delay`. The
    /// `retry_after` is the time until the delay of a hit would be `max_delay`. The remaining units
    /// do not change, even if the hit was refunded, because the refund may have failed.
    pub(crate) fn refuse_delay(mut self, max_delay: Duration) -> Self {
        let max_delay = micros(max_delay);
        self.statuses.as_mut_slice().iter_mut().for_each(|status| status.refuse_delay(max_delay));
        self.verdict = self.verdict.instead(Verdict::REFUSED);
        self
    }

    /// Turns the admission of a peek into a refusal with a `retry_after` of one microsecond,
    /// because other hits wait for the same units. Does not change a refusal.
    pub(crate) fn refuse_turn(mut self) -> Self {
        if self.is_admitted() {
            self.statuses.as_mut_slice().iter_mut().for_each(Status::refuse_turn);
            self.verdict = self.verdict.instead(Verdict::REFUSED);
        }
        self
    }
}

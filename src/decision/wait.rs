use std::time::Duration;

use super::{Decision, Verdict};
use crate::strategy::Status;
use crate::time::micros;

impl Decision {
    /// Returns this refusal as of `passed` later, if nothing else was decided meanwhile. Its
    /// `retry_after` is at least a microsecond.
    pub(crate) fn after(mut self, passed: Duration) -> Self {
        let passed = micros(passed);
        self.at = self.at.plus(passed);
        self.statuses.as_mut_slice().iter_mut().for_each(|status| status.pass(passed));
        self
    }

    /// Turns the admission of a refunded hit into a refusal, because its delay is longer than
    /// `max_delay`. Its `retry_after` is the time until the delay would be that short.
    pub(crate) fn refuse_delay(mut self, max_delay: Duration) -> Self {
        let (cost, max_delay) = (self.cost, micros(max_delay));
        self.statuses.as_mut_slice().iter_mut().for_each(|status| Status::refuse_delay(status, cost, max_delay));
        self.verdict = self.verdict.instead(Verdict::REFUSED);
        self
    }
}

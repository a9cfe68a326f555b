use super::{Outcome, State, Status, Strategy};
use crate::quota::Quota;
use crate::time::Timestamp;

/// An extension of [`Strategy`] that is private to the crate.
pub(crate) trait StrategyDyn: Strategy {
    /// Writes the status after a hit or a peek of `cost` units into `status`. This method is
    /// compiled separately for each strategy, so the numbers are written in place and not copied.
    fn write_status(&self, quota: &Quota, state: &State, now: Timestamp, cost: u32, part: Part, status: &mut Status);
}

/// The effect of a decision on the state of one limit. `None` for a peek.
pub(crate) type Part = Option<Outcome>;

impl<S: Strategy> StrategyDyn for S {
    fn write_status(&self, quota: &Quota, state: &State, now: Timestamp, cost: u32, part: Part, status: &mut Status) {
        let (cost, delay) = match part {
            None | Some(Outcome::Refused) => (cost, None),
            Some(Outcome::Spent { delay } | Outcome::SpentLast { delay }) => (0, Some(delay)),
        };
        *status = self.check(quota, state, now, cost);
        if let Some(delay) = delay {
            status.set_spent(delay, state);
        }
    }
}

use super::{Outcome, State, Status, Strategy};
use crate::{Quota, Timestamp};

/// What only the crate asks of a strategy.
pub(crate) trait StrategyDyn: Strategy {
    /// Writes down what the state says after a hit or a peek of `cost` units. Being compiled for each strategy by itself, it
    /// writes the numbers where they are wanted: handing over a status that was written a moment ago takes longer than
    /// making it.
    fn tell(&self, quota: &Quota, state: &State, now: Timestamp, cost: u32, part: Part, status: &mut Status);
}

/// What a limit has done to its state in a decision: nothing, in a peek.
pub(crate) type Part = Option<Outcome>;

impl<S: Strategy> StrategyDyn for S {
    fn tell(&self, quota: &Quota, state: &State, now: Timestamp, cost: u32, part: Part, status: &mut Status) {
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

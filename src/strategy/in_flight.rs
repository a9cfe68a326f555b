use std::fmt;

use super::{Hit, State, Status, Strategy};
use crate::quota::Quota;
use crate::time::Timestamp;

/// The limit of [`Slots`](crate::Slots), which refunds the cost of a request when its response has
/// ended. It has no period, so it ignores the quota and the time.
///
/// An [`InFlightLayer`](crate::InFlightLayer) counts the slots itself. The limit describes them in
/// events, rejections and header fields.
#[derive(Clone, Debug)]
pub(crate) struct InFlightLimit(pub(crate) u32);

impl InFlightLimit {
    pub(crate) const NAME: &'static str = "in-flight";

    fn taken(state: &State) -> u32 {
        if let State::Counts { amounts: [taken, _], .. } = state { *taken } else { 0 }
    }
}

impl Strategy for InFlightLimit {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn capacity(&self, _: &Quota) -> u32 {
        self.0
    }

    fn check(&self, _: &Quota, state: &State, _: Timestamp, cost: u32) -> Status {
        let remaining = self.0.saturating_sub(Self::taken(state));
        if cost <= remaining {
            Status::admitted(self.0, remaining, 0)
        } else {
            Status::refused(self.0, remaining, 0, (cost <= self.0).then_some(0))
        }
    }

    fn spend(&self, _: &Quota, state: &mut State, _: Timestamp, cost: u32) -> u64 {
        let taken = Self::taken(state).saturating_add(cost);
        *state = State::Counts { until: Timestamp::from_micros(u64::MAX), amounts: [taken, 0] };
        0
    }

    fn refund(&self, _: &Quota, state: &mut State, _: Timestamp, _: &Hit, units: u32) {
        if let State::Counts { amounts: [taken, _], .. } = state {
            *taken = taken.saturating_sub(units);
        }
    }

    fn describe(&self, _: &Quota, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", Self::NAME, self.0)
    }
}

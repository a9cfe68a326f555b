//! The common part of the windows that count units.

use super::arithmetic::low_bits;
use super::{Hit, State, Status};
use crate::quota::Quota;
use crate::time::Timestamp;

/// A window that has not ended.
#[derive(Clone, Copy)]
pub(super) struct Window {
    pub(super) end: Timestamp,
    count: u32,
    /// Distinguishes the window from a later one.
    anchor: u32,
}

impl Window {
    /// Returns the live window of a state. `end` returns its end, which is earlier than the stored one if
    /// the clock has gone back.
    #[inline(always)]
    pub(super) fn live(state: &State, now: Timestamp, end: impl FnOnce(Timestamp) -> Timestamp) -> Option<Self> {
        match *state {
            State::Counts { until, amounts: [count, anchor] } if count > 0 && until > now => {
                Some(Self { end: end(until), count, anchor })
            }
            _ => None,
        }
    }

    /// Returns a window that begins now.
    #[inline(always)]
    pub(super) fn new(end: Timestamp, now: Timestamp) -> Self {
        Self { end, count: 0, anchor: low_bits(now) }
    }

    /// Returns the microseconds that are left and the units that are spent, which are 0 without a window.
    #[inline(always)]
    pub(super) fn left(live: Option<Self>, now: Timestamp) -> (u64, u32) {
        live.map_or((0, 0), |live| (live.end.since(now), live.count))
    }

    /// Stores the window with the units of a hit. Returns its delay, which is 0.
    #[inline(always)]
    pub(super) fn spend(self, state: &mut State, cost: u32) -> u64 {
        state.replace(Self { count: self.count.saturating_add(cost), ..self }.store());
        0
    }

    /// Stores the window without units of a hit, unless the hit belongs to another window.
    pub(super) fn refund(self, state: &mut State, hit: &Hit, units: u32) {
        if self.anchor == hit.anchor {
            let count = self.count.saturating_sub(units);
            *state = if count == 0 { State::Fresh } else { Self { count, ..self }.store() };
        }
    }

    #[inline(always)]
    pub(super) fn store(self) -> State {
        State::Counts { until: self.end, amounts: [self.count, self.anchor] }
    }
}

/// Returns the status of a hit of `cost` units on a window that ends in `left` microseconds and in
/// which `count` units are spent. A refused hit has to wait for `wait` microseconds.
pub(super) fn status(quota: &Quota, left: u64, count: u32, cost: u32, wait: u64) -> Status {
    let capacity = quota.amount();
    let remaining = capacity.saturating_sub(count);
    if cost <= remaining {
        Status::admitted(capacity, remaining, left)
    } else {
        Status::refused(capacity, remaining, left, (cost <= capacity).then_some(wait))
    }
}

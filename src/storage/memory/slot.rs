//! A slot of 32 bytes for one state of a key.

use crate::policy::{Limit, SHADOW};
use crate::strategy::{Outcome, State, Status};
use crate::time::Timestamp;

/// One state of one key. A small state, which is a [`State::Counts`], fits into the slot. A log
/// does not, so its slot has the index of the log.
///
/// The slot is vacant if `until` is the epoch, because such a state has expired.
///
/// Fields that a strategy writes one after the other are not adjacent. Otherwise the compiler would
/// merge their loads, and a merged load of recently written parts stalls (store-to-load forwarding
/// fails).
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct TableSlot {
    pub(super) hash: u64,
    /// The first amount of the state, or the index of its log.
    pub(super) first: u32,
    /// The rest of the key's hash, combined with the limit's digest, and the bits `LOG` and
    /// `SHADOW`.
    pub(super) limit_hash: u32,
    pub(super) until: Timestamp,
    /// The second amount.
    pub(super) second: u32,
    /// The time from the next available unit to `until`, in microseconds, rounded down. Infinite if
    /// a unit remained after the last update, and for shadow limits.
    pub(super) admits_before: f32,
}

impl TableSlot {
    pub(super) fn new(hash: u64, limit_hash: u32, until: Timestamp) -> Self {
        Self { hash, first: 0, limit_hash, until, second: 0, admits_before: f32::INFINITY }
    }

    /// Returns the state, which must be small.
    #[inline]
    pub(super) fn state(&self) -> State {
        State::Counts { until: self.until, amounts: [self.first, self.second] }
    }

    /// Returns `true` if the state is small and has not expired.
    #[inline]
    pub(super) fn can_hold(state: &State, now: Timestamp) -> bool {
        matches!(*state, State::Counts { until, .. } if until > now)
    }

    /// Writes the state after a hit. Ignores a state without counts. The caller has checked that
    /// the state [has not expired](Self::can_hold).
    #[inline]
    pub(super) fn update(&mut self, state: &State, now: Timestamp, limit: &Limit, outcome: Outcome) {
        let State::Counts { until, amounts: [first, second] } = *state else { return };
        match outcome {
            Outcome::Spent { .. } => self.admits_before = f32::INFINITY,
            // `admits_before` stays the same, unless the quota has changed since the last unit was
            // spent.
            Outcome::Refused if self.refuses(state) => return,
            Outcome::SpentLast { .. } | Outcome::Refused => {
                self.set_admits_before(until, now, &limit.check(state, now, 1));
            }
        }
        (self.until, self.first, self.second) = (until, first, second);
    }

    /// Stores the time at which the state admits a hit again. `until` is the state's expiry. A
    /// shadow limit refuses nothing.
    #[inline]
    pub(super) fn set_admits_before(&mut self, until: Timestamp, now: Timestamp, status: &Status) {
        let is_shadow = self.limit_hash & SHADOW != 0;
        self.admits_before = if is_shadow { f32::INFINITY } else { Self::admits_before(until, now, status) };
    }

    /// Computes [`admits_before`](Self#structfield.admits_before) from a status. Rounds down to the
    /// next `f32`: the state may then count as refusing for a little too long, but is never evicted
    /// while it refuses.
    #[inline]
    fn admits_before(until: Timestamp, now: Timestamp, status: &Status) -> f32 {
        if status.remaining() > 0 {
            return f32::INFINITY;
        }
        #[allow(clippy::cast_precision_loss)] // rounded down below
        let before = until.since(now).saturating_sub(status.reset_after_micros()) as f32;
        before.next_down().max(0.0)
    }

    /// Returns `true` if the slot has this state, and the state has no units left.
    #[inline]
    pub(super) fn refuses(&self, state: &State) -> bool {
        self.admits_before < f32::INFINITY && self.state() == *state
    }

    /// Returns `true` if an [`update`](Self::update) after a refused hit that left this state would
    /// change nothing: the slot has this state, and refuses unless units remain.
    #[cold]
    pub(super) fn is_kept(&self, state: &State, now: Timestamp, limit: &Limit) -> bool {
        self.refuses(state) || self.state() == *state && limit.check(state, now, 1).remaining() > 0
    }

    #[inline]
    pub(super) fn is_vacant(&self) -> bool {
        self.until == Timestamp::EPOCH
    }

    #[inline]
    pub(super) fn is_expired(&self, now: Timestamp) -> bool {
        self.until <= now
    }

    /// Returns the time from which the slot can be evicted. Slots of shadow limits can be evicted
    /// at any time.
    #[inline]
    pub(super) fn evictable_from(&self) -> Timestamp {
        if self.limit_hash & SHADOW != 0 { Timestamp::EPOCH } else { self.until }
    }

    /// Returns the time in microseconds until a hit of one unit is admitted, or 0 if the slot does
    /// not refuse such a hit.
    #[inline]
    pub(super) fn refuses_for(&self, now: Timestamp) -> u64 {
        if self.admits_before == f32::INFINITY {
            return 0;
        }
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // saturates, and is never negative
        let admits_before = self.admits_before as u64;
        self.until.since(now).saturating_sub(admits_before)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_for_is_the_time_until_a_unit_is_available() {
        let (now, until) = (Timestamp::from_micros(1_000), Timestamp::from_micros(1_500));
        let full_until_the_end = TableSlot { until, ..TableSlot::default() };
        assert_eq!(full_until_the_end.refuses_for(now), 500);
        assert_eq!(TableSlot { admits_before: 100.0, ..full_until_the_end }.refuses_for(now), 400);
        assert_eq!(TableSlot { admits_before: f32::INFINITY, ..full_until_the_end }.refuses_for(now), 0);
    }
}

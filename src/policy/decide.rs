//! Decisions of a policy: its limits are applied to the states of a key.

use super::Policy;
use crate::decision::{Decision, Statuses};
use crate::strategy::State;
use crate::time::Timestamp;

/// The operation that a policy applies to the states of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "storages match on every operation")]
pub enum Op {
    /// Spends the cost from every limit if all limits admit it, and from none otherwise.
    Hit,
    /// Returns the decision that a hit would get. Spends nothing.
    Peek,
    /// Spends the cost from every limit, even if less remains. No limit refuses a charge, so a
    /// charge can leave a key in debt. The decision contains the statuses after the charge.
    Charge,
}

impl Policy {
    /// Decides an operation of `cost` units at the time `now`. A storage calls this method between
    /// loading and storing the states of a key.
    ///
    /// | operation | effect |
    /// |---|---|
    /// | [`Op::Hit`] | checks every limit, then spends from all of them or none |
    /// | [`Op::Peek`] | checks every limit and spends nothing |
    /// | [`Op::Charge`] | spends from every limit without a check |
    ///
    /// A cost of 0 is always admitted and spends nothing.
    ///
    /// `states` are the states of the limits, in the order of [`limits`](Self::limits), and
    /// [`State::Fresh`] for a limit without a stored state. A hit or a charge updates them in
    /// place, and the storage has to store them. A refused hit can change them too. A peek does not
    /// change them. Loading, deciding and storing must be atomic for each key.
    ///
    /// # Panics
    ///
    /// Panics if the number of states differs from the number of limits.
    #[track_caller]
    pub fn decide(&self, states: &mut [State], now: Timestamp, op: Op, cost: u32) -> Decision {
        let limits = self.limits();
        assert_eq!(states.len(), limits.len(), "one state for each limit");
        if op == Op::Charge {
            return self.charge(states, now, cost);
        }
        let spends = op == Op::Hit && cost > 0;
        let all_admit = spends && limits.len() > 1 && self.admits(states, now, cost);
        let mut decision = Decision::blank();
        for ((limit, state), status) in limits.iter().zip(states).zip(decision.open(limits.len(), cost)) {
            let outcome = match (spends, all_admit) {
                (false, _) => None,
                (true, true) => Some(limit.spend(state, now, cost)),
                (true, false) if limits.len() == 1 => Some(limit.hit(state, now, cost)),
                (true, false) => Some(limit.refuse(state, now)),
            };
            limit.write_status(state, now, cost, outcome, status);
        }
        decision.conclude(now);
        decision
    }

    /// Returns `true` if all limits admit a hit of `cost` units.
    #[inline]
    pub(super) fn admits(&self, states: &[State], now: Timestamp, cost: u32) -> bool {
        self.limits().iter().zip(states).all(|(limit, state)| limit.check(state, now, cost).is_admitted())
    }

    #[cold]
    fn charge(&self, states: &mut [State], now: Timestamp, units: u32) -> Decision {
        let mut decision = Decision::blank();
        for ((limit, state), status) in self.limits().iter().zip(states).zip(decision.open(self.limits().len(), units))
        {
            if units > 0 {
                limit.charge(state, now, units);
            }
            limit.write_status(state, now, 0, None, status);
        }
        decision.conclude(now);
        decision
    }

    /// Charges units like [`decide`](Self::decide), but does not make a log longer. Adds the units
    /// to the newest entry of the log, so they expire with this entry. An empty log gets one entry.
    pub(crate) fn charge_without_growth(&self, states: &mut [State], now: Timestamp, units: u32) -> Decision {
        for (limit, state) in self.limits().iter().zip(&mut *states) {
            let newest = if let State::Log(log) = state { log.newest() } else { None };
            limit.charge(state, newest.map_or(now, |newest| newest.min(now)), units);
        }
        self.charge(states, now, 0).of_cost(units)
    }

    /// Returns a refusal of `cost` units, for a storage that cannot decide. Every limit refuses for
    /// `retry_after` microseconds, and nothing remains.
    ///
    /// Mark the refusal with [`Decision::storage_full`] or [`Decision::contended`].
    pub fn refusal(&self, now: Timestamp, cost: u32, retry_after: u64) -> Decision {
        let limits = self.limits();
        Decision::of_all(now, cost, Statuses::from_fn(limits.len(), |i| limits[i].refusal(retry_after)))
    }

    /// Returns the verdict on a hit of `cost` units by a client that has spent nothing.
    pub(crate) fn unspent(&self, cost: u32) -> Decision {
        self.decide(&mut vec![State::Fresh; self.limits().len()], Timestamp::wall_clock(), Op::Peek, cost)
    }

    /// Corrects the cost of the hit that returned `decision` to `actual` units. `states` are the
    /// states of the limits, as for [`decide`](Self::decide), and are updated in place.
    ///
    /// - If the hit has spent more, the difference is refunded to each limit, by the rules of
    ///   [`Reservation::settle`](crate::Reservation::settle).
    /// - If the hit has spent less, the difference is charged to each limit, even if less remains.
    /// - If the decision has spent nothing, nothing changes. This is a refusal, a peek, a charge,
    ///   or a hit of cost 0.
    ///
    /// The decision must be one of this policy, which is not checked.
    ///
    /// # Panics
    ///
    /// Panics if the number of states differs from the number of limits.
    #[track_caller]
    pub fn settle(&self, states: &mut [State], now: Timestamp, decision: &Decision, actual: u32) {
        assert_eq!(states.len(), self.limits().len(), "one state for each limit");
        match actual.checked_sub(decision.cost()) {
            _ if !decision.has_spent() => {}
            Some(0) => {}
            Some(more) => drop(self.decide(states, now, Op::Charge, more)),
            None => self.refund(states, now, decision, decision.cost() - actual),
        }
    }

    /// Returns `true` if a refund of this hit at `now` changes nothing, because all of its units are free
    /// again.
    pub(crate) fn has_expired(&self, hit: &Decision, now: Timestamp) -> bool {
        self.limits().iter().zip(hit.statuses()).all(|(limit, status)| {
            limit.strategy().refundable_until(limit.quota(), &status.hit(hit.at(), hit.cost())) <= now
        })
    }

    fn refund(&self, states: &mut [State], now: Timestamp, decision: &Decision, units: u32) {
        for ((limit, state), status) in self.limits().iter().zip(states).zip(decision.statuses()) {
            let hit = status.hit(decision.at(), decision.cost());
            if now < hit.until {
                limit.strategy().refund(limit.quota(), state, now, &hit, units);
            }
        }
    }
}

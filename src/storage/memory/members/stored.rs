//! The fast path of several keys whose states are all stored and small: copies of their slots are
//! changed, and then stored or forgotten together.

use super::super::slot::TableSlot;
use super::locked::{Locked, Place};
use crate::decision::Decision;
use crate::policy::Op;
use crate::storage::StorageRequest;
use crate::strategy::Outcome;

/// The largest number of limits, of all keys together, for which [`Locked::decide_stored`] decides.
const MAX_LIMITS: usize = 8;

/// The slot of a limit, as it is after a decision.
#[derive(Clone, Copy, Default)]
struct Change {
    index: usize,
    slot: TableSlot,
    /// The effect of a hit, or `None` if nothing is spent.
    outcome: Option<Outcome>,
}

impl Locked<'_, '_> {
    /// Decides hits and peeks if all states are stored and small, and stay so. Returns `None` in all
    /// other cases. Nothing has changed then, nor if a custom strategy panics.
    #[inline]
    pub(super) fn decide_stored(&mut self, requests: &[StorageRequest<'_>]) -> Option<Vec<Decision>> {
        let mut changes = [Change::default(); MAX_LIMITS];
        if !self.hit_copies(requests, &mut changes)? {
            self.refuse_copies(requests, &mut changes)?;
        }
        let (now, mut decided) = (self.now, changes.iter());
        let mut decisions = Vec::with_capacity(requests.len());
        for (at, request) in requests.iter().enumerate() {
            // Decisions are filled in place, because they are large.
            decisions.push(Decision::blank());
            let decision = &mut decisions[at];
            let (limits, cost) = (request.policy.limits(), request.cost);
            // With a constant number of limits, the statuses are not moved.
            let statuses = if let [_] = limits { decision.open(1, cost) } else { decision.open(limits.len(), cost) };
            for ((limit, status), change) in limits.iter().zip(statuses).zip(&mut decided) {
                limit.write_status(&change.slot.state(), now, cost, change.outcome, status);
            }
            decision.conclude(now);
            self.inner.complete(decision);
        }
        let mut stored = changes.iter();
        for (at, request) in requests.iter().enumerate() {
            let Place { key, number, .. } = self.places[at];
            self.inner.shards[number].clear_hint(key.hash);
            let table = &mut self.shard(at).table;
            for (_, change) in request.policy.limits().iter().zip(&mut stored) {
                *table.get_mut(change.index) = change.slot;
            }
        }
        Some(decisions)
    }

    /// Makes the hits on copies of the slots. Returns `false` if one of them is refused. Then the copies
    /// must be replaced. Returns `None` if a state is not stored, or not small, or does not stay so.
    #[inline]
    fn hit_copies(&mut self, requests: &[StorageRequest<'_>], changes: &mut [Change]) -> Option<bool> {
        let (now, mut all_admit, mut changes) = (self.now, true, changes.iter_mut());
        for (at, request) in requests.iter().enumerate() {
            let StorageRequest { policy, op, cost, .. } = *request;
            let key = self.places[at].key;
            for (limit, &digest) in policy.limits().iter().zip(policy.limit_digests()) {
                let (index, &slot) = self.shard(at).table.find(key.hash, key.limit_hash(digest))?;
                let (mut slot, mut state, mut outcome) = (slot, slot.state(), None);
                match op {
                    Op::Hit if cost > 0 => {
                        let effect = limit.hit(&mut state, now, cost);
                        all_admit &= effect != Outcome::Refused;
                        if !TableSlot::can_hold(&state, now) {
                            return None;
                        }
                        slot.update(&state, now, limit, effect);
                        outcome = Some(effect);
                    }
                    Op::Hit | Op::Peek => {}
                    Op::Charge => return None,
                }
                *changes.next()? = Change { index, slot, outcome };
            }
        }
        Some(all_admit)
    }

    /// Replaces the changes by those of a decision that at least one key refuses: the limits of that key
    /// refuse the hit, and the slots of the other keys stay as they are. Returns `None` if the copies
    /// cannot be stored.
    fn refuse_copies(&mut self, requests: &[StorageRequest<'_>], mut changes: &mut [Change]) -> Option<()> {
        let now = self.now;
        for (at, request) in requests.iter().enumerate() {
            let (limits, table) = (request.policy.limits(), &self.shard(at).table);
            let of_key = changes.split_off_mut(..limits.len())?;
            let refuses = of_key.iter().any(|change| change.outcome == Some(Outcome::Refused));
            for (limit, change) in limits.iter().zip(of_key) {
                let Change { index, slot, outcome } = change;
                *slot = *table.slot(*index);
                *outcome = None;
                if refuses {
                    let mut state = slot.state();
                    let refused = limit.refuse(&mut state, now);
                    if !TableSlot::can_hold(&state, now) {
                        return None;
                    }
                    slot.update(&state, now, limit, refused);
                    *outcome = Some(refused);
                }
            }
        }
        Some(())
    }
}

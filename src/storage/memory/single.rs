use std::cell::Cell;

use super::Shared;
use super::decide::{Located, Lookup, Want};
use super::insert::NewKey;
use super::shard::SWEEP_EVERY;
use crate::storage::{StorageRequest, Summary};
use crate::strategy::{Outcome, Part, State, Status};
use crate::{Decision, Limit, Op, Timestamp};

/// Policies of one limit: most are.
impl Shared {
    pub(super) fn hit_one_at_once(
        &self,
        ask: &StorageRequest<'_>,
        limit: &Limit,
        want: Want,
        mut shown: Option<&mut Summary>,
    ) -> bool {
        let spot = self.spot(ask);
        if let Some(state) = self.noticed(spot, ask)
            && self.refuses_again(&state, spot.now, ask, &mut { Status::BLANK })
        {
            return false;
        }
        let done = self.on_known_one(spot, ask, limit, want, |now, state, part| {
            if let Some(shown) = &mut shown {
                shown.at = now;
                limit.tell(state, now, ask.cost, part, &mut shown.limit);
            }
            part.is_none_or(|outcome| outcome.is_at_once())
        });
        done.unwrap_or_else(|place| self.hit_newcomer_at_once(place, ask, limit, want, shown))
    }

    #[inline(never)]
    fn hit_newcomer_at_once(
        &self,
        mut place: Lookup<'_>,
        ask: &StorageRequest<'_>,
        limit: &Limit,
        want: Want,
        shown: Option<&mut Summary>,
    ) -> bool {
        let now = place.now;
        match self.take_in(&mut place, ask, want) {
            Some(NewKey::Decided(state, outcome)) => {
                self.leave(place);
                if let Some(shown) = shown {
                    shown.at = now;
                    limit.tell(&state, now, ask.cost, Some(outcome), &mut shown.limit);
                }
                true
            }
            Some(NewKey::Crowded(_)) => {
                self.leave(place);
                false
            }
            None => self.hit_any_at_once(place, ask, want, shown),
        }
    }

    pub(super) fn decide_one(&self, ask: &StorageRequest<'_>, limit: &Limit, decision: &mut Decision) {
        let spot = self.spot(ask);
        if let Some(state) = self.noticed(spot, ask)
            && self.refuses_again(&state, spot.now, ask, &mut decision.open(1, ask.cost)[0])
        {
            decision.conclude(spot.now);
            return;
        }
        let told = self.on_known_one(spot, ask, limit, Want::Decision, |now, state, part| {
            limit.tell(state, now, ask.cost, part, &mut decision.open(1, ask.cost)[0]);
            decision.conclude(now);
        });
        if let Err(place) = told {
            self.decide_newcomer(place, ask, limit, decision);
        }
    }

    /// A key that is not there, or whose state is a log.
    #[inline(never)]
    fn decide_newcomer(&self, mut place: Lookup<'_>, ask: &StorageRequest<'_>, limit: &Limit, decision: &mut Decision) {
        let now = place.now;
        match self.take_in(&mut place, ask, Want::Decision) {
            Some(NewKey::Decided(state, outcome)) => {
                self.leave(place);
                limit.tell(&state, now, ask.cost, Some(outcome), &mut decision.open(1, ask.cost)[0]);
                decision.conclude(now);
            }
            Some(NewKey::Crowded(soonest)) => {
                self.leave(place);
                *decision = ask.policy.refuse(now, ask.cost, soonest).storage_full();
            }
            None => *decision = self.decide_any(place, ask, Want::Decision),
        }
    }

    /// Most hits are on a key whose state is there, small, and stays where it is. `then` is called with it when the shard is
    /// free again: what there is to say can be worked out without holding up others. The place is given back when it was not
    /// so.
    #[inline(always)]
    fn on_known_one<T>(
        &self,
        spot: Located,
        ask: &StorageRequest<'_>,
        limit: &Limit,
        want: Want,
        then: impl FnOnce(Timestamp, &State, Part) -> T,
    ) -> Result<T, Lookup<'_>> {
        let StorageRequest { policy, op, cost, .. } = *ask;
        let digest = policy.limit_digests()[0];
        let mut place = self.enter(spot);
        let now = place.now;
        let Some(slot) = place.shard.small(place.key, digest) else { return Err(place) };
        let mut state = slot.state();
        let mut part = None;
        if op == Op::Hit && cost > 0 {
            let outcome = limit.hit(&mut state, now, cost);
            part = Some(outcome);
            let padded = &self.shards[spot.number];
            if outcome == Outcome::Refused && slot.refuses(&state) && !limit.counts_refusals() {
                padded.publish(spot.key, digest, &state, now);
            } else if want.takes(outcome == Outcome::Refused, outcome.is_delayed()) {
                padded.retract(spot.key.hash);
                if !slot.update(&state, now, limit, part) {
                    self.resave(&mut place, policy, &state);
                }
            }
        }
        self.leave(place);
        Ok(then(now, &state, part))
    }

    /// The state of a key that was refused a moment ago.
    #[inline(always)]
    fn noticed(&self, spot: Located, ask: &StorageRequest<'_>) -> Option<State> {
        self.shards[spot.number].noticed(spot.key, *ask.policy.limit_digests().first()?, spot.now)
    }

    /// Refuses from what is on the notice, if that still refuses.
    #[inline(never)]
    fn refuses_again(&self, state: &State, now: Timestamp, ask: &StorageRequest<'_>, status: &mut Status) -> bool {
        ask.policy.limits()[0].tell(state, now, ask.cost, None, status);
        let refused = !status.is_admitted();
        if refused && is_sweep_due() {
            self.sweep(now);
        }
        refused
    }
}

/// Counts a decision of this thread that has not locked its shard, which counts the others. Returns
/// `true` if it sweeps.
fn is_sweep_due() -> bool {
    // The count would outlive one run of a model, and all runs have to do the same.
    if cfg!(tower_ratelimit_loom) {
        return false;
    }
    thread_local! { static HITS: Cell<u32> = const { Cell::new(0) } }
    let hits = HITS.get().wrapping_add(1);
    HITS.set(hits);
    hits.is_multiple_of(SWEEP_EVERY)
}

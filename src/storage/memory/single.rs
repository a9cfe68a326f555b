use std::cell::Cell;

use super::MemoryInner;
use super::decide::{Located, Lookup, Mode};
use super::insert::NewKey;
use super::shard::SWEEP_EVERY;
use crate::storage::{StorageRequest, Summary};
use crate::strategy::{Outcome, Part, State, Status};
use crate::{Decision, Limit, Op, Timestamp};

/// The fast path of policies with one limit, which are the most common.
impl MemoryInner {
    pub(super) fn try_admit_single(
        &self,
        request: &StorageRequest<'_>,
        limit: &Limit,
        mode: Mode,
        mut shown: Option<&mut Summary>,
    ) -> bool {
        let located = self.locate_request(request);
        if let Some(state) = self.published(located, request) {
            let mut unused = Summary::default();
            let shown = shown.as_deref_mut().unwrap_or(&mut unused);
            shown.at = located.now;
            if self.refuses_again(&state, located.now, request, &mut shown.limit) {
                return false;
            }
        }
        let done = self.with_small_state(located, request, limit, mode, |now, state, part| {
            if let Some(shown) = &mut shown {
                shown.at = now;
                limit.tell(state, now, request.cost, part, &mut shown.limit);
            }
            part.is_none_or(|outcome| outcome.is_at_once())
        });
        done.unwrap_or_else(|lookup| self.try_admit_new(lookup, request, limit, mode, shown))
    }

    #[inline(never)]
    fn try_admit_new(
        &self,
        mut lookup: Lookup<'_>,
        request: &StorageRequest<'_>,
        limit: &Limit,
        mode: Mode,
        shown: Option<&mut Summary>,
    ) -> bool {
        let now = lookup.now;
        match self.insert_new(&mut lookup, request, mode) {
            Some(NewKey::Decided(state, outcome)) => {
                self.finish(lookup);
                if let Some(shown) = shown {
                    shown.at = now;
                    limit.tell(&state, now, request.cost, Some(outcome), &mut shown.limit);
                }
                true
            }
            Some(NewKey::Full(_)) => {
                self.finish(lookup);
                false
            }
            None => self.try_admit_any(lookup, request, mode, shown),
        }
    }

    pub(super) fn decide_single(&self, request: &StorageRequest<'_>, limit: &Limit, decision: &mut Decision) {
        let located = self.locate_request(request);
        if let Some(state) = self.published(located, request)
            && self.refuses_again(&state, located.now, request, &mut decision.open(1, request.cost)[0])
        {
            decision.conclude(located.now);
            return;
        }
        let done = self.with_small_state(located, request, limit, Mode::Decision, |now, state, part| {
            limit.tell(state, now, request.cost, part, &mut decision.open(1, request.cost)[0]);
            decision.conclude(now);
        });
        if let Err(lookup) = done {
            self.decide_new(lookup, request, limit, decision);
        }
    }

    /// Decides on a new key, or on a key whose state is a log.
    #[inline(never)]
    fn decide_new(&self, mut lookup: Lookup<'_>, request: &StorageRequest<'_>, limit: &Limit, decision: &mut Decision) {
        let now = lookup.now;
        match self.insert_new(&mut lookup, request, Mode::Decision) {
            Some(NewKey::Decided(state, outcome)) => {
                self.finish(lookup);
                limit.tell(&state, now, request.cost, Some(outcome), &mut decision.open(1, request.cost)[0]);
                decision.conclude(now);
            }
            Some(NewKey::Full(soonest)) => {
                self.finish(lookup);
                *decision = request.policy.refuse(now, request.cost, soonest).storage_full();
            }
            None => *decision = self.decide_any(lookup, request, Mode::Decision),
        }
    }

    /// Decides a request if the key's state exists, is small and stays in its slot. This is the
    /// common case. It calls `then` with the new state after it has unlocked the shard. Otherwise
    /// it changes nothing and returns the lookup.
    #[inline(always)]
    fn with_small_state<T>(
        &self,
        located: Located,
        request: &StorageRequest<'_>,
        limit: &Limit,
        mode: Mode,
        then: impl FnOnce(Timestamp, &State, Part) -> T,
    ) -> Result<T, Lookup<'_>> {
        let StorageRequest { policy, op, cost, .. } = *request;
        let digest = policy.limit_digests()[0];
        let mut lookup = self.look_up(located);
        let now = lookup.now;
        let Some(slot) = lookup.shard.small_slot(lookup.key, digest) else { return Err(lookup) };
        let mut state = slot.state();
        let mut part = None;
        if op == Op::Hit && cost > 0 {
            let outcome = limit.hit(&mut state, now, cost);
            part = Some(outcome);
            let padded = &self.shards[located.number];
            if outcome == Outcome::Refused && slot.refuses(&state) && !limit.counts_refusals() {
                padded.publish(located.key, digest, &state, now);
            } else if mode.stores(outcome == Outcome::Refused, outcome.is_delayed()) {
                padded.clear_hint(located.key.hash);
                if !slot.update(&state, now, limit, part) {
                    self.resave(&mut lookup, policy, &state);
                }
            }
        }
        self.finish(lookup);
        Ok(then(now, &state, part))
    }

    /// Returns the published state of the key, if this key is the one that the shard refused last.
    #[inline(always)]
    fn published(&self, located: Located, request: &StorageRequest<'_>) -> Option<State> {
        self.shards[located.number].published(located.key, *request.policy.limit_digests().first()?, located.now)
    }

    /// Refuses a request by the published state, if that still refuses it.
    #[inline(never)]
    fn refuses_again(&self, state: &State, now: Timestamp, request: &StorageRequest<'_>, status: &mut Status) -> bool {
        request.policy.limits()[0].tell(state, now, request.cost, None, status);
        let refused = !status.is_admitted();
        if refused && is_sweep_due() {
            self.sweep(now);
        }
        refused
    }
}

/// Counts a decision that did not lock its shard, per thread. Returns `true` if a sweep is due.
fn is_sweep_due() -> bool {
    // The count would persist between runs of a model, and all runs must be alike.
    if cfg!(tower_ratelimit_loom) {
        return false;
    }
    thread_local! { static HITS: Cell<u32> = const { Cell::new(0) } }
    let hits = HITS.get().wrapping_add(1);
    HITS.set(hits);
    hits.is_multiple_of(SWEEP_EVERY)
}

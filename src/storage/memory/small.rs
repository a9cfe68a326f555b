//! The fast path, for requests whose states are all stored and small.

use std::cell::Cell;

use super::MemoryInner;
use super::answer::{Answer, array_of};
use super::insert::NewKey;
use super::lookup::Lookup;
use super::shard::SWEEP_EVERY;
use super::slot::Slot;
use crate::policy::{Limit, Op};
use crate::storage::StorageRequest;
use crate::strategy::{Outcome, State};
use crate::time::Timestamp;

impl MemoryInner {
    /// Decides a request with a policy of `N` limits. It changes a copy of the states, so that the
    /// general path can decide if the fast path does not apply.
    #[inline(always)]
    pub(super) fn decide_small<const N: usize, A: Answer>(
        &self,
        request: &StorageRequest<'_>,
        mut answer: A,
    ) -> A::Output {
        let StorageRequest { policy, op, cost, .. } = *request;
        let (limits, digests) = (array_of::<N, _>(policy.limits()), array_of::<N, _>(policy.limit_digests()));
        let located = self.locate_request(request);
        if N == 1
            && let Some(state) = located.padded.published(located.key, digests[0], located.now)
            && let Some(refused) = self.refuse_again(state, &limits[0], located.now, request, &mut answer)
        {
            return refused;
        }
        let mut lookup = self.look_up(located);
        let now = lookup.now;
        let Some((places, mut states)) = lookup.shard.small_states(lookup.key, digests) else {
            return self.decide_new(lookup, request, answer);
        };
        let mut parts = [None; N];
        if op == Op::Hit && cost > 0 {
            let mut outcomes = [Outcome::Refused; N];
            let (mut refused, mut delayed) = (false, false);
            for i in 0..N {
                outcomes[i] = limits[i].hit(&mut states[i], now, cost);
                delayed |= outcomes[i].is_delayed();
                refused |= outcomes[i] == Outcome::Refused;
                if refused {
                    break;
                }
            }
            let shard = &mut *lookup.shard;
            if N == 1 && refused && !limits[0].counts_refusals() && shard.table.slot(places[0]).refuses(&states[0]) {
                located.padded.publish(located.key, digests[0], &states[0], now);
            } else {
                if N > 1 && refused {
                    // The limits before the one that refused have spent units of the copies.
                    (states, delayed) = (places.map(|place| shard.table.slot(place).state()), false);
                    outcomes = [Outcome::Refused; N];
                    for i in 0..N {
                        limits[i].refuse(&mut states[i], now);
                    }
                }
                if answer.mode().stores(refused, delayed) {
                    if states.iter().any(|state| !Slot::can_hold(state, now)) {
                        return self.decide_any(lookup, request, answer);
                    }
                    located.padded.clear_hint(located.key.hash);
                    for i in 0..N {
                        shard.table.get_mut(places[i]).update(&states[i], now, &limits[i], outcomes[i]);
                    }
                }
            }
            parts = outcomes.map(Some);
        }
        self.finish(lookup);
        answer.by_states(request, now, &states, parts)
    }

    /// Decides a request for which the fast path does not apply: a state of the key is a log, or is
    /// not stored, as for a new key.
    #[inline(never)]
    fn decide_new<A: Answer>(&self, mut lookup: Lookup<'_>, request: &StorageRequest<'_>, answer: A) -> A::Output {
        let now = lookup.now;
        match self.insert_new(&mut lookup, request, answer.mode()) {
            Some(NewKey::Decided(state, outcome)) => {
                self.finish(lookup);
                answer.by_states(request, now, &[state], [Some(outcome)])
            }
            Some(NewKey::Full(soonest)) => {
                self.finish(lookup);
                answer.storage_full(request, now, soonest)
            }
            None => self.decide_any(lookup, request, answer),
        }
    }

    /// Refuses a request by the published state, without a lock. Returns `None` if that state does
    /// not refuse the request any more.
    #[inline(never)]
    fn refuse_again<A: Answer>(
        &self,
        mut state: State,
        limit: &Limit,
        now: Timestamp,
        request: &StorageRequest<'_>,
        answer: &mut A,
    ) -> Option<A::Output> {
        let refused = answer.refuse_again(request, limit, &mut state, now)?;
        if is_sweep_due() {
            self.sweep(now);
        }
        Some(refused)
    }
}

/// Counts a decision that did not lock its shard, per thread. Returns `true` if a sweep is due.
fn is_sweep_due() -> bool {
    // loom runs a model many times, and all runs must be alike. The count would persist between
    // them.
    if cfg!(tower_ratelimit_loom) {
        return false;
    }
    thread_local! { static HITS: Cell<u32> = const { Cell::new(0) } }
    let hits = HITS.get().wrapping_add(1);
    HITS.set(hits);
    hits.is_multiple_of(SWEEP_EVERY)
}

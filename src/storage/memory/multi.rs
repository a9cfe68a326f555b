use super::MemoryInner;
use super::decide::{Located, Lookup, Mode};
use super::slot::Slot;
use crate::storage::{StorageRequest, Summary};
use crate::strategy::{Outcome, Part, Status};
use crate::{Decision, Op, Timestamp, decision};

/// The fast path of policies with a few limits. It keeps copies of their states in arrays.
impl MemoryInner {
    #[inline(never)]
    pub(super) fn try_admit_multi<const N: usize>(
        &self,
        request: &StorageRequest<'_>,
        mode: Mode,
        mut shown: Option<&mut Summary>,
    ) -> bool {
        let done = self.with_small_states::<N, _>(self.locate_request(request), request, mode, |now, slots, parts| {
            if let Some(shown) = &mut shown {
                let mut statuses = [Status::BLANK; N];
                write_statuses(request, now, slots, parts, &mut statuses);
                **shown = Summary { at: now, limit: *decision::shown(&statuses) };
            }
            parts.iter().flatten().all(Outcome::is_at_once)
        });
        done.unwrap_or_else(|lookup| self.try_admit_any(lookup, request, mode, shown))
    }

    #[inline(never)]
    pub(super) fn decide_multi<const N: usize>(&self, request: &StorageRequest<'_>, decision: &mut Decision) {
        let done = self.with_small_states::<N, _>(
            self.locate_request(request),
            request,
            Mode::Decision,
            |now, slots, parts| {
                write_statuses(request, now, slots, parts, decision.open(N, request.cost));
                decision.conclude(now);
            },
        );
        if let Err(lookup) = done {
            *decision = self.decide_any(lookup, request, Mode::Decision);
        }
    }

    /// Decides a request if all states of the key exist, are small and stay in their slots. This is
    /// the common case. It calls `then` with the new states after it has unlocked the shard.
    /// Otherwise it changes nothing and returns the lookup.
    #[inline(always)]
    fn with_small_states<const N: usize, T>(
        &self,
        located: Located,
        request: &StorageRequest<'_>,
        mode: Mode,
        then: impl FnOnce(Timestamp, &[Slot; N], [Part; N]) -> T,
    ) -> Result<T, Lookup<'_>> {
        let StorageRequest { policy, op, cost, .. } = *request;
        let mut lookup = self.look_up(located);
        let now = lookup.now;
        let (limits, digests) = (array_of::<N, _>(policy.limits()), array_of::<N, _>(policy.limit_digests()));
        let Some(places) = lookup.shard.small_indices(lookup.key, digests) else { return Err(lookup) };
        let before = lookup.shard.copy_slots(places);
        let (mut slots, mut parts) = (before, [None; N]);
        if op == Op::Hit && cost > 0 {
            let mut delayed = false;
            let mut refused = false;
            for i in 0..N {
                let mut state = slots[i].state();
                let outcome = limits[i].hit(&mut state, now, cost);
                parts[i] = Some(outcome);
                delayed |= outcome.is_delayed();
                refused |= outcome == Outcome::Refused;
                if refused {
                    break;
                }
                if !slots[i].update(&state, now, &limits[i], parts[i]) {
                    return Err(lookup);
                }
            }
            if refused {
                // A limit refused, so the copies in which the earlier limits spent units are reset.
                (slots, delayed) = (before, false);
                parts = [Some(Outcome::Refused); N];
                for i in 0..N {
                    let mut state = slots[i].state();
                    limits[i].refuse(&mut state, now);
                    if !slots[i].update(&state, now, &limits[i], parts[i]) {
                        return Err(lookup);
                    }
                }
            }
            if mode.stores(refused, delayed) {
                self.shards[lookup.number].clear_hint(lookup.key.hash);
                lookup.shard.write_back(places, &slots);
            }
        }
        self.finish(lookup);
        Ok(then(now, &slots, parts))
    }
}

/// Writes the status of each limit.
#[inline(always)]
fn write_statuses<const N: usize>(
    request: &StorageRequest<'_>,
    now: Timestamp,
    slots: &[Slot; N],
    parts: [Part; N],
    statuses: &mut [Status],
) {
    let limits = array_of::<N, _>(request.policy.limits());
    for i in 0..N {
        limits[i].tell(&slots[i].state(), now, request.cost, parts[i], &mut statuses[i]);
    }
}

/// Converts a slice with one element per limit to an array.
#[inline(always)]
fn array_of<const N: usize, T>(slice: &[T]) -> &[T; N] {
    slice.try_into().expect("one element per limit")
}

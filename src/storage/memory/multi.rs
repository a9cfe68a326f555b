use super::Shared;
use super::decide::{Located, Lookup, Want};
use super::slot::Slot;
use crate::storage::{StorageRequest, Summary};
use crate::strategy::{Outcome, Part, Status};
use crate::{Decision, Op, Timestamp, decision};

/// Policies of a few limits, each of which is hit once: all that is looked at on the way stands in arrays.
impl Shared {
    #[inline(never)]
    pub(super) fn hit_few_at_once<const N: usize>(
        &self,
        ask: &StorageRequest<'_>,
        want: Want,
        mut shown: Option<&mut Summary>,
    ) -> bool {
        let done = self.on_known::<N, _>(self.spot(ask), ask, want, |now, slots, parts| {
            if let Some(shown) = &mut shown {
                let mut told = [Status::BLANK; N];
                tell_few(ask, now, slots, parts, &mut told);
                **shown = Summary { at: now, limit: *decision::shown(&told) };
            }
            parts.iter().flatten().all(Outcome::is_at_once)
        });
        done.unwrap_or_else(|place| self.hit_any_at_once(place, ask, want, shown))
    }

    #[inline(never)]
    pub(super) fn decide_few<const N: usize>(&self, ask: &StorageRequest<'_>, decision: &mut Decision) {
        let told = self.on_known::<N, _>(self.spot(ask), ask, Want::Decision, |now, slots, parts| {
            tell_few(ask, now, slots, parts, decision.open(N, ask.cost));
            decision.conclude(now);
        });
        if let Err(place) = told {
            *decision = self.decide_any(place, ask, Want::Decision);
        }
    }

    /// Most hits are on a key whose states are all there, small, and stay where they are. `then` is called with what they
    /// have become when the shard is free again: what there is to say can be worked out without holding up others. The
    /// place is given back, and nothing has changed, when it was not so.
    #[inline(always)]
    fn on_known<const N: usize, T>(
        &self,
        spot: Located,
        ask: &StorageRequest<'_>,
        want: Want,
        then: impl FnOnce(Timestamp, &[Slot; N], [Part; N]) -> T,
    ) -> Result<T, Lookup<'_>> {
        let StorageRequest { policy, op, cost, .. } = *ask;
        let mut place = self.enter(spot);
        let now = place.now;
        let (limits, digests) = (array_of::<N, _>(policy.limits()), array_of::<N, _>(policy.limit_digests()));
        let Some(places) = place.shard.known(place.key, digests) else { return Err(place) };
        let before = place.shard.copies(places);
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
                    return Err(place);
                }
            }
            if refused {
                // Those before it have spent in vain, and wait for nothing.
                (slots, delayed) = (before, false);
                parts = [Some(Outcome::Refused); N];
                for i in 0..N {
                    let mut state = slots[i].state();
                    limits[i].refuse(&mut state, now);
                    if !slots[i].update(&state, now, &limits[i], parts[i]) {
                        return Err(place);
                    }
                }
            }
            if want.takes(refused, delayed) {
                self.shards[place.number].retract(place.key.hash);
                place.shard.write_back(places, &slots);
            }
        }
        self.leave(place);
        Ok(then(now, &slots, parts))
    }
}

/// Writes down what each limit says.
#[inline(always)]
fn tell_few<const N: usize>(
    ask: &StorageRequest<'_>,
    now: Timestamp,
    slots: &[Slot; N],
    parts: [Part; N],
    statuses: &mut [Status],
) {
    let limits = array_of::<N, _>(ask.policy.limits());
    for i in 0..N {
        limits[i].tell(&slots[i].state(), now, ask.cost, parts[i], &mut statuses[i]);
    }
}

/// The same as an array.
#[inline(always)]
fn array_of<const N: usize, T>(slice: &[T]) -> &[T; N] {
    slice.try_into().expect("a policy has as many as it has limits")
}

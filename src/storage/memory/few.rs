use super::Shared;
use super::decide::{Place, Spot, Want};
use crate::storage::{Ask, Shown};
use crate::strategy::{Outcome, Part, State, Status};
use crate::{Decision, Op, Timestamp, decision};

/// Policies of a few limits, each of which is hit once: all that is looked at on the way stands in arrays.
impl Shared {
    #[inline(never)]
    pub(super) fn hit_few_at_once<const N: usize>(&self, ask: &Ask<'_>, shown: Option<&mut Shown>) -> bool {
        let mut told = [Status::BLANK; N];
        let done = self.on_known(self.spot(ask), ask, Want::AtOnce, |now, states, parts: [Part; N]| {
            if shown.is_some() {
                tell_few(ask, now, states, parts, &mut told);
            }
            (now, parts.iter().flatten().all(Outcome::is_at_once))
        });
        match done {
            Ok((at, admitted)) => {
                if let Some(shown) = shown {
                    *shown = Shown { at, limit: *decision::shown(&told) };
                }
                admitted
            }
            Err(place) => self.hit_any_at_once(place, ask, shown),
        }
    }

    #[inline(never)]
    pub(super) fn decide_few<const N: usize>(&self, ask: &Ask<'_>, decision: &mut Decision) {
        let told = self.on_known::<N, _>(self.spot(ask), ask, Want::Decision, |now, states, parts| {
            tell_few(ask, now, states, parts, decision.open(N, ask.cost));
            decision.conclude(now);
        });
        if let Err(place) = told {
            *decision = self.decide_any(place, ask, Want::Decision);
        }
    }

    /// Most hits are on a key whose states are all there, small, and stay where they are. `then` is called with them when
    /// the shard is free again: what there is to say can be worked out without holding up others. The place is given back
    /// when it was not so.
    #[inline(always)]
    fn on_known<const N: usize, T>(
        &self,
        spot: Spot,
        ask: &Ask<'_>,
        want: Want,
        then: impl FnOnce(Timestamp, &[State; N], [Part; N]) -> T,
    ) -> Result<T, Place<'_>> {
        let Ask { policy, op, cost, .. } = *ask;
        let mut place = self.enter(spot);
        let now = place.now;
        let (limits, digests) = (array_of::<N, _>(policy.limits()), array_of::<N, _>(policy.limit_digests()));
        let Some(slots) = place.shard.known(place.key, digests) else { return Err(place) };
        let mut states = place.shard.states(slots);
        let mut parts = [None; N];
        if op == Op::Hit && cost > 0 {
            for i in 0..N {
                let outcome = limits[i].hit(&mut states[i], now, cost);
                parts[i] = Some(outcome);
                if outcome == Outcome::Refused {
                    // Those before it have spent in vain.
                    states = place.shard.states(slots);
                    for i in 0..N {
                        parts[i] = Some(limits[i].refuse(&mut states[i], now));
                    }
                    break;
                }
            }
            let is_unwanted = want == Want::AtOnce && parts.iter().flatten().any(Outcome::is_delayed);
            if !is_unwanted {
                self.shards[place.number].notice.take_down(place.key.hash);
                if !place.shard.update(slots, &states, now, limits, parts) {
                    self.resave(&mut place, policy, &states);
                }
            }
        }
        self.leave(place, op);
        Ok(then(now, &states, parts))
    }
}

/// Writes down what each limit says.
#[inline(always)]
fn tell_few<const N: usize>(
    ask: &Ask<'_>,
    now: Timestamp,
    states: &[State; N],
    parts: [Part; N],
    statuses: &mut [Status],
) {
    let limits = array_of::<N, _>(ask.policy.limits());
    for i in 0..N {
        limits[i].tell(&states[i], now, ask.cost, parts[i], &mut statuses[i]);
    }
}

/// The same as an array.
#[inline(always)]
fn array_of<const N: usize, T>(slice: &[T]) -> &[T; N] {
    slice.try_into().expect("a policy has as many as it has limits")
}

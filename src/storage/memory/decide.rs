use std::mem;

use super::Shared;
use super::shard::{KeyHash, Shard};
use super::usage::{Need, Size};
use crate::storage::{StorageRequest, Summary};
use crate::strategy::State;
use crate::sync::MutexGuard;
use crate::{Decision, Op, Policy, Timestamp};

/// Where a key's states are, and when it was asked for.
#[derive(Clone, Copy)]
pub(super) struct Located {
    pub(super) key: KeyHash,
    pub(super) number: usize,
    pub(super) now: Timestamp,
}

/// The same with the shard locked.
pub(super) struct Lookup<'a> {
    pub(super) shard: MutexGuard<'a, Shard>,
    pub(super) number: usize,
    pub(super) key: KeyHash,
    pub(super) now: Timestamp,
}

/// What a hit is for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Want {
    /// Everything there is to say.
    Decision,
    /// Whether it goes on at once. If it would have to wait, it is not to have been.
    AtOnce,
    /// The same, and if it is refused it is not to have been either: the question will be asked again.
    Yes,
}

impl Want {
    /// Whether a hit that is refused, or admitted and delayed, is to have been.
    #[inline]
    pub(super) fn takes(self, refused: bool, delayed: bool) -> bool {
        match self {
            Self::Decision => true,
            Self::AtOnce => !delayed,
            Self::Yes => !refused && !delayed,
        }
    }
}

impl Shared {
    #[inline]
    pub(super) fn decide(&self, ask: &StorageRequest<'_>) -> Decision {
        let mut decision = Decision::blank();
        self.fill_in(ask, &mut decision);
        decision.set_ahead(self.clock.ahead());
        decision
    }

    fn fill_in(&self, ask: &StorageRequest<'_>, decision: &mut Decision) {
        match ask.policy.limits() {
            [limit] => self.decide_one(ask, limit, decision),
            several => match several.len() {
                2 => self.decide_few::<2>(ask, decision),
                3 => self.decide_few::<3>(ask, decision),
                4 => self.decide_few::<4>(ask, decision),
                5 => self.decide_few::<5>(ask, decision),
                6 => self.decide_few::<6>(ask, decision),
                _ => *decision = self.decide_any(self.enter(self.spot(ask)), ask, Want::Decision),
            },
        }
    }

    #[inline]
    pub(super) fn try_admit(&self, ask: &StorageRequest<'_>, want: Want, shown: Option<&mut Summary>) -> bool {
        let Some(shown) = shown else { return self.try_hit(ask, want, None) };
        let is_admitted = self.try_hit(ask, want, Some(shown));
        shown.at = shown.at.minus(u64::from(self.clock.ahead()) * 1_000_000);
        is_admitted
    }

    fn try_hit(&self, ask: &StorageRequest<'_>, want: Want, shown: Option<&mut Summary>) -> bool {
        match ask.policy.limits() {
            [limit] => self.hit_one_at_once(ask, limit, want, shown),
            several => match several.len() {
                2 => self.hit_few_at_once::<2>(ask, want, shown),
                3 => self.hit_few_at_once::<3>(ask, want, shown),
                4 => self.hit_few_at_once::<4>(ask, want, shown),
                5 => self.hit_few_at_once::<5>(ask, want, shown),
                6 => self.hit_few_at_once::<6>(ask, want, shown),
                _ => self.hit_any_at_once(self.enter(self.spot(ask)), ask, want, shown),
            },
        }
    }

    #[inline(always)]
    pub(super) fn spot(&self, ask: &StorageRequest<'_>) -> Located {
        let now = self.clock.now();
        let (key, number) = self.locate(ask.policy, ask.key);
        Located { key, number, now }
    }

    /// Locks the shard of the key. The clock has been read before.
    #[inline(always)]
    pub(super) fn enter(&self, Located { key, number, now }: Located) -> Lookup<'_> {
        let mut shard = self.lock(number);
        let now = shard.time(now, &self.clock);
        Lookup { shard, number, key, now }
    }

    /// Unlocks the shard, and sweeps another if it is time.
    #[inline(always)]
    pub(super) fn leave(&self, mut place: Lookup<'_>) {
        if place.shard.is_sweep_due() {
            drop(place.shard);
            self.sweep(place.now);
        }
    }

    /// Saves a small state that does not stay where it was: it is forgotten, or has become something else.
    #[cold]
    pub(super) fn resave(&self, place: &mut Lookup<'_>, policy: &Policy, state: &State) {
        let Lookup { shard, key, now, .. } = place;
        let run = shard.run(*key);
        let before = run.len();
        let states = &mut [state.clone()];
        let peek = policy.decide(states, *now, Op::Peek, 1);
        let after = shard.save(run, *key, policy.limit_digests(), states, *now, Some(peek.limits()));
        let before = Size { keys: 1, slots: before, logs: 0 };
        self.usage.settle(before, after);
    }

    /// Any number of states, which may be missing, be logs, and need room.
    #[inline(never)]
    pub(super) fn decide_any(&self, mut place: Lookup<'_>, ask: &StorageRequest<'_>, want: Want) -> Decision {
        let decision = with_states(ask.policy, |states| self.decide_all(&mut place, ask, want, states));
        self.leave(place);
        decision
    }

    #[inline(never)]
    pub(super) fn hit_any_at_once(
        &self,
        place: Lookup<'_>,
        ask: &StorageRequest<'_>,
        want: Want,
        shown: Option<&mut Summary>,
    ) -> bool {
        let decision = self.decide_any(place, ask, want);
        if let Some(shown) = shown {
            *shown = Summary { at: decision.at(), limit: *decision.shown() };
        }
        decision.is_at_once()
    }

    fn decide_all(
        &self,
        place: &mut Lookup<'_>,
        ask: &StorageRequest<'_>,
        want: Want,
        states: &mut [State],
    ) -> Decision {
        let StorageRequest { policy, op, cost, .. } = *ask;
        let Lookup { number, key, now, .. } = *place;
        let mut run = place.shard.run(key);
        let before = place.shard.load(run.clone(), key, policy.limit_digests(), states);
        let taken_out = TakenOut { shared: self, logs: before.logs };
        if want != Want::Decision {
            let peek = policy.decide(states, now, Op::Peek, cost);
            if !want.takes(peek.is_refused(), !peek.delay().is_zero()) {
                mem::forget(taken_out);
                self.usage.settle(before, place.shard.save(run, key, policy.limit_digests(), states, now, None));
                return peek;
            }
        }
        let mut no_room = None;
        if cost > 0 {
            let need = Need::of(policy, states, now, before.keys == 0);
            if !need.is_nothing() && self.usage.lack(self.bounds, &need).is_some() {
                no_room = self.make_room(place, ask, states, &need).err();
                run = place.shard.run(key);
            }
        }
        let is_final = op == Op::Hit && want != Want::Yes;
        let decision = match no_room {
            None => policy.decide(states, now, op, cost),
            // Nothing is stored of a newcomer that is admitted although there is no room.
            Some(no_room) if before.keys == 0 && self.is_admitted(no_room) => {
                let decision = policy.decide(states, now, op, cost);
                states.fill(State::Fresh);
                decision
            }
            Some(no_room) => policy.refuse(now, cost, no_room.wait()).storage_full(),
        };
        if let Some(no_room) = no_room.filter(|_| op == Op::Hit) {
            self.count_full(no_room, before.keys == 0, is_final);
        }
        mem::forget(taken_out);
        self.shards[number].retract(key.hash);
        let said = (op == Op::Hit && no_room.is_none()).then(|| decision.limits());
        let after = place.shard.save(run, key, policy.limit_digests(), states, now, said);
        self.usage.settle(before, after);
        decision
    }
}

/// The logs of a key while they are decided on: if the strategy panics they are lost, and take no room.
struct TakenOut<'a> {
    shared: &'a Shared,
    logs: usize,
}

impl Drop for TakenOut<'_> {
    fn drop(&mut self) {
        let lost = Size { logs: self.logs, ..Size::default() };
        self.shared.usage.settle(lost, Size::default());
    }
}

/// Runs `f` with a place for the state of each limit, in place for up to four.
#[inline]
pub(super) fn with_states<T>(policy: &Policy, f: impl FnOnce(&mut [State]) -> T) -> T {
    match policy.limits().len() {
        1 => f(&mut [State::Fresh]),
        few @ ..=4 => f(&mut [const { State::Fresh }; 4][..few]),
        many => f(&mut vec![State::Fresh; many]),
    }
}

use std::mem;
use std::slice;
use std::sync::atomic::Ordering;

use super::Shared;
use super::shard::{KeyHash, Shard};
use crate::storage::Ask;
use crate::strategy::State;
use crate::{Decision, Op, Policy, Timestamp};

impl Shared {
    pub(super) fn decide(&self, ask: Ask<'_>) -> Decision {
        let (key, number) = self.locate(ask.policy, ask.key);
        let mut shard = self.lock(number);
        // Read under the lock, so that the time of one key's states never goes back.
        let now = self.clock.now();
        let decision = match ask.policy.limits().len() {
            1 => self.decide_one(&mut shard, number, key, ask, now),
            2 => self.decide_few::<2>(&mut shard, number, key, ask, now),
            3 => self.decide_few::<3>(&mut shard, number, key, ask, now),
            4 => self.decide_few::<4>(&mut shard, number, key, ask, now),
            _ => self.decide_any(&mut shard, number, key, ask, now),
        };
        if ask.op == Op::Hit && shard.is_sweep_due() {
            drop(shard);
            self.sweep(now);
        }
        decision
    }

    /// Most hits are on a key of one limit whose state is there, small, and stays where it is.
    #[inline]
    fn decide_one(&self, shard: &mut Shard, number: usize, key: KeyHash, ask: Ask<'_>, now: Timestamp) -> Decision {
        let digests = ask.policy.limit_digests();
        let Some(slot) = shard.small(key, digests[0]) else {
            return self.decide_any(shard, number, key, ask, now);
        };
        let mut state = slot.state();
        let decision = ask.policy.decide(slice::from_mut(&mut state), now, ask.op, ask.cost);
        if ask.op == Op::Hit && !slot.update(&state, now, &decision.limits()[0]) {
            self.resave(shard, key, digests, slice::from_mut(&mut state), now, &decision);
        }
        decision
    }

    /// The same for a few limits.
    #[inline(never)]
    fn decide_few<const N: usize>(
        &self,
        shard: &mut Shard,
        number: usize,
        key: KeyHash,
        ask: Ask<'_>,
        now: Timestamp,
    ) -> Decision {
        let digests = ask.policy.limit_digests();
        let Some(slots) = shard.known::<N>(key, digests) else {
            return self.decide_any(shard, number, key, ask, now);
        };
        let mut states = shard.states(slots);
        let decision = ask.policy.decide(&mut states, now, ask.op, ask.cost);
        if ask.op == Op::Hit && !shard.update(slots, &states, now, decision.limits()) {
            self.resave(shard, key, digests, &mut states, now, &decision);
        }
        decision
    }

    /// Saves small states that do not stay where they were: they are forgotten, or have become something else.
    #[cold]
    fn resave(
        &self,
        shard: &mut Shard,
        key: KeyHash,
        digests: &[u32],
        states: &mut [State],
        now: Timestamp,
        decision: &Decision,
    ) {
        let run = shard.run(key);
        let after = shard.save(run, key, digests, states, now, Some(decision.limits()));
        self.settle(1, after);
    }

    /// Any number of states, which may be missing, be logs, and need room.
    #[inline(never)]
    fn decide_any(&self, shard: &mut Shard, number: usize, key: KeyHash, ask: Ask<'_>, now: Timestamp) -> Decision {
        let Ask { policy, op, cost, .. } = ask;
        let digests = policy.limit_digests();
        with_states(policy, |states| {
            let mut run = shard.run(key);
            let before = shard.load(run.clone(), key, digests, states);
            let log_grows = |state: &State| matches!(state, State::Log(log) if log.grows_at(now));
            let grows = cost > 0 && (before == 0 || states.iter().any(log_grows));
            let mut crowded = None;
            if grows && self.is_full() {
                crowded = self.make_room(shard, number, key, now, ask, states);
                run = shard.run(key);
            }
            let taken_out = TakenOut { shared: self, weight: before.saturating_sub(1) };
            let decision = match crowded {
                None => policy.decide(states, now, op, cost),
                Some(soonest) => policy.refuse(now, cost, soonest).crowded(),
            };
            mem::forget(taken_out);
            let told = (op == Op::Hit).then(|| decision.limits());
            let after = shard.save(run, key, digests, states, now, told);
            self.settle(before, after);
            if op == Op::Hit && decision.is_crowded() {
                self.crowded.fetch_add(1, Ordering::Relaxed);
            }
            decision
        })
    }
}

/// The logs of a key while they are decided on: if the strategy panics they are lost, and weigh nothing.
struct TakenOut<'a> {
    shared: &'a Shared,
    weight: usize,
}

impl Drop for TakenOut<'_> {
    fn drop(&mut self) {
        self.shared.settle(self.weight, 0);
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

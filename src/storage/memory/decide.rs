use std::mem;
use std::slice;
use std::sync::MutexGuard;
use std::sync::atomic::Ordering;

use super::Shared;
use super::shard::{KeyHash, Shard};
use crate::storage::Ask;
use crate::strategy::{State, Status};
use crate::{Decision, Op, Policy, Timestamp};

impl Shared {
    pub(super) fn decide(&self, ask: Ask<'_>) -> Decision {
        let Ask { policy, op, cost, .. } = ask;
        let (key, number) = self.locate(policy, ask.key);
        let mut shard = self.lock(number);
        // Read under the lock, so that the time of one key's states never goes back.
        let now = self.clock.now();
        // Most hits are on a key of one limit whose state is there, small, and stays where it is. The decision is made
        // at the very end: it is large, and moving it costs more than what comes before.
        if let ([limit], &[digest]) = (policy.limits(), policy.limit_digests())
            && let Some(slot) = shard.small(key, digest)
        {
            let mut state = slot.state();
            let status = limit.decide(&mut state, now, op, cost);
            if op == Op::Hit && !slot.update(&state, now, &status) {
                self.resave(&mut shard, key, policy, slice::from_mut(&mut state), now, slice::from_ref(&status));
            }
            self.release(shard, op, now);
            return Decision::of(now, cost, status);
        }
        let decision = match policy.limits().len() {
            2 => self.decide_few::<2>(&mut shard, number, key, ask, now),
            3 => self.decide_few::<3>(&mut shard, number, key, ask, now),
            4 => self.decide_few::<4>(&mut shard, number, key, ask, now),
            _ => self.decide_any(&mut shard, number, key, ask, now),
        };
        self.release(shard, op, now);
        decision
    }

    /// Unlocks a shard, and sweeps another if it is time.
    #[inline]
    fn release(&self, mut shard: MutexGuard<'_, Shard>, op: Op, now: Timestamp) {
        if op == Op::Hit && shard.is_sweep_due() {
            drop(shard);
            self.sweep(now);
        }
    }

    /// The same for a few limits whose states are there and small.
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
            self.resave(shard, key, ask.policy, &mut states, now, decision.limits());
        }
        decision
    }

    /// Saves small states that do not stay where they were: they are forgotten, or have become something else.
    #[cold]
    fn resave(
        &self,
        shard: &mut Shard,
        key: KeyHash,
        policy: &Policy,
        states: &mut [State],
        now: Timestamp,
        told: &[Status],
    ) {
        let run = shard.run(key);
        let after = shard.save(run, key, policy.limit_digests(), states, now, Some(told));
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

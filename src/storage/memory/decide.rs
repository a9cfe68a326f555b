use std::mem;

use super::MemoryInner;
use super::answer::{Answer, Fast, Full, Mode};
use super::padded::Padded;
use super::shard::{KeyHash, Shard};
use super::size::{Need, Size};
use crate::storage::{StorageRequest, Summary};
use crate::strategy::State;
use crate::sync::MutexGuard;
use crate::{Decision, Op, Policy, Timestamp};

/// The location of a key's states, and the time of the request.
#[derive(Clone, Copy)]
pub(super) struct Located<'a> {
    pub(super) key: KeyHash,
    pub(super) padded: &'a Padded,
    /// The number of the shard.
    pub(super) number: usize,
    pub(super) now: Timestamp,
}

/// A [`Located`] key with its shard locked.
pub(super) struct Lookup<'a> {
    pub(super) shard: MutexGuard<'a, Shard>,
    pub(super) padded: &'a Padded,
    pub(super) number: usize,
    pub(super) key: KeyHash,
    pub(super) now: Timestamp,
}

impl MemoryInner {
    #[inline]
    pub(super) fn decide(&self, request: &StorageRequest<'_>) -> Decision {
        let mut decision = Decision::blank();
        if request.op == Op::Charge {
            self.decide_any(self.look_up(self.locate_request(request)), request, Full(&mut decision));
        } else {
            self.answer(request, Full(&mut decision));
        }
        decision.set_policy(request.policy.digest());
        decision.set_ahead(self.clock.ahead());
        if self.resolution > 0 {
            decision.lengthen_waits(self.resolution);
        }
        decision
    }

    #[inline]
    pub(super) fn try_admit(&self, request: &StorageRequest<'_>, mode: Mode, summary: Option<&mut Summary>) -> bool {
        let Some(summary) = summary else { return self.answer(request, Fast { mode, summary: None }) };
        let is_admitted = self.answer(request, Fast { mode, summary: Some(summary) });
        summary.at = summary.at.minus(u64::from(self.clock.ahead()) * 1_000_000);
        is_admitted
    }

    fn answer<A: Answer>(&self, request: &StorageRequest<'_>, answer: A) -> A::Output {
        if request.policy.limits().len() == 1 {
            return self.decide_small::<1, A>(request, answer);
        }
        self.answer_several(request, answer)
    }

    /// A separate function, because the jump table would slow down policies with one limit.
    #[inline(never)]
    fn answer_several<A: Answer>(&self, request: &StorageRequest<'_>, answer: A) -> A::Output {
        match request.policy.limits().len() {
            2 => self.decide_small::<2, A>(request, answer),
            3 => self.decide_small::<3, A>(request, answer),
            4 => self.decide_small::<4, A>(request, answer),
            5 => self.decide_small::<5, A>(request, answer),
            6 => self.decide_small::<6, A>(request, answer),
            _ => self.decide_any(self.look_up(self.locate_request(request)), request, answer),
        }
    }

    #[inline(always)]
    pub(super) fn locate_request(&self, request: &StorageRequest<'_>) -> Located<'_> {
        let (key, number) = self.locate(request.policy, request.key);
        // The clock is read last, because the processor overlaps its latency with the lock's.
        let now = self.clock.now();
        Located { key, padded: &self.shards[number], number, now }
    }

    /// Locks the shard of the key.
    #[inline(always)]
    pub(super) fn look_up<'a>(&self, located: Located<'a>) -> Lookup<'a> {
        let Located { key, padded, number, now } = located;
        let mut shard = padded.lock();
        let now = shard.time(now, &self.clock);
        Lookup { shard, padded, number, key, now }
    }

    /// Unlocks the shard, and sweeps if a sweep is due.
    #[inline(always)]
    pub(super) fn finish(&self, mut lookup: Lookup<'_>) {
        if lookup.shard.is_sweep_due() {
            drop(lookup.shard);
            self.sweep(lookup.now);
        }
    }

    /// Decides any request: with any number of limits, with new keys and logs, and when the storage
    /// is full.
    #[inline(never)]
    pub(super) fn decide_any<A: Answer>(
        &self,
        mut lookup: Lookup<'_>,
        request: &StorageRequest<'_>,
        answer: A,
    ) -> A::Output {
        let mode = answer.mode();
        let decision = with_states(request.policy, |states| self.decide_all(&mut lookup, request, mode, states));
        self.finish(lookup);
        answer.by_decision(decision)
    }

    #[inline(never)]
    fn decide_all(
        &self,
        lookup: &mut Lookup<'_>,
        request: &StorageRequest<'_>,
        mode: Mode,
        states: &mut [State],
    ) -> Decision {
        let StorageRequest { policy, op, cost, .. } = *request;
        let Lookup { padded, key, now, .. } = *lookup;
        let mut run = lookup.shard.run(key);
        let before = lookup.shard.load(run.clone(), key, policy.limit_digests(), states);
        let log_guard = LogGuard { shared: self, logs: before.logs };
        if mode != Mode::Decision {
            let peek = policy.decide(states, now, Op::Peek, cost);
            if !mode.stores(peek.is_refused(), !peek.delay().is_zero()) {
                mem::forget(log_guard);
                self.usage.settle(before, lookup.shard.save(run, key, policy.limit_digests(), states, now, None));
                return peek;
            }
        }
        let mut no_room = None;
        if cost > 0 {
            let need = Need::of(policy, states, now, before.keys == 0);
            if !need.is_empty() && self.usage.lack(self.bounds, &need).is_some() {
                no_room = self.make_room(lookup, request, states, &need).err();
                run = lookup.shard.run(key);
            }
        }
        let is_final = op != Op::Peek && mode != Mode::TryAdmit;
        let decision = match no_room {
            None => policy.decide(states, now, op, cost),
            // `OnFull::Admit` stores nothing for a new key.
            Some(no_room) if before.keys == 0 && self.is_admitted(no_room) => {
                let decision = policy.decide(states, now, op, cost);
                states.fill(State::Fresh);
                decision
            }
            // No log may grow, so the units are added to the newest entries.
            Some(_) if op == Op::Charge && states.iter().all(|state| *state != State::Fresh) => {
                no_room = None;
                policy.charge_without_growth(states, now, cost)
            }
            Some(no_room) => policy.refuse(now, cost, no_room.wait()).storage_full(),
        };
        if let Some(no_room) = no_room.filter(|_| op != Op::Peek) {
            self.count_full(no_room, before.keys == 0, is_final);
        }
        mem::forget(log_guard);
        padded.clear_hint(key.hash);
        let statuses = (op != Op::Peek && no_room.is_none()).then(|| decision.limits());
        let after = lookup.shard.save(run, key, policy.limit_digests(), states, now, statuses);
        self.usage.settle(before, after);
        decision
    }
}

/// The logs of a key while a decision is made on them. If the strategy panics, they are lost, and
/// dropping this releases their bytes.
struct LogGuard<'a> {
    shared: &'a MemoryInner,
    logs: usize,
}

impl Drop for LogGuard<'_> {
    fn drop(&mut self) {
        let lost = Size { logs: self.logs, ..Size::default() };
        self.shared.usage.settle(lost, Size::default());
    }
}

/// Calls `f` with a fresh state for each limit. Up to four are on the stack.
#[inline]
pub(super) fn with_states<T>(policy: &Policy, f: impl FnOnce(&mut [State]) -> T) -> T {
    match policy.limits().len() {
        1 => f(&mut [State::Fresh]),
        few @ ..=4 => f(&mut [const { State::Fresh }; 4][..few]),
        many => f(&mut vec![State::Fresh; many]),
    }
}

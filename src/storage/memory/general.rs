//! The general path, for any request.

use std::mem;

use super::MemoryInner;
use super::answer::{Answer, Mode};
use super::lookup::Lookup;
use super::size::{Need, Size};
use crate::decision::Decision;
use crate::policy::{Op, Policy};
use crate::storage::StorageRequest;
use crate::strategy::State;

impl MemoryInner {
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

/// The size of the logs that are taken out of their shard during a decision. If a custom strategy
/// panics, the logs are lost, and dropping this guard subtracts their bytes from the usage.
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

/// Calls `f` with a fresh state for each limit. Up to four states are on the stack.
#[inline]
pub(super) fn with_states<T>(policy: &Policy, f: impl FnOnce(&mut [State]) -> T) -> T {
    match policy.limits().len() {
        1 => f(&mut [State::Fresh]),
        few @ ..=4 => f(&mut [const { State::Fresh }; 4][..few]),
        many => f(&mut vec![State::Fresh; many]),
    }
}

use std::mem;

use super::MemoryInner;
use super::shard::{KeyHash, Shard};
use super::usage::{Need, Size};
use crate::storage::{StorageRequest, Summary};
use crate::strategy::State;
use crate::sync::MutexGuard;
use crate::{Decision, Op, Policy, Timestamp};

/// The location of a key's states, and the time of the request.
#[derive(Clone, Copy)]
pub(super) struct Located {
    pub(super) key: KeyHash,
    pub(super) number: usize,
    pub(super) now: Timestamp,
}

/// A [`Located`] key with its shard locked.
pub(super) struct Lookup<'a> {
    pub(super) shard: MutexGuard<'a, Shard>,
    pub(super) number: usize,
    pub(super) key: KeyHash,
    pub(super) now: Timestamp,
}

/// The result that the caller of a hit needs, which determines if the hit is stored.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    /// A full decision. The hit is always stored.
    Decision,
    /// `true` if the hit is admitted without a delay. A delayed hit is not stored.
    Admit,
    /// As `Admit`, but a refused hit is not stored either, because the caller requests a decision
    /// next.
    TryAdmit,
}

impl Mode {
    /// Returns `true` if a hit with this outcome is stored.
    #[inline]
    pub(super) fn stores(self, refused: bool, delayed: bool) -> bool {
        match self {
            Self::Decision => true,
            Self::Admit => !delayed,
            Self::TryAdmit => !refused && !delayed,
        }
    }
}

impl MemoryInner {
    #[inline]
    pub(super) fn decide(&self, request: &StorageRequest<'_>) -> Decision {
        let mut decision = Decision::blank();
        self.fill_in(request, &mut decision);
        decision.set_ahead(self.clock.ahead());
        decision
    }

    fn fill_in(&self, request: &StorageRequest<'_>, decision: &mut Decision) {
        match request.policy.limits() {
            [limit] => self.decide_single(request, limit, decision),
            several => match several.len() {
                2 => self.decide_multi::<2>(request, decision),
                3 => self.decide_multi::<3>(request, decision),
                4 => self.decide_multi::<4>(request, decision),
                5 => self.decide_multi::<5>(request, decision),
                6 => self.decide_multi::<6>(request, decision),
                _ => *decision = self.decide_any(self.look_up(self.locate_request(request)), request, Mode::Decision),
            },
        }
    }

    #[inline]
    pub(super) fn try_admit(&self, request: &StorageRequest<'_>, mode: Mode, shown: Option<&mut Summary>) -> bool {
        let Some(shown) = shown else { return self.try_hit(request, mode, None) };
        let is_admitted = self.try_hit(request, mode, Some(shown));
        shown.at = shown.at.minus(u64::from(self.clock.ahead()) * 1_000_000);
        is_admitted
    }

    fn try_hit(&self, request: &StorageRequest<'_>, mode: Mode, shown: Option<&mut Summary>) -> bool {
        match request.policy.limits() {
            [limit] => self.try_admit_single(request, limit, mode, shown),
            several => match several.len() {
                2 => self.try_admit_multi::<2>(request, mode, shown),
                3 => self.try_admit_multi::<3>(request, mode, shown),
                4 => self.try_admit_multi::<4>(request, mode, shown),
                5 => self.try_admit_multi::<5>(request, mode, shown),
                6 => self.try_admit_multi::<6>(request, mode, shown),
                _ => self.try_admit_any(self.look_up(self.locate_request(request)), request, mode, shown),
            },
        }
    }

    #[inline(always)]
    pub(super) fn locate_request(&self, request: &StorageRequest<'_>) -> Located {
        let now = self.clock.now();
        let (key, number) = self.locate(request.policy, request.key);
        Located { key, number, now }
    }

    /// Locks the shard of the key.
    #[inline(always)]
    pub(super) fn look_up(&self, Located { key, number, now }: Located) -> Lookup<'_> {
        let mut shard = self.lock(number);
        let now = shard.time(now, &self.clock);
        Lookup { shard, number, key, now }
    }

    /// Unlocks the shard, and sweeps if a sweep is due.
    #[inline(always)]
    pub(super) fn finish(&self, mut lookup: Lookup<'_>) {
        if lookup.shard.is_sweep_due() {
            drop(lookup.shard);
            self.sweep(lookup.now);
        }
    }

    /// Saves a small state that has expired or become a log.
    #[cold]
    pub(super) fn resave(&self, lookup: &mut Lookup<'_>, policy: &Policy, state: &State) {
        let Lookup { shard, key, now, .. } = lookup;
        let run = shard.run(*key);
        let before = run.len();
        let states = &mut [state.clone()];
        let peek = policy.decide(states, *now, Op::Peek, 1);
        let after = shard.save(run, *key, policy.limit_digests(), states, *now, Some(peek.limits()));
        let before = Size { keys: 1, slots: before, logs: 0 };
        self.usage.settle(before, after);
    }

    /// Decides any request: with any number of limits, with new keys and logs, and when the storage
    /// is full.
    #[inline(never)]
    pub(super) fn decide_any(&self, mut lookup: Lookup<'_>, request: &StorageRequest<'_>, mode: Mode) -> Decision {
        let decision = with_states(request.policy, |states| self.decide_all(&mut lookup, request, mode, states));
        self.finish(lookup);
        decision
    }

    #[inline(never)]
    pub(super) fn try_admit_any(
        &self,
        lookup: Lookup<'_>,
        request: &StorageRequest<'_>,
        mode: Mode,
        shown: Option<&mut Summary>,
    ) -> bool {
        let decision = self.decide_any(lookup, request, mode);
        // A full storage counts in `decide`.
        if let Some(shown) = shown.filter(|_| !decision.is_storage_full()) {
            *shown = Summary { at: decision.at(), limit: *decision.shown() };
        }
        decision.is_at_once()
    }

    fn decide_all(
        &self,
        lookup: &mut Lookup<'_>,
        request: &StorageRequest<'_>,
        mode: Mode,
        states: &mut [State],
    ) -> Decision {
        let StorageRequest { policy, op, cost, .. } = *request;
        let Lookup { number, key, now, .. } = *lookup;
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
        let is_final = op == Op::Hit && mode != Mode::TryAdmit;
        let decision = match no_room {
            None => policy.decide(states, now, op, cost),
            // `OnFull::Admit` stores nothing for a new key.
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
        mem::forget(log_guard);
        self.shards[number].clear_hint(key.hash);
        let statuses = (op == Op::Hit && no_room.is_none()).then(|| decision.limits());
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

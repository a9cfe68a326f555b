//! The paths of a decision: the entry points, the fast path for stored small states, the one for new
//! keys, and the general path.

use std::cell::Cell;
use std::sync::atomic::Ordering;
use std::{mem, slice};

use super::answer::{AdmitAnswer, Answer, Asked, DecisionAnswer, Mode, array_of};
use super::evict::{NoRoom, Put};
use super::inner::{Located, LockedKey, MemoryInner};
use super::size::{Need, Size};
use super::slot::TableSlot;
use super::usage::Lack;
use crate::decision::Decision;
use crate::key::Key;
use crate::policy::{Limit, Op, Policy, SHADOW};
use crate::storage::{StorageRequest, Summary};
use crate::strategy::{Outcome, State, Status};

/// The result of a hit on a new key.
enum NewKey {
    /// The hit was admitted. This is its state and outcome.
    Decided(State, Outcome),
    /// The storage is full, and all considered keys are being refused. The value is the time in
    /// microseconds until the first of them is admitted again.
    Full(u64),
}

impl MemoryInner {
    #[inline]
    pub(super) fn decide(&self, request: &StorageRequest<'_>) -> Decision {
        let mut decision = Decision::blank();
        if request.op == Op::Charge {
            self.decide_any(self.lock(self.locate_request(request)), request, DecisionAnswer(&mut decision));
        } else {
            self.dispatch(request, DecisionAnswer(&mut decision));
        }
        self.complete(&mut decision);
        decision
    }

    /// Completes a decision, which the states have decided, by what only the clock knows.
    #[inline]
    pub(super) fn complete(&self, decision: &mut Decision) {
        decision.set_ahead(self.clock.ahead());
        self.lengthen_waits(|| decision.statuses_mut());
    }

    #[inline]
    pub(super) fn try_admit(&self, request: &StorageRequest<'_>, mode: Mode, summary: Option<&mut Summary>) -> bool {
        let Some(summary) = summary else { return self.dispatch(request, AdmitAnswer { mode, summary: None }) };
        let is_admitted = self.dispatch(request, AdmitAnswer { mode, summary: Some(summary) });
        self.lengthen_waits(|| slice::from_mut(&mut summary.limit));
        // Header fields report the time of the wall clock, like `Decision::wall_at`.
        summary.at = summary.at.minus(u64::from(self.clock.ahead()) * 1_000_000);
        is_admitted
    }

    /// Adds the resolution of the clock to the waits of a refusal. Each answer of the storage that
    /// can contain a wait passes here.
    #[inline]
    fn lengthen_waits<'a>(&self, statuses: impl FnOnce() -> &'a mut [Status]) {
        if self.resolution > 0 {
            for status in statuses() {
                status.lengthen_wait(self.resolution);
            }
        }
    }

    fn dispatch<A: Answer>(&self, request: &StorageRequest<'_>, answer: A) -> A::Output {
        if request.policy.limits().len() == 1 {
            return self.decide_small::<1, A>(request, answer);
        }
        self.dispatch_several(request, answer)
    }

    /// A separate function, because the jump table would slow down policies with one limit.
    #[inline(never)]
    fn dispatch_several<A: Answer>(&self, request: &StorageRequest<'_>, answer: A) -> A::Output {
        match request.policy.limits().len() {
            2 => self.decide_small::<2, A>(request, answer),
            3 => self.decide_small::<3, A>(request, answer),
            4 => self.decide_small::<4, A>(request, answer),
            5 => self.decide_small::<5, A>(request, answer),
            6 => self.decide_small::<6, A>(request, answer),
            _ => self.decide_any(self.lock(self.locate_request(request)), request, answer),
        }
    }

    /// Decides a request with a policy of `N` limits. It changes a copy of the states, so that the
    /// general path can decide if the fast path does not apply.
    #[inline(always)]
    fn decide_small<const N: usize, A: Answer>(&self, request: &StorageRequest<'_>, mut answer: A) -> A::Output {
        let StorageRequest { policy, op, cost, .. } = *request;
        let (limits, digests) = (array_of::<N, _>(policy.limits()), array_of::<N, _>(policy.limit_digests()));
        let located = self.locate_request(request);
        if N == 1
            && let Some(state) = located.cell.published(located.key, digests[0], located.now)
            && let Some(refused) =
                self.refuse_again(Asked { request, now: located.now }, state, &limits[0], &mut answer)
        {
            return refused;
        }
        let mut locked = self.lock(located);
        let now = locked.now;
        let Some((places, mut states)) = locked.shard.small_states(locked.key, digests) else {
            return self.decide_new(locked, request, answer);
        };
        let mut effects = [None; N];
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
            let shard = &mut *locked.shard;
            if N == 1 && refused && !limits[0].counts_refusals() && shard.table.slot(places[0]).refuses(&states[0]) {
                located.cell.publish(located.key, digests[0], &states[0], now);
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
                    if states.iter().any(|state| !TableSlot::can_hold(state, now)) {
                        return self.decide_any(locked, request, answer);
                    }
                    located.cell.clear_hint(located.key.hash);
                    for i in 0..N {
                        shard.table.get_mut(places[i]).update(&states[i], now, &limits[i], outcomes[i]);
                    }
                } else if N > 1 || !shard.table.slot(places[0]).is_kept(&states[0], now, &limits[0]) {
                    answer.leave_blank();
                }
            }
            effects = outcomes.map(Some);
        }
        self.finish(locked);
        answer.by_states(Asked { request, now }, &states, effects)
    }

    /// Decides a request for which the fast path does not apply: a state of the key is a log, or is
    /// not stored, as for a new key.
    #[inline(never)]
    fn decide_new<A: Answer>(&self, mut locked: LockedKey<'_>, request: &StorageRequest<'_>, answer: A) -> A::Output {
        let now = locked.now;
        self.keep_key(&locked.shard, locked.number, locked.key, request);
        match self.insert_new(&mut locked, request, answer.mode()) {
            Some(NewKey::Decided(state, outcome)) => {
                self.finish(locked);
                answer.by_states(Asked { request, now }, &[state], [Some(outcome)])
            }
            Some(NewKey::Full(soonest)) => {
                self.finish(locked);
                answer.storage_full(Asked { request, now }, soonest)
            }
            None => self.decide_any(locked, request, answer),
        }
    }

    /// Refuses a request by the published state, without a lock. Returns `None` if that state does
    /// not refuse the request any more.
    #[inline(never)]
    fn refuse_again<A: Answer>(
        &self,
        asked: Asked<'_>,
        mut state: State,
        limit: &Limit,
        answer: &mut A,
    ) -> Option<A::Output> {
        let refused = answer.refuse_again(asked, limit, &mut state)?;
        if self.is_sweep_due(count_hit()) {
            self.sweep(asked.now);
        }
        Some(refused)
    }

    /// Decides a hit of a new key on a policy with one limit and a small state. This is the common
    /// case in a flood of new keys. Returns `None` in all other cases. Nothing has changed then,
    /// and the general path must decide.
    fn insert_new(&self, locked: &mut LockedKey<'_>, request: &StorageRequest<'_>, mode: Mode) -> Option<NewKey> {
        if request.op == Op::Peek || request.cost == 0 {
            return None;
        }
        let ([limit], &[digest]) = (request.policy.limits(), request.policy.limit_digests()) else { return None };
        if digest & SHADOW != 0 {
            return None;
        }
        let start = locked.shard.table.place(locked.key.hash);
        if locked.shard.table.get(start).is_some_and(|first| first.hash == locked.key.hash) {
            return None;
        }
        let mut state = State::Fresh;
        let outcome = limit.hit(&mut state, locked.now, request.cost);
        let State::Counts { until, .. } = state else { return None };
        let unwanted = mode != Mode::Decision && outcome.is_delayed();
        if until <= locked.now || outcome == Outcome::Refused || unwanted {
            return None;
        }
        let mut slot = TableSlot::new(locked.key.hash, locked.key.limit_hash(digest), until);
        slot.update(&state, locked.now, limit, outcome);
        let lack = self.usage.lack(self.bounds, &Need::SMALL);
        match locked.shard.put(start, slot, lack.is_some(), locked.now) {
            Put::Added => self.usage.add_small(),
            Put::Replaced(forgotten) => {
                if !forgotten.is_expired(locked.now) {
                    self.usage.count_evicted();
                }
                locked.cell.clear_hint(forgotten.hash);
            }
            Put::Full(soonest) => {
                match self.evict_from_other_shard(locked.located(), request.op, Lack::Room, soonest) {
                    Ok(()) => {
                        locked.shard.table.insert_at(start, slot);
                        self.usage.add_small();
                    }
                    Err(soonest) => {
                        let no_room = NoRoom::Full(soonest);
                        self.count_full(no_room, true, mode != Mode::TryAdmit);
                        let is_admitted = self.is_admitted(no_room);
                        return Some(if is_admitted { NewKey::Decided(state, outcome) } else { NewKey::Full(soonest) });
                    }
                }
            }
            Put::Unclear => return None,
        }
        locked.cell.clear_hint(locked.key.hash);
        Some(NewKey::Decided(state, outcome))
    }

    /// Decides any request: with any number of limits, with new keys and logs, and when the storage
    /// is full.
    #[inline(never)]
    fn decide_any<A: Answer>(
        &self,
        mut locked: LockedKey<'_>,
        request: &StorageRequest<'_>,
        mut answer: A,
    ) -> A::Output {
        let mode = answer.mode();
        self.keep_key(&locked.shard, locked.number, locked.key, request);
        let mut is_kept = true;
        let decision =
            with_states(request.policy, |states| self.decide_loaded(&mut locked, request, mode, states, &mut is_kept));
        self.finish(locked);
        if !is_kept {
            answer.leave_blank();
        }
        answer.by_decision(decision)
    }

    /// Decides on the states of one key, which it loads into `states`, and stores them. Sets
    /// `is_kept` to `false` if it has not stored a hit that may change them.
    #[inline(never)]
    fn decide_loaded(
        &self,
        locked: &mut LockedKey<'_>,
        request: &StorageRequest<'_>,
        mode: Mode,
        states: &mut [State],
        is_kept: &mut bool,
    ) -> Decision {
        let StorageRequest { policy, op, cost, .. } = *request;
        let located @ Located { cell, key, now, .. } = locked.located();
        let mut run = locked.shard.run(key);
        let before = locked.shard.load(run.clone(), key, policy.limit_digests(), states);
        let log_guard = LogGuard { shared: self, logs: before.logs };
        if mode != Mode::Decision {
            let peek = policy.decide(states, now, Op::Peek, cost);
            if !mode.stores(peek.is_refused(), !peek.delay().is_zero()) {
                // A caller uses the summary of a refusal only if the policy has one limit.
                let (digest, remaining) = (policy.limit_digests()[0], peek.statuses()[0].remaining());
                *is_kept = locked.shard.keeps(run.clone(), key, digest, &states[0], now, remaining);
                mem::forget(log_guard);
                self.usage.resize(before, locked.shard.save(run, key, policy.limit_digests(), states, now, None));
                return peek;
            }
        }
        let mut no_room = None;
        if cost > 0 {
            let need = Need::of(policy, states, now, before.keys == 0);
            if !need.is_empty() && self.usage.lack(self.bounds, &need).is_some() {
                no_room = self.make_room(&mut locked.shard, located, request, states, &need).err();
                run = locked.shard.run(key);
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
            Some(NoRoom::Strike) => policy.decide(states, now, Op::Peek, cost),
            Some(no_room) => policy.refusal(now, cost, no_room.wait()).storage_full(),
        };
        if let Some(no_room) = no_room.filter(|no_room| op != Op::Peek && *no_room != NoRoom::Strike) {
            self.count_full(no_room, before.keys == 0, is_final);
        }
        mem::forget(log_guard);
        cell.clear_hint(key.hash);
        let statuses = (op != Op::Peek && no_room.is_none()).then(|| decision.statuses());
        let after = locked.shard.save(run, key, policy.limit_digests(), states, now, statuses);
        self.usage.resize(before, after);
        decision
    }

    /// Corrects the cost of a decision. See [`Storage::settle`](crate::storage::Storage::settle).
    pub(super) fn settle(&self, policy: &Policy, key: &Key, decision: &Decision, actual: u32) {
        if !decision.has_spent() {
            return;
        }
        if let Some(more) = actual.checked_sub(decision.cost()) {
            let _ = self.decide(&StorageRequest::new(policy, key, Op::Charge, more));
            return;
        }
        let (key, number) = self.locate(policy, key);
        let cell = &self.shards[number];
        let read = self.clock.now();
        let mut shard = cell.lock();
        cell.clear_hint(key.hash);
        let now = shard.time(read, &self.clock);
        with_states(policy, |states| {
            let run = shard.run(key);
            let before = shard.load(run.clone(), key, policy.limit_digests(), states);
            let log_guard = LogGuard { shared: self, logs: before.logs };
            policy.settle(states, now, decision, actual);
            let peek = policy.decide(states, now, Op::Peek, 1);
            mem::forget(log_guard);
            let after = shard.save(run, key, policy.limit_digests(), states, now, Some(peek.statuses()));
            self.usage.resize(before, after);
        });
        // The refund may have made a key evictable.
        self.full_until.iter().for_each(|until| until.store(0, Ordering::Relaxed));
    }
}

/// Counts a decision that did not lock its shard, per thread. Returns the number of decisions.
fn count_hit() -> u32 {
    // loom runs a model many times, and all runs must be alike. The count would persist between
    // them.
    if cfg!(tower_ratelimit_loom) {
        return 1;
    }
    thread_local! { static HITS: Cell<u32> = const { Cell::new(0) } }
    let hits = HITS.get().wrapping_add(1);
    HITS.set(hits);
    hits
}

/// The size of the logs that are taken out of their shard during a decision. If a custom strategy
/// panics, the logs are lost, and dropping this guard subtracts their bytes from the usage.
pub(super) struct LogGuard<'a> {
    pub(super) shared: &'a MemoryInner,
    pub(super) logs: usize,
}

impl Drop for LogGuard<'_> {
    fn drop(&mut self) {
        let lost = Size { logs: self.logs, ..Size::default() };
        self.shared.usage.resize(lost, Size::default());
    }
}

/// Calls `f` with a fresh state for each limit. Up to four states are on the stack.
#[inline]
fn with_states<T>(policy: &Policy, f: impl FnOnce(&mut [State]) -> T) -> T {
    match policy.limits().len() {
        1 => f(&mut [State::Fresh]),
        few @ ..=4 => f(&mut [const { State::Fresh }; 4][..few]),
        many => f(&mut vec![State::Fresh; many]),
    }
}

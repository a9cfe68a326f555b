//! Decisions on several keys together.

use std::mem;

use super::decide::LogGuard;
use super::evict::{NoRoom, Search};
use super::inner::{Located, MemoryInner};
use super::shard::{KeyHash, Shard};
use super::shard_cell::ShardCell;
use super::size::{Need, Size};
use super::time::StorageClock;
use crate::decision::Decision;
use crate::policy::{Member, Op};
use crate::storage::StorageRequest;
use crate::strategy::State;
use crate::sync::MutexGuard;
use crate::time::Timestamp;

/// Decides on several keys, which must be distinct.
pub(super) fn decide(inner: &MemoryInner, requests: &[StorageRequest<'_>]) -> Vec<Decision> {
    let limits = requests.iter().map(|request| request.policy.limits().len()).sum();
    let mut states = vec![State::Fresh; limits];
    let mut rest = &mut states[..];
    let mut members = Vec::with_capacity(requests.len());
    for request in requests {
        let states = rest.split_off_mut(..request.policy.limits().len()).expect("a state for each limit");
        let (key, number) = inner.locate(request.policy, request.key);
        members.push(Loaded { request, key, number, states, before: Size::default(), no_room: None });
    }
    let read = inner.clock.now();
    let mut locked = Locked::new(inner, &members);
    let now = locked.time(read, &inner.clock);
    let decisions = locked.decide(&mut members, now);
    if locked.unlock() {
        inner.sweep(now);
    }
    decisions
}

fn do_all_admit(members: &mut [Loaded<'_>], now: Timestamp) -> bool {
    members.iter_mut().all(|member| member.member(now).admits())
}

/// A member, and the states of its key while they are taken out of their shard.
struct Loaded<'a> {
    request: &'a StorageRequest<'a>,
    key: KeyHash,
    /// The number of the shard.
    number: usize,
    states: &'a mut [State],
    /// The size of the states when they were taken out.
    before: Size,
    no_room: Option<NoRoom>,
}

impl Loaded<'_> {
    fn member(&mut self, now: Timestamp) -> Member<'_> {
        let StorageRequest { policy, op, cost, .. } = *self.request;
        Member { policy, states: self.states, now, op, cost }
    }

    /// Returns the room that this member needs. A hit that is refused anyway needs none, except for
    /// strikes on lockouts by refusals.
    fn need(&mut self, now: Timestamp, all_admit: bool) -> Need {
        let StorageRequest { policy, op, cost, .. } = *self.request;
        if op != Op::Hit || cost == 0 {
            return Need::default();
        }
        let need = Need::of(policy, self.states, now, self.before.keys == 0);
        match all_admit {
            true => need,
            false if self.member(now).admits() => Need::default(),
            false => need.of_refusal(policy, self.states),
        }
    }
}

/// The shards of several keys, each locked once. They are locked in the order of their numbers, so
/// two threads never wait for each other.
struct Locked<'a> {
    inner: &'a MemoryInner,
    /// The shards with their numbers, in ascending order.
    shards: Vec<(usize, MutexGuard<'a, Shard>)>,
}

impl<'a> Locked<'a> {
    fn new(inner: &'a MemoryInner, members: &[Loaded<'_>]) -> Self {
        let mut numbers: Vec<_> = members.iter().map(|member| member.number).collect();
        numbers.sort_unstable();
        numbers.dedup();
        let lock = |number: usize| (number, ShardCell::lock(&inner.shards[number]));
        Self { inner, shards: numbers.into_iter().map(lock).collect() }
    }

    /// Returns the time of the decision. See [`Shard::time`].
    fn time(&mut self, read: Timestamp, clock: &StorageClock) -> Timestamp {
        let now = self.shards.iter_mut().fold(read, |now, (_, shard)| shard.time(now, clock));
        // The last shard may have got a later time than the first ones.
        self.shards.iter_mut().fold(now, |now, (_, shard)| shard.time(now, clock))
    }

    /// Unlocks the shards. Returns `true` if a sweep is due.
    fn unlock(mut self) -> bool {
        self.shards.iter_mut().fold(false, |is_due, (_, shard)| self.inner.is_sweep_due(shard.count_hit()) | is_due)
    }

    fn shard(&mut self, number: usize) -> &mut Shard {
        let at = self.shards.binary_search_by_key(&number, |(number, _)| *number).expect("the shard is locked");
        &mut self.shards[at].1
    }

    fn decide(&mut self, members: &mut [Loaded<'_>], now: Timestamp) -> Vec<Decision> {
        let mut log_guard = self.load_all(members);
        let mut all_admit = do_all_admit(members, now);
        while members.iter_mut().any(|member| self.lacks_room(member, now, all_admit)) {
            mem::forget(log_guard);
            for member in &mut *members {
                self.save(member, now, None);
            }
            // Room for one member may be made by an eviction of another one, so all states are loaded
            // again after that.
            for member in &mut *members {
                self.make_room(member, now, all_admit);
            }
            log_guard = self.load_all(members);
            // The states that refused may have been evicted. Then all members need room.
            if all_admit || !do_all_admit(members, now) {
                break;
            }
            all_admit = true;
        }
        all_admit &= members.iter().all(|member| member.no_room.is_none_or(|_| self.is_not_stored(member)));
        let decide = |member: &mut Loaded<'_>| match member.no_room {
            None => member.member(now).decide(all_admit),
            Some(NoRoom::Strike) => member.request.policy.decide(member.states, now, Op::Peek, member.request.cost),
            Some(_) if self.is_not_stored(member) => {
                let decision = member.member(now).decide(all_admit);
                member.states.fill(State::Fresh);
                decision
            }
            Some(no_room) => member.request.policy.refusal(now, member.request.cost, no_room.wait()).storage_full(),
        };
        let mut decisions: Vec<_> = members.iter_mut().map(decide).collect();
        mem::forget(log_guard);
        for (member, decision) in members.iter_mut().zip(&mut decisions) {
            if let Some(no_room) = member.no_room.filter(|no_room| *no_room != NoRoom::Strike) {
                self.inner.count_full(no_room, member.before.keys == 0, true);
            }
            let is_changed = member.no_room.is_none() && (decision.has_spent() || decision.is_refused());
            self.save(member, now, is_changed.then_some(&*decision));
            let (inner, Loaded { request, key, number, .. }) = (self.inner, &*member);
            inner.keep_key(self.shard(*number), *number, *key, request);
            self.inner.complete(decision);
        }
        decisions
    }

    /// Returns `true` if the member finds no room, but is admitted without being stored.
    fn is_not_stored(&self, member: &Loaded<'_>) -> bool {
        member.before.keys == 0 && member.no_room.is_some_and(|no_room| self.inner.is_admitted(no_room))
    }

    /// Returns `true` if the states of the member need more room than there is.
    fn lacks_room(&self, member: &mut Loaded<'_>, now: Timestamp, all_admit: bool) -> bool {
        let need = member.need(now, all_admit);
        !need.is_empty() && self.inner.usage.lack(self.inner.bounds, &need).is_some()
    }

    /// Makes room for the states of a member, which stay in their shard.
    fn make_room(&mut self, member: &mut Loaded<'_>, now: Timestamp, all_admit: bool) {
        self.load(member);
        member.no_room = None;
        if self.lacks_room(member, now, all_admit) {
            let (inner, need) = (self.inner, member.need(now, true));
            let log_guard = LogGuard { shared: inner, logs: member.before.logs };
            let Loaded { request, key, number, .. } = *member;
            let located = Located { key, cell: &inner.shards[number], number, now };
            member.no_room = loop {
                let made = inner.make_room(self.shard(number), located, request, member.states, &need);
                let is_full = matches!(made, Err(NoRoom::Full(_))) && !request.policy.is_shadow();
                if !(is_full && self.evict_from_locked(located, &need)) {
                    break made.err();
                }
            };
            mem::forget(log_guard);
        }
        self.save(member, now, None);
    }

    /// Evicts a key from one of the other locked shards, which the search of all shards skips. Returns
    /// `false` if none of them has a key to evict.
    fn evict_from_locked(&mut self, located: Located<'_>, need: &Need) -> bool {
        let Located { number: own, key, now, .. } = located;
        let Some(lack) = self.inner.usage.lack(self.inner.bounds, need) else { return true };
        for (number, shard) in self.shards.iter_mut().filter(|(number, _)| *number != own) {
            if let Search::Found(start, end) = shard.find_victim(key.hash, now, lack) {
                self.inner.evict(shard, *number, now, start, end);
                return true;
            }
        }
        false
    }

    fn load_all(&mut self, members: &mut [Loaded<'_>]) -> LogGuard<'a> {
        for member in &mut *members {
            self.load(member);
        }
        LogGuard { shared: self.inner, logs: members.iter().map(|member| member.before.logs).sum() }
    }

    fn load(&mut self, member: &mut Loaded<'_>) {
        let shard = self.shard(member.number);
        member.states.fill(State::Fresh);
        let run = shard.run(member.key);
        member.before = shard.load(run, member.key, member.request.policy.limit_digests(), member.states);
    }

    /// Puts the states back. `decision` is the decision that has changed them.
    fn save(&mut self, member: &mut Loaded<'_>, now: Timestamp, decision: Option<&Decision>) {
        let Loaded { request, key, number, before, ref mut states, .. } = *member;
        self.inner.shards[number].clear_hint(key.hash);
        let shard = self.shard(number);
        let (run, digests) = (shard.run(key), request.policy.limit_digests());
        let after = shard.save(run, key, digests, states, now, decision.map(Decision::statuses));
        self.inner.usage.resize(before, after);
    }
}

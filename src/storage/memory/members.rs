//! Decisions on several keys together.

mod locked;
mod stored;

use std::mem;

use self::locked::{Locked, Place};
use super::decide::LogGuard;
use super::evict::{NoRoom, Search};
use super::inner::{Located, MemoryInner};
use super::shard::Shard;
use super::size::{Need, Size};
use super::usage::ReservedRoom;
use crate::decision::Decision;
use crate::policy::{Member, Op};
use crate::storage::{MAX_MEMBERS, StorageRequest};
use crate::strategy::State;
use crate::sync::MutexGuard;
use crate::time::Timestamp;

/// Decides on several keys, which must be distinct. There are at most [`MAX_MEMBERS`].
pub(super) fn decide(inner: &MemoryInner, requests: &[StorageRequest<'_>]) -> Vec<Decision> {
    match requests.len() {
        2 => decide_up_to::<2>(inner, requests),
        3 => decide_up_to::<3>(inner, requests),
        _ => decide_up_to::<MAX_MEMBERS>(inner, requests),
    }
}

/// Decides on up to `N` keys. Large arrays would take a tenth of the time of a decision on two or three
/// keys.
fn decide_up_to<const N: usize>(inner: &MemoryInner, requests: &[StorageRequest<'_>]) -> Vec<Decision> {
    let mut places = [Place::default(); N];
    let places = &mut places[..requests.len()];
    for (place, request) in places.iter_mut().zip(requests) {
        (place.key, place.number) = inner.locate(request.policy, request.key);
    }
    let read = inner.clock.now();
    let mut shards = [const { None }; N];
    lock_all::<N>(inner, places, &mut shards);
    let mut locked = Locked { inner, places, shards: &mut shards[..requests.len()], now: read };
    locked.set_time();
    if locked.now != read {
        // The last shard may have got a later time than the first ones.
        locked.set_time();
    }
    let decisions = locked.decide_stored(requests).unwrap_or_else(|| locked.decide_any(requests));
    let (is_sweep_due, now) = (locked.count_hit(), locked.now);
    drop(shards);
    if is_sweep_due {
        inner.sweep(now);
    }
    decisions
}

/// Locks each shard once, in the order of their numbers, so two threads never wait for each other.
#[inline(always)]
fn lock_all<'a, const N: usize>(
    inner: &'a MemoryInner,
    places: &mut [Place],
    shards: &mut [Option<MutexGuard<'a, Shard>>; N],
) {
    // The number of a shard and the index of its member in one integer, because that sorts fastest.
    let mut order = [0; N];
    let order = &mut order[..places.len()];
    for (at, place) in places.iter().enumerate() {
        order[at] = place.number * MAX_MEMBERS + at;
    }
    order.sort_unstable();
    let mut last = None;
    for at in order.iter().map(|place| place % MAX_MEMBERS) {
        let number = places[at].number;
        places[at].owner = match last {
            Some((owner, of_last)) if of_last == number => owner,
            _ => {
                shards[at] = Some(inner.shards[number].lock());
                at
            }
        };
        last = Some((places[at].owner, number));
    }
}

fn do_all_admit(members: &mut [Loaded<'_>], now: Timestamp) -> bool {
    members.iter_mut().all(|member| member.member(now).admits())
}

/// A member, and the states of its key while they are taken out of their shard.
struct Loaded<'a> {
    request: &'a StorageRequest<'a>,
    /// The index of the member.
    at: usize,
    place: Place,
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

impl<'a> Locked<'a, '_> {
    /// Decides any requests: with new keys and logs, and when the storage is full.
    #[inline(never)]
    fn decide_any(&mut self, requests: &[StorageRequest<'_>]) -> Vec<Decision> {
        let limits = requests.iter().map(|request| request.policy.limits().len()).sum();
        let mut states = vec![State::Fresh; limits];
        let mut rest = &mut states[..];
        let mut members = Vec::with_capacity(requests.len());
        for (at, request) in requests.iter().enumerate() {
            let states = rest.split_off_mut(..request.policy.limits().len()).expect("a state for each limit");
            members.push(Loaded {
                request,
                at,
                place: self.places[at],
                states,
                before: Size::default(),
                no_room: None,
            });
        }
        self.decide_loaded(&mut members)
    }

    fn decide_loaded(&mut self, members: &mut [Loaded<'_>]) -> Vec<Decision> {
        let now = self.now;
        let mut log_guard = self.load_all(members);
        let mut all_admit = do_all_admit(members, now);
        while self.lacks_room(members, now, all_admit) {
            mem::forget(log_guard);
            for member in &mut *members {
                self.save(member, now, None);
            }
            // Room for one member may be made by an eviction of another one, so all states are loaded
            // again after that.
            let inner = self.inner;
            let mut room = ReservedRoom::new(&inner.usage);
            for member in &mut *members {
                self.make_room(member, now, all_admit, &mut room);
            }
            drop(room);
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
            let (inner, Place { key, number, .. }) = (self.inner, member.place);
            inner.keep_key(self.shard(member.at), number, key, member.request);
            self.inner.complete(decision);
        }
        decisions
    }

    /// Returns `true` if the member finds no room, but is admitted without being stored.
    fn is_not_stored(&self, member: &Loaded<'_>) -> bool {
        member.before.keys == 0 && member.no_room.is_some_and(|no_room| self.inner.is_admitted(no_room))
    }

    /// Returns `true` if the states of all members together need more room than there is.
    fn lacks_room(&self, members: &mut [Loaded<'_>], now: Timestamp, all_admit: bool) -> bool {
        let mut size = Size::default();
        members.iter_mut().any(|member| {
            let need = member.need(now, all_admit);
            size = size.plus(need.size);
            !need.is_empty() && self.inner.usage.lack(self.inner.bounds, &Need { size, ..need }).is_some()
        })
    }

    /// Makes room for the states of a member, which stay in their shard, and reserves it.
    fn make_room(&mut self, member: &mut Loaded<'_>, now: Timestamp, all_admit: bool, room: &mut ReservedRoom<'_>) {
        self.load(member);
        let inner = self.inner;
        let log_guard = LogGuard { shared: inner, logs: member.before.logs };
        let need = member.need(now, all_admit);
        member.no_room = None;
        if !need.is_empty() && inner.usage.lack(inner.bounds, &need).is_some() {
            let Loaded { request, at, place: Place { key, number, .. }, .. } = *member;
            let located = Located { key, cell: &inner.shards[number], number, now };
            member.no_room = loop {
                let made = inner.make_room(self.shard(at), located, request, member.states, &need);
                let is_full = matches!(made, Err(NoRoom::Full(_))) && !request.policy.is_shadow();
                if !(is_full && self.evict_from_locked(located, &need)) {
                    break made.err();
                }
            };
        }
        mem::forget(log_guard);
        if member.no_room.is_none() {
            room.add(need.size);
        }
        self.save(member, now, None);
    }

    /// Evicts a key from one of the other locked shards, which the search of all shards skips. Returns
    /// `false` if none of them has a key to evict.
    fn evict_from_locked(&mut self, located: Located<'_>, need: &Need) -> bool {
        let Located { number: own, key, now, .. } = located;
        let Some(lack) = self.inner.usage.lack(self.inner.bounds, need) else { return true };
        for (place, shard) in self.places.iter().zip(&mut *self.shards).filter(|(place, _)| place.number != own) {
            let Some(shard) = shard else { continue };
            if let Search::Found(start, end) = shard.find_victim(key.hash, now, lack) {
                self.inner.evict(shard, place.number, now, start, end);
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
        let (shard, key) = (self.shard(member.at), member.place.key);
        member.states.fill(State::Fresh);
        let run = shard.run(key);
        member.before = shard.load(run, key, member.request.policy.limit_digests(), member.states);
    }

    /// Puts the states back. `decision` is the decision that has changed them.
    fn save(&mut self, member: &mut Loaded<'_>, now: Timestamp, decision: Option<&Decision>) {
        let Loaded { request, at, place: Place { key, number, .. }, before, ref mut states, .. } = *member;
        self.inner.shards[number].clear_hint(key.hash);
        let shard = self.shard(at);
        let (run, digests) = (shard.run(key), request.policy.limit_digests());
        let after = shard.save(run, key, digests, states, now, decision.map(Decision::statuses));
        self.inner.usage.resize(before, after);
    }
}

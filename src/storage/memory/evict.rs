//! Finds keys to evict, in one shard or in all, and counts the hits that find no room.

use std::mem;
use std::sync::atomic::Ordering;

use super::inner::{Located, MemoryInner, OnFull};
use super::shard::{LOG, Shard};
use super::size::{Need, Size};
use super::slot::TableSlot;
use super::usage::{Lack, MemoryUsage};
use crate::policy::{Limit, Op, Policy};
use crate::storage::StorageRequest;
use crate::strategy::State;
use crate::time::Timestamp;

/// The maximum number of keys per shard that are considered for eviction.
const MAX_KEYS_SEARCHED: usize = 8;

/// The maximum number of slots per shard that are searched for a key with a log.
const MAX_SLOTS_SEARCHED: usize = 256;

/// The minimum pause in microseconds after a search of all shards has found no key to evict. During
/// the pause, a new key searches only its own shard.
const MIN_PAUSE: u64 = 1_000;

/// The pause per shard, in microseconds.
const PAUSE_PER_SHARD: u64 = 8;

/// The factor by which the pause is longer after a search for a key with a log.
const LOG_PAUSE_FACTOR: u64 = 8;

/// The wait in microseconds that a refused hit reports if the time until there is room is unknown.
const UNKNOWN_WAIT: u64 = 1_000_000;

/// The reason for which a hit finds no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoRoom {
    /// All considered keys are being refused. The value is the time in microseconds until the first
    /// of them is admitted again.
    Full(u64),
    /// The key's own log is long, and cannot grow before its oldest entry expires. The value is the
    /// time in microseconds until then.
    OwnLog(u64),
    /// The hit is refused anyway, and its strike on a lockout by refusals is not counted.
    Strike,
}

impl NoRoom {
    pub(super) fn wait(self) -> u64 {
        match self {
            Self::Full(wait) | Self::OwnLog(wait) => wait,
            Self::Strike => UNKNOWN_WAIT,
        }
    }
}

/// The result of a search for a key to evict.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Search {
    /// The states of a key that can be evicted are in this range of slots.
    Found(usize, usize),
    /// All considered keys are being refused. The value is the time in microseconds until the first
    /// of them is admitted again.
    Full(u64),
}

/// The result of the insertion of a slot.
pub(super) enum Put {
    /// The slot was added.
    Added,
    /// The slot replaces this slot of an evicted key.
    Replaced(TableSlot),
    /// The storage is full, and all considered keys are being refused. The value is the time in microseconds
    /// until the first of them is admitted again.
    Full(u64),
    /// Nothing has changed, and the general path must decide, because it can evict keys with
    /// several slots or a log.
    Unclear,
}

impl MemoryInner {
    /// Evicts keys until there is room for the states of a hit.
    #[cold]
    pub(super) fn make_room(
        &self,
        shard: &mut Shard,
        located: Located<'_>,
        request: &StorageRequest<'_>,
        states: &mut [State],
        need: &Need,
    ) -> Result<(), NoRoom> {
        // A lockout by refusals admits any cost.
        let never_fits =
            |limit: &Limit| limit.needed(request.cost) > limit.capacity() && !limit.counts_refusals_of_others();
        let is_fresh = states.iter().all(|state| *state == State::Fresh);
        let is_refused = if is_fresh {
            request.policy.limits().iter().any(never_fits)
        } else {
            request.policy.decide(states, located.now, Op::Peek, request.cost).is_refused()
        };
        match request.op {
            Op::Peek if is_refused => return Ok(()),
            Op::Hit if is_refused => {
                let need = need.of_refusal(request.policy, states);
                let has_room = need.is_empty() || self.evict_for(shard, located, request, states, &need).is_ok();
                return if has_room { Ok(()) } else { Err(NoRoom::Strike) };
            }
            _ => {}
        }
        if request.policy.is_shadow() {
            // A shadow limit must not evict keys of enforced limits.
            return Err(NoRoom::Full(longest_period(request.policy)));
        }
        self.evict_for(shard, located, request, states, need)
    }

    fn evict_for(
        &self,
        shard: &mut Shard,
        located: Located<'_>,
        request: &StorageRequest<'_>,
        states: &[State],
        need: &Need,
    ) -> Result<(), NoRoom> {
        let Located { number, key, now, .. } = located;
        while let Some(lack) = self.usage.lack(self.bounds, need) {
            if MemoryUsage::must_not_evict(self.bounds, need) {
                return Err(NoRoom::OwnLog(expires_in(states, now)));
            }
            match shard.find_victim(key.hash, now, lack) {
                Search::Found(..) if request.op == Op::Peek => return Ok(()),
                Search::Found(start, end) => self.evict(shard, number, now, start, end),
                Search::Full(soonest) => {
                    self.evict_from_other_shard(located, request.op, lack, soonest).map_err(NoRoom::Full)?;
                    if request.op == Op::Peek {
                        return Ok(());
                    }
                }
            }
        }
        Ok(())
    }

    pub(super) fn evict(&self, shard: &mut Shard, number: usize, now: Timestamp, start: usize, end: usize) {
        let mut slots = (start..end).filter_map(|index| shard.table.get(index));
        if slots.any(|slot| !slot.is_expired(now)) {
            self.usage.count_evicted();
        }
        if let Some(slot) = shard.table.get(start) {
            self.shards[number].clear_hint(slot.hash);
        }
        self.usage.resize(shard.evict(start, end), Size::default());
    }

    /// Evicts a key of another shard. If there is none, returns the wait in microseconds until
    /// there may be room.
    #[cold]
    pub(super) fn evict_from_other_shard(
        &self,
        located: Located<'_>,
        op: Op,
        lack: Lack,
        mut soonest: u64,
    ) -> Result<(), u64> {
        let Located { number, key, now, .. } = located;
        // During a flood of new keys, all shards are searched only once per pause.
        let (full_until, factor) = match lack {
            Lack::Room => (&self.full_until[0], 1),
            Lack::LogRoom => (&self.full_until[1], LOG_PAUSE_FACTOR),
        };
        let pause = factor * MIN_PAUSE.max(PAUSE_PER_SHARD * self.shards.len() as u64);
        let left = Timestamp::from_micros(full_until.load(Ordering::Relaxed)).since(now);
        let is_full = (1..=pause).contains(&left);
        for other in (1..self.shards.len()).map(|step| (number + step) % self.shards.len()) {
            if is_full {
                break;
            }
            // `try_lock` avoids a deadlock of two threads that need each other's shard. It skips the shards
            // that a decision on several keys has locked itself, which searches them afterwards.
            let Some(mut shard) = self.shards[other].try_lock() else { continue };
            match shard.find_victim(key.hash, now, lack) {
                Search::Found(start, end) => {
                    if op != Op::Peek {
                        self.evict(&mut shard, other, now, start, end);
                    }
                    return Ok(());
                }
                Search::Full(wait) => soonest = soonest.min(wait),
            }
        }
        if !is_full {
            full_until.store(now.plus(pause.min(soonest)).as_micros(), Ordering::Relaxed);
        }
        Err(if soonest == u64::MAX { UNKNOWN_WAIT } else { soonest })
    }

    /// Counts a hit that found no room. `is_final` is `false` if the caller sends the same hit
    /// again.
    #[cold]
    pub(super) fn count_full(&self, no_room: NoRoom, is_new: bool, is_final: bool) {
        if is_new && self.is_admitted(no_room) {
            self.counts.admitted();
        } else if is_final {
            self.counts.refused(is_new);
        }
    }

    /// Returns `true` if a new key is admitted without being stored.
    pub(super) fn is_admitted(&self, no_room: NoRoom) -> bool {
        self.on_full == OnFull::Admit && matches!(no_room, NoRoom::Full(_))
    }
}

fn longest_period(policy: &Policy) -> u64 {
    policy.limits().iter().map(|limit| limit.quota().period_micros()).max().unwrap_or(0)
}

/// Returns the time in microseconds until the oldest entry of each growing log has expired. Then
/// the logs need not grow for the hit.
fn expires_in(states: &[State], now: Timestamp) -> u64 {
    let expiry = |state: &State| match state {
        State::Log(log) if log.growth_at(now) > 0 => log.oldest_expires_at(),
        _ => None,
    };
    states.iter().filter_map(expiry).max().map_or(UNKNOWN_WAIT, |at| at.since(now))
}

impl Shard {
    /// Searches a few keys after `hash` for one to evict. Returns an expired key, or else the key
    /// that expires first of those that are not being refused.
    pub(super) fn find_victim(&self, hash: u64, now: Timestamp, lack: Lack) -> Search {
        let start_index = self.table.run(hash).end;
        let mut best: Option<(Timestamp, usize, usize)> = None;
        let mut soonest = u64::MAX;
        let mut index = start_index;
        let (mut seen, mut looked_at) = (0, 0);
        let mut wrapped = false;
        while seen < MAX_KEYS_SEARCHED && looked_at < MAX_SLOTS_SEARCHED {
            looked_at += usize::from(lack == Lack::LogRoom);
            if index >= self.table.slots() {
                if wrapped {
                    break;
                }
                wrapped = true;
                index = 0;
            }
            if wrapped && index >= start_index {
                break;
            }
            let Some(first) = self.table.get(index) else {
                index += 1;
                continue;
            };
            // The states of a key are in adjacent slots.
            let (mut until, mut refuses_for, mut end) = (first.evictable_from(), first.refuses_for(now), index + 1);
            let mut has_log = first.limit_hash & LOG != 0;
            while let Some(slot) = self.table.get(end).filter(|slot| slot.hash == first.hash) {
                until = until.max(slot.evictable_from());
                refuses_for = refuses_for.max(slot.refuses_for(now));
                has_log |= slot.limit_hash & LOG != 0;
                end += 1;
            }
            let start = mem::replace(&mut index, end);
            if first.hash == hash || lack == Lack::LogRoom && !has_log {
                continue;
            }
            seen += 1;
            if until <= now {
                return Search::Found(start, end);
            }
            if refuses_for > 0 {
                soonest = soonest.min(refuses_for);
            } else if best.is_none_or(|(earliest, ..)| until < earliest) {
                best = Some((until, start, end));
            }
        }
        match best {
            Some((_, start, end)) => Search::Found(start, end),
            None => Search::Full(soonest),
        }
    }

    /// Inserts a slot with a new hash at its place, `start`. If the storage is full, the slot
    /// replaces that of a key that can be evicted. The slots after `start` are searched in one pass
    /// for such a key, and for a vacant slot.
    pub(super) fn put(&mut self, start: usize, slot: TableSlot, full: bool, now: Timestamp) -> Put {
        if !full {
            self.table.insert_at(start, slot);
            return Put::Added;
        }
        let (mut gap, mut victim, mut seen) = (None, None, 0);
        let (mut earliest, mut soonest) = (Timestamp::EPOCH, u64::MAX);
        let mut previous = slot.hash;
        for (index, other) in (start..).zip(self.table.from(start)) {
            if other.is_vacant() {
                gap = gap.or(Some(index));
                continue;
            }
            // A key with several slots or a log cannot be evicted by replacing a single slot.
            if other.hash == previous || other.limit_hash & LOG != 0 {
                return Put::Unclear;
            }
            previous = other.hash;
            let (refuses_for, until) = (other.refuses_for(now), other.evictable_from());
            if refuses_for > 0 {
                soonest = soonest.min(refuses_for);
            } else if victim.is_none() || until < earliest {
                (earliest, victim) = (until, Some(index));
            }
            seen += 1;
            if seen == MAX_KEYS_SEARCHED || until <= now {
                if self.table.get(index + 1).is_some_and(|next| next.hash == previous) {
                    return Put::Unclear;
                }
                let Some(victim) = victim else { return Put::Full(soonest) };
                let forgotten = *self.table.slot(victim);
                self.table.replace(start, gap, victim, slot);
                return Put::Replaced(forgotten);
            }
        }
        Put::Unclear
    }
}

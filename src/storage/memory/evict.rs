use std::sync::atomic::Ordering;

use super::decide::Lookup;
use super::shard::{KeyHash, LOG, Shard};
use super::usage::{Lack, Need, Size, Usage};
use super::{OnFull, Shared};
use crate::storage::StorageRequest;
use crate::strategy::State;
use crate::{Op, Policy, Timestamp};

/// The number of keys that are looked at in a shard for one to make room.
pub(super) const LOOKS: usize = 8;

/// The number of slots that are looked at for a key that has a log.
const LOG_LOOKS: usize = 256;

/// After no shard had room, none is looked at again for so long: microseconds, and for each shard. A
/// look for logs takes longer.
const PAUSE: u64 = 1_000;
const PAUSE_FOR_EACH: u64 = 8;
const PAUSE_FOR_LOGS: u64 = 8;

/// The wait of a refused newcomer if it is not known when there will be room.
const UNKNOWN_WAIT: u64 = 1_000_000;

/// A hit for which there is no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoRoom {
    /// Every key that was looked at is being refused, the first one for so many microseconds more.
    Full(u64),
    /// The key's own log is long and cannot grow before its oldest entry expires, in so many
    /// microseconds.
    OwnLog(u64),
}

impl NoRoom {
    pub(super) fn wait(self) -> u64 {
        match self {
            Self::Full(wait) | Self::OwnLog(wait) => wait,
        }
    }
}

/// A key that makes room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Room {
    /// The states in these slots can go.
    Take(usize, usize),
    /// No key that was looked at can go. The first one is admitted again after so many microseconds.
    Full(u64),
}

impl Shared {
    /// Makes room for what the hit would store.
    #[cold]
    pub(super) fn make_room(
        &self,
        place: &mut Lookup<'_>,
        ask: &StorageRequest<'_>,
        states: &mut [State],
        need: &Need,
    ) -> Result<(), NoRoom> {
        let &mut Lookup { ref mut shard, number, key, now } = place;
        // A hit that is refused anyway is not stored and needs no room.
        let is_fresh = states.iter().all(|state| *state == State::Fresh);
        let is_refused = if is_fresh {
            ask.policy.limits().iter().any(|limit| ask.cost > limit.capacity())
        } else {
            ask.policy.decide(states, now, Op::Peek, ask.cost).is_refused()
        };
        if is_refused {
            return Ok(());
        }
        if ask.policy.is_shadow() {
            // No key is evicted for a limit that is not enforced.
            return Err(NoRoom::Full(longest_period(ask.policy)));
        }
        while let Some(lack) = self.usage.lack(self.bounds, need) {
            if Usage::is_own_fault(self.bounds, need) {
                return Err(NoRoom::OwnLog(expires_in(states, now)));
            }
            match shard.look_for_room(key.hash, now, lack) {
                Room::Take(..) if ask.op == Op::Peek => return Ok(()),
                Room::Take(start, end) => self.evict(shard, number, start, end),
                Room::Full(soonest) => {
                    self.make_room_elsewhere(number, key, now, ask.op, lack, soonest).map_err(NoRoom::Full)?;
                    if ask.op == Op::Peek {
                        return Ok(());
                    }
                }
            }
        }
        Ok(())
    }

    fn evict(&self, shard: &mut Shard, number: usize, start: usize, end: usize) {
        if let Some(slot) = shard.table.get(start) {
            self.shards[number].retract(slot.hash);
        }
        self.usage.settle(shard.evict(start, end), Size::default());
    }

    /// Evicts a key of another shard, when the key's own has none to evict. Returns the wait until
    /// there may be room if no shard has any.
    #[cold]
    pub(super) fn make_room_elsewhere(
        &self,
        number: usize,
        key: KeyHash,
        now: Timestamp,
        op: Op,
        lack: Lack,
        mut soonest: u64,
    ) -> Result<(), u64> {
        // A flood of newcomers does not look into all shards each time.
        let (full_until, times) = match lack {
            Lack::Room => (&self.full_until[0], 1),
            Lack::LogRoom => (&self.full_until[1], PAUSE_FOR_LOGS),
        };
        let pause = times * PAUSE.max(PAUSE_FOR_EACH * self.shards.len() as u64);
        let left = Timestamp::from_micros(full_until.load(Ordering::Relaxed)).since(now);
        let is_full = (1..=pause).contains(&left);
        for other in (1..self.shards.len()).map(|step| (number + step) % self.shards.len()) {
            if is_full {
                break;
            }
            // Two threads that wait for each other's shard would wait forever.
            let Some(mut shard) = self.try_lock(other) else { continue };
            match shard.look_for_room(key.hash, now, lack) {
                Room::Take(start, end) => {
                    if op == Op::Hit {
                        self.evict(&mut shard, other, start, end);
                    }
                    return Ok(());
                }
                Room::Full(wait) => soonest = soonest.min(wait),
            }
        }
        if !is_full {
            full_until.store(now.plus(pause.min(soonest)).as_micros(), Ordering::Relaxed);
        }
        Err(if soonest == u64::MAX { UNKNOWN_WAIT } else { soonest })
    }

    /// Counts a hit for which there was no room. `is_final` is `false` if it is asked for again.
    #[cold]
    pub(super) fn count_full(&self, no_room: NoRoom, is_new: bool, is_final: bool) {
        if is_new && self.is_admitted(no_room) {
            self.counts.admitted();
        } else if is_final {
            self.counts.refused(is_new);
        }
    }

    /// Returns `true` if a newcomer is admitted although nothing is stored of it.
    pub(super) fn is_admitted(&self, no_room: NoRoom) -> bool {
        self.on_full == OnFull::Admit && matches!(no_room, NoRoom::Full(_))
    }
}

fn longest_period(policy: &Policy) -> u64 {
    policy.limits().iter().map(|limit| limit.quota().period_micros()).max().unwrap_or(0)
}

/// The time until no log has to grow for a hit.
fn expires_in(states: &[State], now: Timestamp) -> u64 {
    let expiry = |state: &State| match state {
        State::Log(log) if log.growth_at(now) > 0 => log.oldest_expires_at(),
        _ => None,
    };
    states.iter().filter_map(expiry).max().map_or(UNKNOWN_WAIT, |at| at.since(now))
}

impl Shard {
    /// Looks at a few keys near `hash`, but not at its own, for one to make room: one that has expired,
    /// else the one that is forgotten soonest of those that would be admitted.
    fn look_for_room(&self, hash: u64, now: Timestamp, lack: Lack) -> Room {
        let behind = self.table.run(hash).end;
        let mut best: Option<(Timestamp, usize, usize)> = None;
        let mut soonest = u64::MAX;
        let mut index = behind;
        let (mut seen, mut looked_at) = (0, 0);
        let mut wrapped = false;
        while seen < LOOKS && looked_at < LOG_LOOKS {
            looked_at += usize::from(lack == Lack::LogRoom);
            if index >= self.table.slots() {
                if wrapped {
                    break;
                }
                wrapped = true;
                index = 0;
            }
            if wrapped && index >= behind {
                break;
            }
            let Some(first) = self.table.get(index) else {
                index += 1;
                continue;
            };
            // The states of one key stand side by side.
            let (mut until, mut refuses_for, mut end) = (first.makes_room_from(), first.refuses_for(now), index + 1);
            let mut has_log = first.limit & LOG != 0;
            while let Some(slot) = self.table.get(end).filter(|slot| slot.hash == first.hash) {
                until = until.max(slot.makes_room_from());
                refuses_for = refuses_for.max(slot.refuses_for(now));
                has_log |= slot.limit & LOG != 0;
                end += 1;
            }
            let start = std::mem::replace(&mut index, end);
            if first.hash == hash || lack == Lack::LogRoom && !has_log {
                continue;
            }
            seen += 1;
            if until <= now {
                return Room::Take(start, end);
            }
            if refuses_for > 0 {
                soonest = soonest.min(refuses_for);
            } else if best.is_none_or(|(earliest, ..)| until < earliest) {
                best = Some((until, start, end));
            }
        }
        match best {
            Some((_, start, end)) => Room::Take(start, end),
            None => Room::Full(soonest),
        }
    }
}

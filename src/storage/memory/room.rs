use std::sync::atomic::Ordering;

use super::Shared;
use super::shard::{KeyHash, Shard};
use crate::storage::Ask;
use crate::strategy::State;
use crate::{Op, Timestamp};

/// How many keys are looked at for one to make room.
pub(super) const LOOKS: usize = 8;

/// What can be done about a storage that is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Room {
    /// The states in these slots can go.
    Take(usize, usize),
    /// Nothing can: of the keys that were looked at, the first one is admitted again after so many microseconds.
    Crowded(u64),
    /// There are no other keys here.
    Alone,
}

impl Shared {
    /// Forgets all keys. Returns how many there were.
    pub(super) fn forget_all(&self) -> u64 {
        let forget = |number: usize| {
            let mut shard = self.lock(number);
            self.shards[number].take_down_any();
            let (keys, weight) = shard.reset();
            drop(shard);
            self.settle(weight, 0);
            keys
        };
        (0..self.shards.len()).map(forget).sum()
    }

    pub(super) fn is_full(&self) -> bool {
        self.weight.load(Ordering::Relaxed) >= self.max_weight
    }

    /// Makes room for what the hit would store. If there is none, how long until there may be.
    #[cold]
    pub(super) fn make_room(
        &self,
        shard: &mut Shard,
        number: usize,
        key: KeyHash,
        now: Timestamp,
        ask: &Ask<'_>,
        states: &mut [State],
    ) -> Option<u64> {
        // What is refused anyway is not stored and needs no room.
        let is_new = states.iter().all(|state| *state == State::Fresh);
        let refused = if is_new {
            ask.policy.limits().iter().any(|limit| ask.cost > limit.capacity())
        } else {
            ask.policy.decide(states, now, Op::Peek, ask.cost).is_refused()
        };
        if refused {
            return None;
        }
        if ask.policy.is_shadow() {
            // Nobody has to go for what is only tried out.
            return Some(ask.policy.limits().iter().map(|limit| limit.quota().period_micros()).max().unwrap_or(0));
        }
        while self.is_full() {
            match shard.look_for_room(key.hash, now) {
                Room::Take(..) if ask.op == Op::Peek => return None,
                Room::Take(start, end) => self.evict(shard, number, start, end),
                Room::Crowded(soonest) => return Some(soonest),
                Room::Alone => return self.make_room_elsewhere(number, key, now, ask.op),
            }
        }
        None
    }

    fn evict(&self, shard: &mut Shard, number: usize, start: usize, end: usize) {
        if let Some(slot) = shard.table.get(start) {
            self.shards[number].take_down(slot.hash);
        }
        self.settle(shard.evict(start, end), 0);
    }

    /// The same in the other shards, when there is no other key in the key's own.
    fn make_room_elsewhere(&self, number: usize, key: KeyHash, now: Timestamp, op: Op) -> Option<u64> {
        let mut soonest = None;
        for other in (1..self.shards.len()).map(|step| (number + step) % self.shards.len()) {
            // Two that wait for each other's shard would wait forever.
            let Some(mut shard) = self.try_lock(other) else { continue };
            match shard.look_for_room(key.hash, now) {
                Room::Take(..) if op == Op::Peek => return None,
                Room::Take(start, end) => {
                    self.evict(&mut shard, other, start, end);
                    return None;
                }
                Room::Crowded(wait) => soonest = Some(soonest.map_or(wait, |least: u64| least.min(wait))),
                Room::Alone => {}
            }
        }
        soonest
    }
}

impl Shard {
    /// Looks at a few keys near `hash`, but not at it, for one to make room: one that has expired, else the one that
    /// is forgotten soonest of those that would be admitted.
    fn look_for_room(&self, hash: u64, now: Timestamp) -> Room {
        let behind = self.table.run(hash).end;
        let mut best: Option<(Timestamp, usize, usize)> = None;
        let mut soonest = u64::MAX;
        let mut index = behind;
        let mut seen = 0;
        let mut wrapped = false;
        while seen < LOOKS {
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
            while let Some(slot) = self.table.get(end).filter(|slot| slot.hash == first.hash) {
                until = until.max(slot.makes_room_from());
                refuses_for = refuses_for.max(slot.refuses_for(now));
                end += 1;
            }
            let start = std::mem::replace(&mut index, end);
            if first.hash == hash {
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
            None if seen == 0 => Room::Alone,
            None => Room::Crowded(soonest),
        }
    }
}

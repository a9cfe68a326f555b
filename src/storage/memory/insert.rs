use super::Shared;
use super::decide::{Lookup, Want};
use super::evict::{LOOKS, NoRoom};
use super::shard::{LOG, Shard};
use super::slot::Slot;
use super::usage::{Lack, Need};
use crate::policy::SHADOW;
use crate::storage::StorageRequest;
use crate::strategy::{Outcome, State};
use crate::{Op, Timestamp};

/// What became of a key that was not there.
pub(super) enum NewKey {
    /// It was admitted, and has left this.
    Decided(State, Outcome),
    /// There is no room: all keys that were looked at are being refused, the first one for so many
    /// microseconds more.
    Crowded(u64),
}

/// Where a new slot went.
enum Put {
    /// Into a gap.
    Added,
    /// To where a key with this hash was, which is forgotten.
    Replaced(u64),
    Crowded(u64),
    /// Not decided here.
    Unclear,
}

impl Shared {
    /// A flood of new keys is decided here: a hit on a policy of one limit, whose key is not there, and whose state is small.
    /// `None` leaves everything as it was, for the way that knows all cases.
    pub(super) fn take_in(&self, place: &mut Lookup<'_>, ask: &StorageRequest<'_>, want: Want) -> Option<NewKey> {
        if ask.op == Op::Peek || ask.cost == 0 {
            return None;
        }
        let ([limit], &[digest]) = (ask.policy.limits(), ask.policy.limit_digests()) else { return None };
        if digest & SHADOW != 0 {
            return None;
        }
        let start = place.shard.table.place(place.key.hash);
        if place.shard.table.get(start).is_some_and(|first| first.hash == place.key.hash) {
            return None;
        }
        let mut state = State::Fresh;
        let outcome = limit.hit(&mut state, place.now, ask.cost);
        let State::Counts { until, .. } = state else { return None };
        let unwanted = want != Want::Decision && outcome.is_delayed();
        if until <= place.now || outcome == Outcome::Refused || unwanted {
            return None;
        }
        let mut slot = Slot::new(place.key.hash, place.key.limit(digest), until);
        slot.update(&state, place.now, limit, Some(outcome));
        let lack = self.usage.lack(self.bounds, &Need::SMALL);
        match place.shard.put(start, slot, lack.is_some(), place.now) {
            Put::Added => self.usage.add_small(),
            Put::Replaced(forgotten) => self.shards[place.number].retract(forgotten),
            Put::Crowded(soonest) => {
                match self.make_room_elsewhere(place.number, place.key, place.now, ask.op, Lack::Room, soonest) {
                    Ok(()) => {
                        place.shard.table.insert_at(start, slot);
                        self.usage.add_small();
                    }
                    Err(soonest) => {
                        let no_room = NoRoom::Full(soonest);
                        self.count_full(no_room, true, want != Want::Yes);
                        let is_admitted = self.is_admitted(no_room);
                        return Some(if is_admitted {
                            NewKey::Decided(state, outcome)
                        } else {
                            NewKey::Crowded(soonest)
                        });
                    }
                }
            }
            Put::Unclear => return None,
        }
        self.shards[place.number].retract(place.key.hash);
        Some(NewKey::Decided(state, outcome))
    }
}

impl Shard {
    /// Puts in a slot whose hash is not there, at its place in the table; when all is full, in the place of one of the keys that
    /// [make room](Shared::make_room). The two happen side by side, so both are done in one pass.
    fn put(&mut self, start: usize, slot: Slot, full: bool, now: Timestamp) -> Put {
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
            // What takes several slots, or a log beside them, is not forgotten in one go.
            if other.hash == previous || other.limit & LOG != 0 {
                return Put::Unclear;
            }
            previous = other.hash;
            let (refuses_for, until) = (other.refuses_for(now), other.makes_room_from());
            if refuses_for > 0 {
                soonest = soonest.min(refuses_for);
            } else if victim.is_none() || until < earliest {
                (earliest, victim) = (until, Some(index));
            }
            seen += 1;
            if seen == LOOKS || until <= now {
                if self.table.get(index + 1).is_some_and(|next| next.hash == previous) {
                    return Put::Unclear;
                }
                let Some(victim) = victim else { return Put::Crowded(soonest) };
                let forgotten = self.table.slot(victim).hash;
                self.table.replace(start, gap, victim, slot);
                return Put::Replaced(forgotten);
            }
        }
        Put::Unclear
    }
}

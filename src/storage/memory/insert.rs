use super::MemoryInner;
use super::answer::Mode;
use super::evict::{MAX_KEYS_SEARCHED, NoRoom};
use super::lookup::Lookup;
use super::shard::{LOG, Shard};
use super::size::Need;
use super::slot::Slot;
use super::usage::Lack;
use crate::policy::{Op, SHADOW};
use crate::storage::StorageRequest;
use crate::strategy::{Outcome, State};
use crate::time::Timestamp;

/// The result of a hit on a new key.
pub(super) enum NewKey {
    /// The hit was admitted. This is its state and outcome.
    Decided(State, Outcome),
    /// The storage is full, and all considered keys are being refused. The value is the time in
    /// microseconds until the first of them is admitted again.
    Full(u64),
}

/// The result of the insertion of a slot.
enum Put {
    /// The slot was added.
    Added,
    /// The slot replaces this slot of an evicted key.
    Replaced(Slot),
    /// The storage is full, as in [`NewKey::Full`].
    Full(u64),
    /// Nothing has changed, and the general path must decide, because it can evict keys with
    /// several slots or a log.
    Unclear,
}

impl MemoryInner {
    /// Decides a hit of a new key on a policy with one limit and a small state. This is the common
    /// case in a flood of new keys. Returns `None` in all other cases. Nothing has changed then,
    /// and the general path must decide.
    pub(super) fn insert_new(
        &self,
        lookup: &mut Lookup<'_>,
        request: &StorageRequest<'_>,
        mode: Mode,
    ) -> Option<NewKey> {
        if request.op == Op::Peek || request.cost == 0 {
            return None;
        }
        let ([limit], &[digest]) = (request.policy.limits(), request.policy.limit_digests()) else { return None };
        if digest & SHADOW != 0 {
            return None;
        }
        let start = lookup.shard.table.place(lookup.key.hash);
        if lookup.shard.table.get(start).is_some_and(|first| first.hash == lookup.key.hash) {
            return None;
        }
        let mut state = State::Fresh;
        let outcome = limit.hit(&mut state, lookup.now, request.cost);
        let State::Counts { until, .. } = state else { return None };
        let unwanted = mode != Mode::Decision && outcome.is_delayed();
        if until <= lookup.now || outcome == Outcome::Refused || unwanted {
            return None;
        }
        let mut slot = Slot::new(lookup.key.hash, lookup.key.limit(digest), until);
        slot.update(&state, lookup.now, limit, outcome);
        let lack = self.usage.lack(self.bounds, &Need::SMALL);
        match lookup.shard.put(start, slot, lack.is_some(), lookup.now) {
            Put::Added => self.usage.add_small(),
            Put::Replaced(forgotten) => {
                if !forgotten.is_expired(lookup.now) {
                    self.usage.count_evicted();
                }
                lookup.padded.clear_hint(forgotten.hash);
            }
            Put::Full(soonest) => {
                match self.evict_from_other_shard(
                    lookup.number,
                    lookup.key,
                    lookup.now,
                    request.op,
                    Lack::Room,
                    soonest,
                ) {
                    Ok(()) => {
                        lookup.shard.table.insert_at(start, slot);
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
        lookup.padded.clear_hint(lookup.key.hash);
        Some(NewKey::Decided(state, outcome))
    }
}

impl Shard {
    /// Inserts a slot with a new hash at its place, `start`. If the storage is full, the slot
    /// replaces that of a key that can be evicted. The slots after `start` are searched in one pass
    /// for such a key, and for a vacant slot.
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
            // A key with several slots or a log cannot be evicted by replacing a single slot.
            if other.hash == previous || other.limit & LOG != 0 {
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

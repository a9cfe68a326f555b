//! The refusals that are known, and the hits that are under way.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::entry::Entry;
use crate::storage::counters::Counters;
use crate::storage::key_table::{Bucket, Table, TableKey};
use crate::storage::{Clock, StorageRequest};
use crate::{Decision, Key, Policy, Timestamp};

/// Of so many costs, or quotas of one name, refusals of one key are kept.
const KINDS: usize = 4;

/// What the handles on a cache share.
#[derive(Debug)]
pub(super) struct Cache {
    table: Table<RefusalEntry>,
    /// How many keys have a refusal.
    held: AtomicUsize,
    pub(super) counters: Counters,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) max_keys: usize,
    /// In microseconds.
    pub(super) ttl: u64,
}

/// What is known of one key under one policy's name.
#[derive(Debug, Default)]
struct RefusalEntry {
    held: Vec<Entry>,
    /// How many hits are under way, and the most that any of them costs.
    under_way: u32,
    dearest: u32,
    /// How often what was known then has become doubtful. It is kept for as long as a hit is under way that began before.
    changes: u64,
}

/// What the storage is asked, or what is known already.
pub(super) enum Beginning {
    Cache(Decision),
    StorageRequest(UnderWay),
}

impl Cache {
    pub(super) fn new(max_keys: usize, ttl: u64, clock: Arc<dyn Clock>) -> Self {
        let (table, held, counters) =
            (Table::new(max_keys), AtomicUsize::new(0), Counters::new("ratelimit_refusal_cache_total"));
        Self { table, held, counters, clock, max_keys, ttl }
    }

    pub(super) fn len(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }

    fn place(&self, policy: &Policy, key: &Key) -> TableKey {
        // A limit that is only tried out has the digest of its policy, and states of its own.
        let what = if policy.is_shadow() { policy.limit_digests().first().copied().unwrap_or_default() } else { 0 };
        self.table.place(policy, what, key)
    }

    /// Whether it is known what a hit is answered.
    pub(super) fn knows(&self, ask: &StorageRequest<'_>) -> bool {
        let (place, now) = (self.place(ask.policy, ask.key), self.clock.now());
        self.table.lock(place).find().is_some_and(|of_key| of_key.knows(ask, now))
    }

    /// What a hit is answered, if that is known, and else it is under way from now on.
    pub(super) fn begin(self: &Arc<Self>, ask: &StorageRequest<'_>) -> Beginning {
        let (place, now) = (self.place(ask.policy, ask.key), self.clock.now());
        let mut bucket = self.table.lock(place);
        if let Some(decision) = bucket.find().and_then(|of_key| of_key.answer(ask, now)) {
            self.counters.here(ask.policy);
            return Beginning::Cache(decision);
        }
        self.sweep(&mut bucket, now);
        let of_key = bucket.find_or_insert(RefusalEntry::default);
        of_key.held.iter_mut().for_each(|held| held.lend(ask.policy, ask.cost, now));
        (of_key.under_way, of_key.dearest) = (of_key.under_way + 1, of_key.dearest.max(ask.cost));
        let changes = of_key.changes;
        self.counters.asked(ask.policy);
        let (known, policy) = (Arc::clone(self), ask.policy.clone());
        Beginning::StorageRequest(UnderWay { known, policy, place, cost: ask.cost, sent: now, changes, in_doubt: true })
    }

    /// The key has been given something, or may have been, or has spent something.
    pub(super) fn forget(&self, policy: &Policy, key: &Key) {
        self.forget_at(self.place(policy, key));
    }

    fn forget_at(&self, place: TableKey) {
        let mut bucket = self.table.lock(place);
        if let Some(of_key) = bucket.find() {
            of_key.changes += 1;
            self.keep_only(of_key, |_| false);
            bucket.retain(|of_key| !of_key.is_idle());
        }
    }

    /// Keeps only some of what is known of a key.
    fn keep_only(&self, of_key: &mut RefusalEntry, stays: impl FnMut(&Entry) -> bool) {
        let before = of_key.held.len();
        of_key.held.retain(stays);
        if before > 0 && of_key.held.is_empty() {
            of_key.held = Vec::new();
            self.held.fetch_sub(1, Ordering::Relaxed);
        }
    }

    fn sweep(&self, bucket: &mut Bucket<'_, RefusalEntry>, now: Timestamp) {
        bucket.retain(|of_key| {
            self.keep_only(of_key, |held| !held.is_gone(now));
            !of_key.is_idle()
        });
    }

    /// Keeps a refusal. When there is no room for one more key, the one goes whose refusal is over first.
    fn keep(&self, bucket: &mut Bucket<'_, RefusalEntry>, held: Entry) {
        let ways = bucket.ways;
        let is_new = bucket.find().is_some_and(|of_key| of_key.held.is_empty());
        let taken = bucket.others().filter(|of_key| !of_key.held.is_empty()).count();
        if is_new && taken >= ways {
            let others = bucket.others().filter_map(|of_key| Some((of_key.end()?, of_key)));
            let Some((_, soonest)) = others.min_by_key(|(end, _)| *end).filter(|(end, _)| *end <= held.end) else {
                return;
            };
            self.keep_only(soonest, |_| false);
            bucket.retain(|of_key| !of_key.is_idle());
        }
        let Some(of_key) = bucket.find() else { return };
        if is_new {
            self.held.fetch_add(1, Ordering::Relaxed);
        }
        of_key.held.retain(|other| !held.is_instead_of(other));
        if of_key.held.len() == KINDS {
            of_key.held.remove(0);
        }
        of_key.held.push(held);
    }
}

impl RefusalEntry {
    fn knows(&self, ask: &StorageRequest<'_>, now: Timestamp) -> bool {
        self.find(ask, now).is_some()
    }

    fn answer(&self, ask: &StorageRequest<'_>, now: Timestamp) -> Option<Decision> {
        Some(self.find(ask, now)?.answer(ask.cost, now))
    }

    /// Finds the refusal that answers a hit.
    ///
    /// A cost for which only a lower bound of the wait is known is a miss, so that its exact wait
    /// becomes known, unless there is no room for another cost or a caller is asking already. So a
    /// client that varies its costs does not reach the storage with each of them.
    fn find(&self, ask: &StorageRequest<'_>, now: Timestamp) -> Option<&Entry> {
        let answers = || self.held.iter().filter(|held| held.answers(ask.policy, ask.cost, now));
        // The last one is the newest.
        if let Some(exact) = answers().rfind(|held| held.is_exact(ask.cost)) {
            return Some(exact);
        }
        let is_full = || self.held.iter().filter(|held| now < held.end).count() == KINDS;
        let may_estimate = self.under_way > 0 || is_full();
        answers().max_by_key(|held| held.until(ask.cost)).filter(|_| may_estimate)
    }

    /// When the last of what is known is over.
    fn end(&self) -> Option<Timestamp> {
        self.held.iter().map(|held| held.end).max()
    }

    fn is_idle(&self) -> bool {
        self.held.is_empty() && self.under_way == 0
    }
}

/// A hit for which the storage was asked. However it ends, it is under way no longer when this is dropped.
#[derive(Debug)]
pub(super) struct UnderWay {
    known: Arc<Cache>,
    policy: Policy,
    place: TableKey,
    cost: u32,
    /// When the storage had not been asked yet.
    sent: Timestamp,
    changes: u64,
    in_doubt: bool,
}

impl UnderWay {
    /// The storage has decided.
    pub(super) fn decided(mut self, decision: &Decision) {
        self.in_doubt = false;
        if decision.is_admitted() {
            // Less remains than was known, or more than was known had come back.
            return self.known.forget_at(self.place);
        }
        let known = &self.known;
        let held = Entry::of(&self.policy, decision, self.sent, known.clock.now(), known.ttl);
        let mut bucket = known.table.lock(self.place);
        let unchanged = bucket.find().is_some_and(|of_key| of_key.changes == self.changes);
        if let Some(held) = held.filter(|_| unchanged) {
            known.keep(&mut bucket, held);
        }
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        let mut bucket = self.known.table.lock(self.place);
        let Some(of_key) = bucket.find() else { return };
        of_key.under_way -= 1;
        // Nobody knows whether it has spent anything. What its own quota refused for costing no more than this did not change by it.
        if self.in_doubt {
            of_key.changes += u64::from(of_key.dearest > self.cost);
            self.known.keep_only(of_key, |held| held.cost() <= self.cost && *held.policy() == self.policy);
        }
        of_key.held.iter_mut().for_each(Entry::take_back);
        if of_key.under_way == 0 {
            of_key.dearest = 0;
        }
        bucket.retain(|of_key| !of_key.is_idle());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::storage::ManualClock;
    use crate::strategy::Status;
    use crate::{Op, Quota};

    /// Hits that are under way stand in no bound, so they must not stay.
    #[test]
    fn nothing_stays_of_hits_that_have_ended() {
        let known = Arc::new(Cache::new(1, 1_000, Arc::new(ManualClock::default())));
        let policy = Policy::from(Quota::per_day(1));
        let keys: Vec<Key> = (0..50_u64).map(Key::from).collect();
        let begin = |key| match known.begin(&StorageRequest::new(&policy, key, Op::Hit, 1)) {
            Beginning::StorageRequest(under_way) => under_way,
            Beginning::Cache(_) => panic!("nothing is known"),
        };
        let admitted = Decision::of(Timestamp::EPOCH, 1, Status::admitted(1, 0, 9));
        let contended = policy.refuse(Timestamp::EPOCH, 1, 9).contended();
        for end in [None, Some(&admitted), Some(&contended)] {
            let all: Vec<UnderWay> = keys.iter().chain(&keys).map(begin).collect();
            assert_eq!(known.table.count(|_| true), 50);
            for under_way in all {
                match end {
                    Some(decision) => under_way.decided(decision),
                    None => drop(under_way),
                }
            }
            assert_eq!((known.table.count(|_| true), known.len()), (0, 0), "{end:?}");
        }
        for key in &keys {
            begin(key).decided(&policy.refuse(Timestamp::EPOCH, 1, 9));
            known.forget(&policy, key);
        }
        assert_eq!((known.table.count(|_| true), known.len()), (0, 0));
    }
}

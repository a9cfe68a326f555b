//! The cached refusals, and the hits that are in flight.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::entry::CachedRefusal;
use crate::decision::Decision;
use crate::key::Key;
use crate::policy::Policy;
use crate::storage::key_table::{Bucket, KeyTable, TableKey};
use crate::storage::metrics::Counters;
use crate::storage::{Clock, StorageRequest};
use crate::time::Timestamp;

/// The maximum number of refusals per key, of different costs or quotas.
const MAX_REFUSALS: usize = 4;

/// The state that all handles to a cache share.
#[derive(Debug)]
pub(super) struct Cache {
    table: KeyTable<KeyEntry>,
    /// The number of keys with a refusal.
    keys: AtomicUsize,
    pub(super) counters: Counters,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) max_keys: usize,
    /// The time to live in microseconds.
    pub(super) ttl: u64,
}

/// The refusals of one key by policies with the same identity.
#[derive(Debug, Default)]
struct KeyEntry {
    refusals: Vec<CachedRefusal>,
    /// The number of hits in flight.
    in_flight: u32,
    /// The largest cost of a hit in flight.
    max_cost: u32,
    /// The number of times that the refusals became invalid. The refusal of a hit that was sent
    /// before the latest change is not added.
    changes: u64,
}

/// The result of a lookup: `Hit` with the cached decision, or `Miss` if the request goes to the
/// storage.
pub(super) enum CacheLookup {
    Hit(Decision),
    Miss(PendingMiss),
}

impl Cache {
    pub(super) fn new(max_keys: usize, ttl: u64, clock: Arc<dyn Clock>) -> Self {
        let (table, keys, counters) =
            (KeyTable::new(max_keys), AtomicUsize::new(0), Counters::new("ratelimit_refusal_cache_total"));
        Self { table, keys, counters, clock, max_keys, ttl }
    }

    pub(super) fn len(&self) -> usize {
        self.keys.load(Ordering::Relaxed)
    }

    /// Returns the table key.
    fn place(&self, policy: &Policy, key: &Key) -> TableKey {
        self.table.place(policy, key)
    }

    /// Returns the answer to a hit if the cache has one.
    pub(super) fn answer(&self, request: &StorageRequest<'_>) -> Option<Decision> {
        let (place, now) = (self.place(request.policy, request.key), self.clock.now());
        self.table.lock(place).find()?.answer(request, now)
    }

    /// Answers a hit from the cache, or records that it is in flight.
    pub(super) fn look_up(self: &Arc<Self>, request: &StorageRequest<'_>) -> CacheLookup {
        let (place, now) = (self.place(request.policy, request.key), self.clock.now());
        let mut bucket = self.table.lock(place);
        if let Some(decision) = bucket.find().and_then(|entry| entry.answer(request, now)) {
            self.counters.here(request.policy);
            return CacheLookup::Hit(decision);
        }
        CacheLookup::Miss(self.begin_in(bucket, place, request, now))
    }

    /// Records that a hit is in flight, even if the cache could answer it.
    pub(super) fn begin(self: &Arc<Self>, request: &StorageRequest<'_>) -> PendingMiss {
        let (place, now) = (self.place(request.policy, request.key), self.clock.now());
        self.begin_in(self.table.lock(place), place, request, now)
    }

    fn begin_in(
        self: &Arc<Self>,
        mut bucket: Bucket<'_, KeyEntry>,
        place: TableKey,
        request: &StorageRequest<'_>,
        now: Timestamp,
    ) -> PendingMiss {
        self.sweep(&mut bucket, now);
        let entry = bucket.find_or_insert(KeyEntry::default);
        entry.refusals.iter_mut().for_each(|refusal| refusal.serve_stale(request.policy, request.cost, now));
        (entry.in_flight, entry.max_cost) = (entry.in_flight + 1, entry.max_cost.max(request.cost));
        let changes = entry.changes;
        self.counters.asked(request.policy);
        let (cache, policy) = (Arc::clone(self), request.policy.clone());
        PendingMiss { cache, policy, place, cost: request.cost, sent: now, changes, is_undecided: true }
    }

    /// Removes the refusals of a key whose state has changed or may have changed.
    pub(super) fn invalidate(&self, policy: &Policy, key: &Key) {
        self.invalidate_at(self.place(policy, key));
    }

    fn invalidate_at(&self, place: TableKey) {
        let mut bucket = self.table.lock(place);
        if let Some(entry) = bucket.find() {
            entry.changes += 1;
            self.keep_only(entry, |_| false);
            bucket.retain(|entry| !entry.is_idle());
        }
    }

    /// Removes the refusals of all keys.
    pub(super) fn invalidate_all(&self) {
        self.table.visit_all(|entry| {
            entry.changes += 1;
            self.keep_only(entry, |_| false);
        });
    }

    /// Removes the refusals of a key for which `keep` returns `false`.
    fn keep_only(&self, entry: &mut KeyEntry, keep: impl FnMut(&CachedRefusal) -> bool) {
        let before = entry.refusals.len();
        entry.refusals.retain(keep);
        if before > 0 && entry.refusals.is_empty() {
            entry.refusals = Vec::new();
            self.keys.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Removes all expired refusals from a bucket.
    fn sweep(&self, bucket: &mut Bucket<'_, KeyEntry>, now: Timestamp) {
        bucket.retain(|entry| {
            self.keep_only(entry, |refusal| !refusal.is_expired(now));
            !entry.is_idle()
        });
    }

    /// Adds a refusal. If the bucket is full, removes the key whose refusals expire first. If even
    /// those expire later than the new refusal, does not add it.
    fn keep(&self, bucket: &mut Bucket<'_, KeyEntry>, refusal: CachedRefusal) {
        let ways = bucket.ways;
        let is_new = bucket.find().is_some_and(|entry| entry.refusals.is_empty());
        let taken = bucket.others().filter(|entry| !entry.refusals.is_empty()).count();
        if is_new && taken >= ways {
            let others = bucket.others().filter_map(|entry| Some((entry.end()?, entry)));
            let Some((_, soonest)) = others.min_by_key(|(end, _)| *end).filter(|(end, _)| *end <= refusal.end) else {
                return;
            };
            self.keep_only(soonest, |_| false);
            bucket.retain(|entry| !entry.is_idle());
        }
        let Some(entry) = bucket.find() else { return };
        if is_new {
            self.keys.fetch_add(1, Ordering::Relaxed);
        }
        entry.refusals.retain(|other| !refusal.replaces(other));
        if entry.refusals.len() == MAX_REFUSALS {
            entry.refusals.remove(0);
        }
        entry.refusals.push(refusal);
    }
}

impl KeyEntry {
    fn answer(&self, request: &StorageRequest<'_>, now: Timestamp) -> Option<Decision> {
        Some(self.find(request, now)?.answer(request.cost, now))
    }

    /// Returns the refusal that answers a hit.
    ///
    /// For some costs, the cached refusals give only a lower bound of the wait. A hit of such a
    /// cost is a miss, so that the storage returns the exact wait. There are two exceptions, in
    /// which the lower bound is used: the key has no room for another refusal, or another hit is in
    /// flight. So a client that varies its costs does not reach the storage with every hit.
    fn find(&self, request: &StorageRequest<'_>, now: Timestamp) -> Option<&CachedRefusal> {
        let answers = || self.refusals.iter().filter(|refusal| refusal.answers(request.policy, request.cost, now));
        // The last refusal is the newest.
        if let Some(exact) = answers().rfind(|refusal| refusal.is_exact(request.cost)) {
            return Some(exact);
        }
        let is_full = || self.refusals.iter().filter(|refusal| now < refusal.end).count() == MAX_REFUSALS;
        let may_estimate = self.in_flight > 0 || is_full();
        answers().max_by_key(|refusal| refusal.until(request.cost)).filter(|_| may_estimate)
    }

    /// Returns the time at which the last of the refusals expires.
    fn end(&self) -> Option<Timestamp> {
        self.refusals.iter().map(|refusal| refusal.end).max()
    }

    fn is_idle(&self) -> bool {
        self.refusals.is_empty() && self.in_flight == 0
    }
}

/// A hit that was sent to the storage. It counts as in flight until this value is dropped.
#[derive(Debug)]
pub(super) struct PendingMiss {
    cache: Arc<Cache>,
    policy: Policy,
    place: TableKey,
    cost: u32,
    /// A time just before the request was sent.
    sent: Timestamp,
    /// The value of [`KeyEntry::changes`] when the request was sent.
    changes: u64,
    /// `true` until the storage has decided.
    is_undecided: bool,
}

impl PendingMiss {
    /// Updates the cache with the decision of the storage.
    pub(super) fn decided(mut self, decision: &Decision) {
        self.is_undecided = false;
        if decision.has_spent() {
            // The key's state is not the one that was refused.
            return self.cache.invalidate_at(self.place);
        }
        if decision.is_admitted() {
            // Another key of the same decision has refused the hit.
            return;
        }
        let cache = &self.cache;
        let refusal = CachedRefusal::of(&self.policy, decision, self.sent, cache.clock.now(), cache.ttl);
        let mut bucket = cache.table.lock(self.place);
        let unchanged = bucket.find().is_some_and(|entry| entry.changes == self.changes);
        if let Some(refusal) = refusal.filter(|_| unchanged) {
            cache.keep(&mut bucket, refusal);
        }
    }
}

impl Drop for PendingMiss {
    fn drop(&mut self) {
        let mut bucket = self.cache.table.lock(self.place);
        let Some(entry) = bucket.find() else { return };
        entry.in_flight -= 1;
        // A hit without a decision may have spent units, which makes the cached waits too short.
        // But it has spent nothing if a refusal of the same or a smaller cost held. So the refusals
        // of these costs by the same policy are kept.
        if self.is_undecided {
            entry.changes += u64::from(entry.max_cost > self.cost);
            self.cache.keep_only(entry, |refusal| refusal.cost() <= self.cost && *refusal.policy() == self.policy);
        }
        entry.refusals.iter_mut().for_each(CachedRefusal::stop_serving_stale);
        if entry.in_flight == 0 {
            entry.max_cost = 0;
        }
        bucket.retain(|entry| !entry.is_idle());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Op;
    use crate::quota::Quota;
    use crate::storage::ManualClock;
    use crate::strategy::Status;

    /// A hit in flight has an entry in the table, but does not count towards the maximum number of
    /// keys. So its entry must be removed when it ends.
    #[test]
    fn hits_in_flight_are_removed_when_they_end() {
        let cache = Arc::new(Cache::new(1, 1_000, Arc::new(ManualClock::default())));
        let policy = Policy::from(Quota::per_day(1));
        let keys: Vec<Key> = (0..50_u64).map(Key::from).collect();
        let begin = |key| match cache.look_up(&StorageRequest::new(&policy, key, Op::Hit, 1)) {
            CacheLookup::Miss(in_flight) => in_flight,
            CacheLookup::Hit(_) => panic!("the cache must be empty"),
        };
        let admitted = Decision::new(Timestamp::EPOCH, 1, Status::admitted(1, 0, 9));
        let contended = policy.refusal(Timestamp::EPOCH, 1, 9).contended();
        for end in [None, Some(&admitted), Some(&contended)] {
            let all: Vec<PendingMiss> = keys.iter().chain(&keys).map(begin).collect();
            assert_eq!(cache.table.count(|_| true), 50);
            for in_flight in all {
                match end {
                    Some(decision) => in_flight.decided(decision),
                    None => drop(in_flight),
                }
            }
            assert_eq!((cache.table.count(|_| true), cache.len()), (0, 0), "{end:?}");
        }
        for key in &keys {
            begin(key).decided(&policy.refusal(Timestamp::EPOCH, 1, 9));
            cache.invalidate(&policy, key);
        }
        assert_eq!((cache.table.count(|_| true), cache.len()), (0, 0));
    }
}

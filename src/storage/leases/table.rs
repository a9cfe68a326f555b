//! The table of all keys: their leases, and the pace of their hits.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::runtime::Id;
use tokio::sync::Notify;

use super::lease::{Lease, refill};
use crate::decision::Decision;
use crate::key::Key;
use crate::policy::Policy;
use crate::storage::key_table::{Bucket, KeyTable, TableKey};
use crate::storage::metrics::Counters;
use crate::storage::queues::JobQueues;
use crate::storage::ticket::Ticket;
use crate::storage::{AnyStorage, Clock, StorageError, StorageRequest};
use crate::time::Timestamp;

/// A slice is at most the remaining units divided by this number. With 4, sixteen processes that
/// begin a window together lease all of it, because each assumes that all remains. The last ones were
/// refused with 99 % unused.
const SHARES: u32 = 16;

/// The longest default time of a lease, in microseconds.
const LONGEST: u64 = 1_000_000;

/// The number of leases of a period by default.
const LEASES_PER_PERIOD: u64 = 20;

/// The state that all handles share.
pub(super) struct LeaseTable {
    pub(super) inner: AnyStorage,
    pub(super) settings: LeaseSettings,
    pub(super) table: KeyTable<LeaseEntry>,
    pub(super) queues: JobQueues<LeaseKey, LeaseJob>,
    pub(super) counters: Counters,
    /// `true` after [`close`](super::Leases::close): no more slices are taken.
    pub(super) is_closed: AtomicBool,
    /// Notified when a worker ends.
    pub(super) idle: Notify,
}

#[derive(Clone, Debug)]
pub(super) struct LeaseSettings {
    pub(super) slice: u32,
    pub(super) max_keys: usize,
    /// The time of a lease in microseconds, or `None` for the default.
    pub(super) ttl: Option<u64>,
    /// The name of the only policy that is leased, or `None` if all are.
    pub(super) only: Option<Arc<str>>,
    pub(super) clock: Arc<dyn Clock>,
}

impl LeaseSettings {
    /// Returns `true` if units of this policy are leased.
    pub(super) fn selects(&self, policy: &Policy) -> bool {
        self.only.as_ref().is_none_or(|name| policy.name() == Some(name))
    }
}

/// Identifies a worker by its runtime and its key.
pub(super) type LeaseKey = (Id, TableKey);

/// A hit that waits for a slice. `None` means that its caller must send it to the storage alone.
pub(super) struct LeaseJob {
    pub(super) policy: Policy,
    pub(super) cost: u32,
    pub(super) ticket: Ticket<Result<Option<Decision>, StorageError>>,
}

/// The lease of one key under one policy's name.
pub(super) struct LeaseEntry {
    pub(super) lease: Option<Box<Lease>>,
    /// The units that remained in the storage after its latest decision.
    pub(super) remaining: u32,
    /// The units that this process has spent since `since`, from which the next slice is computed.
    pub(super) spent: u32,
    pub(super) since: Timestamp,
    /// `true` if the latest request failed. The storage may have counted it, so hits are sent alone
    /// until one succeeds. This limits the loss to one slice per key and outage.
    pub(super) is_uncertain: bool,
    /// The number of requests for a slice in flight.
    pub(super) requests: u32,
    /// The number of clears. A slice that was requested before a clear is not leased.
    pub(super) clears: u64,
    /// The runtime of the task that refunds the lease when it ends. A task with another `Arc` is not
    /// the current one, and ends.
    pub(super) timer: Option<Arc<Id>>,
    /// The time of the latest use, for eviction.
    used: Timestamp,
}

impl LeaseEntry {
    fn new(now: Timestamp) -> Self {
        Self {
            lease: None,
            remaining: 0,
            spent: 0,
            since: now,
            is_uncertain: false,
            requests: 0,
            clears: 0,
            timer: None,
            used: now,
        }
    }

    /// Decides a hit by spending units of the lease.
    pub(super) fn take(&mut self, policy: &Policy, cost: u32, now: Timestamp) -> Option<Decision> {
        let lease = self.lease_at(policy, now)?;
        let decision = lease.take(cost)?;
        self.spent = self.spent.saturating_add(cost);
        self.used = now;
        Some(decision)
    }

    /// Returns the lease, unless it has ended or belongs to another policy of the same name.
    pub(super) fn lease_at(&mut self, policy: &Policy, now: Timestamp) -> Option<&mut Lease> {
        self.lease.as_deref_mut().filter(|lease| lease.policy == *policy && lease.time_left(now).is_some())
    }

    /// Drops the lease when the key is cleared, and a slice in flight when it arrives.
    pub(super) fn forget(&mut self) {
        self.clears += 1;
        self.lease = None;
    }

    /// Records the result of a request, before which this process has spent units.
    pub(super) fn record(&mut self, decided: &Result<Decision, StorageError>) {
        match decided {
            Ok(decision) if decision.is_contended() || decision.is_storage_full() => {}
            // A breaker hides the failure of its primary storage.
            Ok(decision) if !decision.is_from_fallback() => {
                self.is_uncertain = false;
                self.remaining = decision.remaining();
            }
            _ => self.is_uncertain = true,
        }
    }

    /// Counts units for the pace of this key, which is measured anew after `span` microseconds.
    pub(super) fn count(&mut self, units: u32, now: Timestamp, span: u64) {
        if now.since(self.since) > span {
            (self.since, self.spent) = (now, 0);
        }
        self.spent = self.spent.saturating_add(units);
    }

    /// Returns `true` if the entry cannot be removed without a loss of units.
    fn is_busy(&self, now: Timestamp) -> bool {
        self.requests > 0 || self.lease.as_ref().is_some_and(|lease| lease.leftover(now).is_some())
    }
}

impl LeaseTable {
    pub(super) fn new(inner: AnyStorage, settings: LeaseSettings) -> Self {
        Self {
            inner,
            table: KeyTable::new(settings.max_keys),
            settings,
            queues: JobQueues::default(),
            counters: Counters::new("ratelimit_leases_total"),
            is_closed: AtomicBool::new(false),
            idle: Notify::new(),
        }
    }

    pub(super) fn now(&self) -> Timestamp {
        self.settings.clock.now()
    }

    /// Returns the table key. Policies with the same identity share an entry.
    pub(super) fn place(&self, policy: &Policy, key: &Key) -> TableKey {
        self.table.place(policy, key)
    }

    /// Calls `f` for the entry of a key, if there is one.
    pub(super) fn with_entry<T>(&self, place: TableKey, f: impl FnOnce(&mut LeaseEntry) -> T) -> Option<T> {
        self.table.lock(place).find().map(f)
    }

    /// Returns the entry of a key. Makes room for it by removing the entry that was not used for the
    /// longest time. Returns `None` if all others have a lease or a request in flight.
    pub(super) fn entry<'a>(bucket: &'a mut Bucket<'_, LeaseEntry>, now: Timestamp) -> Option<&'a mut LeaseEntry> {
        let ways = bucket.ways;
        if bucket.find().is_none() && bucket.others().count() >= ways {
            let oldest = bucket.others().filter(|entry| !entry.is_busy(now)).map(|entry| entry.used).min()?;
            bucket.retain(|entry| entry.is_busy(now) || entry.used != oldest);
        }
        let entry = bucket.find_or_insert(|| LeaseEntry::new(now));
        entry.used = now;
        Some(entry)
    }

    /// Spends units of the key's lease, if it has enough.
    pub(super) fn take(&self, request: &StorageRequest<'_>) -> Option<Decision> {
        let (place, now) = (self.place(request.policy, request.key), self.now());
        let decision = self.table.lock(place).find()?.take(request.policy, request.cost, now)?;
        self.counters.here(request.policy);
        Some(decision)
    }

    /// Returns the time of a lease in microseconds.
    pub(super) fn ttl(&self, policy: &Policy) -> u64 {
        let shortest = policy.limits().iter().map(|limit| limit.quota().period_micros() / LEASES_PER_PERIOD).min();
        self.settings.ttl.unwrap_or_else(|| shortest.unwrap_or(0).min(LONGEST))
    }

    /// Returns the units of a slice that is requested in addition to the costs of waiting hits: those
    /// that this process spends in the time of a lease if it continues as before. The slice is at
    /// most
    ///
    /// - the configured one,
    /// - a share of the units that remain,
    /// - the units that a bucket refills in the time of a lease.
    pub(super) fn slice(&self, policy: &Policy, entry: &LeaseEntry, now: Timestamp) -> u32 {
        if entry.is_uncertain || self.is_closed.load(Ordering::SeqCst) {
            return 0;
        }
        let ttl = self.ttl(policy);
        let pace = u64::from(entry.spent).saturating_mul(ttl) / now.since(entry.since).max(1);
        let most = u64::from(self.settings.slice.min(entry.remaining / SHARES));
        let refilled = |slice: u64, limit| match refill(limit, now, u32::try_from(slice).unwrap_or(u32::MAX)) {
            longer if longer > ttl => slice.saturating_mul(ttl) / longer,
            _ => slice,
        };
        let slice = policy.limits().iter().fold(pace.min(most), refilled);
        u32::try_from(slice).unwrap_or(u32::MAX)
    }
}

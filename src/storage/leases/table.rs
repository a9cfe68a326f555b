//! The table of all keys: their leases, and the jobs that wait for the worker of a key.
//!
//! Two flags limit the loss. The flag of a key, until a request of this key succeeds, gives the
//! bound: one slice per key, node and outage, plus one hit per further request. The flag of the
//! node stops the slices of all other keys, so that an outage does not cost one slice for each key.
//! It would not be enough alone: if one shard of a cluster fails, keys on other shards succeed all
//! the time.
//!
//! While a key is in doubt, a request is for one waiting hit. With 50 hits per timeout, all of them
//! would cost half a slice per lost reply.

use std::mem::take;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use tokio::runtime::Id;
use tokio::sync::oneshot;

use super::lease::Lease;
use crate::decision::Decision;
use crate::key::Key;
use crate::policy::{Op, Policy};
use crate::storage::calls::Counters;
use crate::storage::key_table::{Bucket, Table, TableKey};
use crate::storage::{AnyStorage, Clock, StorageError, StorageRequest};
use crate::time::Timestamp;

/// The state that all handles share.
pub(super) struct LeaseTable {
    pub(super) inner: AnyStorage,
    pub(super) table: Table<LeaseEntry>,
    pub(super) counters: Counters,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) slice: u32,
    pub(super) max_keys: usize,
    pub(super) outage: Outage,
    /// `true` after [`close`](super::Leases::close): no more slices are taken.
    pub(super) closed: AtomicBool,
}

impl LeaseTable {
    pub(super) fn new(inner: AnyStorage, slice: u32, max_keys: usize, clock: Arc<dyn Clock>) -> Self {
        let (table, counters) = (Table::new(max_keys), Counters::new("ratelimit_leases_total"));
        Self {
            inner,
            table,
            counters,
            clock,
            slice,
            max_keys,
            outage: Outage::default(),
            closed: AtomicBool::new(false),
        }
    }

    /// Returns the table key. Policies with the same identity share an entry if their first limits
    /// share states.
    pub(super) fn place(&self, policy: &Policy, key: &Key) -> TableKey {
        self.table.place(policy, policy.limit_digests().first().copied().unwrap_or_default(), key)
    }

    /// Returns the number of keys with a lease whose window has not ended.
    pub(super) fn len(&self) -> usize {
        let now = self.clock.now();
        self.table.count(|entry| entry.lease.as_ref().is_some_and(|lease| lease.is_live(now)))
    }

    /// Drops the key's lease.
    pub(super) fn forget(&self, place: TableKey) {
        if let Some(entry) = self.table.lock(place).find() {
            entry.forget();
        }
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    /// Cleans up after a worker that was dropped before it ended. Its callers get an error, because
    /// their jobs are dropped here. If a request for units was in flight (`is_requesting`), the
    /// storage may have counted it.
    pub(super) fn abandon(&self, place: TableKey, is_requesting: bool) {
        if is_requesting {
            self.outage.failed();
        }
        let mut bucket = self.table.lock(place);
        let waiting = bucket.find().map(|entry| {
            entry.is_uncertain |= is_requesting;
            entry.end_worker();
            std::mem::take(&mut entry.waiting)
        });
        drop(bucket);
        drop(waiting);
    }
}

/// The lease of one key under one policy's name, and the callers that wait for it.
pub(super) struct LeaseEntry {
    pub(super) key: Key,
    pub(super) lease: Option<Lease>,
    /// The jobs that the worker does next.
    pub(super) waiting: Vec<Job>,
    pub(super) worker: WorkerState,
    /// The time of the latest use, for eviction.
    pub(super) used: Timestamp,
    /// The number of clears. A slice that was requested before a clear serves only the hits that
    /// already wait for it.
    pub(super) changes: u64,
    /// `true` if the latest request for units failed. The storage may have counted it.
    pub(super) is_uncertain: bool,
    /// The calls of [`close`](super::Leases::close) that wait for the worker. The worker drops the
    /// senders when it ends, or sends the error if it fails to refund the lease.
    pub(super) when_idle: Vec<oneshot::Sender<StorageError>>,
}

/// The state of a key's worker.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum WorkerState {
    /// No worker runs.
    Idle,
    /// The worker runs in this runtime, or outside of a runtime (`None`). Callers in another
    /// runtime do not wait for it, because its runtime may have stopped.
    Running(Option<Id>),
}

impl LeaseEntry {
    pub(super) fn new(key: Key, now: Timestamp) -> Self {
        Self {
            key,
            lease: None,
            waiting: Vec::new(),
            worker: WorkerState::Idle,
            used: now,
            changes: 0,
            is_uncertain: false,
            when_idle: Vec::new(),
        }
    }

    /// Decides a hit by spending units of the lease. Returns `None` for another operation, or if
    /// the lease has too few units.
    pub(super) fn take(&mut self, request: &StorageRequest<'_>, now: Timestamp) -> Option<Decision> {
        if request.op != Op::Hit || request.cost == 0 {
            return None;
        }
        let lease = self.lease.as_mut().filter(|lease| lease.is_live(now) && lease.policy == *request.policy)?;
        let decision = lease.take(request.cost, now)?;
        self.used = now;
        Some(decision)
    }

    /// Drops the lease when the key is cleared. Of a slice in flight, only the hits that already
    /// wait for it are served, and the rest is discarded.
    pub(super) fn forget(&mut self) {
        self.changes += 1;
        self.lease = None;
    }

    /// Takes the waiting jobs. If there are none, the worker ends.
    pub(super) fn next_jobs(&mut self) -> Vec<Job> {
        let jobs = take(&mut self.waiting);
        if jobs.is_empty() {
            self.end_worker();
        }
        jobs
    }

    /// Records that the worker has ended, and wakes the calls of `close` that wait for it.
    pub(super) fn end_worker(&mut self) {
        self.worker = WorkerState::Idle;
        self.when_idle.clear();
    }

    /// Returns `true` if the entry is empty and can be removed.
    pub(super) fn is_idle(&self) -> bool {
        self.worker == WorkerState::Idle && self.lease.is_none() && !self.is_uncertain
    }
}

/// The error of a bucket in which all entries have a worker.
pub(super) struct NoRoom;

/// Makes room for one more key in a bucket:
///
/// 1. Removes all leases of ended windows.
/// 2. If the bucket is still full, evicts the least recently used key, preferably one without a
///    lease, and returns its lease.
///
/// Never evicts a key with a worker.
pub(super) fn make_room(bucket: &mut Bucket<'_, LeaseEntry>, now: Timestamp) -> Result<Option<(Key, Lease)>, NoRoom> {
    bucket.retain(|entry| {
        if entry.worker == WorkerState::Idle {
            entry.lease.take_if(|lease| now >= lease.end);
        }
        !entry.is_idle()
    });
    let ways = bucket.ways;
    if bucket.others().count() < ways {
        return Ok(None);
    }
    let idle = bucket.others().filter(|entry| entry.worker == WorkerState::Idle);
    let victim = idle.min_by_key(|entry| (entry.lease.is_some(), entry.used)).ok_or(NoRoom)?;
    victim.is_uncertain = false;
    let evicted = victim.lease.take().map(|lease| (victim.key.clone(), lease));
    bucket.retain(|entry| !entry.is_idle());
    Ok(evicted)
}

/// The action that a caller requests for a key.
#[derive(Debug)]
pub(super) enum Command {
    /// A hit of this cost on a window that is leased.
    Hit(u32),
    /// A request that the storage decides, such as a peek, a charge, or a hit by a policy that is
    /// not leased.
    Forward(Op, u32),
    /// A settlement: the decision on a hit, and the actual cost of the hit.
    Settle(Decision, u32),
    Clear,
}

/// The reply to a job. `None` means that a change is done, or that the caller must send its hit to
/// the storage itself.
pub(super) type LeaseResult = Result<Option<Reply>, StorageError>;

/// The job of one caller.
pub(super) struct Job {
    pub(super) policy: Policy,
    pub(super) command: Command,
    reply: oneshot::Sender<LeaseResult>,
}

impl Job {
    pub(super) fn new(policy: &Policy, command: Command) -> (Self, oneshot::Receiver<LeaseResult>) {
        let (reply, answer) = oneshot::channel();
        (Self { policy: policy.clone(), command, reply }, answer)
    }

    /// Returns the cost, if the job is a hit by this policy.
    pub(super) fn cost(&self, policy: &Policy) -> Option<u32> {
        match self.command {
            Command::Hit(cost) if self.policy == *policy => Some(cost),
            _ => None,
        }
    }

    /// Returns `true` if the job is a hit or a peek whose caller has gone, so that it can be
    /// skipped. Charges, settlements and clears are never skipped.
    pub(super) fn is_abandoned(&self) -> bool {
        matches!(self.command, Command::Hit(_) | Command::Forward(Op::Hit | Op::Peek, _)) && self.reply.is_closed()
    }

    /// Sends the reply. The caller of this method must not hold a lock of the lease table: if the
    /// receiver is gone, dropping the reply refunds its units, which takes such a lock.
    pub(super) fn send(self, answer: LeaseResult) {
        drop(self.reply.send(answer));
    }
}

/// Takes back the units of an admitted hit whose caller has gone. [`LeaseTable`] implements this
/// trait, so that jobs do not depend on the type of the storage.
///
/// [`LeaseTable`]: super::table::LeaseTable
pub(super) trait TakeBack: Send + Sync {
    fn take_back(self: Arc<Self>, policy: &Policy, key: &Key, decision: &Decision);
}

/// A decision on its way to its caller. If the caller is gone, its units are refunded.
pub(super) struct Reply {
    decision: Option<Decision>,
    refund_to: Option<(Arc<dyn TakeBack>, Policy, Key)>,
}

impl Reply {
    /// Creates a reply with a decision on a hit. If the hit was admitted, dropping the reply
    /// refunds it.
    pub(super) fn of(decision: Decision, leases: Arc<dyn TakeBack>, policy: &Policy, key: &Key) -> Self {
        let refund_to = decision.is_admitted().then(|| (leases, policy.clone(), key.clone()));
        Self { decision: Some(decision), refund_to }
    }

    /// Creates a reply with a decision that is not refunded if the caller has gone: a refusal, or a
    /// decision that the storage made for this caller.
    pub(super) fn without_units(decision: Decision) -> Self {
        Self { decision: Some(decision), refund_to: None }
    }

    /// Returns the decision. The caller owns its units from now on.
    pub(super) fn claim(mut self) -> Option<Decision> {
        self.decision.take()
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        if let (Some(decision), Some((leases, policy, key))) = (self.decision.take(), self.refund_to.take()) {
            leases.take_back(&policy, &key, &decision);
        }
    }
}

/// Counts failed requests for units, over all keys. During an outage, each request is for the units
/// of one hit instead of a slice.
#[derive(Debug, Default)]
pub(super) struct Outage {
    failures: AtomicU64,
    /// The value of `failures` when the latest successful request was sent.
    ended: AtomicU64,
}

impl Outage {
    /// Returns the number of failures so far. A request reads it before it is sent.
    pub(super) fn failures(&self) -> u64 {
        self.failures.load(Ordering::SeqCst)
    }

    pub(super) fn failed(&self) {
        self.failures.fetch_add(1, Ordering::SeqCst);
    }

    /// Records the success of a request that was sent when the failure count was `failures`. If the
    /// count has grown since, the success does not prove that the storage has recovered.
    pub(super) fn answered(&self, failures: u64) {
        self.ended.fetch_max(failures, Ordering::SeqCst);
    }

    pub(super) fn is_on(&self) -> bool {
        self.ended.load(Ordering::SeqCst) < self.failures()
    }
}

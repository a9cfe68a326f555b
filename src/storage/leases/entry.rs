//! The table entry of one key.

use std::mem::take;

use tokio::runtime::Id;
use tokio::sync::oneshot;

use super::job::Job;
use super::lease::Lease;
use crate::decision::Decision;
use crate::key::Key;
use crate::policy::Op;
use crate::storage::key_table::Bucket;
use crate::storage::{StorageError, StorageRequest};
use crate::time::Timestamp;

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

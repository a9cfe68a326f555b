//! One key's row in the table of leases.

use std::mem::take;

use tokio::runtime::Id;
use tokio::sync::oneshot;

use super::error::LeaseError;
use super::job::Job;
use super::lease::Lease;
use crate::storage::StorageRequest;
use crate::storage::key_table::Bucket;
use crate::{Decision, Key, Op, Storage, Timestamp};

/// The lease of one key under one policy's name, and the callers that wait for it.
pub(super) struct LeaseEntry<St: Storage> {
    pub(super) key: Key,
    pub(super) lease: Option<Lease>,
    /// The jobs that the worker does next.
    pub(super) waiting: Vec<Job<St>>,
    pub(super) busy: Busy,
    pub(super) used: Timestamp,
    /// Counts clears. A slice that was asked for before a clear is not kept.
    pub(super) changes: u64,
    /// The last request for units failed, and the storage may have counted it.
    pub(super) in_doubt: bool,
    /// Dropped when the worker ends. A refund that fails after [`close`](super::Leases::close) is
    /// reported here.
    pub(super) when_idle: Vec<oneshot::Sender<LeaseError>>,
}

/// Whether a worker asks the storage for a key.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Busy {
    No,
    /// The worker's runtime. Callers in another one do not wait for the worker, as its runtime may
    /// have stopped.
    In(Option<Id>),
}

impl<St: Storage> LeaseEntry<St> {
    pub(super) fn new(key: Key, now: Timestamp) -> Self {
        Self {
            key,
            lease: None,
            waiting: Vec::new(),
            busy: Busy::No,
            used: now,
            changes: 0,
            in_doubt: false,
            when_idle: Vec::new(),
        }
    }

    /// Spends units of the lease, if it has enough.
    pub(super) fn take(&mut self, ask: &StorageRequest<'_>, now: Timestamp) -> Option<Decision> {
        if ask.op == Op::Peek || ask.cost == 0 {
            return None;
        }
        let lease = self.lease.as_mut().filter(|lease| lease.is_live(now) && lease.policy == *ask.policy)?;
        let decision = lease.take(ask.cost, now)?;
        self.used = now;
        Some(decision)
    }

    /// Drops the lease and the slice that is in flight, because of a clear.
    pub(super) fn forget(&mut self) {
        self.changes += 1;
        self.lease = None;
    }

    /// Takes the jobs that wait. If there are none, the worker ends.
    pub(super) fn next_jobs(&mut self) -> Vec<Job<St>> {
        let jobs = take(&mut self.waiting);
        if jobs.is_empty() {
            self.end_worker();
        }
        jobs
    }

    pub(super) fn end_worker(&mut self) {
        self.busy = Busy::No;
        self.when_idle.clear();
    }

    /// Returns `true` if the row holds nothing and can be removed.
    pub(super) fn is_idle(&self) -> bool {
        self.busy == Busy::No && self.lease.is_none() && !self.in_doubt
    }
}

/// All rows of a bucket are busy.
pub(super) struct NoRoom;

/// Makes room for one more key. Leases whose windows have ended are removed first, then keys
/// without a lease, then the least recently used lease, which is returned.
pub(super) fn make_room<St: Storage>(
    bucket: &mut Bucket<'_, LeaseEntry<St>>,
    now: Timestamp,
) -> Result<Option<(Key, Lease)>, NoRoom> {
    bucket.retain(|of_key| {
        if of_key.busy == Busy::No {
            of_key.lease.take_if(|lease| now >= lease.end);
        }
        !of_key.is_idle()
    });
    let ways = bucket.ways;
    if bucket.others().count() < ways {
        return Ok(None);
    }
    let idle = bucket.others().filter(|of_key| of_key.busy == Busy::No);
    let victim = idle.min_by_key(|of_key| (of_key.lease.is_some(), of_key.used)).ok_or(NoRoom)?;
    victim.in_doubt = false;
    let evicted = victim.lease.take().map(|lease| (victim.key.clone(), lease));
    bucket.retain(|of_key| !of_key.is_idle());
    Ok(evicted)
}

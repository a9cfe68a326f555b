//! The routing of requests: to a lease, to the key's worker, or to the storage.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Waker};

use tokio::runtime::Handle;
use tokio::sync::oneshot;

use super::entry::{LeaseEntry, NoRoom, WorkerState, make_room};
use super::job::{Command, Job, LeaseResult, TakeBack};
use super::lease::{Lease, window};
use super::shared::LeaseTable;
use super::worker::LeaseWorker;
use crate::decision::Decision;
use crate::key::Key;
use crate::policy::{Op, Policy};
use crate::storage::key_table::{Bucket, TableKey};
use crate::storage::{Storage, StorageRequest};

/// The route of a request.
pub(super) enum Route {
    /// The request was decided locally.
    Local(Decision),
    /// The key's worker replies.
    Wait(oneshot::Receiver<LeaseResult>),
    /// The caller sends the request to the storage.
    Inner,
}

impl LeaseTable {
    /// Spends units of the key's lease, if it has enough.
    pub(super) fn take(&self, request: &StorageRequest<'_>) -> Option<Decision> {
        let (place, now) = (self.place(request.policy, request.key), self.clock.now());
        let decision = self.table.lock(place).find()?.take(request, now)?;
        self.counters.here(request.policy);
        Some(decision)
    }

    /// Returns `true` if the key has an entry. Then its requests must go through the worker.
    pub(super) fn knows(&self, policy: &Policy, key: &Key) -> bool {
        self.table.lock(self.place(policy, key)).find().is_some()
    }

    /// Decides locally, or passes the request to the key's worker.
    pub(super) fn decide(self: &Arc<Self>, request: &StorageRequest<'_>, is_leased: bool) -> Route {
        let (place, now) = (self.place(request.policy, request.key), self.clock.now());
        let mut bucket = self.table.lock(place);
        let spends = is_leased && request.op == Op::Hit && request.cost > 0;
        if spends && let Some(decision) = bucket.find().and_then(|entry| entry.take(request, now)) {
            drop(bucket);
            self.counters.here(request.policy);
            return Route::Local(decision);
        }
        if self.is_closed() || !spends && bucket.find().is_none() {
            return Route::Inner;
        }
        let command = if spends { Command::Hit(request.cost) } else { Command::Forward(request.op, request.cost) };
        self.push_job(bucket, place, request.policy, request.key, command)
    }

    /// Passes a change to the key's worker, which runs it after earlier jobs.
    pub(super) fn enqueue(self: &Arc<Self>, policy: &Policy, key: &Key, command: Command) -> Route {
        let place = self.place(policy, key);
        let mut bucket = self.table.lock(place);
        if let Command::Clear = command
            && let Some(entry) = bucket.find()
        {
            entry.forget();
        }
        if self.is_closed() {
            return Route::Inner;
        }
        self.push_job(bucket, place, policy, key, command)
    }

    /// Adds a job to the queue of the key's worker, and starts a worker if there is none. Returns
    /// [`Route::Inner`] if the key's worker runs in another runtime, or if the table has no room
    /// for the key.
    fn push_job(
        self: &Arc<Self>,
        mut bucket: Bucket<'_, LeaseEntry>,
        place: TableKey,
        policy: &Policy,
        key: &Key,
        command: Command,
    ) -> Route {
        let (now, runtime) = (self.clock.now(), Handle::try_current().ok());
        let mut evicted = None;
        if bucket.find().is_none() {
            match make_room(&mut bucket, now) {
                Ok(removed) => evicted = removed,
                Err(NoRoom) => return Route::Inner,
            }
        }
        let entry = bucket.find_or_insert(|| LeaseEntry::new(key.clone(), now));
        entry.used = now;
        let running = WorkerState::Running(runtime.as_ref().map(Handle::id));
        let starts_worker = entry.worker == WorkerState::Idle;
        if !starts_worker && entry.worker != running {
            return Route::Inner;
        }
        let (job, answer) = Job::new(policy, command);
        entry.waiting.push(job);
        entry.worker = running;
        drop(bucket);
        if let Some((key, lease)) = evicted {
            self.refund_evicted(&key, &lease);
        }
        if starts_worker {
            let mut worker = Box::pin(LeaseWorker::new(Arc::clone(self), place, key.clone()).run());
            // A storage in memory is ready at the first poll, so a task is spawned only if the
            // worker is still pending.
            if worker.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending()
                && let Some(runtime) = runtime
            {
                runtime.spawn(worker);
            }
        }
        Route::Wait(answer)
    }

    /// Puts units of a hit back into the key's lease. Returns `None` if the lease does not accept
    /// them, for example if the hit is of another window. Then the caller refunds them to the
    /// storage.
    pub(super) fn put_back(
        self: &Arc<Self>,
        policy: &Policy,
        key: &Key,
        decision: &Decision,
        units: u32,
    ) -> Option<Route> {
        if decision.is_from_fallback() {
            return None;
        }
        let place = self.place(policy, key);
        let mut bucket = self.table.lock(place);
        let entry = bucket.find()?;
        let lease = entry.lease.as_mut().filter(|lease| lease.is_live(self.clock.now()))?;
        if !lease.put_back(window(decision), units) {
            return None;
        }
        if lease.is_unspent() && entry.worker == WorkerState::Idle {
            // All hits of this window were refunded, so the whole lease is refunded too. Then the
            // next hit can start a new window.
            let hit = lease.as_hit()?;
            let policy = lease.policy.clone();
            entry.lease = None;
            return Some(self.push_job(bucket, place, &policy, key, Command::Settle(hit, 0)));
        }
        Some(Route::Local(decision.clone()))
    }

    /// Refunds the unspent units of an evicted lease, without waiting.
    fn refund_evicted(&self, key: &Key, lease: &Lease) {
        if let Some(hit) = lease.as_hit() {
            in_background(self.inner.settle(&lease.policy, key, &hit, 0));
        }
    }
}

/// Runs a future without waiting for it: polls it once, and spawns a task if it is pending. Without
/// a runtime, a pending future is dropped.
fn in_background<F: Future + Send + Unpin + 'static>(mut done: F)
where
    F::Output: Send,
{
    let polled = Pin::new(&mut done).poll(&mut Context::from_waker(Waker::noop()));
    if polled.is_pending()
        && let Ok(runtime) = Handle::try_current()
    {
        runtime.spawn(async move { drop(done.await) });
    }
}

impl TakeBack for LeaseTable {
    /// Refunds a hit without waiting: to the lease, or else to the storage.
    fn take_back(self: Arc<Self>, policy: &Policy, key: &Key, decision: &Decision) {
        match self.put_back(policy, key, decision, decision.cost()) {
            Some(Route::Local(_) | Route::Wait(_)) => {}
            Some(Route::Inner) | None => in_background(self.inner.settle(policy, key, decision, 0)),
        }
    }
}

//! The routing of requests: to a lease, to the key's worker, or to the storage. Also refunds all
//! leases when a node shuts down.
//!
//! `close` sets a flag and then visits each bucket under its lock. A worker begins under the same
//! lock and only if the flag is not set. So each lease is either taken by `close` or refunded by a
//! worker that `close` waits for. It does not wait for workers of another runtime, which may have
//! stopped.

use std::future::poll_fn;
use std::iter::from_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, Waker};

use tokio::runtime::Handle;
use tokio::sync::oneshot;

use super::lease::{Lease, window};
use super::table::{Command, Job, LeaseEntry, LeaseResult, LeaseTable, NoRoom, TakeBack, WorkerState, make_room};
use super::worker::LeaseWorker;
use crate::decision::Decision;
use crate::key::Key;
use crate::policy::{Op, Policy};
use crate::storage::key_table::{Bucket, TableKey};
use crate::storage::{AnyStorage, Storage, StorageError, StorageFuture, StorageRequest};
use crate::time::Timestamp;

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

/// Runs a change without waiting for it. Without a runtime, a pending one is dropped.
fn in_background(change: StorageFuture<()>) {
    let change = change.polled_once();
    if change.as_ready().is_none()
        && let Ok(runtime) = Handle::try_current()
    {
        runtime.spawn(async move { drop(change.await) });
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

/// The maximum number of refunds in flight.
const IN_FLIGHT: usize = 64;

/// The unspent units of one lease, as a hit that can be refunded.
struct Unspent {
    policy: Policy,
    key: Key,
    hit: Decision,
}

impl LeaseTable {
    /// Refunds all leases, and waits for the workers of this runtime. Each worker refunds the units
    /// that it still receives.
    pub(super) async fn close(&self) -> Result<(), StorageError> {
        // The flag is set before `visit` takes the lock of a bucket. A worker starts under the same
        // lock, so a worker that starts after the visit finds the flag set.
        self.closed.store(true, Ordering::SeqCst);
        let runtime = Handle::try_current().ok().map(|runtime| runtime.id());
        let (mut bucket, mut taken, mut worker) = (0, Vec::new(), Vec::new());
        let slices = from_fn(|| {
            while taken.is_empty() {
                let exists = self.table.visit(bucket, |entry| {
                    taken.extend(self.take_unspent(entry));
                    if runtime.is_some() && entry.worker == WorkerState::Running(runtime) {
                        let (when_idle, idle) = oneshot::channel();
                        entry.when_idle.push(when_idle);
                        worker.push(idle);
                    }
                });
                if !exists {
                    return None;
                }
                bucket += 1;
            }
            taken.pop()
        });
        let mut refunded = refund_all(&self.inner, slices).await;
        for idle in worker {
            if let Ok(error) = idle.await {
                refunded = refunded.and(Err(error));
            }
        }
        refunded
    }

    /// Removes the lease of a key. Returns its unspent units, or `None` if there are none or their
    /// window has ended.
    fn take_unspent(&self, entry: &mut LeaseEntry) -> Option<Unspent> {
        let lease = entry.lease.take().filter(|lease| self.clock.now() < lease.end)?;
        let hit = lease.as_hit()?;
        Some(Unspent { policy: lease.policy, key: entry.key.clone(), hit })
    }
}

/// Refunds all leases in a background task. Outside of a tokio runtime, does not refund them. This
/// runs when the last handle and all workers have been dropped.
impl Drop for LeaseTable {
    fn drop(&mut self) {
        let Ok(runtime) = Handle::try_current() else { return };
        let mut slices = Vec::new();
        self.table.visit_all(|entry| slices.extend(self.take_unspent(entry)));
        if !slices.is_empty() {
            let inner = self.inner.clone();
            runtime.spawn(async move { drop(refund_all(&inner, slices.into_iter()).await) });
        }
    }
}

/// Refunds the slices, up to [`IN_FLIGHT`] at a time. Continues after a failure, and returns the
/// first error.
async fn refund_all(inner: &AnyStorage, mut slices: impl Iterator<Item = Unspent>) -> Result<(), StorageError> {
    let mut in_flight = Vec::<StorageFuture<()>>::new();
    let mut refunded = Ok(());
    poll_fn(|cx| {
        let mut is_pending = |refund: &mut StorageFuture<()>| match Pin::new(refund).poll(cx) {
            Poll::Pending => true,
            Poll::Ready(Ok(())) => false,
            Poll::Ready(Err(error)) => {
                if refunded.is_ok() {
                    refunded = Err(StorageError::from_boxed(error));
                }
                false
            }
        };
        in_flight.retain_mut(&mut is_pending);
        while in_flight.len() < IN_FLIGHT
            && let Some(slice) = slices.next()
        {
            let mut refund = inner.settle(&slice.policy, &slice.key, &slice.hit, 0);
            if is_pending(&mut refund) {
                in_flight.push(refund);
            }
        }
        if in_flight.is_empty() { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    refunded
}

/// Units that a charge took from a slice. Dropping this value puts them back, unless
/// [`keep`](Self::keep) was called.
pub(super) struct Taken {
    shared: Arc<LeaseTable>,
    policy: Policy,
    key: Key,
    units: u32,
    window: (Timestamp, u32),
}

impl LeaseTable {
    /// Takes up to `units` of the key's slice for a charge, and returns the decision if they are all.
    /// Returns `None` if the key has no slice.
    pub(super) fn take_for_charge(
        self: &Arc<Self>,
        policy: &Policy,
        key: &Key,
        units: u32,
    ) -> Option<(Taken, Option<Decision>)> {
        let (place, now) = (self.place(policy, key), self.clock.now());
        let mut bucket = self.table.lock(place);
        let lease = lease_to_charge(bucket.find()?, policy, now)?;
        let taken = lease.take_for_charge(units);
        let decision = (taken == units).then(|| lease.charged(units, now));
        let (shared, window) = (Arc::clone(self), lease.window);
        Some((Taken { shared, policy: policy.clone(), key: key.clone(), units: taken, window }, decision))
    }

    /// Puts back the units that a failed charge took, if the slice still exists.
    fn put_back_taken(&self, taken: &Taken) {
        let mut bucket = self.table.lock(self.place(&taken.policy, &taken.key));
        let lease = bucket.find().and_then(|entry| entry.lease.as_mut());
        if let Some(lease) = lease.filter(|lease| lease.policy == taken.policy) {
            lease.put_back_charge(taken.window, taken.units);
        }
    }
}

/// Returns the lease that a charge by this policy can take units from. If another policy of the same
/// name has the lease, the charge goes to the storage, and so do later refunds.
fn lease_to_charge<'a>(entry: &'a mut LeaseEntry, policy: &Policy, now: Timestamp) -> Option<&'a mut Lease> {
    let lease = entry.lease.as_mut().filter(|lease| lease.is_live(now))?;
    lease.is_charged |= lease.policy != *policy;
    (lease.policy == *policy).then_some(lease)
}

impl Taken {
    pub(super) fn units(&self) -> u32 {
        self.units
    }

    /// Spends the units for good.
    pub(super) fn keep(mut self) {
        self.units = 0;
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        if self.units > 0 {
            self.shared.put_back_taken(self);
        }
    }
}

//! The worker that requests slices for the waiting hits of one key, and the task that refunds the
//! rest of a lease.

use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::{Handle, Id};
use tokio::time::sleep;

use super::lease::Lease;
use super::table::{LeaseJob, LeaseKey, LeaseTable};
use crate::decision::Decision;
use crate::key::Key;
use crate::policy::{Op, Policy};
use crate::storage::key_table::TableKey;
use crate::storage::{Storage, StorageError, StorageRequest};
use crate::time::Timestamp;

/// Serves the waiting hits of one key in one runtime. If it is dropped early, the waiting callers get
/// an error.
pub(super) struct LeaseWorker {
    shared: Arc<LeaseTable>,
    place: LeaseKey,
    key: Key,
    /// `true` while a request for a slice is in flight.
    is_requesting: bool,
    is_done: bool,
}

impl Drop for LeaseWorker {
    fn drop(&mut self) {
        if self.is_requesting {
            self.shared.with_entry(self.place.1, |entry| {
                entry.requests -= 1;
                entry.is_uncertain = true;
            });
        }
        if !self.is_done {
            self.shared.queues.abandon(&self.place);
        }
        self.shared.idle.notify_waiters();
    }
}

/// The next step of a worker.
enum WorkerStep {
    /// Requests these units, while the key had been cleared so many times.
    Request { units: u32, clears: u64 },
    /// Refunds the rest of a lease that is too small for the next hit, or has ended.
    Refund(Box<Lease>),
    /// Lets the callers send their hits alone.
    Pass,
}

impl LeaseWorker {
    pub(super) fn new(shared: Arc<LeaseTable>, place: LeaseKey, key: Key) -> Self {
        Self { shared, place, key, is_requesting: false, is_done: false }
    }

    /// Serves hits until none are waiting.
    pub(super) async fn run(mut self) {
        loop {
            let jobs = self.shared.queues.take(&self.place);
            let Some(policy) = jobs.first().map(|job| job.policy.clone()) else {
                self.is_done = true;
                return;
            };
            let (jobs, others) = jobs.into_iter().partition(|job| job.policy == policy);
            pass(others);
            self.serve(&policy, jobs).await;
        }
    }

    /// Serves hits of one policy: from the lease, from a new slice, or by their callers.
    async fn serve(&mut self, policy: &Policy, mut jobs: Vec<LeaseJob>) {
        loop {
            // Callers that have left spend nothing.
            jobs.retain(|job| !job.ticket.is_dropped());
            jobs = self.serve_from_lease(policy, jobs);
            if jobs.is_empty() {
                return;
            }
            match self.next_step(policy, &jobs) {
                WorkerStep::Request { units, clears } => return self.request(policy, jobs, units, clears).await,
                WorkerStep::Refund(lease) => drop(self.shared.refund(&lease).await),
                WorkerStep::Pass => return pass(jobs),
            }
        }
    }

    /// Serves the first hits from the lease, while it has enough units. Returns the others.
    fn serve_from_lease(&self, policy: &Policy, jobs: Vec<LeaseJob>) -> Vec<LeaseJob> {
        let now = self.shared.now();
        let mut jobs = jobs.into_iter().peekable();
        while let Some(cost) = jobs.peek().map(|job| job.cost)
            && let Some(decision) =
                self.shared.with_entry(self.place.1, |entry| entry.take(policy, cost, now)).flatten()
            && let Some(job) = jobs.next()
        {
            self.shared.counters.here(policy);
            job.ticket.answer(Ok(Some(decision)));
        }
        jobs.collect()
    }

    fn next_step(&mut self, policy: &Policy, jobs: &[LeaseJob]) -> WorkerStep {
        let now = self.shared.now();
        let needed = jobs.iter().fold(0, |sum: u32, job| sum.saturating_add(job.cost));
        let step = self.shared.with_entry(self.place.1, |entry| {
            if let Some(lease) = entry.lease.take_if(|lease| lease.unspent > 0) {
                return WorkerStep::Refund(lease);
            }
            match self.shared.slice(policy, entry, now) {
                0 => WorkerStep::Pass,
                slice => {
                    let units = needed.saturating_add(slice);
                    if units > entry.remaining {
                        return WorkerStep::Pass;
                    }
                    entry.requests += 1;
                    (entry.since, entry.spent) = (now, 0);
                    WorkerStep::Request { units, clears: entry.clears }
                }
            }
        });
        self.is_requesting = matches!(step, Some(WorkerStep::Request { .. }));
        step.unwrap_or(WorkerStep::Pass)
    }

    /// Requests units for the hits and for a lease.
    async fn request(&mut self, policy: &Policy, jobs: Vec<LeaseJob>, units: u32, clears: u64) {
        let (shared, sent) = (Arc::clone(&self.shared), self.shared.now());
        shared.counters.asked(policy);
        let decided = shared.inner.decide(StorageRequest::new(policy, &self.key, Op::Hit, units)).await;
        self.is_requesting = false;
        shared.with_entry(self.place.1, |entry| {
            entry.requests -= 1;
            entry.record(&decided);
        });
        match decided {
            Ok(slice) if slice.is_admitted() => {
                let (served, rest) = self.share_out(policy, jobs, slice, sent);
                let refund = shared.keep(rest, clears, Some(&Handle::current()));
                // A peek of a caller that was served sees the rest.
                for (job, decision) in served {
                    job.ticket.answer(Ok(Some(decision)));
                }
                if let Some(lease) = refund {
                    drop(shared.refund(&lease).await);
                }
            }
            // The storage may admit some of the hits alone.
            Ok(_) => pass(jobs),
            Err(error) => jobs.into_iter().for_each(|job| job.ticket.answer(Err(error.clone()))),
        }
    }

    /// Spends a slice for hits, even if it has arrived late: the storage has decided them. Returns their
    /// decisions and the rest.
    fn share_out(
        &self,
        policy: &Policy,
        jobs: Vec<LeaseJob>,
        slice: Decision,
        sent: Timestamp,
    ) -> (Vec<(LeaseJob, Decision)>, Box<Lease>) {
        let micros = if slice.is_from_fallback() { 0 } else { self.shared.ttl(policy) };
        let mut rest = Box::new(Lease::new(policy, &self.key, slice, sent, micros));
        // A caller that has left spends nothing.
        let awaited = jobs.into_iter().filter(|job| !job.ticket.is_dropped());
        let served: Vec<_> = awaited.filter_map(|job| rest.take(job.cost).map(|decision| (job, decision))).collect();
        let spent = served.iter().fold(0, |sum: u32, (job, _)| sum.saturating_add(job.cost));
        self.shared.with_entry(self.place.1, |entry| entry.spent = entry.spent.saturating_add(spent));
        served.iter().skip(1).for_each(|_| self.shared.counters.here(policy));
        (served, rest)
    }
}

/// Lets the callers send their hits to the storage alone.
fn pass(jobs: Vec<LeaseJob>) {
    for job in jobs {
        job.ticket.answer(Ok(None));
    }
}

impl LeaseTable {
    /// Refunds the unspent units of a lease. A failure may have lost them, so hits are sent alone until
    /// one succeeds.
    pub(super) async fn refund(&self, lease: &Lease) -> Result<(), StorageError> {
        let Some((hit, spent)) = lease.leftover(self.now()) else { return Ok(()) };
        let refunded = self.inner.settle(&lease.policy, &lease.key, &hit, spent).await;
        if refunded.is_err() {
            self.with_entry(self.place(&lease.policy, &lease.key), |entry| entry.is_uncertain = true);
        }
        refunded
    }

    /// Leases units, and starts a timer in `runtime` that refunds them. Drops them if the key was cleared
    /// since it had been cleared `clears` times. Returns the lease to refund:
    ///
    /// - these units if their lease has ended, or if the key has lost its entry,
    /// - or the lease that they replace, because a worker in another runtime may have leased a slice,
    ///   too.
    pub(super) fn keep(
        self: &Arc<Self>,
        lease: Box<Lease>,
        clears: u64,
        runtime: Option<&Handle>,
    ) -> Option<Box<Lease>> {
        let (place, now) = (self.place(&lease.policy, &lease.key), self.now());
        let mut refund = Some(lease);
        let started = self.with_entry(place, |entry| {
            if entry.clears != clears {
                refund = None;
                return None;
            }
            let lease = refund.take_if(|lease| lease.time_left(now).is_some())?;
            refund = entry.lease.replace(lease);
            // The timer of another runtime may have stopped with it.
            let runtime = runtime.filter(|runtime| entry.timer.as_deref() != Some(&runtime.id()))?;
            Some((runtime, Arc::clone(entry.timer.insert(Arc::new(runtime.id())))))
        });
        if let Some((runtime, timer)) = started.flatten() {
            runtime.spawn(Arc::clone(self).refund_at_end(place, timer));
        }
        refund
    }

    /// Waits until the key's lease ends, or the one that has replaced it, and refunds it. Ends early if
    /// the key has another timer.
    async fn refund_at_end(self: Arc<Self>, place: TableKey, timer: Arc<Id>) {
        loop {
            let now = self.now();
            let left = self.with_entry(place, |entry| {
                if !entry.timer.as_ref().is_some_and(|current| Arc::ptr_eq(current, &timer)) {
                    return Err(None);
                }
                let left = entry.lease.as_ref().and_then(|lease| lease.time_left(now));
                if left.is_none() {
                    entry.timer = None;
                }
                left.ok_or_else(|| entry.lease.take())
            });
            match left {
                Some(Ok(micros)) => sleep(Duration::from_micros(micros)).await,
                Some(Err(Some(lease))) => return drop(self.refund(&lease).await),
                _ => return,
            }
        }
    }
}

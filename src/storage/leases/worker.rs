//! The worker that sends the requests for one key to the storage, one after the other.
//!
//! One worker per key does one job after the other, so a slice cannot arrive after a later clear.
//! It is polled where it begins, so a memory storage needs no runtime.

use std::collections::VecDeque;
use std::sync::Arc;

use tokio::runtime::Handle;
use tokio::task::yield_now;

use super::lease::{Lease, charged_locally, decide_locally, derive_refusal};
use super::table::{Command, Job, LeaseEntry, LeaseTable, Reply};
use crate::decision::Decision;
use crate::key::Key;
use crate::policy::{Op, Policy};
use crate::storage::key_table::TableKey;
use crate::storage::{Storage, StorageError, StorageRequest};
use crate::time::{Timestamp, micros};

/// A slice is at most the remaining units divided by this number. If the remaining units are
/// unknown, the capacity replaces them. So 16 nodes can take a slice at the start of a window, and
/// few units stay on one node while others refuse hits.
const SLICES_PER_WINDOW: u32 = 16;

/// The maximum number of attempts with a smaller slice after a refusal. The next attempts request
/// only the units that are needed.
const MAX_SMALLER_SLICES: u32 = 2;

/// The maximum number of requests in a row that lead to no reply, because the storage refuses units
/// that it reports as remaining. After that, the caller of the first hit sends the hit to the
/// storage.
const MAX_IDLE_REQUESTS: u32 = 5;

/// The number of rounds after which the worker yields to other tasks. Its first poll runs in the
/// task of a caller, which would otherwise execute the jobs of all others.
const ROUNDS_PER_YIELD: u32 = 16;

/// Sends requests for one key to the storage. If it is dropped before it ends, its callers get an
/// error.
pub(super) struct LeaseWorker {
    pub(super) shared: Arc<LeaseTable>,
    pub(super) place: TableKey,
    pub(super) key: Key,
    pub(super) jobs: VecDeque<Job>,
    /// `true` after the worker has ended normally.
    has_ended: bool,
    /// `true` while a request for units is in flight.
    is_requesting: bool,
}

impl Drop for LeaseWorker {
    fn drop(&mut self) {
        if !self.has_ended {
            self.shared.abandon(self.place, self.is_requesting);
        }
    }
}

impl LeaseWorker {
    pub(super) fn new(shared: Arc<LeaseTable>, place: TableKey, key: Key) -> Self {
        Self { shared, place, key, jobs: VecDeque::new(), has_ended: false, is_requesting: false }
    }

    /// Runs the key's jobs until there are none.
    pub(super) async fn run(mut self) {
        let mut rounds = 0;
        while self.collect() {
            rounds = (rounds + 1) % ROUNDS_PER_YIELD;
            if rounds == 0 && Handle::try_current().is_ok() {
                yield_now().await;
            }
            let policy = self.jobs[0].policy.clone();
            self.refund_other_policy(&policy).await;
            match self.jobs[0].command {
                Command::Hit(_) => self.serve(&policy).await,
                _ => self.run_first(&policy).await,
            }
            if self.shared.is_closed() {
                self.refund_lease().await;
            }
        }
        self.has_ended = true;
    }

    /// If this worker has no jobs left, takes those that are waiting. Returns `false` if there are
    /// none either, which ends the worker.
    fn collect(&mut self) -> bool {
        let mut bucket = self.shared.table.lock(self.place);
        if let Some(entry) = bucket.find() {
            // `next_jobs` ends the worker if no jobs are waiting, so it is called only when this
            // worker has no jobs left.
            while self.jobs.is_empty() {
                let more = entry.next_jobs();
                if more.is_empty() {
                    break;
                }
                self.jobs.extend(more);
                self.jobs.retain(|job| !job.is_abandoned());
            }
        }
        if self.jobs.is_empty() {
            bucket.retain(|entry| !entry.is_idle());
        }
        !self.jobs.is_empty()
    }

    /// Refunds the key's lease if it belongs to another policy with the same name, because `policy`
    /// cannot spend it.
    async fn refund_other_policy(&mut self, policy: &Policy) {
        let lease = self.with_entry(|entry| entry.lease.take_if(|lease| lease.policy != *policy)).flatten();
        if let Some(lease) = lease
            && let Some(hit) = lease.as_hit()
        {
            drop(self.shared.inner.settle(&lease.policy, &self.key, &hit, 0).await);
        }
    }

    /// Refunds the lease after a close. Sends an error to the callers that wait in `close`.
    async fn refund_lease(&mut self) {
        let lease = self.with_entry(|entry| entry.lease.take()).flatten();
        if let Some(lease) = lease
            && let Some(hit) = lease.as_hit()
            && let Err(error) = self.shared.inner.settle(&lease.policy, &self.key, &hit, 0).await
        {
            let closing = self.with_entry(|entry| std::mem::take(&mut entry.when_idle)).unwrap_or_default();
            for when_idle in closing {
                drop(when_idle.send(error.clone()));
            }
        }
    }

    /// Runs the first job, which is not a hit on a leased window.
    async fn run_first(&mut self, policy: &Policy) {
        let Some(job) = self.jobs.pop_front() else { return };
        let inner = &self.shared.inner;
        let answer = match &job.command {
            Command::Forward(op, cost) => {
                let decided = inner.decide(StorageRequest::new(policy, &self.key, *op, *cost)).await;
                decided.map(|decision| Some(Reply::without_units(self.with_unspent(policy, decision, *op))))
            }
            Command::Settle(hit, actual) => inner.settle(policy, &self.key, hit, *actual).await.map(|()| None),
            Command::Hit(_) | Command::Clear => {
                // Hits before the clear may have added a lease.
                self.with_entry(|entry| entry.lease = None);
                inner.clear(policy, &self.key).await.map(|()| None)
            }
        };
        job.send(answer);
    }

    /// Adds the unspent units of the lease to a decision, because the storage counts them as spent.
    fn with_unspent(&mut self, policy: &Policy, decision: Decision, op: Op) -> Decision {
        let local = self.unspent(self.shared.clock.now());
        let is_undecided = decision.is_from_fallback() || decision.is_contended() || decision.is_storage_full();
        if local == 0 || is_undecided {
            return decision;
        }
        let remaining = decision.remaining().saturating_add(local);
        if op == Op::Charge {
            return charged_locally(policy, &decision, remaining);
        }
        decide_locally(policy, decision.at(), decision.cost(), remaining, decision.shown().reset_after_micros())
    }

    /// Serves the hits at the front of the queue that have the same policy: from the lease, from a
    /// new slice, or with a refusal.
    async fn serve(&mut self, policy: &Policy) {
        // Hits that arrive later are served from the rest of this slice, or in the next round.
        let mut waiting = self.jobs.iter().take_while(|job| job.cost(policy).is_some()).count();
        let (mut remain, mut attempt, mut idle_requests) = (None, 0, 0);
        loop {
            // A refund may have arrived meanwhile.
            waiting -= self.serve_from_lease(policy, waiting, true);
            if waiting == 0 {
                return;
            }
            let (now, slice) = (self.shared.clock.now(), self.request_size(policy, waiting, remain, attempt));
            attempt += 1;
            let changes = self.with_entry(|entry| entry.changes);
            let decided = self.request_units(policy, slice).await;
            let before = self.jobs.len();
            match decided {
                Err(error) => return self.fail(&error),
                Ok(decision) if decision.is_from_fallback() => {
                    return self.decided_by_fallback(policy, &decision).await;
                }
                Ok(decision) if decision.is_admitted() => {
                    return self.admitted(policy, &decision, now, waiting, changes);
                }
                Ok(decision) if decision.is_contended() || decision.is_storage_full() => {
                    return self.refuse_undecided(policy, &decision, waiting);
                }
                Ok(decision) => {
                    self.refuse(policy, &decision, waiting);
                    remain = Some(decision.remaining());
                }
            }
            let replied = before - self.jobs.len();
            waiting -= replied;
            idle_requests = if replied > 0 { 0 } else { idle_requests + 1 };
            if idle_requests == MAX_IDLE_REQUESTS
                && let Some(job) = self.jobs.pop_front()
            {
                job.send(Ok(None));
                (waiting, idle_requests) = (waiting - 1, 0);
            }
        }
    }

    /// Requests units from the storage, and records the success or failure.
    async fn request_units(&mut self, policy: &Policy, units: u32) -> Result<Decision, StorageError> {
        let (shared, failures) = (Arc::clone(&self.shared), self.shared.outage.failures());
        shared.counters.asked(policy);
        self.is_requesting = true;
        let decided = shared.inner.decide(StorageRequest::new(policy, &self.key, Op::Hit, units)).await;
        self.is_requesting = false;
        match &decided {
            // The breaker's primary did not answer, and may have counted the hit.
            Ok(decision) if decision.is_from_fallback() => self.failed(),
            Err(_) => self.failed(),
            // The storage counted nothing, which does not prove that it has recovered.
            Ok(decision) if decision.is_contended() || decision.is_storage_full() => {}
            Ok(_) => {
                shared.outage.answered(failures);
                self.with_entry(|entry| entry.is_uncertain = false);
            }
        }
        decided
    }

    /// Records a failure. Until a later request succeeds, all keys request the units of one hit
    /// instead of a slice.
    fn failed(&self) {
        self.shared.outage.failed();
        self.with_entry(|entry| entry.is_uncertain = true);
    }

    /// Returns the number of units to request:
    ///
    /// - Usually a slice. More if the waiting hits need more, and less if few units remain.
    /// - After a [close](super::Leases::close), the units that the waiting hits need.
    /// - After a failure, or after [`MAX_SMALLER_SLICES`], the units that the first hit needs. So
    ///   another lost request costs no more than one hit.
    fn request_size(&mut self, policy: &Policy, waiting: usize, remain: Option<u32>, attempt: u32) -> u32 {
        let (now, slice) = (self.shared.clock.now(), self.shared.slice);
        let local = self.unspent(now);
        let known =
            self.with_entry(|entry| entry.lease.as_ref().filter(|lease| lease.is_live(now)).map(|it| it.in_storage));
        let remain = remain.or(known.flatten()).unwrap_or_else(|| policy.limits()[0].capacity());
        let costs = self.jobs.iter().take(waiting).filter_map(|job| job.cost(policy));
        let (mut first, mut all) = (None, 0_u32);
        for cost in costs {
            first = first.or(Some(cost));
            all = all.saturating_add(cost);
        }
        let needed = first.unwrap_or(1).saturating_sub(local).max(1);
        let is_uncertain = self.shared.outage.is_on() || self.with_entry(|entry| entry.is_uncertain) == Some(true);
        if is_uncertain || attempt > MAX_SMALLER_SLICES {
            return needed;
        }
        let wanted = all.saturating_sub(local).min(remain).max(needed);
        if self.shared.is_closed() { wanted } else { wanted.max(slice.min(remain / SLICES_PER_WINDOW)) }
    }

    /// Stores a slice that the storage has admitted. It serves the hits that were waiting for it,
    /// even if the window has ended meanwhile.
    fn admitted(&mut self, policy: &Policy, slice: &Decision, sent: Timestamp, waiting: usize, changes: Option<u64>) {
        let mut lease = Lease::of(policy, slice, sent, self.shared.clock.now());
        let unchanged = self.with_entry(|entry| entry.changes) == changes;
        self.with_entry(|entry| {
            if let Some(older) = entry.lease.take() {
                lease.add(&older);
            }
            entry.lease = Some(lease);
        });
        self.serve_from_lease(policy, waiting, false);
        if !unchanged {
            // A clear that did not wait for this worker ran meanwhile. The rest of the slice is
            // from before the clear.
            self.with_entry(|entry| entry.lease = None);
        }
    }

    /// Returns the unspent units of the lease, or 0 if its window has ended.
    pub(super) fn unspent(&self, now: Timestamp) -> u32 {
        let unspent =
            self.with_entry(|entry| entry.lease.as_ref().filter(|lease| lease.is_live(now)).map(|it| it.unspent));
        unspent.flatten().unwrap_or(0)
    }

    pub(super) fn with_entry<T>(&self, f: impl FnOnce(&mut LeaseEntry) -> T) -> Option<T> {
        self.shared.table.lock(self.place).find().map(f)
    }
}

impl LeaseWorker {
    /// Serves up to `most` waiting hits from the lease, in order, while it has enough units.
    /// Returns the number of served hits. If `open` is `true`, serves none after the lease's window
    /// has ended.
    pub(super) fn serve_from_lease(&mut self, policy: &Policy, most: usize, open: bool) -> usize {
        let now = self.shared.clock.now();
        let mut served = Vec::new();
        let jobs = &mut self.jobs;
        let mut bucket = self.shared.table.lock(self.place);
        let lease = bucket.find().and_then(|entry| entry.lease.as_mut()).filter(|lease| !open || lease.is_live(now));
        if let Some(lease) = lease.filter(|lease| lease.policy == *policy) {
            while served.len() < most
                && let Some(cost) = jobs.front().and_then(|job| job.cost(policy))
                && let Some(decision) = lease.take(cost, now)
                && let Some(job) = jobs.pop_front()
            {
                served.push((job, decision));
            }
        }
        drop(bucket);
        let count = served.len();
        for (number, (job, decision)) in served.into_iter().enumerate() {
            if open || number > 0 {
                self.shared.counters.here(policy);
            }
            job.send(Ok(Some(Reply::of(decision, self.shared.clone(), policy, &self.key))));
        }
        count
    }

    /// Refuses those of the first `waiting` hits that cost more than the units in the storage and
    /// in the lease together.
    pub(super) fn refuse(&mut self, policy: &Policy, refusal: &Decision, waiting: usize) {
        let local = self.unspent(self.shared.clock.now());
        self.with_entry(|entry| {
            if let Some(lease) = &mut entry.lease {
                lease.in_storage = refusal.remaining();
            }
        });
        let remaining = refusal.remaining().saturating_add(local);
        let reset = refusal.shown().reset_after_micros();
        self.reply_to(policy, waiting, |cost| {
            (cost > remaining).then(|| decide_locally(policy, refusal.at(), cost, remaining, reset))
        });
    }

    /// Refuses the first `waiting` hits, because the storage was full or contended. Each hit gets
    /// the `retry_after` of `refusal`.
    pub(super) fn refuse_undecided(&mut self, policy: &Policy, refusal: &Decision, waiting: usize) {
        let wait = refusal.shown().retry_after().map_or(0, micros);
        self.reply_to(policy, waiting, |cost| {
            let refused = policy.refuse(refusal.at(), cost, wait);
            Some(if refusal.is_storage_full() { refused.storage_full() } else { refused.contended() })
        });
    }

    /// Replies to each of the first `waiting` hits for which `decide` returns a decision. The other
    /// hits keep waiting.
    fn reply_to(&mut self, policy: &Policy, waiting: usize, decide: impl Fn(u32) -> Option<Decision>) {
        let mut rest = self.jobs.split_off(waiting.min(self.jobs.len()));
        for job in std::mem::take(&mut self.jobs) {
            match job.cost(policy).and_then(&decide) {
                Some(decision) => job.send(Ok(Some(Reply::without_units(decision)))),
                None => self.jobs.push_back(job),
            }
        }
        self.jobs.append(&mut rest);
    }

    /// Fails all waiting hits with the error of the storage.
    pub(super) fn fail(&mut self, error: &StorageError) {
        for job in self.all_hits() {
            job.send(Err(error.clone()));
        }
    }

    /// Removes all waiting hits from the queue, including those that were added meanwhile.
    fn all_hits(&mut self) -> VecDeque<Job> {
        let more = self.with_entry(|entry| std::mem::take(&mut entry.waiting)).unwrap_or_default();
        let all = std::mem::take(&mut self.jobs).into_iter().chain(more);
        let (hits, others) = all.partition(|job| matches!(job.command, Command::Hit(_)));
        self.jobs = others;
        hits
    }

    /// Handles a decision by a fallback, from which nothing is leased.
    ///
    /// - An admission serves the waiting hits as long as its units last. The rest is refunded.
    /// - A refusal serves the waiting hits of a cost that it excludes.
    /// - The callers of the other hits send them to the storage.
    pub(super) async fn decided_by_fallback(&mut self, policy: &Policy, decision: &Decision) {
        let now = self.shared.clock.now();
        let mut slice = Lease::of(policy, decision, now, now);
        let mut decide =
            |cost| if decision.is_admitted() { slice.take(cost, now) } else { derive_refusal(decision, cost) };
        for job in self.all_hits() {
            let own = job.cost(policy).and_then(&mut decide).map(|own| own.via(decision.source()));
            job.send(Ok(own.map(|own| Reply::of(own, self.shared.clone(), policy, &self.key))));
        }
        if let Some(rest) = slice.as_hit().filter(|_| decision.is_admitted()) {
            drop(self.shared.inner.settle(policy, &self.key, &rest.via(decision.source()), 0).await);
        }
    }
}

//! The replies to the hits that wait for one key.

use std::collections::VecDeque;

use super::job::{Command, Job, Reply};
use super::lease::{Lease, decide_locally, derive_refusal};
use super::worker::LeaseWorker;
use crate::decision::Decision;
use crate::policy::Policy;
use crate::storage::{Storage, StorageError};
use crate::time::micros;

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

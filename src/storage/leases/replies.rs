//! What those are told who wait for one key.

use std::collections::VecDeque;

use super::error::LeaseError;
use super::job::{Command, Job, Reply};
use super::lease::{Lease, refused_too, told};
use super::worker::LeaseWorker;
use crate::time::micros;
use crate::{Decision, Policy, Storage};

impl<St: Storage> LeaseWorker<St> {
    /// Gives those in front what they want, for as long as there is enough: `most` of them, of a window that is open or, if it was
    /// asked for them, `open` or not. Returns how many.
    pub(super) fn hand_out(&mut self, policy: &Policy, most: usize, open: bool) -> usize {
        let now = self.shared.clock.now();
        let mut served = Vec::new();
        let jobs = &mut self.jobs;
        let mut bucket = self.shared.table.lock(self.place);
        let lease = bucket.find().and_then(|of_key| of_key.lease.as_mut()).filter(|lease| !open || lease.is_live(now));
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
            job.tell(Ok(Some(Reply::of(decision, &self.shared, policy, &self.key))));
        }
        count
    }

    /// What remains of the window, all told, is known: those of the crowd are refused who want more.
    pub(super) fn refuse(&mut self, policy: &Policy, refusal: &Decision, crowd: usize) {
        let here = self.left(self.shared.clock.now());
        self.of_key(|of_key| {
            if let Some(lease) = &mut of_key.lease {
                lease.elsewhere = refusal.remaining();
            }
        });
        let remaining = refusal.remaining().saturating_add(here);
        let reset = refusal.shown().reset_after_micros();
        self.word(policy, crowd, |cost| (cost > remaining).then(|| told(policy, refusal.at(), cost, remaining, reset)));
    }

    /// The storage could not decide, and says when to come back.
    pub(super) fn turn_away(&mut self, policy: &Policy, refusal: &Decision, crowd: usize) {
        let wait = refusal.shown().retry_after().map_or(0, micros);
        self.word(policy, crowd, |cost| {
            let refused = policy.refuse(refusal.at(), cost, wait);
            Some(if refusal.is_storage_full() { refused.storage_full() } else { refused.contended() })
        });
    }

    /// Tells those of the crowd what is said of their costs, if anything is.
    fn word(&mut self, policy: &Policy, crowd: usize, say: impl Fn(u32) -> Option<Decision>) {
        let mut rest = self.jobs.split_off(crowd.min(self.jobs.len()));
        for job in std::mem::take(&mut self.jobs) {
            match job.cost(policy).and_then(&say) {
                Some(decision) => job.tell(Ok(Some(Reply::word(decision)))),
                None => self.jobs.push_back(job),
            }
        }
        self.jobs.append(&mut rest);
    }

    /// Tells all who wait for units: had each of them asked, they would have heard the same.
    pub(super) fn fail(&mut self, error: &LeaseError) {
        for job in self.all_hits() {
            job.tell(Err(error.clone()));
        }
    }

    /// Takes all who wait for units out of the queue, those who have come meanwhile too.
    fn all_hits(&mut self) -> VecDeque<Job<St>> {
        let more = self.of_key(|of_key| std::mem::take(&mut of_key.waiting)).unwrap_or_default();
        let all = std::mem::take(&mut self.jobs).into_iter().chain(more);
        let (hits, others) = all.partition(|job| matches!(job.want, Command::Hit(_)));
        self.jobs = others;
        hits
    }

    /// A fallback has decided, in a window of its own that is not leased: all who wait for units are told what follows for them, and
    /// what nobody wants is given back. Nobody waits for a second answer here; whom this one leaves open asks by itself.
    pub(super) async fn stood_in(&mut self, policy: &Policy, decision: &Decision) {
        let now = self.shared.clock.now();
        let mut slice = Lease::of(policy, decision, now, now);
        let mut say = |cost| if decision.is_admitted() { slice.take(cost, now) } else { refused_too(decision, cost) };
        for job in self.all_hits() {
            let said = job.cost(policy).and_then(&mut say).map(|said| said.the_way_of(decision));
            job.tell(Ok(said.map(|said| Reply::of(said, &self.shared, policy, &self.key))));
        }
        if let Some(rest) = slice.as_hit().filter(|_| decision.is_admitted()) {
            drop(self.shared.inner.refund(policy, &self.key, &rest.the_way_of(decision)).await);
        }
    }
}

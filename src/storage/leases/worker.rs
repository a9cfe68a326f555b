//! Who asks the storage for all who wait for one key, one question after the other.

use std::collections::VecDeque;
use std::sync::Arc;

use tokio::runtime::Handle;
use tokio::task::yield_now;

use super::entry::LeaseEntry;
use super::error::LeaseError;
use super::job::{Command, Job, Reply};
use super::lease::{Lease, told};
use super::lease_table::LeaseTable;
use crate::storage::StorageRequest;
use crate::storage::key_table::TableKey;
use crate::{Decision, Key, Op, Policy, Storage, Timestamp};

/// No slice is larger than this part of what remains of the window, as far as that is known: the last units of it are not to lie on
/// one node while others are refused. Of the limit, when nothing is known: so many nodes can begin a window at once.
const SHARE: u32 = 16;

/// So often a slice that is refused is tried with less, before just what is needed is asked for.
const SMALLER: u32 = 2;

/// So often the storage is asked without anybody being told anything, as it refuses what it says there is room for; then the first
/// asks by itself.
const FRUITLESS: u32 = 5;

/// So often it looks for more to do before it lets others run: the caller who polls it first has a hit of its own.
const ROUNDS: u32 = 16;

/// Asks the storage for one key. If it is dropped before it ends, its callers get an error.
pub(super) struct LeaseWorker<St: Storage> {
    pub(super) shared: Arc<LeaseTable<St>>,
    pub(super) place: TableKey,
    pub(super) key: Key,
    pub(super) jobs: VecDeque<Job<St>>,
    over: bool,
    /// A request for units is in flight.
    asking: bool,
}

impl<St: Storage> Drop for LeaseWorker<St> {
    fn drop(&mut self) {
        if !self.over {
            self.shared.abandon(self.place, self.asking);
        }
    }
}

impl<St: Storage> LeaseWorker<St> {
    pub(super) fn new(shared: Arc<LeaseTable<St>>, place: TableKey, key: Key) -> Self {
        Self { shared, place, key, jobs: VecDeque::new(), over: false, asking: false }
    }

    /// Does all that is wanted of the key until nobody wants anything.
    pub(super) async fn run(mut self) {
        let mut rounds = 0;
        while self.collect() {
            rounds = (rounds + 1) % ROUNDS;
            if rounds == 0 && Handle::try_current().is_ok() {
                yield_now().await;
            }
            let policy = self.jobs[0].policy.clone();
            self.give_back_of_others(&policy).await;
            match self.jobs[0].want {
                Command::Hit(_) => self.serve(&policy).await,
                _ => self.do_first(&policy).await,
            }
            if self.shared.is_closed() {
                self.give_back_all().await;
            }
        }
        self.over = true;
    }

    /// Takes over what has come meanwhile. Whether there is anything to do.
    fn collect(&mut self) -> bool {
        let mut bucket = self.shared.table.lock(self.place);
        if let Some(of_key) = bucket.find() {
            // Not busy from here on, if there is nothing: so it is not to be asked while something is left.
            while self.jobs.is_empty() {
                let more = of_key.next_jobs();
                if more.is_empty() {
                    break;
                }
                self.jobs.extend(more);
                self.jobs.retain(|job| !job.is_given_up());
            }
        }
        if self.jobs.is_empty() {
            bucket.retain(|of_key| !of_key.is_idle());
        }
        !self.jobs.is_empty()
    }

    /// A lease by another quota of the same name is for nobody else: the storage gets it back first.
    async fn give_back_of_others(&mut self, policy: &Policy) {
        let lease = self.of_key(|of_key| of_key.lease.take_if(|lease| lease.policy != *policy)).flatten();
        if let Some(lease) = lease
            && let Some(hit) = lease.as_hit()
        {
            drop(self.shared.inner.refund(&lease.policy, &self.key, &hit).await);
        }
    }

    /// Refunds what is left of the lease, because the leases are closed.
    async fn give_back_all(&mut self) {
        let lease = self.of_key(|of_key| of_key.lease.take()).flatten();
        if let Some(lease) = lease
            && let Some(hit) = lease.as_hit()
            && let Err(error) = self.shared.inner.refund(&lease.policy, &self.key, &hit).await
        {
            let error = LeaseError::storage(error);
            let closing = self.of_key(|of_key| std::mem::take(&mut of_key.when_idle)).unwrap_or_default();
            for when_idle in closing {
                drop(when_idle.send(error.clone()));
            }
        }
    }

    /// Does the first job, which is no hit on a window.
    async fn do_first(&mut self, policy: &Policy) {
        let Some(job) = self.jobs.pop_front() else { return };
        let inner = &self.shared.inner;
        let answer = match &job.want {
            Command::StorageRequest(op, cost) => {
                let asked = inner.decide(StorageRequest::new(policy, &self.key, *op, *cost)).await;
                asked.map(|decision| Some(Reply::word(self.with_what_is_here(policy, decision))))
            }
            Command::Refund(decision) => inner.refund(policy, &self.key, decision).await.map(|()| None),
            Command::Hit(_) | Command::Clear => {
                // A slice that was taken for those who were before it is from before it, too.
                self.of_key(|of_key| of_key.lease = None);
                inner.clear(policy, &self.key).await.map(|()| None)
            }
        };
        job.tell(answer.map_err(LeaseError::storage));
    }

    /// The storage does not know that what is leased has not been spent.
    fn with_what_is_here(&mut self, policy: &Policy, decision: Decision) -> Decision {
        let here = self.left(self.shared.clock.now());
        let is_no_answer = decision.is_from_fallback() || decision.is_contended() || decision.is_storage_full();
        if here == 0 || is_no_answer {
            return decision;
        }
        let remaining = decision.remaining().saturating_add(here);
        told(policy, decision.at(), decision.cost(), remaining, decision.shown().reset_after_micros())
    }

    /// Serves the hits that wait in front, all by one policy: from what is here, from a slice, or with a refusal.
    async fn serve(&mut self, policy: &Policy) {
        // Those who come later are served by what this leaves, or next time.
        let mut crowd = self.jobs.iter().take_while(|job| job.cost(policy).is_some()).count();
        let (mut remain, mut attempt, mut fruitless) = (None, 0, 0);
        loop {
            // Some may have given back meanwhile.
            crowd -= self.hand_out(policy, crowd, true);
            if crowd == 0 {
                return;
            }
            let (now, slice) = (self.shared.clock.now(), self.size(policy, crowd, remain, attempt));
            attempt += 1;
            let changes = self.of_key(|of_key| of_key.changes);
            let decided = self.ask(policy, slice).await;
            let before = self.jobs.len();
            match decided {
                Err(error) => return self.fail(&LeaseError::storage(error)),
                Ok(decision) if decision.is_from_fallback() => {
                    return self.stood_in(policy, &decision).await;
                }
                Ok(decision) if decision.is_admitted() => {
                    return self.admitted(policy, &decision, now, crowd, changes);
                }
                Ok(decision) if decision.is_contended() || decision.is_storage_full() => {
                    return self.turn_away(policy, &decision, crowd);
                }
                Ok(decision) => {
                    self.refuse(policy, &decision, crowd);
                    remain = Some(decision.remaining());
                }
            }
            let told = before - self.jobs.len();
            crowd -= told;
            fruitless = if told > 0 { 0 } else { fruitless + 1 };
            if fruitless == FRUITLESS
                && let Some(job) = self.jobs.pop_front()
            {
                job.tell(Ok(None));
                (crowd, fruitless) = (crowd - 1, 0);
            }
        }
    }

    /// Asks the storage for units, and notes whether it can be relied on.
    async fn ask(&mut self, policy: &Policy, units: u32) -> Result<Decision, St::Error> {
        let (shared, failures) = (Arc::clone(&self.shared), self.shared.outage.failures());
        shared.counters.asked(policy);
        self.asking = true;
        let decided = shared.inner.decide(StorageRequest::new(policy, &self.key, Op::Hit, units)).await;
        self.asking = false;
        match &decided {
            // The storage that counts for all nodes did not answer. It may have counted.
            Ok(decision) if decision.is_from_fallback() => self.failed(),
            Err(_) => self.failed(),
            // It counted nothing, and could not say what remains.
            Ok(decision) if decision.is_contended() || decision.is_storage_full() => {}
            Ok(_) => {
                shared.outage.answered(failures);
                self.of_key(|of_key| of_key.in_doubt = false);
            }
        }
        decided
    }

    /// From now on this key asks for single units, and so do all others.
    fn failed(&self) {
        self.shared.outage.failed();
        self.of_key(|of_key| of_key.in_doubt = true);
    }

    /// The units to ask for: usually a slice. It is more if the waiting hits need more, less if few
    /// units remain, and at least what the first hit needs. After a failure it is what the first hit
    /// needs: if that is lost too, it is the cost of one hit.
    fn size(&mut self, policy: &Policy, crowd: usize, remain: Option<u32>, attempt: u32) -> u32 {
        let (now, slice) = (self.shared.clock.now(), self.shared.slice);
        let here = self.left(now);
        let known =
            self.of_key(|of_key| of_key.lease.as_ref().filter(|lease| lease.is_live(now)).map(|it| it.elsewhere));
        let remain = remain.or(known.flatten()).unwrap_or_else(|| policy.limits()[0].capacity());
        let costs = self.jobs.iter().take(crowd).filter_map(|job| job.cost(policy));
        let (mut first, mut all) = (None, 0_u32);
        for cost in costs {
            first = first.or(Some(cost));
            all = all.saturating_add(cost);
        }
        let needed = first.unwrap_or(1).saturating_sub(here).max(1);
        let in_doubt = self.shared.outage.is_on() || self.of_key(|of_key| of_key.in_doubt) == Some(true);
        if in_doubt || attempt > SMALLER {
            return needed;
        }
        let wanted = all.saturating_sub(here).min(remain).max(needed);
        if self.shared.is_closed() { wanted } else { wanted.max(slice.min(remain / SHARE)) }
    }

    /// The storage has admitted a slice: those who waited when it was asked for are served from it, whatever time it is now.
    fn admitted(&mut self, policy: &Policy, slice: &Decision, sent: Timestamp, crowd: usize, changes: Option<u64>) {
        let mut lease = Lease::of(policy, slice, sent, self.shared.clock.now());
        let unchanged = self.of_key(|of_key| of_key.changes) == changes;
        self.of_key(|of_key| {
            if let Some(older) = of_key.lease.take() {
                lease.add(&older);
            }
            of_key.lease = Some(lease);
        });
        self.hand_out(policy, crowd, false);
        if !unchanged {
            // It was cleared meanwhile, by somebody who did not wait: the rest is from before that.
            self.of_key(|of_key| of_key.lease = None);
        }
    }

    /// What is left here of a window that is open.
    pub(super) fn left(&self, now: Timestamp) -> u32 {
        let left = self.of_key(|of_key| of_key.lease.as_ref().filter(|lease| lease.is_live(now)).map(|it| it.left));
        left.flatten().unwrap_or(0)
    }

    pub(super) fn of_key<T>(&self, look: impl FnOnce(&mut LeaseEntry<St>) -> T) -> Option<T> {
        self.shared.table.lock(self.place).find().map(look)
    }
}

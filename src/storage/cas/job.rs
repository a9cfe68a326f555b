//! A job on the states of a key or of several keys, and the caller that waits for it.
//!
//! A hit is refused as contended only if the store cannot execute it anymore. If a swap with the
//! hit was sent and has no result, its caller gets an error for which `may_have_counted` is `true`.

use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Id;
use tokio::time::Instant;

use crate::decision::Decision;
use crate::policy::Policy;
use crate::storage::contract::OwnedRequest;
use crate::storage::ticket::{CallStage, Caller, Ticket, Unanswered};
use crate::storage::{StorageError, StorageErrorKind};
use crate::time::Timestamp;

/// The `retry_after` of a contended hit, in microseconds.
const RETRY_AFTER: u64 = 20_000;

/// The number of lost swaps after which a job is answered as contended.
const MAX_LOST_SWAPS: u32 = 24;

/// The result of a job. A hit or a charge has a decision for each key, and other commands have none.
pub(super) type JobResult = Result<Vec<Decision>, StorageError>;

#[derive(Clone, Debug)]
pub(in crate::storage) enum Command {
    /// A hit of this cost.
    Hit(u32),
    /// A charge of this many units.
    Charge(u32),
    /// The decision of a hit, and its actual cost.
    Settle(Box<Decision>, u32),
    Clear,
}

/// The work of a job.
#[derive(Clone, Debug)]
pub(super) enum JobWork {
    /// A command on one key.
    One { key: Arc<str>, policy: Policy, command: Command },
    /// A decision on several keys together. Each member is in the store under its key.
    All(Vec<(Arc<str>, OwnedRequest)>),
}

impl JobWork {
    /// Returns the name of the job's queue: its key in the store. Decisions on several keys share a queue,
    /// whose name is empty, because most of them have a key in common. And a batch costs as many
    /// round trips as one decision: with a worker for each of 100 tenants, etcd and PostgreSQL made
    /// a quarter of the decisions.
    pub(super) fn queue_name(&self) -> Arc<str> {
        match self {
            Self::One { key, .. } => Arc::clone(key),
            Self::All(_) => "".into(),
        }
    }

    /// Returns the keys of the job, with their policies.
    pub(super) fn keys(&self) -> impl Iterator<Item = (&Arc<str>, &Policy)> {
        let (one, all) = match self {
            Self::One { key, policy, .. } => (Some((key, policy)), &[][..]),
            Self::All(members) => (None, &members[..]),
        };
        one.into_iter().chain(all.iter().map(|(key, request)| (key, &request.policy)))
    }
}

/// The worker's side of a call. The ticket is begun while a swap with the job is in flight.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) work: Arc<JobWork>,
    pub(super) ticket: Ticket<JobResult>,
    pub(super) deadline: Instant,
    /// The timeout of the call.
    pub(super) timeout: Duration,
    /// The number of lost swaps.
    lost: u32,
    /// The name of the store, for errors.
    store_name: Arc<str>,
}

/// The caller's side of a call. The job is executed even if this is dropped.
#[derive(Debug)]
pub(super) struct JobWaiter {
    work: Arc<JobWork>,
    caller: Caller<JobResult>,
    deadline: Instant,
    store_name: Arc<str>,
}

impl Job {
    /// Creates both sides of a call that times out after `timeout`.
    pub(super) fn new(work: JobWork, timeout: Duration, store_name: &Arc<str>) -> (Self, JobWaiter) {
        let (ticket, caller) = Ticket::new();
        let (work, deadline, store_name) = (Arc::new(work), Instant::now() + timeout, Arc::clone(store_name));
        let waiting = JobWaiter { work: Arc::clone(&work), caller, deadline, store_name: Arc::clone(&store_name) };
        (Self { work, ticket, deadline, timeout, lost: 0, store_name }, waiting)
    }

    /// Records that a swap with this job was lost.
    pub(super) fn set_lost(&mut self, at: Timestamp) {
        self.lost += 1;
        self.ticket.set_contended(at);
        self.ticket.take_back();
    }

    /// Returns the job if it can still be executed before its deadline, assuming that a round trip
    /// takes `trip`. Otherwise answers its caller and returns `None`.
    ///
    /// If the store has just cancelled a swap of the key, which took `blocked`, the next one may
    /// take as long.
    ///
    /// A contended or blocked job without enough time is not sent. Its caller gets a definite answer
    /// instead: the hit was not counted.
    pub(super) fn retain(self, trip: Duration, blocked: Duration) -> Option<Self> {
        if !self.ticket.is_awaited() {
            return None;
        }
        let stage = self.ticket.stage();
        let trips = if stage.contended.is_some() { 2 * trip } else { Duration::ZERO };
        // The extra eighth keeps a slow reply from turning a definite answer into an indefinite one.
        let is_delayed = stage.contended.is_some() || !blocked.is_zero();
        let least = if is_delayed { trips.max(blocked) + self.timeout / 8 } else { Duration::ZERO };
        if self.lost < MAX_LOST_SWAPS && Instant::now() + least < self.deadline {
            return Some(self);
        }
        self.ticket.answer(unfinished_answer(&self.work, &stage, &self.store_name));
        None
    }
}

impl JobWaiter {
    /// Waits for the answer until the deadline.
    pub(super) async fn answer(self) -> JobResult {
        match self.caller.wait(self.deadline).await {
            Ok(answer) => answer,
            Err(Unanswered::Dropped) => Err(cancelled()),
            Err(Unanswered::Late(stage)) => unfinished_answer(&self.work, &stage, &self.store_name),
        }
    }
}

/// Returns the answer to a job that ends without a result: at its deadline, or after too many lost
/// swaps. If a sent swap may have stored it, the answer is an error, because a refusal would mean
/// that nothing was spent.
fn unfinished_answer(work: &JobWork, stage: &CallStage, store: &str) -> JobResult {
    let Some(at) = stage.contended.filter(|_| !stage.is_begun) else { return Err(late(store, stage.is_begun)) };
    let refuse = |policy: &Policy, cost| policy.refusal(at, cost, RETRY_AFTER).contended();
    match work {
        JobWork::One { policy, command: Command::Hit(cost) | Command::Charge(cost), .. } => {
            Ok(vec![refuse(policy, *cost)])
        }
        JobWork::One { .. } => Err(contended()),
        JobWork::All(members) => Ok(members.iter().map(|(_, member)| refuse(&member.policy, member.cost)).collect()),
    }
}

/// Creates the error of a timeout of `store`. `sent` is `true` if a swap was sent, which the store
/// may have executed.
pub(super) fn late(store: &str, sent: bool) -> StorageError {
    let message = if sent {
        format!("{store} did not confirm a swap within the timeout: the call may have been executed")
    } else {
        format!("{store} did not return the state within the timeout")
    };
    StorageError::new(StorageErrorKind::Timeout, message).with_may_have_counted(sent)
}

/// Creates the error of a call whose worker has ended.
pub(super) fn cancelled() -> StorageError {
    let message = "the background task ended without a decision: its runtime was shut down, or a strategy panicked";
    StorageError::new(StorageErrorKind::Cancelled, message)
}

/// Creates the error of a clear or a settlement that lost every race.
fn contended() -> StorageError {
    let message = "other processes changed the key before every swap, nothing was cleared or settled; try again";
    StorageError::new(StorageErrorKind::Contended, message)
}

/// Creates the error of a decision on two keys that are the same one in the store.
pub(super) fn same_key() -> StorageError {
    let message = "two keys of one decision have the same name in the store";
    StorageError::new(StorageErrorKind::Unsupported, message)
}

/// Identifies a worker by its runtime and its [queue](JobWork::queue_name).
pub(super) type QueueKey = (Id, Arc<str>);

//! A job on the states of a key, and the caller that waits for it.
//!
//! A hit is refused as contended only if the store cannot execute it anymore. If a swap with the
//! hit was sent and has no result, its caller gets an error for which `may_have_counted` is `true`.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};

use super::error;
use crate::decision::Decision;
use crate::policy::Policy;
use crate::storage::StorageError;
use crate::sync::unpoisoned;
use crate::time::Timestamp;

/// The `retry_after` of a contended hit, in microseconds.
const RETRY_AFTER: u64 = 20_000;

/// The number of lost swaps after which a job is answered as contended.
const MAX_LOST_SWAPS: u32 = 24;

/// The result of a job. Only hits and charges have a decision.
pub(super) type JobResult = Result<Option<Decision>, StorageError>;

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

/// The worker's side of a call.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) policy: Policy,
    pub(super) command: Command,
    deadline: Instant,
    /// The timeout of the call.
    pub(super) timeout: Duration,
    /// The number of lost swaps.
    lost: u32,
    progress: Arc<Progress>,
    reply: oneshot::Sender<JobResult>,
}

/// The caller's side of a call. The job is executed even if this is dropped.
#[derive(Debug)]
pub(super) struct JobWaiter {
    policy: Policy,
    command: Command,
    deadline: Instant,
    progress: Arc<Progress>,
    reply: oneshot::Receiver<JobResult>,
}

/// The progress of a job, shared by both sides.
#[derive(Debug, Default)]
struct Progress(Mutex<Stage>);

#[derive(Debug, Default)]
struct Stage {
    /// The last time at which other jobs or processes were known to delay this job, if any.
    contended: Option<Timestamp>,
    /// `true` if the job is part of a swap that was sent, or that is about to be sent.
    sent: bool,
    /// `true` if the caller has left. Then the job is not sent anymore.
    left: bool,
}

impl Progress {
    fn lock(&self) -> MutexGuard<'_, Stage> {
        unpoisoned(self.0.lock())
    }
}

impl Job {
    /// Creates both sides of a call that times out after `timeout`.
    pub(super) fn new(policy: &Policy, command: Command, timeout: Duration) -> (Self, JobWaiter) {
        let (sender, reply) = oneshot::channel();
        let (deadline, progress) = (Instant::now() + timeout, Arc::new(Progress::default()));
        let waiting = JobWaiter {
            policy: policy.clone(),
            command: command.clone(),
            deadline,
            progress: Arc::clone(&progress),
            reply,
        };
        (Self { policy: policy.clone(), command, deadline, timeout, lost: 0, progress, reply: sender }, waiting)
    }

    /// Records that other jobs or processes delay this one.
    pub(super) fn set_contended(&self, at: Timestamp) {
        self.progress.lock().contended = Some(at);
    }

    /// Records that a swap with this job was lost.
    pub(super) fn set_lost(&mut self, at: Timestamp) {
        self.lost += 1;
        let mut stage = self.progress.lock();
        (stage.contended, stage.sent) = (Some(at), false);
    }

    /// Records that no swap with this job was stored.
    pub(super) fn take_back(&self) {
        self.progress.lock().sent = false;
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
        let stage = self.progress.lock();
        if stage.left {
            return None;
        }
        let trips = if stage.contended.is_some() { 2 * trip } else { Duration::ZERO };
        // The extra eighth keeps a slow reply from turning a definite answer into an indefinite one.
        let is_delayed = stage.contended.is_some() || !blocked.is_zero();
        let least = if is_delayed { trips.max(blocked) + self.timeout / 8 } else { Duration::ZERO };
        if self.lost < MAX_LOST_SWAPS && Instant::now() + least < self.deadline {
            drop(stage);
            return Some(self);
        }
        let answer = unfinished_answer(&self.policy, &self.command, &stage);
        drop(stage);
        let _ = self.reply.send(answer);
        None
    }

    /// Marks the job as sent. Returns `false` if the caller has left.
    pub(super) fn begin(&self) -> bool {
        let mut stage = self.progress.lock();
        stage.sent = !stage.left;
        stage.sent
    }

    /// Sends the answer to the caller, if it still waits. A caller that left after its job was sent
    /// has already returned an error for which `may_have_counted` is `true`.
    pub(super) fn answer(self, answer: JobResult) {
        // The caller checks for an answer under the same lock before it leaves.
        let _stage = self.progress.lock();
        let _ = self.reply.send(answer);
    }
}

impl JobWaiter {
    /// Waits for the answer until the deadline.
    pub(super) async fn answer(mut self) -> JobResult {
        match timeout_at(self.deadline, &mut self.reply).await {
            Ok(answer) => answer.unwrap_or_else(|_| Err(error::cancelled())),
            Err(_) => self.leave(),
        }
    }

    /// Stops waiting at the deadline.
    fn leave(mut self) -> JobResult {
        let mut stage = self.progress.lock();
        if let Ok(answer) = self.reply.try_recv() {
            return answer;
        }
        stage.left = true;
        unfinished_answer(&self.policy, &self.command, &stage)
    }
}

/// Returns the answer to a job that ends without a result: at its deadline, or after too many lost
/// swaps. If a sent swap may have stored it, the answer is an error, because a refusal would mean
/// that nothing was spent.
fn unfinished_answer(policy: &Policy, command: &Command, stage: &Stage) -> JobResult {
    match (stage.contended, command) {
        _ if stage.sent => Err(error::late(true)),
        (Some(at), Command::Hit(cost) | Command::Charge(cost)) => {
            Ok(Some(policy.refuse(at, *cost, RETRY_AFTER).contended()))
        }
        (Some(_), _) => Err(error::contended()),
        (None, _) => Err(error::late(false)),
    }
}

//! What a caller wants done to the states of a key, and how it waits for it.
//!
//! A hit is refused as contended only if it was not part of a swap that may still be executed. Otherwise
//! its caller gets an error that may have counted.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};

use super::error::CasError;
use crate::{Decision, Policy, Timestamp};

/// When a contended hit had better come back, in microseconds.
const COME_BACK: u64 = 20_000;

/// How often a job is tried before it is contended.
const ATTEMPTS: u32 = 24;

/// A decision, if there was something to decide.
pub(super) type Answer = Result<Option<Decision>, CasError>;

#[derive(Clone, Debug)]
pub(super) enum Command {
    /// So many units.
    Hit(u32),
    Refund(Box<Decision>),
    Clear,
}

/// One caller's part of what is done to a key.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) policy: Policy,
    pub(super) want: Command,
    deadline: Instant,
    /// How long the caller waits in all.
    pub(super) patience: Duration,
    lost: u32,
    progress: Arc<Progress>,
    reply: oneshot::Sender<Answer>,
}

/// What a caller waits for. It may be dropped at any time: the job is done all the same.
#[derive(Debug)]
pub(super) struct Waiting {
    policy: Policy,
    want: Command,
    deadline: Instant,
    progress: Arc<Progress>,
    reply: oneshot::Receiver<Answer>,
}

/// What both of them know.
#[derive(Debug, Default)]
struct Progress(Mutex<Stage>);

#[derive(Debug, Default)]
struct Stage {
    /// When others were last known to be in the way.
    contended: Option<Timestamp>,
    /// It is part of what is sent to the store, or is about to be.
    sent: bool,
    /// The caller waits no longer. A job that was not sent by then is never sent.
    left: bool,
}

impl Progress {
    fn lock(&self) -> MutexGuard<'_, Stage> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Job {
    /// What is to be done within `patience`, and what waits for it.
    pub(super) fn new(policy: &Policy, want: Command, patience: Duration) -> (Self, Waiting) {
        let (sender, reply) = oneshot::channel();
        let (deadline, progress) = (Instant::now() + patience, Arc::new(Progress::default()));
        let waiting =
            Waiting { policy: policy.clone(), want: want.clone(), deadline, progress: Arc::clone(&progress), reply };
        (Self { policy: policy.clone(), want, deadline, patience, lost: 0, progress, reply: sender }, waiting)
    }

    /// Others are in the way: they have swapped, or are doing so.
    pub(super) fn is_contended(&self, at: Timestamp) {
        self.progress.lock().contended = Some(at);
    }

    /// It was part of a swap, and others were faster.
    pub(super) fn has_lost(&mut self, at: Timestamp) {
        self.lost += 1;
        let mut stage = self.progress.lock();
        (stage.contended, stage.sent) = (Some(at), false);
    }

    /// Whether there is any point in trying. A contended job that would not be done in time, if it takes `trip` as before, is
    /// not tried: its caller is told so, and nothing is left in doubt.
    pub(super) fn goes_on(self, trip: Duration) -> Option<Self> {
        let stage = self.progress.lock();
        if stage.left {
            return None;
        }
        // Some slack, so that a late reply does not make an error of a refusal.
        let least = if stage.contended.is_some() { 2 * trip + self.patience / 8 } else { Duration::ZERO };
        if self.lost < ATTEMPTS && Instant::now() + least < self.deadline {
            drop(stage);
            return Some(self);
        }
        let answer = answer_without(&self.policy, &self.want, &stage);
        drop(stage);
        let _ = self.reply.send(answer);
        None
    }

    /// From here on it may be done, unless the caller waits no longer.
    pub(super) fn begins(&self) -> bool {
        let mut stage = self.progress.lock();
        stage.sent = !stage.left;
        stage.sent
    }

    /// Sends the answer to the caller, if it still waits. A caller that has left after its job was sent
    /// knows that the job may have counted.
    pub(super) fn answer(self, answer: Answer) {
        // The caller looks for the answer under the same lock before it leaves.
        let _stage = self.progress.lock();
        let _ = self.reply.send(answer);
    }
}

impl Waiting {
    /// What became of the job, in time.
    pub(super) async fn answer(mut self) -> Answer {
        match timeout_at(self.deadline, &mut self.reply).await {
            Ok(answer) => answer.unwrap_or_else(|_| Err(CasError::ended())),
            Err(_) => self.leave(),
        }
    }

    /// Stops waiting at the deadline.
    fn leave(mut self) -> Answer {
        let mut stage = self.progress.lock();
        if let Ok(answer) = self.reply.try_recv() {
            return answer;
        }
        stage.left = true;
        answer_without(&self.policy, &self.want, &stage)
    }
}

/// The answer at the deadline. A hit that may have been stored is not refused: a refusal spends
/// nothing.
fn answer_without(policy: &Policy, want: &Command, stage: &Stage) -> Answer {
    match (stage.contended, want) {
        _ if stage.sent => Err(CasError::late(true)),
        (Some(at), Command::Hit(cost)) => Ok(Some(policy.refuse(at, *cost, COME_BACK).contended())),
        (Some(_), _) => Err(CasError::contended()),
        (None, _) => Err(CasError::late(false)),
    }
}

//! A call, and the caller that waits for the worker thread to execute it.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};

use super::error;
use crate::decision::Decision;
use crate::policy::{Op, Policy};
use crate::storage::cas::Command;
use crate::storage::{Clock, StorageError};
use crate::sync::unpoisoned;

/// The work of a call.
#[derive(Debug)]
pub(super) enum Work {
    /// Reads the states of a key.
    Peek { policy: Policy, key: Arc<str>, op: Op, cost: u32 },
    /// Changes the states of a key.
    Change { policy: Policy, key: Arc<str>, command: Command },
    /// Checks that the file can be written to.
    Check,
    /// Deletes all keys with this prefix.
    DeleteAll { prefix: Arc<str> },
}

/// The result of a call.
#[derive(Debug)]
pub(super) enum WorkResult {
    Decided(Decision),
    /// The number of deleted keys, or 0 for a call that deletes none.
    Done(u64),
}

/// The worker's side of a call.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) work: Work,
    /// Replaces the wall clock in tests.
    pub(super) clock: Option<Arc<dyn Clock>>,
    stage: Arc<Mutex<Stage>>,
    reply: oneshot::Sender<Result<WorkResult, StorageError>>,
    _counted: Counted,
}

/// The caller's side of a call. The job is executed even if this is dropped.
#[derive(Debug)]
pub(super) struct WorkWaiter {
    stage: Arc<Mutex<Stage>>,
    reply: oneshot::Receiver<Result<WorkResult, StorageError>>,
}

#[derive(Debug, Default)]
struct Stage {
    /// `true` if the job is part of an open transaction, or was committed.
    begun: bool,
    /// `true` if the caller no longer waits. A job that has not begun by then is never executed.
    left: bool,
}

/// Counts one job in the number of waiting jobs. Dropping it ends the count.
#[derive(Debug)]
pub(super) struct Counted(Arc<AtomicUsize>);

impl Counted {
    /// Counts a job. Returns `None` if `most` jobs are waiting already.
    pub(super) fn new(jobs: &Arc<AtomicUsize>, most: usize) -> Option<Self> {
        let counted = Self(Arc::clone(jobs));
        (jobs.fetch_add(1, Ordering::Relaxed) < most).then_some(counted)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Job {
    /// Creates both sides of a call.
    pub(super) fn new(work: Work, clock: Option<Arc<dyn Clock>>, counted: Counted) -> (Self, WorkWaiter) {
        let (sender, reply) = oneshot::channel();
        let stage = Arc::default();
        let waiting = WorkWaiter { stage: Arc::clone(&stage), reply };
        (Self { work, clock, stage, reply: sender, _counted: counted }, waiting)
    }

    /// Returns `true` if the job needs the write lock.
    pub(super) fn writes(&self) -> bool {
        !matches!(self.work, Work::Peek { .. })
    }

    /// Returns `true` if the caller still waits.
    pub(super) fn is_awaited(&self) -> bool {
        !lock(&self.stage).left
    }

    /// Marks the job as part of a transaction. Returns `false` if the caller no longer waits.
    pub(super) fn begin(&self) -> bool {
        let mut stage = lock(&self.stage);
        stage.begun = !stage.left;
        stage.begun
    }

    /// Marks the job as not executed, after a rollback.
    pub(super) fn roll_back(&self) {
        lock(&self.stage).begun = false;
    }

    /// Sends the answer to the caller.
    pub(super) fn answer(self, answer: Result<WorkResult, StorageError>) {
        // At its deadline, the caller checks for an answer under the same lock.
        let _stage = lock(&self.stage);
        let _ = self.reply.send(answer);
    }
}

impl WorkWaiter {
    /// Waits for the answer until the deadline.
    pub(super) async fn answer(mut self, deadline: Instant, path: &Path) -> Result<WorkResult, StorageError> {
        match timeout_at(deadline, &mut self.reply).await {
            Ok(answer) => answer.unwrap_or_else(|_| Err(error::ended(path))),
            Err(_) => self.leave(path),
        }
    }

    /// Ends the wait at the deadline. Returns the answer if it has just arrived.
    fn leave(mut self, path: &Path) -> Result<WorkResult, StorageError> {
        let mut stage = lock(&self.stage);
        if let Ok(answer) = self.reply.try_recv() {
            return answer;
        }
        stage.left = true;
        Err(error::late(path, stage.begun))
    }
}

fn lock(stage: &Mutex<Stage>) -> MutexGuard<'_, Stage> {
    unpoisoned(stage.lock())
}

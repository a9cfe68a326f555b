//! The worker thread, which executes all calls of a storage. Calls that wait at the same time share
//! a transaction.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use tokio::sync::OwnedSemaphorePermit;

use super::Durability;
use super::error::{at_commit, is_busy, is_full, rolled_back};
use super::file::{ATTEMPTS, FULL, File};
use crate::decision::Decision;
use crate::policy::{Op, Policy};
use crate::storage::bounds::MAX_SKEW;
use crate::storage::cas::skew::Skew;
use crate::storage::cas::{Batch, Command};
use crate::storage::contract::OwnedRequest;
use crate::storage::listing::NameRange;
use crate::storage::ticket::Ticket;
use crate::storage::{Clock, StorageError};
use crate::time::Timestamp;

/// The maximum number of calls in a transaction.
const MAX_BATCH: usize = 512;

/// The time between two checkpoints. With [`Durability::EverySecond`], a power failure loses at most
/// the hits since the last complete checkpoint.
const CHECKPOINT_EVERY: Duration = Duration::from_secs(1);

/// The first wait for the lock of another process, which is about the time of a transaction. Each
/// further wait is 1.5 times as long, up to [`LONGEST_WAIT`].
const FIRST_WAIT: Duration = Duration::from_micros(300);
const LONGEST_WAIT: Duration = Duration::from_millis(5);

/// The worker thread. It ends when the storage and all its clones are dropped.
pub(super) struct FileWorker {
    path: PathBuf,
    durability: Durability,
    skew: Skew,
    /// Opened for the first call, and again after an error.
    file: Option<File>,
    /// The time of the first commit since the last checkpoint.
    unsynced: Option<Instant>,
}

/// The failure of a transaction.
enum Failure {
    /// The transaction was rolled back.
    RolledBack(rusqlite::Error),
    /// The commit failed, and may have changed the database.
    AtCommit(rusqlite::Error),
}

impl From<rusqlite::Error> for Failure {
    fn from(error: rusqlite::Error) -> Self {
        Self::RolledBack(error)
    }
}

impl FileWorker {
    pub(super) fn new(path: PathBuf, durability: Durability) -> Self {
        Self { path, durability, skew: Skew::new(MAX_SKEW), file: None, unsynced: None }
    }

    #[cfg(test)]
    pub(super) fn with_file(path: PathBuf, file: File) -> Self {
        Self { file: Some(file), ..Self::new(path, Durability::EverySecond) }
    }

    /// Executes the calls until all senders are dropped.
    pub(super) fn run(mut self, calls: &Receiver<FileJob>) {
        while let Some(job) = self.next(calls) {
            let mut jobs = vec![job];
            fill(&mut jobs, calls);
            // A custom strategy may panic. Dropping the connection rolls back the open transaction.
            if catch_unwind(AssertUnwindSafe(|| self.run_batch(jobs, calls))).is_err() {
                self.file = None;
            }
            self.checkpoint_if_due();
        }
    }

    /// Waits for the next call, and makes the checkpoints that become due meanwhile. Returns `None`
    /// when all senders are dropped.
    fn next(&mut self, calls: &Receiver<FileJob>) -> Option<FileJob> {
        while let Some(since) = self.unsynced {
            match calls.recv_timeout((since + CHECKPOINT_EVERY).saturating_duration_since(Instant::now())) {
                Ok(job) => return Some(job),
                Err(RecvTimeoutError::Timeout) => self.checkpoint_if_due(),
                Err(RecvTimeoutError::Disconnected) => return None,
            }
        }
        calls.recv().ok()
    }

    /// Executes these calls in one transaction. While another process holds the lock, retries until
    /// no caller waits any more. A call whose caller was dropped waits until its deadline. If the disk
    /// is full, retries as long as there is room.
    fn run_batch(&mut self, mut jobs: Vec<FileJob>, calls: &Receiver<FileJob>) {
        let (mut wait, mut attempts) = (FIRST_WAIT, 0);
        loop {
            jobs.retain(FileJob::is_wanted);
            if jobs.is_empty() {
                return;
            }
            let failure = match self.transact(&mut jobs) {
                Ok(()) => return,
                Err(failure) => failure,
            };
            let (Failure::RolledBack(error) | Failure::AtCommit(error)) = &failure;
            let (is_busy, is_full) = (is_busy(error), is_full(error));
            if is_busy || is_full {
                for job in &jobs {
                    job.ticket.take_back();
                }
            }
            if is_busy {
                thread::sleep(wait);
                wait = (wait * 3 / 2).min(LONGEST_WAIT);
                fill(&mut jobs, calls);
                continue;
            }
            if is_full && attempts < ATTEMPTS && self.make_room(attempts) {
                attempts += 1;
                continue;
            }
            // The next call opens the file again. On a full disk it may not be possible to open it.
            self.file = self.file.take().filter(|_| is_full);
            let error = match failure {
                Failure::RolledBack(error) => rolled_back(&self.path, error),
                Failure::AtCommit(error) => at_commit(&self.path, error),
            };
            for job in jobs {
                job.answer(Err(error.clone()));
            }
            return;
        }
    }

    /// Makes room on a full disk. Returns `false` if there is none.
    fn make_room(&mut self, attempt: u32) -> bool {
        self.file.as_mut().is_some_and(|file| file.make_room(attempt).unwrap_or(false))
    }

    /// Executes the calls in a transaction, and answers the callers after its commit. After an
    /// error, no caller has been answered.
    fn transact(&mut self, jobs: &mut Vec<FileJob>) -> Result<(), Failure> {
        let writes = jobs.iter().any(FileJob::writes);
        let file = match self.file.take().filter(|file| file.is_at(&self.path)) {
            Some(file) => self.file.insert(file),
            None => self.file.insert(File::open(&self.path, self.durability)?),
        };
        file.begin(writes)?;
        jobs.retain(|job| job.is_wanted() && job.ticket.begin());
        let executed = execute(file, &self.skew, jobs).map_err(Failure::from);
        let committed = executed.and_then(|answers| file.commit().map(|()| answers).map_err(Failure::AtCommit));
        let answers = match committed {
            Ok(answers) => answers,
            Err(failure) => {
                // If the rollback fails too, the connection is closed, which rolls back.
                if file.roll_back().is_err() {
                    self.file = None;
                }
                return Err(failure);
            }
        };
        if writes {
            self.unsynced.get_or_insert_with(Instant::now);
        }
        for (job, answer) in jobs.drain(..).zip(answers) {
            job.answer(answer);
        }
        Ok(())
    }

    /// Makes a checkpoint if the first commit since the last checkpoint is a second old.
    fn checkpoint_if_due(&mut self) {
        if self.unsynced.is_none_or(|since| since.elapsed() < CHECKPOINT_EVERY) {
            return;
        }
        self.unsynced = None;
        let Some(file) = self.file.as_mut() else { return };
        match file.checkpoint().and_then(|is_complete| file.allow_growth().map(|()| is_complete)) {
            Ok(true) => return,
            // The last writes may not be on the disk yet, so another checkpoint is due.
            Ok(false) => {}
            Err(error) if is_busy(&error) => {}
            Err(error) if is_full(&error) => drop(file.make_room(FULL)),
            // The next call opens the file again, and gets the error if it is permanent.
            Err(_) => {
                self.file = None;
                return;
            }
        }
        self.unsynced = Some(Instant::now());
    }
}

/// Adds the calls that are already waiting, up to the size of a batch.
fn fill(jobs: &mut Vec<FileJob>, calls: &Receiver<FileJob>) {
    jobs.extend(calls.try_iter().take(MAX_BATCH.saturating_sub(jobs.len())));
}

/// The answer to a call. A call fails alone if the text of its key has an unknown version.
type FileReply = Result<WorkResult, StorageError>;

/// Executes the calls and returns their answers, in the same order. The state of each key is loaded
/// once, and stored once if it has changed.
pub(super) fn execute(file: &mut File, skew: &Skew, jobs: &[FileJob]) -> rusqlite::Result<Vec<FileReply>> {
    let mut answers: Vec<Option<FileReply>> = jobs.iter().map(|_| None).collect();
    let mut keys: Vec<(&str, Vec<usize>)> = Vec::new();
    let mut positions: HashMap<&str, usize> = HashMap::new();
    for (index, job) in jobs.iter().enumerate() {
        match &job.work {
            Work::Peek { key, .. } | Work::Change { key, .. } => {
                let position = *positions.entry(key).or_insert_with(|| {
                    keys.push((key, Vec::new()));
                    keys.len() - 1
                });
                keys[position].1.push(index);
            }
            // They follow all others, because each has several keys.
            Work::DecideAll { .. } => {}
            Work::Check => answers[index] = Some(Ok(WorkResult::Done(0))),
            Work::List(range) => answers[index] = Some(Ok(WorkResult::Listed(file.list(range)?))),
            Work::DeleteAll { prefix } => answers[index] = Some(Ok(WorkResult::Done(file.delete_all(prefix)?))),
        }
    }
    let mut written = 0;
    for (key, indices) in keys {
        let jobs = indices.into_iter().map(|index| (index, &jobs[index]));
        written += execute_key(file, skew, key, jobs, &mut answers)?;
    }
    for (job, answer) in jobs.iter().zip(&mut answers) {
        if let Work::DecideAll { members } = &job.work {
            let (decided, changes) = decide_all(file, skew, job, members)?;
            *answer = Some(decided.map(WorkResult::DecidedAll));
            written += changes;
        }
    }
    if written > 0 {
        file.sweep(written)?;
    }
    Ok(answers.into_iter().map(|answer| answer.unwrap_or(Ok(WorkResult::Done(0)))).collect())
}

/// Executes the calls on one key. If they have changed its states, returns the number of calls that
/// can change states, otherwise 0.
fn execute_key<'a>(
    file: &File,
    skew: &Skew,
    key: &str,
    jobs: impl Iterator<Item = (usize, &'a FileJob)>,
    answers: &mut [Option<FileReply>],
) -> rusqlite::Result<u32> {
    let loaded = file.load(key)?;
    let (mut batch, mut changes): (Option<Batch<'_>>, u32) = (None, 0);
    for (index, job) in jobs {
        answers[index] = match &job.work {
            // A peek is concurrent with the hits of the same transaction, so it may ignore them.
            Work::Peek { policy, op, cost, .. } => {
                Some(skew.view(key, &loaded, job.now()).peek(policy, *op, *cost).map(WorkResult::Decided))
            }
            Work::Change { policy, command, .. } => {
                changes += 1;
                let batch = batch.get_or_insert_with(|| {
                    let view = skew.view(key, &loaded, job.now());
                    skew.remember(key, view.behind);
                    Batch::new(view)
                });
                let executed = batch.execute(policy, command);
                Some(executed.map(|decision| decision.map_or(WorkResult::Done(0), WorkResult::Decided)))
            }
            Work::DecideAll { .. } | Work::Check | Work::List(_) | Work::DeleteAll { .. } => None,
        };
    }
    let Some((text, keep)) = batch.and_then(|batch| batch.finish(skew.max())) else { return Ok(0) };
    file.save(key, &text, keep)?;
    Ok(changes)
}

/// Decides on several keys together. Returns the decisions, and the number of changed keys.
fn decide_all(
    file: &File,
    skew: &Skew,
    job: &FileJob,
    members: &[(Arc<str>, OwnedRequest)],
) -> rusqlite::Result<(Result<Vec<Decision>, StorageError>, u32)> {
    let texts = members.iter().map(|(key, _)| file.load(key)).collect::<rusqlite::Result<Vec<_>>>()?;
    let now = job.now();
    let mut batches = Vec::with_capacity(members.len());
    for ((key, _), text) in members.iter().zip(&texts) {
        let view = skew.view(key, text, now);
        skew.remember(key, view.behind);
        batches.push(Batch::new(view));
    }
    let requests: Vec<_> = members.iter().map(|(_, request)| request.borrow()).collect();
    let decided = Batch::decide_all(&mut batches, &requests);
    let mut changes = 0;
    for ((key, _), batch) in members.iter().zip(batches) {
        if let Some((text, keep)) = batch.finish(skew.max()) {
            file.save(key, &text, keep)?;
            changes += 1;
        }
    }
    Ok((decided, changes))
}

/// The work of a call.
#[derive(Debug)]
pub(super) enum Work {
    /// Reads the states of a key.
    Peek { policy: Policy, key: Arc<str>, op: Op, cost: u32 },
    /// Changes the states of a key.
    Change { policy: Policy, key: Arc<str>, command: Command },
    /// Decides on several keys together.
    DecideAll { members: Vec<(Arc<str>, OwnedRequest)> },
    /// Checks that the file can be written to.
    Check,
    /// Lists keys.
    List(NameRange),
    /// Deletes all keys with this prefix.
    DeleteAll { prefix: Arc<str> },
}

/// The result of a call.
#[derive(Debug)]
pub(super) enum WorkResult {
    Decided(Decision),
    DecidedAll(Vec<Decision>),
    Listed(Vec<String>),
    /// The number of deleted keys, or 0 for a call that deletes none.
    Done(u64),
}

/// The worker's side of a call. The ticket is begun if the job is part of an open transaction, or was
/// committed.
#[derive(Debug)]
pub(super) struct FileJob {
    pub(super) work: Work,
    /// Replaces the wall clock in tests.
    pub(super) clock: Option<Arc<dyn Clock>>,
    pub(super) deadline: tokio::time::Instant,
    pub(super) ticket: Ticket<Result<WorkResult, StorageError>>,
    pub(super) counted: OwnedSemaphorePermit,
}

impl FileJob {
    /// Returns `true` if the job needs the write lock.
    pub(super) fn writes(&self) -> bool {
        !matches!(self.work, Work::Peek { .. } | Work::List(_))
    }

    /// Returns `true` if the caller waits, or was dropped before the deadline.
    fn is_wanted(&self) -> bool {
        self.ticket.is_awaited() && !(self.ticket.is_dropped() && tokio::time::Instant::now() >= self.deadline)
    }

    /// Returns the time of a decision that is made now.
    fn now(&self) -> Timestamp {
        self.clock.as_ref().map_or_else(Timestamp::wall_clock, Clock::now)
    }

    /// Answers the caller. It no longer counts as waiting when it learns the answer.
    fn answer(self, answer: FileReply) {
        drop(self.counted);
        self.ticket.answer(answer);
    }
}

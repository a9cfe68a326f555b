//! The worker thread, which executes all calls of a storage. Calls that wait at the same time share
//! a transaction.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use super::Durability;
use super::error::{at_commit, is_busy, is_full, rolled_back};
use super::file::File;
use super::job::Job;
use super::room::{ATTEMPTS, FULL};
use super::transaction::execute;
use crate::storage::cas::skew::Skew;
use crate::storage::settings::MAX_SKEW;

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
pub(super) struct Worker {
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

impl Worker {
    pub(super) fn new(path: PathBuf, durability: Durability) -> Self {
        Self { path, durability, skew: Skew::new(MAX_SKEW), file: None, unsynced: None }
    }

    #[cfg(test)]
    pub(super) fn with_file(path: PathBuf, file: File) -> Self {
        Self { file: Some(file), ..Self::new(path, Durability::EverySecond) }
    }

    /// Executes the calls until all senders are dropped.
    pub(super) fn run(mut self, calls: &Receiver<Job>) {
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
    fn next(&mut self, calls: &Receiver<Job>) -> Option<Job> {
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
    /// no caller waits any more. If the disk is full, retries as long as there is room.
    fn run_batch(&mut self, mut jobs: Vec<Job>, calls: &Receiver<Job>) {
        let (mut wait, mut attempts) = (FIRST_WAIT, 0);
        loop {
            jobs.retain(|job| job.ticket.is_awaited());
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
                jobs.iter().for_each(|job| job.ticket.take_back());
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
                job.ticket.answer(Err(error.clone()));
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
    fn transact(&mut self, jobs: &mut Vec<Job>) -> Result<(), Failure> {
        let writes = jobs.iter().any(Job::writes);
        let file = match self.file.take().filter(|file| file.is_at(&self.path)) {
            Some(file) => self.file.insert(file),
            None => self.file.insert(File::open(&self.path, self.durability)?),
        };
        file.begin(writes)?;
        jobs.retain(|job| job.ticket.begin());
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
            job.ticket.answer(answer);
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
fn fill(jobs: &mut Vec<Job>, calls: &Receiver<Job>) {
    jobs.extend(calls.try_iter().take(MAX_BATCH.saturating_sub(jobs.len())));
}

//! A call of the worker thread.

use std::sync::Arc;

use crate::decision::Decision;
use crate::policy::{Op, Policy};
use crate::storage::cas::Command;
use crate::storage::ticket::Ticket;
use crate::storage::{Clock, StorageError};
use crate::sync::Counted;

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

/// The worker's side of a call. The ticket is begun if the job is part of an open transaction, or was
/// committed.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) work: Work,
    /// Replaces the wall clock in tests.
    pub(super) clock: Option<Arc<dyn Clock>>,
    pub(super) ticket: Ticket<Result<WorkResult, StorageError>>,
    pub(super) _counted: Counted,
}

impl Job {
    /// Returns `true` if the job needs the write lock.
    pub(super) fn writes(&self) -> bool {
        !matches!(self.work, Work::Peek { .. })
    }
}

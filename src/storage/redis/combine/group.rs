//! A group of hits that one call sends.

use std::sync::{Arc, Mutex, MutexGuard};

use redis::Value;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::super::script::Call;
use crate::storage::StorageError;
use crate::sync::unpoisoned;

/// The hits of one call that have not been sent yet.
#[derive(Debug, Default)]
pub(super) struct Group(Mutex<Vec<Hit>>);

/// A hit that waits to be sent with others.
#[derive(Debug)]
pub(super) struct Hit {
    pub(super) call: Arc<Call>,
    pub(super) deadline: Instant,
    pub(super) outcome: oneshot::Sender<Outcome>,
}

/// The result of a hit, or `None` if the hit has not counted and must be sent in a call of its own.
pub(super) type Outcome = Option<Result<Value, StorageError>>;

/// The membership of a caller in a group. If it is dropped before the hit is sent, the hit is not
/// sent.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) group: Arc<Group>,
    pub(super) call: Arc<Call>,
}

impl Group {
    /// Adds a hit, and returns the number of hits.
    pub(super) fn push(&self, hit: Hit) -> usize {
        let mut hits = self.hits();
        hits.push(hit);
        hits.len()
    }

    pub(super) fn len(&self) -> usize {
        self.hits().len()
    }

    pub(super) fn last_deadline(&self) -> Option<Instant> {
        self.hits().iter().map(|hit| hit.deadline).max()
    }

    /// Removes all hits, to send them.
    pub(super) fn take(&self) -> Vec<Hit> {
        std::mem::take(&mut self.hits())
    }

    fn hits(&self) -> MutexGuard<'_, Vec<Hit>> {
        unpoisoned(self.0.lock())
    }
}

impl Member {
    /// Removes the hit. Returns `false` if it has been sent.
    pub(super) fn leave(&self) -> bool {
        let mut hits = self.group.hits();
        let at = hits.iter().position(|hit| Arc::ptr_eq(&hit.call, &self.call));
        let left = at.map(|at| hits.remove(at));
        drop(hits);
        left.is_some()
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.leave();
    }
}

impl Hit {
    pub(super) fn send_alone(self) {
        self.complete(None);
    }

    pub(super) fn complete(self, outcome: Outcome) {
        // A caller that has left needs no outcome.
        _ = self.outcome.send(outcome);
    }
}

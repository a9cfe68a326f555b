//! The queues of jobs, one per busy key.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard};

use tokio::runtime::Id;

use super::job::Job;
use crate::sync::unpoisoned;
use crate::time::Timestamp;

/// Identifies a worker by its runtime and its key. Each runtime has its own workers, because a
/// worker in another runtime may stop while its callers still wait.
pub(super) type Place = (Id, Arc<str>);

/// The waiting jobs of each key that has a worker. The lock is never held during a call to the
/// store.
#[derive(Debug, Default)]
pub(super) struct Queues(Mutex<HashMap<Place, Vec<Job>>>);

impl Queues {
    /// Adds a job. Returns `true` if the key has no worker yet, so that the caller must spawn one.
    pub(super) fn add(&self, place: &Place, job: Job) -> bool {
        match self.lock().entry(place.clone()) {
            Entry::Occupied(mut waiting) => {
                waiting.get_mut().push(job);
                false
            }
            Entry::Vacant(place) => {
                place.insert(vec![job]);
                true
            }
        }
    }

    /// Takes all waiting jobs of the key. If there are none, the key is no longer busy, and its
    /// worker must end.
    pub(super) fn take(&self, place: &Place) -> Vec<Job> {
        let mut busy = self.lock();
        let jobs = busy.get_mut(place).map(std::mem::take).unwrap_or_default();
        if jobs.is_empty() {
            busy.remove(place);
            // Free the memory after a burst of keys.
            if busy.capacity() > 1_024 && busy.len() < busy.capacity() / 8 {
                busy.shrink_to_fit();
            }
        }
        jobs
    }

    /// Drops the jobs of a key whose worker was dropped. Their callers get an error.
    pub(super) fn abandon(&self, place: &Place) {
        // The jobs are dropped after the lock is released.
        let jobs = self.lock().remove(place);
        drop(jobs);
    }

    /// Records for each waiting job of the key that the worker's current batch still delayed it at
    /// the time `at`.
    pub(super) fn set_contended(&self, place: &Place, at: Timestamp) {
        for job in self.lock().get(place).into_iter().flatten() {
            job.ticket.set_contended(at);
        }
    }

    /// Returns the number of workers.
    pub(super) fn len(&self) -> usize {
        self.lock().len()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Place, Vec<Job>>> {
        unpoisoned(self.0.lock())
    }
}

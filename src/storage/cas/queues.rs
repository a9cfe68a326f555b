//! Which keys are busy, and who waits for them.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::runtime::Id;

use super::job::Job;
use crate::Timestamp;

/// A key, in a runtime: a task of another one may not be running when its callers are.
pub(super) type Place = (Id, Arc<str>);

/// The jobs of each key that has a task; the lock is held while a job is put in or taken out, and never while a store is asked.
#[derive(Debug, Default)]
pub(super) struct Queues(Mutex<HashMap<Place, Vec<Job>>>);

impl Queues {
    /// Adds a job. Whether a task is needed for it.
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

    /// All jobs that wait for the key. When there are none, it is no longer busy.
    pub(super) fn take(&self, place: &Place) -> Vec<Job> {
        let mut busy = self.lock();
        let jobs = busy.get_mut(place).map(std::mem::take).unwrap_or_default();
        if jobs.is_empty() {
            busy.remove(place);
            // What was large once is not kept for good.
            if busy.capacity() > 1_024 && busy.len() < busy.capacity() / 8 {
                busy.shrink_to_fit();
            }
        }
        jobs
    }

    /// The task of the key has ended without having been done.
    pub(super) fn abandon(&self, place: &Place) {
        let jobs = self.lock().remove(place);
        // Who waits is told so, by this.
        drop(jobs);
    }

    /// Whoever waits for the key waits for others, not for the store.
    pub(super) fn are_contended(&self, place: &Place, at: Timestamp) {
        for job in self.lock().get(place).into_iter().flatten() {
            job.is_contended(at);
        }
    }

    pub(super) fn len(&self) -> usize {
        self.lock().len()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Place, Vec<Job>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

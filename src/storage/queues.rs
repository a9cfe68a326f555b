//! The jobs that wait for the worker of their key.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::Hash;
use std::sync::{Mutex, MutexGuard};

use crate::sync::unpoisoned;

/// The waiting jobs of each place that has a worker. The lock is never held during a call to the
/// store.
///
/// A place is a runtime and a key. Each runtime has its own workers, because a worker in another
/// runtime may stop while its callers still wait.
#[derive(Debug)]
pub(super) struct JobQueues<P, J>(Mutex<HashMap<P, Vec<J>>>);

impl<P, J> Default for JobQueues<P, J> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<P: Clone + Eq + Hash, J> JobQueues<P, J> {
    /// Adds a job. Returns `true` if the place has no worker yet, so that the caller must spawn one.
    pub(super) fn add(&self, place: &P, job: J) -> bool {
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

    /// Takes all waiting jobs of the place. If there are none, the place is no longer busy, and its
    /// worker must end.
    pub(super) fn take(&self, place: &P) -> Vec<J> {
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

    /// Drops the jobs of a place whose worker was dropped. Their callers get an error.
    pub(super) fn abandon(&self, place: &P) {
        // The jobs are dropped after the lock is released.
        let jobs = self.lock().remove(place);
        drop(jobs);
    }

    /// Calls `visit` for each waiting job of the place.
    pub(super) fn visit(&self, place: &P, visit: impl FnMut(&J)) {
        self.lock().get(place).into_iter().flatten().for_each(visit);
    }

    /// Returns `true` if a place for which `is_meant` returns `true` has a worker.
    pub(super) fn is_busy(&self, is_meant: impl FnMut(&P) -> bool) -> bool {
        self.lock().keys().any(is_meant)
    }

    /// Returns the number of workers.
    pub(super) fn len(&self) -> usize {
        self.lock().len()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<P, Vec<J>>> {
        unpoisoned(self.0.lock())
    }
}

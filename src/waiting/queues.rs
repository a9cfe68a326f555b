use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::Instant;

use super::Refusal;
use crate::Key;

/// The digest of a policy, and a key.
type Id = (u128, Key);

/// The queues of waiting hits: one for each policy and key that has any.
#[derive(Default)]
pub(crate) struct Queues(Mutex<HashMap<Id, Members>>);

/// A queue and the number of its hits.
struct Members {
    queue: Arc<Queue>,
    count: usize,
}

struct Queue {
    /// The turn to ask the storage. The semaphore hands it on in the order of arrival. It is closed
    /// when the queue is dissolved.
    turn: Semaphore,
    /// The last refusal, if no hit of the queue was admitted since.
    refusal: Mutex<Option<Refusal>>,
}

/// The place of a hit in a queue. Dropping it leaves the queue.
pub(super) struct Place<'a> {
    queues: &'a Queues,
    id: Id,
    queue: Arc<Queue>,
}

impl Queues {
    /// Adds a hit to its queue. The first polls of [`Place::turn`] determine the order of the hits.
    pub(super) fn join(&self, policy: u128, key: &Key) -> Place<'_> {
        let id = (policy, key.clone());
        let mut queues = self.lock();
        let members = queues.entry(id.clone()).or_insert_with(|| {
            let queue = Arc::new(Queue { turn: Semaphore::new(1), refusal: Mutex::default() });
            Members { queue, count: 0 }
        });
        members.count += 1;
        Place { queues: self, id, queue: Arc::clone(&members.queue) }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Id, Members>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Place<'_> {
    /// Waits until it is this hit's turn to ask the storage. Returns `None` if the queue was
    /// dissolved.
    pub(super) async fn turn(&self) -> Option<SemaphorePermit<'_>> {
        self.queue.turn.acquire().await.ok()
    }

    /// Removes the queue after a failure of the storage. Its hits ask the storage on their own, so
    /// none of them waits for the failure of another.
    pub(super) fn dissolve(&self) {
        if let Entry::Occupied(members) = self.queues.lock().entry(self.id.clone())
            && Arc::ptr_eq(&members.get().queue, &self.queue)
        {
            members.remove();
        }
        self.queue.turn.close();
    }

    /// Stores the queue's last refusal.
    pub(super) fn record(&self, refusal: &Refusal) {
        *self.refusal() = Some(refusal.clone());
    }

    /// Removes the last refusal after an admission, because the next hit may be admitted too.
    pub(super) fn forget_refusal(&self) {
        *self.refusal() = None;
    }

    /// Returns the queue's last refusal if it is newer than `own` and for the same cost, else `own`.
    pub(super) fn latest(&self, own: Refusal) -> Refusal {
        self.refusal().as_ref().filter(|last| last.replaces(&own)).cloned().unwrap_or(own)
    }

    /// Returns the instant until which a hit is refused: the later of the ends of its `own` refusal
    /// and of the queue's last one, or now if neither has an end.
    pub(super) fn end_of(&self, own: &Refusal) -> Instant {
        let of_queue = self.refusal().as_ref().and_then(|last| last.end_for(own.cost()));
        of_queue.max(own.end_for(own.cost())).unwrap_or_else(Instant::now)
    }

    fn refusal(&self) -> MutexGuard<'_, Option<Refusal>> {
        self.queue.refusal.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        if let Entry::Occupied(mut members) = self.queues.lock().entry(self.id.clone())
            && Arc::ptr_eq(&members.get().queue, &self.queue)
        {
            members.get_mut().count -= 1;
            if members.get().count == 0 {
                members.remove();
            }
        }
    }
}

impl fmt::Debug for Queues {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Queues").finish_non_exhaustive()
    }
}

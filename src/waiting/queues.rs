use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::time::Instant;

use super::Refusal;
use super::place::{Place, Queue};
use crate::Key;

/// The digest of a policy, and a key.
pub(super) type Id = (u128, Key);

/// The queues of waiting hits: one for each policy and key that has any.
#[derive(Default)]
pub(crate) struct Queues {
    queues: Mutex<HashMap<Id, Members>>,
    /// The number of all queues, so that a hit looks for its queue only if there is any.
    count: AtomicUsize,
}

/// A queue and the number of its hits.
struct Members {
    queue: Arc<Queue>,
    count: usize,
}

impl Queues {
    /// Adds a refused hit to the end of its queue.
    pub(crate) fn join(self: &Arc<Self>, refusal: &Refusal, key: &Key) -> Place {
        let id = (refusal.policy().digest(), key.clone());
        let mut queues = self.lock();
        let members = queues.entry(id.clone()).or_insert_with(|| {
            self.count.fetch_add(1, Ordering::Relaxed);
            Members { queue: Arc::default(), count: 0 }
        });
        members.count += 1;
        let queue = Arc::clone(&members.queue);
        drop(queues);
        queue.record(refusal);
        Place::new(Arc::clone(self), id, queue, refusal.cost())
    }

    /// Returns `true` if no hit waits.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.count.load(Ordering::Relaxed) == 0
    }

    /// Adds a new hit to the end of its queue, if hits wait there, and the last refusal of the queue
    /// does not prevent its admission before the deadline.
    #[cold]
    pub(super) fn join_behind(
        self: &Arc<Self>,
        policy: u128,
        key: &Key,
        cost: u32,
        deadline: Instant,
    ) -> Option<Place> {
        let id = (policy, key.clone());
        let mut queues = self.lock();
        let members = queues.get_mut(&id)?;
        if cost == 0 || deadline <= Instant::now() || members.queue.refuses_until_after(deadline, cost) {
            return None;
        }
        members.count += 1;
        let queue = Arc::clone(&members.queue);
        drop(queues);
        Some(Place::new(Arc::clone(self), id, queue, cost))
    }

    /// Removes a hit from its queue, and the queue with its last hit.
    pub(super) fn leave(&self, id: &Id) {
        let mut queues = self.lock();
        let Some(members) = queues.get_mut(id) else { return };
        members.count -= 1;
        if members.count == 0 {
            queues.remove(id);
            self.count.fetch_sub(1, Ordering::Relaxed);
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Id, Members>> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Queues {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Queues").finish_non_exhaustive()
    }
}

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use super::queue::Queue;
use crate::key::Key;
use crate::sync::unpoisoned;

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
    /// Counts one more hit in its queue, and returns the queue.
    pub(super) fn enter(&self, id: &Id) -> Arc<Queue> {
        let mut queues = self.lock();
        let members = queues.entry(id.clone()).or_insert_with(|| {
            self.count.fetch_add(1, Ordering::Relaxed);
            Members { queue: Arc::default(), count: 0 }
        });
        members.enter()
    }

    /// Returns `true` if no hit waits.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.count.load(Ordering::Relaxed) == 0
    }

    /// Like [`enter`](Self::enter), but only if there is a queue for which `accepts` returns
    /// `true`.
    pub(super) fn enter_behind(&self, id: &Id, accepts: impl FnOnce(&Queue) -> bool) -> Option<Arc<Queue>> {
        let mut queues = self.lock();
        let members = queues.get_mut(id)?;
        accepts(&members.queue).then(|| members.enter())
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
        unpoisoned(self.queues.lock())
    }
}

impl Members {
    fn enter(&mut self) -> Arc<Queue> {
        self.count += 1;
        Arc::clone(&self.queue)
    }
}

impl fmt::Debug for Queues {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Queues").finish_non_exhaustive()
    }
}

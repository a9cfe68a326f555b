//! The entries of waiting hits in the queues of all policies and keys.

use std::collections::HashMap;
use std::fmt;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Wake, Waker, ready};

use tokio::time::{Instant, Sleep, sleep_until};

use super::queue::{Refusal, WaitQueue};
use crate::key::Key;
use crate::sync::unpoisoned;

/// The entry of a hit in a queue. Dropping it removes the hit from the queue and passes its turn
/// on.
pub(crate) struct QueueEntry {
    queues: Arc<WaitQueues>,
    id: QueueId,
    queue: Arc<WaitQueue>,
    cost: u32,
    /// The position in the order of arrival.
    ticket: u64,
}

impl QueueEntry {
    /// Adds a refused hit to the end of its queue.
    pub(crate) fn after(refusal: &Refusal, key: &Key, queues: &Arc<WaitQueues>) -> Self {
        let id = (refusal.policy().queue_digest(), key.clone());
        let queue = queues.enter(&id);
        queue.record(refusal);
        Self::new(queues, id, queue, refusal.cost())
    }

    /// Adds a new hit to the end of its queue before its first attempt, so that it does not
    /// overtake the hits that wait there.
    ///
    /// Returns `None` if no hit waits in the queue, if the hit costs nothing, if it cannot be
    /// admitted before the deadline according to the last refusal of the queue, or if `accept`
    /// returns `None`. The caller then makes the first attempt without an entry.
    #[cold]
    pub(super) fn behind<T>(
        queues: &Arc<WaitQueues>,
        id: QueueId,
        cost: u32,
        deadline: Instant,
        accept: impl FnOnce() -> Option<T>,
    ) -> Option<(Self, T)> {
        if cost == 0 || deadline <= Instant::now() {
            return None;
        }
        let in_time = |queue: &WaitQueue| queue.refused_until(cost).is_none_or(|end| end <= deadline);
        let accept = |queue: &WaitQueue| in_time(queue).then(accept).flatten();
        let (queue, accepted) = queues.enter_behind(&id, accept)?;
        Some((Self::new(queues, id, queue, cost), accepted))
    }

    fn new(queues: &Arc<WaitQueues>, id: QueueId, queue: Arc<WaitQueue>, cost: u32) -> Self {
        let ticket = queue.take_ticket();
        Self { queues: Arc::clone(queues), id, queue, cost, ticket }
    }

    /// Waits for a turn to ask the storage. Turns are given in the order of arrival, except to hits
    /// that nothing polls.
    pub(super) async fn turn(&mut self) {
        // Finds hits ahead that nothing polls. Each hit has a timer of its own, because the timers
        // of such a hit may not run either.
        let mut check: Option<Pin<Box<Sleep>>> = None;
        poll_fn(|cx| {
            loop {
                let Err(next_check) = self.queue.poll_turn(self.ticket, self.cost, cx) else {
                    return Poll::Ready(());
                };
                let check = check.get_or_insert_with(|| Box::pin(sleep_until(next_check)));
                if check.deadline() != next_check {
                    check.as_mut().reset(next_check);
                }
                ready!(check.as_mut().poll(cx));
            }
        })
        .await;
    }

    /// Sleeps until an instant, at which this hit is due to use its turn.
    pub(super) async fn sleep_until(&self, instant: Instant) {
        self.queue.set_due(self.ticket, Some(instant));
        sleep_until(instant).await;
    }

    /// Returns a watch over the storage calls of this hit.
    pub(super) fn watch(&self) -> Watch {
        Watch { queue: Arc::clone(&self.queue), ticket: self.ticket }
    }

    /// Stores a refusal of this hit, and gives its turn back. The hit keeps its place in the order.
    pub(super) fn refused(&mut self, refusal: &Refusal) {
        self.queue.refused(self.ticket, refusal);
    }

    /// Gives turns to more hits, if units remain.
    pub(super) fn admitted(&self, remaining: u32) {
        self.queue.admitted(self.cost, remaining);
    }

    /// Counts a failed storage call.
    pub(super) fn failed(&self) {
        self.queue.failed();
    }

    /// Returns the queue's last refusal if it is for the same cost.
    pub(super) fn last_refusal(&self) -> Option<Refusal> {
        self.queue.last_refusal(self.cost)
    }

    /// Returns the instant until which this hit is refused, if it is known: the later end of its
    /// `own` refusal and of the queue's last one.
    pub(super) fn end_of(&self, own: Option<&Refusal>) -> Option<Instant> {
        self.queue.refused_until(self.cost).max(own.and_then(|own| own.end_for(self.cost)))
    }
}

impl Drop for QueueEntry {
    fn drop(&mut self) {
        self.queue.leave(self.ticket);
        self.queues.leave(&self.id);
    }
}

/// Watches a storage call of a hit that has a turn. If the call wakes the hit, it is due to be
/// polled. If the call is dropped, a task continues it, so the hit is not due.
pub(super) struct Watch {
    queue: Arc<WaitQueue>,
    ticket: u64,
}

impl Watch {
    pub(super) async fn polls<F: Future>(self, call: F) -> F::Output {
        let mut call = pin!(call);
        poll_fn(|cx| {
            self.queue.set_due(self.ticket, None);
            let waker = Woken { queue: Arc::clone(&self.queue), ticket: self.ticket, waker: cx.waker().clone() };
            call.as_mut().poll(&mut Context::from_waker(&Waker::from(Arc::new(waker))))
        })
        .await
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.queue.set_due(self.ticket, None);
    }
}

/// Wakes the task of a hit whose storage call can continue. From then on, the hit is due.
struct Woken {
    queue: Arc<WaitQueue>,
    ticket: u64,
    waker: Waker,
}

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.queue.set_due(self.ticket, Some(Instant::now()));
        self.waker.wake_by_ref();
    }
}

/// The digest of a policy, and a key.
pub(super) type QueueId = (u128, Key);

/// The queues of waiting hits: one for each policy and key that has any.
#[derive(Default)]
pub(crate) struct WaitQueues {
    queues: Mutex<HashMap<QueueId, CountedQueue>>,
    /// The number of all queues, so that a hit looks for its queue only if there is any.
    count: AtomicUsize,
}

/// A queue and the number of its hits.
struct CountedQueue {
    queue: Arc<WaitQueue>,
    count: usize,
}

impl WaitQueues {
    /// Counts one more hit in its queue, and returns the queue.
    pub(super) fn enter(&self, id: &QueueId) -> Arc<WaitQueue> {
        let mut queues = self.lock();
        let counted = queues.entry(id.clone()).or_insert_with(|| {
            self.count.fetch_add(1, Ordering::Relaxed);
            CountedQueue { queue: Arc::default(), count: 0 }
        });
        counted.enter()
    }

    /// Returns `true` if no hit waits.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.count.load(Ordering::Relaxed) == 0
    }

    /// Like [`enter`](Self::enter), but only if there is a queue for which `accept` returns a
    /// value. Returns this value too.
    pub(super) fn enter_behind<T>(
        &self,
        id: &QueueId,
        accept: impl FnOnce(&WaitQueue) -> Option<T>,
    ) -> Option<(Arc<WaitQueue>, T)> {
        let mut queues = self.lock();
        let counted = queues.get_mut(id)?;
        let accepted = accept(&counted.queue)?;
        Some((counted.enter(), accepted))
    }

    /// Removes a hit from its queue, and the queue with its last hit.
    pub(super) fn leave(&self, id: &QueueId) {
        let mut queues = self.lock();
        let Some(counted) = queues.get_mut(id) else { return };
        counted.count -= 1;
        if counted.count == 0 {
            queues.remove(id);
            self.count.fetch_sub(1, Ordering::Relaxed);
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<QueueId, CountedQueue>> {
        unpoisoned(self.queues.lock())
    }
}

impl CountedQueue {
    fn enter(&mut self) -> Arc<WaitQueue> {
        self.count += 1;
        Arc::clone(&self.queue)
    }
}

impl fmt::Debug for WaitQueues {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WaitQueues").finish_non_exhaustive()
    }
}

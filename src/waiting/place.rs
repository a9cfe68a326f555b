use std::future::poll_fn;
use std::mem;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use tokio::time::Instant;

use super::Refusal;
use super::queue::Queue;
use super::queues::{Id, Queues};
use crate::Key;

/// The place of a hit in a queue. Dropping it removes the hit from the queue and passes its turn
/// on.
pub(crate) struct Place {
    queues: Arc<Queues>,
    id: Id,
    queue: Arc<Queue>,
    cost: u32,
    /// The position in the order of arrival.
    ticket: u64,
    has_turn: bool,
}

impl Place {
    /// Adds a refused hit to the end of its queue.
    pub(crate) fn after(refusal: &Refusal, key: &Key, queues: &Arc<Queues>) -> Self {
        let id = (refusal.policy().digest(), key.clone());
        let queue = queues.enter(&id);
        queue.record(refusal);
        Self::new(queues, id, queue, refusal.cost())
    }

    /// Adds a new hit to the end of its queue, if hits wait there, and the last refusal of the
    /// queue does not prevent its admission before the deadline.
    #[cold]
    pub(super) fn behind(queues: &Arc<Queues>, id: Id, cost: u32, deadline: Instant) -> Option<Self> {
        if cost == 0 || deadline <= Instant::now() {
            return None;
        }
        let in_time = |queue: &Queue| queue.refused_until(cost).is_none_or(|end| end <= deadline);
        let queue = queues.enter_behind(&id, in_time)?;
        Some(Self::new(queues, id, queue, cost))
    }

    fn new(queues: &Arc<Queues>, id: Id, queue: Arc<Queue>, cost: u32) -> Self {
        let ticket = queue.take_ticket();
        Self { queues: Arc::clone(queues), id, queue, cost, ticket, has_turn: false }
    }

    /// Waits for a turn to ask the storage. Turns are given in the order of arrival.
    pub(super) async fn turn(&mut self) {
        poll_fn(|cx| self.poll_turn(cx)).await;
    }

    fn poll_turn(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if !self.has_turn {
            ready!(self.queue.poll_turn(self.ticket, self.cost, cx));
            self.has_turn = true;
        }
        Poll::Ready(())
    }

    /// Stores a refusal of this hit, and gives its turn back. The hit keeps its place in the order.
    pub(super) fn refused(&mut self, refusal: &Refusal) {
        if mem::take(&mut self.has_turn) {
            self.queue.refused(self.ticket, refusal);
        }
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

impl Drop for Place {
    fn drop(&mut self) {
        self.queue.leave(self.ticket, self.has_turn);
        self.queues.leave(&self.id);
    }
}

//! The waiting requests of a layer.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use super::queue::later;
use super::{Attempted, Place, Queues, Refusal, Waiter};
use crate::decision::Decision;
use crate::policy::Policy;
use crate::storage::StorageFuture;

/// The bounds of [`RateLimitLayer::wait`](crate::RateLimitLayer::wait).
#[derive(Clone, Copy)]
pub(crate) struct WaitBounds {
    pub(crate) max_wait: Duration,
    pub(crate) max_waiting: usize,
}

/// The waiting requests of a layer.
pub(crate) struct WaitingRoom {
    bounds: WaitBounds,
    waiting: AtomicUsize,
    queues: Arc<Queues>,
}

/// The wait of a request. It ends when the request is admitted, cannot be admitted in time, or the
/// storage fails.
pub(crate) type Turn = Pin<Box<dyn Future<Output = Attempted> + Send>>;

/// The reason for which a decision lets a request wait.
pub(crate) enum Pause {
    /// The delay of the decision, which has not been reported yet.
    Delay(Box<Decision>),
    Turn(Turn),
}

/// The stage of a request that waits.
pub(crate) enum Stage {
    /// The storage decides the first hit.
    Decision(StorageFuture<Decision>),
    /// The request is in a queue.
    Turn(Turn),
    /// The hit is admitted after a delay.
    Delay,
}

/// One of the `max_waiting` seats of a layer, taken by a waiting request. Dropping it frees the
/// seat.
struct Seat(Arc<WaitingRoom>);

impl WaitingRoom {
    pub(crate) fn new(bounds: WaitBounds, queues: Arc<Queues>) -> Arc<Self> {
        Arc::new(Self { bounds, waiting: AtomicUsize::new(0), queues })
    }

    /// Lets a refused request wait for its turn to ask the storage, if it can be admitted in time
    /// and fewer than `max_waiting` requests wait.
    pub(crate) fn turn(
        self: &Arc<Self>,
        refusal: &Decision,
        policy: &Policy,
        waiter: impl FnOnce() -> Waiter,
    ) -> Option<Turn> {
        let deadline = later(Instant::now(), self.bounds.max_wait);
        let refusal = Refusal::new(refusal.clone(), policy.clone());
        let seat = refusal.ends_by(deadline).then(|| self.seat()).flatten()?;
        let waiter = waiter();
        let place = Place::after(&refusal, &waiter.key, &self.queues);
        Some(wait(waiter, place, Some(refusal), deadline, seat))
    }

    /// Lets a new request wait behind others of its key, if it may be admitted in time and fewer
    /// than `max_waiting` requests wait. Otherwise returns `None`, and the caller makes the first
    /// hit of the request, which can overtake the others.
    pub(crate) fn turn_behind(self: &Arc<Self>, waiter: impl FnOnce() -> Waiter) -> Option<Turn> {
        if self.queues.is_empty() {
            return None;
        }
        let deadline = later(Instant::now(), self.bounds.max_wait);
        let (seat, waiter) = (self.seat()?, waiter());
        let place = waiter.join_behind(&self.queues, deadline)?;
        Some(wait(waiter, place, None, deadline, seat))
    }

    /// Takes a seat. Returns `None` if all of them are taken.
    fn seat(self: &Arc<Self>) -> Option<Seat> {
        let more = |waiting: usize| (waiting < self.bounds.max_waiting).then_some(waiting + 1);
        self.waiting.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok()?;
        Some(Seat(Arc::clone(self)))
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

fn wait(waiter: Waiter, place: Place, refusal: Option<Refusal>, deadline: Instant, seat: Seat) -> Turn {
    Box::pin(async move {
        let _seat = seat;
        waiter.wait(place, refusal, deadline).await
    })
}

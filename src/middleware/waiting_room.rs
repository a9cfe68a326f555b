//! The waiting requests of a layer.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::decision::Decision;
use crate::storage::StorageFuture;
use crate::waiting::{Attempted, Queues};

/// The bounds of [`RateLimitLayer::wait`](crate::RateLimitLayer::wait).
#[derive(Clone, Copy)]
pub(crate) struct WaitBounds {
    pub(crate) max_wait: Duration,
    pub(crate) max_waiting: usize,
}

/// The waiting requests of a layer.
pub(crate) struct WaitingRoom {
    pub(super) bounds: WaitBounds,
    waiting: AtomicUsize,
    pub(super) queues: Arc<Queues>,
}

/// The wait of a request. It ends when the request is admitted, cannot be admitted in time, or the
/// storage fails.
pub(crate) type Turn = Pin<Box<dyn Future<Output = Attempted> + Send>>;

/// The decision that a request waits for.
pub(crate) enum Deciding {
    /// The decision on the first hit.
    First(StorageFuture<Decision>),
    /// The decision at the end of a wait in a queue.
    Turn(Turn),
}

/// The reason for which a request waits after a decision.
pub(crate) enum Pause {
    /// The delay of the decision, which has not been reported yet.
    Delay(Box<Decision>),
    Turn(Turn),
}

/// One of the `max_waiting` seats of a layer, taken by a waiting request. Dropping it frees the
/// seat.
pub(super) struct Seat(Arc<WaitingRoom>);

impl WaitingRoom {
    pub(crate) fn new(bounds: WaitBounds, queues: Arc<Queues>) -> Arc<Self> {
        Arc::new(Self { bounds, waiting: AtomicUsize::new(0), queues })
    }

    /// Takes a seat. Returns `None` if all of them are taken.
    pub(super) fn seat(self: &Arc<Self>) -> Option<Seat> {
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

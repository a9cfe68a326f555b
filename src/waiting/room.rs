//! The waiting requests of a layer, and their seats.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use super::queue::{Refusal, later};
use super::{HitResult, QueueEntry, WaitQueues, Waiter};
use crate::decision::Decision;
use crate::key::Key;
use crate::storage::StorageRequest;

/// The bounds of [`RateLimitLayer::wait`](crate::RateLimitLayer::wait).
#[derive(Clone, Copy)]
pub(crate) struct WaitBounds {
    pub(crate) max_wait: Duration,
    pub(crate) max_waiting: usize,
}

/// The waiting requests of a layer.
pub(crate) struct WaitingRoom {
    max_wait: Duration,
    seats: Arc<Seats>,
    queues: Arc<WaitQueues>,
}

/// The wait of a request in a queue. It ends when the request is admitted, cannot be admitted in
/// time, or the storage fails.
pub(crate) type QueueFuture = Pin<Box<dyn Future<Output = HitResult> + Send>>;

impl WaitingRoom {
    pub(crate) fn new(bounds: WaitBounds, queues: Arc<WaitQueues>) -> Arc<Self> {
        Arc::new(Self { max_wait: bounds.max_wait, seats: Seats::new(bounds.max_waiting), queues })
    }

    /// Lets a refused request wait in its queue, if it can be admitted in time and a seat is free for
    /// its key.
    pub(crate) fn wait_after(
        self: &Arc<Self>,
        refusal: &Decision,
        request: StorageRequest<'_>,
        waiter: impl FnOnce() -> Waiter,
    ) -> Option<QueueFuture> {
        let deadline = later(Instant::now(), self.max_wait);
        let refusal = Refusal::new(refusal.clone(), request.policy.clone());
        let own = || self.queues.len_of(&(request.policy.queue_digest(), request.key.clone()));
        let seat = refusal.ends_by(deadline).then(|| self.seats.take(request.key, own)).flatten()?;
        let entry = QueueEntry::after(&refusal, request.key, &self.queues);
        Some(wait(waiter(), entry, Some(refusal), deadline, seat))
    }

    /// Lets a new request wait behind others of its policy and key, if it may be admitted in time
    /// and a seat is free for its key. Otherwise returns `None`, and the caller makes the first hit of
    /// the request, which can overtake the others.
    pub(crate) fn wait_behind(
        self: &Arc<Self>,
        request: StorageRequest<'_>,
        waiter: impl FnOnce() -> Waiter,
    ) -> Option<QueueFuture> {
        if self.queues.is_empty() {
            return None;
        }
        let deadline = later(Instant::now(), self.max_wait);
        let id = (request.policy.queue_digest(), request.key.clone());
        let (entry, seat) =
            QueueEntry::behind(&self.queues, id, request.cost, deadline, |own| self.seats.take(request.key, || own))?;
        Some(wait(waiter(), entry, None, deadline, seat))
    }
}

fn wait(waiter: Waiter, entry: QueueEntry, refusal: Option<Refusal>, deadline: Instant, seat: Seat) -> QueueFuture {
    Box::pin(async move {
        let _seat = seat;
        waiter.wait(entry, refusal, deadline).await
    })
}

/// The seats for the waiting requests of a layer, which its keys share.
///
/// A key gets another seat as long as it has fewer than are free. So a single key can take half of them,
/// two keys a third each, and so on: the next key always finds a free seat, until each has only one.
#[derive(Debug)]
pub(crate) struct Seats {
    max: usize,
    taken: AtomicUsize,
}

/// A seat, taken by a waiting request. Dropping it frees the seat.
#[derive(Debug)]
pub(crate) struct Seat(Arc<Seats>);

impl Seats {
    pub(crate) fn new(max: usize) -> Arc<Self> {
        Arc::new(Self { max, taken: AtomicUsize::new(0) })
    }

    /// Takes a seat for a key that has `own` seats already. Returns `None` if at most as many are free.
    /// [`Key::global`] can take all of them, because all requests have it.
    pub(crate) fn take(self: &Arc<Self>, key: &Key, own: impl FnOnce() -> usize) -> Option<Seat> {
        if self.taken.load(Ordering::Relaxed) >= self.max {
            return None;
        }
        let own = if key.is_global() { 0 } else { own() };
        let more = |taken: usize| (own < self.max.saturating_sub(taken)).then(|| taken + 1);
        self.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok()?;
        Some(Seat(Arc::clone(self)))
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.taken.fetch_sub(1, Ordering::Relaxed);
    }
}

//! The waiting requests of a layer, and their seats.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::Instant;

use super::queue::{Refusal, later};
use super::{HitResult, QueueEntry, WaitQueues, Waiter};
use crate::decision::Decision;
use crate::key::Key;
use crate::storage::StorageRequest;
use crate::sync::unpoisoned;

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
        let seat = refusal.ends_by(deadline).then(|| self.seats.take(request.key)).flatten()?;
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
            QueueEntry::behind(&self.queues, id, request.cost, deadline, || self.seats.take(request.key))?;
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
/// two keys a third each, and so on: the next key always finds a free seat, until each has only one. The
/// seats of a key count together, also if its requests have different policies.
#[derive(Debug)]
pub(crate) struct Seats {
    max: usize,
    taken: Mutex<TakenSeats>,
}

#[derive(Debug, Default)]
struct TakenSeats {
    sum: usize,
    by_key: HashMap<Key, usize>,
}

/// A seat, taken by a waiting request. Dropping it frees the seat.
#[derive(Debug)]
pub(crate) struct Seat {
    seats: Arc<Seats>,
    key: Key,
}

impl Seats {
    pub(crate) fn new(max: usize) -> Arc<Self> {
        Arc::new(Self { max, taken: Mutex::default() })
    }

    /// Takes a seat for a key. Returns `None` if the key has at least as many seats as are free.
    /// [`Key::global`] can take all of them, because all requests have it.
    pub(crate) fn take(self: &Arc<Self>, key: &Key) -> Option<Seat> {
        let mut taken = unpoisoned(self.taken.lock());
        let free = self.max - taken.sum;
        let own = taken.by_key.get(key).copied().unwrap_or(0);
        if free == 0 || own >= free && !key.is_global() {
            return None;
        }
        taken.sum += 1;
        taken.by_key.insert(key.clone(), own + 1);
        Some(Seat { seats: Arc::clone(self), key: key.clone() })
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut taken = unpoisoned(self.seats.taken.lock());
        taken.sum -= 1;
        let Some(own) = taken.by_key.get_mut(&self.key) else { return };
        *own -= 1;
        if *own == 0 {
            taken.by_key.remove(&self.key);
        }
    }
}

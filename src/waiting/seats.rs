//! The seats of waiting requests.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::key::Key;

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

//! Limits the callers that wait for a connection.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::time::sleep;

use crate::storage::StorageError;

/// The maximum number of calls in flight on one connection, and of callers that wait for a
/// connection. The documentation of the storages contains this number.
pub(in crate::storage) const MOST: usize = 1_024;

/// Returns `error` after three quarters of `timeout`, the timeout of the call. Without the delay,
/// callers that retry immediately would take all processor time from the connection.
pub(in crate::storage) async fn overloaded<T>(error: StorageError, timeout: Duration) -> Result<T, StorageError> {
    sleep(timeout * 3 / 4).await;
    Err(error)
}

/// Counts the callers that wait for a connection.
#[derive(Default)]
pub(super) struct Waiters(AtomicUsize);

/// Counts one waiting caller until it is dropped.
pub(super) struct Waiter<'a>(&'a Waiters);

impl Waiters {
    /// Adds a caller. Returns `None` if too many callers wait.
    pub(super) fn enter(&self) -> Option<Waiter<'_>> {
        let waiter = Waiter(self);
        (self.0.fetch_add(1, Ordering::Relaxed) < MOST).then_some(waiter)
    }

    pub(super) fn count(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Relaxed);
    }
}

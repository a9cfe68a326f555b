//! The callers of a shared connection, which wait while it is opened.

use std::sync::Arc;

use tokio::task::yield_now;
use tokio::time::{Instant, timeout_at};

#[cfg(any(test, feature = "redis", feature = "memcached", feature = "etcd"))]
use super::race::{race, tries};
use super::reconnect::{Found, Reconnecting, Usable};
use super::waiters::{MOST, overloaded};
use crate::storage::StorageError;

impl<T: Usable + Send + Sync + 'static> Reconnecting<T> {
    /// Returns the value. Calls `make` for the tries of a race if there is no value, no attempt is
    /// running, and the backoff is over.
    ///
    /// # Errors
    ///
    /// Returns the error of the last attempt during the backoff, a timeout at `deadline`, and an
    /// overload error if too many callers wait.
    #[cfg(any(test, feature = "redis", feature = "memcached", feature = "etcd"))]
    pub(in crate::storage) async fn get<F>(
        self: &Arc<Self>,
        deadline: Instant,
        make: impl Fn() -> F,
    ) -> Result<Arc<T>, StorageError>
    where
        F: Future<Output = Result<T, StorageError>> + Send + 'static,
    {
        self.get_for(self, deadline, || race(tries(&make))).await
    }

    /// Returns the value, like `get`, but calls `make` once per attempt. The caller
    /// counts as one that waits for `other`, so that callers who wait for the same value can have
    /// separate limits.
    ///
    /// # Errors
    ///
    /// The errors are those of `get`.
    pub(in crate::storage) async fn get_for<F>(
        self: &Arc<Self>,
        other: &Self,
        deadline: Instant,
        make: impl Fn() -> F,
    ) -> Result<Arc<T>, StorageError>
    where
        F: Future<Output = Result<T, StorageError>> + Send + 'static,
    {
        loop {
            let mut attempt = match self.find(&make) {
                Found::Value(value) => return Ok(value),
                Found::Failure(error) => return Err(error),
                Found::Attempt(attempt) => attempt,
            };
            let Some(waiter) = other.waiting.enter(1, MOST) else {
                let timeout = deadline.saturating_duration_since(Instant::now());
                return overloaded(StorageError::overloaded(self.name(), MOST), timeout).await;
            };
            // The next iteration finds the result, or starts another attempt if this one stalled.
            let _ = timeout_at(deadline.min(attempt.until), attempt.ended.changed()).await;
            drop(waiter);
            if Instant::now() >= deadline {
                return Err(StorageError::not_connected(self.name()));
            }
            // On a runtime that shuts down, each attempt ends before it begins. Yielding lets this
            // task end too.
            yield_now().await;
        }
    }

    /// Returns the current value, if it is usable. Otherwise begins an attempt in the background,
    /// unless one is running, or the backoff is not over.
    #[cfg(feature = "postgres")]
    pub(in crate::storage) fn value_or_begin<F>(self: &Arc<Self>, make: impl Fn() -> F) -> Option<Arc<T>>
    where
        F: Future<Output = Result<T, StorageError>> + Send + 'static,
    {
        match self.find(&make) {
            Found::Value(value) => Some(value),
            Found::Attempt(_) | Found::Failure(_) => None,
        }
    }
}

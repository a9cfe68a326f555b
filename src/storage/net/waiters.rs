//! Limits the callers that wait for a connection.

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

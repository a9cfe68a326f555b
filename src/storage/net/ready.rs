//! Waits until servers are ready.

use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use crate::storage::StorageError;

/// The delay between two checks.
const RETRY_AFTER: Duration = Duration::from_millis(20);

/// The timeout of one check.
const CHECK_TIMEOUT: Duration = Duration::from_secs(1);

/// Repeats `check` until it succeeds. The argument of `check` is the deadline of that check.
///
/// # Errors
///
/// Returns the last error if no check has succeeded at `deadline`. A timeout does not replace an
/// earlier error, because that error explains more.
pub(in crate::storage) async fn until_ready<F>(
    deadline: Instant,
    check: impl Fn(Instant) -> F,
) -> Result<(), StorageError>
where
    F: Future<Output = Result<(), StorageError>>,
{
    let mut last = None;
    loop {
        let Err(error) = check((Instant::now() + CHECK_TIMEOUT).min(deadline)).await else { return Ok(()) };
        let error = match &last {
            Some(before) if error.is_timeout() => before,
            _ => last.insert(error),
        };
        let retry = Instant::now() + RETRY_AFTER;
        if retry >= deadline {
            return Err(error.clone());
        }
        sleep_until(retry).await;
    }
}

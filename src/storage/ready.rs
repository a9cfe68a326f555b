//! Repeats the check of a storage until it succeeds.

use std::time::Duration;

use tokio::runtime::Handle;
use tokio::time::{Instant, sleep, timeout};

use super::{StorageError, StorageErrorKind, StorageFuture};

/// The delay between two checks.
const RETRY_AFTER: Duration = Duration::from_millis(20);

/// The longest time of the first check. Each check that takes longer doubles it. A storage with a
/// long timeout may wait for a connection that has stopped replying, and the next check replaces
/// it. An attempt to connect takes at most half of this time, so the check returns its error.
const FIRST_LIMIT: Duration = Duration::from_secs(2);

/// The longest timeout. An instant in the far future can overflow on some systems.
const LONGEST: Duration = Duration::from_secs(365 * 86_400);

/// Repeats `check` until it succeeds, for at most `longest`.
///
/// # Errors
///
/// Returns the last error. A timeout does not replace an earlier error, because that error explains
/// more.
pub(super) async fn until_ready(
    longest: Duration,
    check: impl Fn() -> StorageFuture<()> + Send,
) -> Result<(), StorageError> {
    let mut checked = check();
    if let Some(Ok(())) = checked.as_ready() {
        return Ok(());
    }
    Handle::try_current().map_err(|_| StorageError::no_runtime())?;
    let deadline = Instant::now() + longest.min(LONGEST);
    let (mut limit, mut last) = (FIRST_LIMIT, None);
    loop {
        let within = limit.min(deadline.saturating_duration_since(Instant::now()));
        let result = timeout(within, checked).await.unwrap_or_else(|_| {
            limit *= 2;
            Err(took_longer(within))
        });
        let Err(error) = result else { return Ok(()) };
        let error = match &last {
            Some(before) if error.is_timeout() => before,
            _ => last.insert(error),
        };
        if Instant::now() + RETRY_AFTER >= deadline {
            return Err(error.clone());
        }
        sleep(RETRY_AFTER).await;
        checked = check();
    }
}

fn took_longer(limit: Duration) -> StorageError {
    let message = format!("the check of the storage took longer than {limit:?}");
    StorageError::new(StorageErrorKind::Timeout, message).uncounted()
}

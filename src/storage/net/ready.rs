//! Waiting for servers before they are used.

use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use super::LinkError;

/// Between two looks at servers that are not ready yet.
const AGAIN: Duration = Duration::from_millis(20);

/// For how long one look at them may take.
const LOOK: Duration = Duration::from_secs(1);

/// Looks again and again, each time until the instant that `look` is told.
///
/// # Errors
///
/// What was last wrong when `deadline` has passed.
pub(in crate::storage) async fn until_ready<E, F>(deadline: Instant, look: impl Fn(Instant) -> F) -> Result<(), E>
where
    E: LinkError,
    F: Future<Output = Result<(), E>>,
{
    let mut why = None;
    loop {
        let Err(error) = look((Instant::now() + LOOK).min(deadline)).await else { return Ok(()) };
        // That there was no time left says less than what was wrong before.
        let why = match &why {
            Some(before) if error.is_timeout() => before,
            _ => why.insert(error),
        };
        let again = Instant::now() + AGAIN;
        if again >= deadline {
            return Err(why.clone());
        }
        sleep_until(again).await;
    }
}

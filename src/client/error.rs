//! The error of a request that was not sent.

use std::error::Error;
use std::fmt;
use std::time::Duration;

use crate::extract::KeyError;
use crate::storage::StorageError;

/// The error of a request that a [`ClientLimit`](crate::ClientLimit) did not send. The service
/// returns it as a [`BoxError`](crate::BoxError).
///
/// | cause | [`retry_after`](Self::retry_after) | [`source`](Error::source) |
/// |---|---|---|
/// | the pause of the host is longer than [`max_wait`](crate::ClientLimitLayer::max_wait) | the rest of the pause | none |
/// | the [limit of the client](crate::ClientLimitLayer::limit) does not admit the request within `max_wait` | that of the limit's decision | none |
/// | [`max_waiting`](crate::ClientLimitLayer::max_waiting) requests wait already | `None` | none |
/// | the key extractor returned an error | `None` | this [`KeyError`] |
/// | the storage of the client's limit failed | `None` | this [`StorageError`] |
///
/// ```
/// use tower_ratelimit::{BoxError, ClientLimitError};
///
/// /// Returns the whole seconds after which a failed request can be sent.
/// fn seconds(error: &BoxError) -> Option<u64> {
///     error.downcast_ref::<ClientLimitError>()?.retry_after().map(|wait| wait.as_secs() + 1)
/// }
/// # assert_eq!(seconds(&"closed".into()), None);
/// ```
#[derive(Debug)]
pub struct ClientLimitError(pub(super) NotSent);

/// The reason why a request was not sent.
#[derive(Debug)]
pub(super) enum NotSent {
    Paused { wait: Duration, max_wait: Duration },
    Limited { wait: Option<Duration>, max_wait: Duration },
    TooManyWaiting(usize),
    Key(KeyError),
    Storage(StorageError),
}

impl ClientLimitError {
    /// Returns the time after which the request can be sent, if it was not sent because its wait
    /// would be longer than [`max_wait`](crate::ClientLimitLayer::max_wait). Returns `None` for all
    /// other causes, and if the client's limit can never admit the request.
    pub fn retry_after(&self) -> Option<Duration> {
        match &self.0 {
            NotSent::Paused { wait, .. } => Some(*wait),
            NotSent::Limited { wait, .. } => *wait,
            _ => None,
        }
    }
}

impl fmt::Display for ClientLimitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            NotSent::Paused { wait, max_wait } => {
                write!(
                    f,
                    "request not sent: the server asks to wait for {wait:.1?}, longer than the maximum {max_wait:?}"
                )
            }
            NotSent::Limited { max_wait, .. } => {
                write!(f, "request not sent: the client's own limit does not admit it within {max_wait:?}")
            }
            NotSent::TooManyWaiting(most) => write!(f, "request not sent: {most} requests wait already"),
            NotSent::Key(_) => f.write_str("request not sent: it has no rate limit key"),
            NotSent::Storage(_) => f.write_str("request not sent: the storage of the client's own limit failed"),
        }
    }
}

impl Error for ClientLimitError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match &self.0 {
            NotSent::Key(error) => Some(error),
            NotSent::Storage(error) => Some(error),
            _ => None,
        }
    }
}

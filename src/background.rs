//! Futures that run to their end, even if nothing awaits them.

use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use crate::storage::{StorageError, StorageErrorKind};

/// Polls without a waker, for futures that may be ready immediately.
pub(crate) fn poll_once<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
    Pin::new(future).poll(&mut Context::from_waker(Waker::noop()))
}

/// The outcome of work that may be moved to a background task.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum RunOutcome {
    Finished,
    /// The work runs in a task of the tokio runtime.
    Spawned,
    /// The work was dropped because it was started outside of a tokio runtime.
    Dropped,
}

impl RunOutcome {
    /// Returns an error if the work was dropped.
    pub(crate) fn error(self) -> Option<StorageError> {
        let message = "the storage is asynchronous, and the call was made outside of a tokio runtime";
        (self == Self::Dropped)
            .then(|| StorageError::new(StorageErrorKind::Cancelled, message).with_may_have_counted(false))
    }
}

/// Runs the future and then `then`: immediately if the future is ready, else in a task of the tokio
/// runtime if there is one.
pub(crate) fn run_or_spawn<F>(mut future: F, then: impl FnOnce(F::Output) + Send + 'static) -> RunOutcome
where
    F: Future + Unpin + Send + 'static,
{
    if let Poll::Ready(output) = poll_once(&mut future) {
        then(output);
        return RunOutcome::Finished;
    }
    match tokio::runtime::Handle::try_current() {
        Ok(runtime) => {
            runtime.spawn(async move { then(future.await) });
            RunOutcome::Spawned
        }
        Err(_) => RunOutcome::Dropped,
    }
}

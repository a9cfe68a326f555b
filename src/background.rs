//! Storage calls that end even if nothing awaits them.

use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use tokio::runtime::Handle;

use crate::storage::{StorageError, StorageErrorKind, StorageFuture};

/// Polls without a waker, for futures that may be ready immediately.
pub(crate) fn poll_once<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
    Pin::new(future).poll(&mut Context::from_waker(Waker::noop()))
}

/// Runs the call and passes its result to `then`: immediately if the call is ready, else in a task
/// of the tokio runtime. Outside of a runtime, drops the call and passes an error.
pub(crate) fn run_or_spawn<T>(mut call: StorageFuture<T>, then: impl FnOnce(Result<T, StorageError>) + Send + 'static)
where
    T: Send + 'static,
{
    if let Poll::Ready(result) = poll_once(&mut call) {
        return then(result);
    }
    if let Ok(runtime) = Handle::try_current() {
        drop(runtime.spawn(async move { then(call.await) }));
    } else {
        let message = "the storage is asynchronous, and the call was made outside of a tokio runtime";
        // The storage may have sent the call at an earlier poll.
        then(Err(StorageError::new(StorageErrorKind::Cancelled, message).with_may_have_counted(true)));
    }
}

/// Calls `f` in this runtime if the current thread has none.
pub(crate) fn in_runtime<T>(runtime: Option<&Handle>, f: impl FnOnce() -> T) -> T {
    let outside = runtime.filter(|_| Handle::try_current().is_err());
    let _entered = outside.map(Handle::enter);
    f()
}

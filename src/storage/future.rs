use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use tokio::runtime::Handle;

use super::StorageError;

/// The future of a call to a [`Storage`](super::Storage): a result that is ready, or a boxed future.
///
/// A ready future does not allocate.
///
/// ```
/// use tower_ratelimit::storage::StorageFuture;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tower_ratelimit::storage::StorageError> {
/// let ready = StorageFuture::ok(3);
/// let later = StorageFuture::new(async {
///     tokio::task::yield_now().await;
///     Ok(4)
/// });
/// assert_eq!(ready.await? + later.await?, 7);
/// # Ok(())
/// # }
/// ```
#[must_use = "futures do nothing unless they are polled"]
pub struct StorageFuture<T>(ReadyOrBoxed<T>);

enum ReadyOrBoxed<T> {
    /// `None` after the result was returned.
    Ready(Option<Result<T, StorageError>>),
    Pending(Pin<Box<dyn Future<Output = Result<T, StorageError>> + Send>>),
}

impl<T> StorageFuture<T> {
    /// Returns a future that is ready with `value`.
    #[inline]
    pub fn ok(value: T) -> Self {
        Self::ready(Ok(value))
    }

    /// Returns a future that is ready with `result`.
    #[inline]
    pub fn ready(result: Result<T, StorageError>) -> Self {
        Self(ReadyOrBoxed::Ready(Some(result)))
    }

    /// Boxes `future`. It does not run until the returned future is polled.
    pub fn new(future: impl Future<Output = Result<T, StorageError>> + Send + 'static) -> Self {
        Self(ReadyOrBoxed::Pending(Box::pin(future)))
    }

    /// Returns the result if the future is ready without being polled.
    #[inline]
    pub(crate) fn as_ready(&self) -> Option<Result<&T, &StorageError>> {
        match &self.0 {
            ReadyOrBoxed::Ready(result) => result.as_ref().map(Result::as_ref),
            ReadyOrBoxed::Pending(_) => None,
        }
    }

    /// Polls a boxed future once, so that a result that is available immediately is ready.
    pub(crate) fn polled_once(self) -> Self {
        let ReadyOrBoxed::Pending(mut future) = self.0 else { return self };
        match future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(result) => Self::ready(result),
            Poll::Pending => Self(ReadyOrBoxed::Pending(future)),
        }
    }
}

impl<T> StorageFuture<T> {
    /// Polls a boxed future once inside of a tokio runtime. Outside, the future may be awaited on a
    /// runtime that its caller has not entered yet, and most storages fail without one.
    pub(crate) fn polled_once_in_runtime(self) -> Self {
        let is_boxed = matches!(self.0, ReadyOrBoxed::Pending(_));
        if is_boxed && Handle::try_current().is_err() { self } else { self.polled_once() }
    }
}

impl<T: Send + 'static> StorageFuture<T> {
    /// Passes the result to `next`: now if it is ready, and otherwise when it is.
    pub(crate) fn then<U: Send + 'static>(
        self,
        next: impl FnOnce(Result<T, StorageError>) -> StorageFuture<U> + Send + 'static,
    ) -> StorageFuture<U> {
        match self.0 {
            ReadyOrBoxed::Ready(Some(result)) => next(result),
            ReadyOrBoxed::Ready(None) => returned(),
            ReadyOrBoxed::Pending(future) => StorageFuture::new(async move { next(future.await).await }),
        }
    }

    /// Changes the result with `change`: now if it is ready, and otherwise when it is.
    pub(crate) fn map<U: Send + 'static>(
        self,
        change: impl FnOnce(Result<T, StorageError>) -> Result<U, StorageError> + Send + 'static,
    ) -> StorageFuture<U> {
        match self.0 {
            ReadyOrBoxed::Ready(Some(result)) => StorageFuture::ready(change(result)),
            ReadyOrBoxed::Ready(None) => returned(),
            ReadyOrBoxed::Pending(future) => StorageFuture::new(async move { change(future.await) }),
        }
    }

    /// Calls `then` when this future has a result or is dropped: now if it is ready.
    pub(crate) fn finally(self, then: impl FnOnce() + Send + 'static) -> Self {
        let guard = OnDrop(Some(then));
        self.map(move |result| {
            drop(guard);
            result
        })
    }
}

/// Calls a closure when it is dropped.
struct OnDrop<F: FnOnce()>(Option<F>);

impl<F: FnOnce()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        if let Some(then) = self.0.take() {
            then();
        }
    }
}

#[cold]
fn returned() -> ! {
    panic!("`StorageFuture` polled after completion")
}

/// A ready result is not pinned, and the box of a pending future pins it.
impl<T> Unpin for StorageFuture<T> {}

impl<T> Future for StorageFuture<T> {
    type Output = Result<T, StorageError>;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut self.0 {
            ReadyOrBoxed::Ready(result) => Poll::Ready(result.take().unwrap_or_else(|| returned())),
            ReadyOrBoxed::Pending(future) => future.as_mut().poll(cx),
        }
    }
}

impl<T> fmt::Debug for StorageFuture<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match &self.0 {
            ReadyOrBoxed::Ready(Some(_)) => "StorageFuture(Ready)",
            ReadyOrBoxed::Ready(None) => "StorageFuture(Returned)",
            ReadyOrBoxed::Pending(_) => "StorageFuture(Pending)",
        })
    }
}

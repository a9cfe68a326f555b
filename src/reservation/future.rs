//! The future of a settlement, and calls that continue in a task.

use std::fmt;
use std::mem;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use tokio::runtime::Handle;

use crate::storage::{StorageError, StorageErrorKind, StorageFuture};
use crate::sync::join_all;

/// A settlement: the future that [`Reservation::settle`](crate::Reservation::settle),
/// [`refund`](crate::Reservation::refund), [`clear`](crate::Reservation::clear) and
/// [`Counter::finish`](crate::Counter::finish) return.
///
/// The storage was called when the settlement was created. Await the settlement to get the result.
///
/// If the settlement is dropped while the storage is not ready, a task of the current tokio runtime
/// continues it, or else a task of the runtime in which the hit was made. If there is neither, the
/// call is dropped, and the failure is logged (feature `tracing`). The hit then keeps its estimated
/// cost, unless the storage has executed the call already.
///
/// # Errors
///
/// Returns the storage's error if the storage fails. The memory storage never fails.
pub struct SettleFuture {
    call: StorageFuture<()>,
    /// `None` if there is nothing to report, or the call has ended.
    rest: Option<Rest>,
}

/// The report that is left.
struct Rest {
    when: ReportWhen,
    report: Report,
    /// The runtime in which the call began. The settlement may be dropped in a thread outside of
    /// it.
    runtime: Option<Handle>,
}

/// Reports the result of a call.
type Report = Box<dyn FnOnce(Result<(), &StorageError>) + Send>;

/// The condition on which the result of a call is reported.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum ReportWhen {
    /// The settlement was dropped, so no caller gets the result.
    Dropped,
    /// The call has ended.
    Ended,
}

impl SettleFuture {
    /// Creates a settlement with nothing left to report.
    pub(super) fn without_report(call: StorageFuture<()>) -> Self {
        Self { call, rest: None }
    }

    /// Creates a settlement whose result is reported. The call is not ready, or is ready with an error.
    pub(super) fn with_report(
        call: StorageFuture<()>,
        when: ReportWhen,
        report: impl FnOnce(Result<(), &StorageError>) + Send + 'static,
    ) -> Self {
        Self { call, rest: Some(Rest { when, report: Box::new(report), runtime: None }) }
    }

    /// Combines the settlements of several hits. They continue in this runtime if they are dropped
    /// outside of any. Returns the first error.
    pub(super) fn all(settlements: Vec<Self>, runtime: Option<&Handle>) -> Self {
        let mut settlements: Vec<_> = settlements.into_iter().map(|settling| settling.continuing_in(runtime)).collect();
        if settlements.len() == 1 {
            return settlements.remove(0);
        }
        // Each of them continues in a task of its own if this one is dropped.
        let all = async { join_all(settlements).await.into_iter().collect() };
        Self::without_report(StorageFuture::new(all).polled_once())
    }

    /// Sets the runtime in which the call continues if the settlement is dropped outside of any.
    pub(super) fn continuing_in(mut self, runtime: Option<&Handle>) -> Self {
        if let Some(rest) = &mut self.rest {
            rest.runtime = runtime.cloned();
        }
        self
    }

    /// Returns `true` if nothing is left to report. Always `true` for [several](Self::all) settlements,
    /// because each of them reports its own result.
    pub(super) fn is_done(&self) -> bool {
        self.rest.is_none()
    }
}

impl Future for SettleFuture {
    type Output = Result<(), StorageError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        // Taken out, so that `drop` does not poll the call again after a panic.
        let rest = self.rest.take();
        let polled = Pin::new(&mut self.call).poll(cx);
        match (&polled, rest) {
            (Poll::Pending, rest) => self.rest = rest,
            (Poll::Ready(done), Some(Rest { when: ReportWhen::Ended, report, .. })) => {
                report(done.as_ref().copied());
            }
            (Poll::Ready(_), _) => {}
        }
        polled
    }
}

impl Drop for SettleFuture {
    fn drop(&mut self) {
        if let Some(Rest { report, runtime, .. }) = self.rest.take() {
            let call = mem::replace(&mut self.call, StorageFuture::ok(()));
            in_runtime(runtime.as_ref(), || run_or_spawn(call, move |done| report(done.as_ref().copied())));
        }
    }
}

impl fmt::Debug for SettleFuture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SettleFuture").field(&self.call).finish()
    }
}

/// Runs the call and passes its result to `then`: immediately if the call is ready, else in a task
/// of the tokio runtime. Outside of a runtime, drops the call and passes an error.
pub(crate) fn run_or_spawn<T>(mut call: StorageFuture<T>, then: impl FnOnce(Result<T, StorageError>) + Send + 'static)
where
    T: Send + 'static,
{
    if let Poll::Ready(result) = Pin::new(&mut call).poll(&mut Context::from_waker(Waker::noop())) {
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
pub(super) fn in_runtime<T>(runtime: Option<&Handle>, f: impl FnOnce() -> T) -> T {
    let outside = runtime.filter(|_| Handle::try_current().is_err());
    let _entered = outside.map(Handle::enter);
    f()
}

//! Settlements that go on without their caller.

use std::fmt;
use std::mem;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::runtime::Handle;

use crate::background::{in_runtime, run_or_spawn};
use crate::storage::{StorageError, StorageFuture};

/// A settlement: the future of [`Reservation::settle`](crate::Reservation::settle).
///
/// The storage was called when the settlement was created. Await the settlement to get the result.
///
/// If the settlement is dropped while the storage is not ready, a task of the current tokio runtime
/// continues it, or else a task of the runtime in which the hit was made. If there is neither, the
/// hit keeps its estimated cost, and a line is logged (feature `tracing`).
///
/// # Errors
///
/// Returns the storage's error if the storage fails. The memory storage never fails.
pub struct SettleFuture {
    call: StorageFuture<()>,
    /// `None` if the call was ready, or has ended.
    rest: Option<Rest>,
}

/// The work that is left while the storage is not ready.
struct Rest {
    when: ReportWhen,
    report: Report,
    /// The runtime in which the call began. The settlement may be dropped in a thread outside of it.
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
    /// Creates a settlement whose call is ready, and is reported already if it has to be.
    pub(super) fn done(call: StorageFuture<()>) -> Self {
        Self { call, rest: None }
    }

    /// Creates a settlement whose call is not ready.
    pub(super) fn pending(
        call: StorageFuture<()>,
        when: ReportWhen,
        report: impl FnOnce(Result<(), &StorageError>) + Send + 'static,
    ) -> Self {
        Self { call, rest: Some(Rest { when, report: Box::new(report), runtime: None }) }
    }

    /// Sets the runtime in which the call continues if the settlement is dropped outside of any.
    pub(super) fn in_runtime(mut self, runtime: Option<&Handle>) -> Self {
        if let Some(rest) = &mut self.rest {
            rest.runtime = runtime.cloned();
        }
        self
    }

    /// Returns `true` if the storage was immediately ready.
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

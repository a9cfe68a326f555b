//! The futures of leases.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use tokio::sync::oneshot;

use super::charge::Taken;
use super::job::Answer;
use super::shared::{InvalidateOnDrop, LeaseTable};
use crate::storage::{StorageError, StorageErrorKind, StorageRequest};
use crate::{Decision, Key, Op, Policy, Storage};

/// The future of a decision by [`Leases`](super::Leases).
#[must_use = "futures do nothing unless they are polled"]
pub struct Deciding<St: Storage> {
    progress: Progress<St>,
    /// The cost of the request. The slice may have paid a part of a charge, so the storage decides
    /// on less.
    cost: u32,
    /// The units that the slice has paid. They are put back into the slice unless the storage
    /// charges the rest.
    taken: Option<Taken<St>>,
}

impl<St: Storage> Deciding<St> {
    pub(super) fn new(progress: Progress<St>, cost: u32, taken: Option<Taken<St>>) -> Self {
        Self { progress, cost, taken }
    }

    /// Completes a decision of the storage or of the worker.
    fn complete(&mut self, decision: Result<Decision, StorageError>) -> Result<Decision, StorageError> {
        let decision = decision?;
        if decision.is_admitted() {
            self.taken.take().into_iter().for_each(Taken::keep);
        }
        Ok(decision.of_cost(self.cost))
    }
}

#[allow(clippy::large_enum_variant, reason = "boxing it would cost an allocation per hit")]
pub(super) enum Progress<St: Storage> {
    Local(Option<Decision>),
    Wait(oneshot::Receiver<Answer>, OwnedRequest<St>),
    Inner(St::DecideFuture),
}

/// An owned copy of the request, for a caller that sends it to the storage itself.
pub(super) struct OwnedRequest<St: Storage> {
    shared: Arc<LeaseTable<St>>,
    policy: Policy,
    key: Key,
    op: Op,
    cost: u32,
}

impl<St: Storage> OwnedRequest<St> {
    pub(super) fn new(shared: &Arc<LeaseTable<St>>, request: &StorageRequest<'_>) -> Self {
        let (shared, policy, key) = (Arc::clone(shared), request.policy.clone(), request.key.clone());
        Self { shared, policy, key, op: request.op, cost: request.cost }
    }

    fn decide(&self) -> St::DecideFuture {
        self.shared.inner.decide(StorageRequest::new(&self.policy, &self.key, self.op, self.cost))
    }
}

impl<St: Storage> Future for Deciding<St> {
    type Output = Result<Decision, StorageError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        loop {
            let decided = match &mut self.progress {
                Progress::Local(decision) => {
                    return Poll::Ready(Ok(decision.take().expect("`Deciding` polled after completion")));
                }
                Progress::Inner(decided) => {
                    let decision = ready!(Pin::new(decided).poll(cx)).map_err(StorageError::from_boxed);
                    return Poll::Ready(self.complete(decision));
                }
                Progress::Wait(answer, request) => match ready!(Pin::new(answer).poll(cx)) {
                    Ok(Ok(Some(given))) => {
                        let decision = given.claim().ok_or_else(cancelled);
                        return Poll::Ready(self.complete(decision));
                    }
                    Ok(Ok(None)) => request.decide(),
                    Ok(Err(error)) => return Poll::Ready(Err(error)),
                    Err(_) => return Poll::Ready(Err(cancelled())),
                },
            };
            self.progress = Progress::Inner(decided);
        }
    }
}

fn cancelled() -> StorageError {
    let message = "lease task was cancelled: leases on a storage with round trips need a running tokio runtime";
    StorageError::new(StorageErrorKind::Cancelled, message)
}

/// The future of a clear or settlement through [`Leases`](super::Leases).
#[must_use = "futures do nothing unless they are polled"]
pub struct Change<St: Storage>(pub(super) ChangeState<St>);

pub(super) enum ChangeState<St: Storage> {
    Local,
    Wait(oneshot::Receiver<Answer>),
    /// A change in the storage that does not wait for the worker. A clear has a guard, which is
    /// dropped when the clear ends.
    Inner(St::UpdateFuture, Option<InvalidateOnDrop<St>>),
    /// Charges the storage for the units that the slice lacks. If that fails or is dropped, the
    /// units taken from the slice are put back.
    Charge(St::UpdateFuture, Option<Taken<St>>),
}

impl<St: Storage> Future for Change<St> {
    type Output = Result<(), StorageError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        Poll::Ready(match &mut self.0 {
            ChangeState::Local => Ok(()),
            ChangeState::Inner(done, guard) => {
                let done = ready!(Pin::new(done).poll(cx));
                drop(guard.take());
                done.map_err(StorageError::from_boxed)
            }
            ChangeState::Charge(done, taken) => {
                let done = ready!(Pin::new(done).poll(cx));
                if done.is_ok() {
                    taken.take().into_iter().for_each(Taken::keep);
                }
                done.map_err(StorageError::from_boxed)
            }
            ChangeState::Wait(answer) => match ready!(Pin::new(answer).poll(cx)) {
                Ok(answer) => answer.map(drop),
                Err(_) => Err(cancelled()),
            },
        })
    }
}

impl<St: Storage> fmt::Debug for Deciding<St> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Deciding").finish_non_exhaustive()
    }
}

impl<St: Storage> fmt::Debug for Change<St> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Change").finish_non_exhaustive()
    }
}

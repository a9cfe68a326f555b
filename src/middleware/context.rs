//! Work on a storage beside a request, with events for its results.

use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use crate::observe::{Event, EventKind, Reporter};
use crate::storage::StorageRequest;
use crate::{Decision, Key, Op, Policy, Storage};

/// A policy and a key on a storage, with the observer to report to.
#[derive(Clone)]
pub(crate) struct ChargeContext<St> {
    pub(crate) storage: St,
    pub(crate) policy: Policy,
    pub(crate) key: Key,
    pub(crate) reporter: Reporter,
    pub(crate) shadow: bool,
}

impl<St: Storage> ChargeContext<St> {
    pub(crate) fn storage_request(&self, op: Op, cost: u32) -> StorageRequest<'_> {
        StorageRequest::new(&self.policy, &self.key, op, cost)
    }

    /// Corrects the cost of a hit. Returns `true` if this is complete, and `false` if it runs in a
    /// task of the tokio runtime or could not run.
    pub(crate) fn settle(&self, decision: &Decision, actual: u32) -> bool {
        if actual == decision.cost() {
            return true;
        }
        let (context, hit) = (self.clone(), decision.clone());
        let settling = self.storage.settle(&self.policy, &self.key, decision, actual);
        let outcome = run_or_spawn(settling, move |done| match done {
            Ok(()) => context.report(EventKind::Settled { decision: &hit, actual }),
            Err(error) => context.report(EventKind::NotSettled { decision: &hit, actual, error: &error.into() }),
        });
        if outcome == RunOutcome::Dropped {
            let error = &"the storage is asynchronous and there is no tokio runtime".into();
            self.report(EventKind::NotSettled { decision, actual, error });
        }
        outcome == RunOutcome::Finished
    }

    /// Peeks at the key. Returns `None` if the storage is not immediately ready or fails.
    pub(crate) fn peek_now(&self) -> Option<Decision> {
        match poll_once(&mut self.storage.decide(self.storage_request(Op::Peek, 1))) {
            Poll::Ready(decided) => decided.ok(),
            Poll::Pending => None,
        }
    }

    pub(super) fn report(&self, kind: EventKind<'_>) {
        if std::thread::panicking() {
            // A second panic, in the observer, would abort the process.
            return;
        }
        let Self { policy, key, shadow, .. } = self;
        self.reporter.report(&Event { kind, policy, key: Some(key), shadow: *shadow });
    }
}

/// Polls without a waker, for futures that may be ready immediately.
pub(crate) fn poll_once<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
    Pin::new(future).poll(&mut Context::from_waker(Waker::noop()))
}

/// The outcome of work that may be moved to a background task.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum RunOutcome {
    Finished,
    /// The work runs in a task of the tokio runtime.
    Spawned,
    /// The work was dropped because there is no tokio runtime.
    Dropped,
}

/// Runs the future and then `then`: immediately if the future is ready, else in a task of the tokio
/// runtime if there is one.
pub(super) fn run_or_spawn<F>(mut future: F, then: impl FnOnce(F::Output) + Send + 'static) -> RunOutcome
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

//! Storage calls after the decision on a request, which report their results to the observer.

use std::task::Poll;

pub(super) use crate::background::{RunOutcome, poll_once, run_or_spawn};
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

    /// Corrects the cost of a hit to `actual` units. Returns `false` if the storage is not
    /// immediately ready. Then a task of the tokio runtime continues. Without a runtime, the hit is
    /// reported as not settled.
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
        if let Some(error) = outcome.error() {
            self.report(EventKind::NotSettled { decision, actual, error: &error.into() });
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
        let Self { policy, key, shadow, .. } = self;
        self.reporter.report_in_drop(&Event { kind, policy, key: Some(key), shadow: *shadow });
    }
}

//! Storage calls after the decision on a request, which report their results to the observer.

use std::task::Poll;
use std::time::Duration;

use tokio::time::Instant;

pub(super) use crate::background::{RunOutcome, poll_once, run_or_spawn};
use crate::decision::Decision;
use crate::key::Key;
use crate::observe::{Event, EventKind, Reporter};
use crate::policy::{Op, Policy};
use crate::storage::{AnyStorage, Storage, StorageError, StorageRequest};
use crate::time::{Timestamp, micros};

/// A policy and a key on a storage, with the observer to report to.
#[derive(Clone)]
pub(crate) struct ChargeContext {
    pub(crate) storage: AnyStorage,
    pub(crate) policy: Policy,
    pub(crate) key: Key,
    pub(crate) reporter: Reporter,
    pub(crate) shadow: bool,
    /// The time at which the hit was sent to the storage, or a little later.
    pub(crate) since: Instant,
}

impl ChargeContext {
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
        let (context, hit, elapsed) = (self.clone(), decision.clone(), self.since.elapsed());
        let mut settling = self.storage.settle(&self.policy, &self.key, decision, actual);
        if let Poll::Ready(done) = poll_once(&mut settling) {
            // The storage is immediately ready, so its own clock can be read.
            let is_refund = actual < decision.cost();
            let now = if is_refund { self.peek_now(0).map(|peek| peek.at()) } else { None };
            self.report_settled(decision, actual, now, elapsed, done);
            return true;
        }
        let outcome = run_or_spawn(settling, move |done| context.report_settled(&hit, actual, None, elapsed, done));
        if let Some(error) = outcome.error() {
            self.report(EventKind::NotSettled { decision, actual, error: &error });
        }
        outcome == RunOutcome::Finished
    }

    /// Returns the state of the limits, for the header fields of an admitted request of `cost`
    /// units. Returns `None` if the storage is not immediately ready or fails.
    ///
    /// The peek itself is about one unit. A refused peek would report the limit with the longest
    /// wait instead of the one with the fewest remaining units.
    pub(crate) fn peek_now(&self, cost: u32) -> Option<Decision> {
        match poll_once(&mut self.storage.decide(self.storage_request(Op::Peek, 1))) {
            Poll::Ready(decided) => decided.ok().map(|now| now.of_cost(cost)),
            Poll::Pending => None,
        }
    }

    /// Reports the result of a settlement. `now` is the time of the storage's clock if it is known.
    /// Otherwise the hit has expired if it has `elapsed` for long enough.
    fn report_settled(
        &self,
        decision: &Decision,
        actual: u32,
        now: Option<Timestamp>,
        elapsed: Duration,
        done: Result<(), StorageError>,
    ) {
        let now = now.unwrap_or_else(|| decision.at().plus(micros(elapsed)));
        match done {
            Ok(()) => {
                let expired = actual < decision.cost() && decision.has_expired(now);
                self.report(EventKind::Settled { decision, actual, expired });
            }
            Err(error) => self.report(EventKind::NotSettled { decision, actual, error: &error }),
        }
    }

    pub(super) fn report(&self, kind: EventKind<'_>) {
        let Self { policy, key, shadow, .. } = self;
        self.reporter.report_in_drop(&Event { kind, policy, key: Some(key), shadow: *shadow });
    }
}

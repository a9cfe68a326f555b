//! The storage calls for the hits of one key, and their events.

use std::sync::LazyLock;
use std::time::Duration;

use tokio::time::Instant;

use super::settling::{ReportWhen, Settling};
use crate::decision::Decision;
use crate::key::Key;
use crate::observe::{Event, EventKind, Reporter};
use crate::policy::{Op, Policy};
use crate::storage::{AnyStorage, Storage, StorageError, StorageFuture, StorageRequest};
use crate::time::{Timestamp, micros};

/// A policy and a key on a storage. It keeps the policy of a hit, so that a change of a live policy
/// does not affect the settlement of the hit.
#[derive(Clone, Debug)]
pub(crate) struct Account {
    pub(crate) storage: AnyStorage,
    pub(crate) policy: Policy,
    pub(crate) key: Key,
}

/// Writes the log lines of limiters, which have no observer.
static LOG: LazyLock<Reporter> = LazyLock::new(Reporter::default);

impl Account {
    pub(crate) fn request(&self, op: Op, cost: u32) -> StorageRequest<'_> {
        StorageRequest::new(&self.policy, &self.key, op, cost)
    }

    pub(crate) fn decide(&self, op: Op, cost: u32) -> StorageFuture<Decision> {
        self.storage.decide(self.request(op, cost))
    }

    /// Corrects the cost of a hit to `actual` units. Calls the storage immediately.
    pub(crate) fn correct(&self, hit: &Decision, actual: u32) -> StorageFuture<()> {
        self.storage.settle(&self.policy, &self.key, hit, actual).polled_once()
    }

    /// Corrects the cost of a limiter's hit. A failure is logged if no caller gets it.
    pub(super) fn settle(self, hit: Decision, actual: u32) -> Settling {
        if actual == hit.cost() || !hit.has_spent() {
            return Settling::done(StorageFuture::ok(()));
        }
        let call = self.correct(&hit, actual);
        if matches!(call.as_ready(), Some(Ok(()))) {
            return Settling::done(call);
        }
        Settling::pending(call, ReportWhen::Dropped, move |done| {
            if let Err(error) = done {
                let kind = EventKind::NotSettled { decision: &hit, actual, error };
                LOG.report_in_drop(&Event { kind, policy: &self.policy, key: Some(&self.key), shadow: false });
            }
        })
    }
}

/// An account of a layer, with the observer to report to.
#[derive(Clone)]
pub(crate) struct ObservedAccount {
    pub(crate) account: Account,
    pub(crate) reporter: Reporter,
    pub(crate) shadow: bool,
    /// The time at which the hit was sent to the storage, or a little later.
    pub(crate) since: Instant,
}

impl ObservedAccount {
    /// Corrects the cost of a hit to `actual` units, and reports the result.
    pub(crate) fn settle(&self, hit: &Decision, actual: u32) -> Settling {
        if actual == hit.cost() {
            return Settling::done(StorageFuture::ok(()));
        }
        let (call, elapsed) = (self.account.correct(hit, actual), self.since.elapsed());
        if let Some(done) = call.as_ready() {
            // The storage is immediately ready, so its own clock can be read.
            let is_refund = actual < hit.cost();
            let now = if is_refund { self.peek_now(0).map(|peek| peek.at()) } else { None };
            self.report_settled(hit, actual, now, elapsed, done.copied());
            return Settling::done(call);
        }
        let (observed, hit) = (self.clone(), hit.clone());
        Settling::pending(call, ReportWhen::Ended, move |done| {
            observed.report_settled(&hit, actual, None, elapsed, done);
        })
    }

    /// Returns the state of the limits, for the header fields of an admitted request of `cost`
    /// units. Returns `None` if the storage is not immediately ready or fails.
    ///
    /// The peek itself is about one unit. A refused peek would report the limit with the longest
    /// wait instead of the one with the fewest remaining units.
    pub(crate) fn peek_now(&self, cost: u32) -> Option<Decision> {
        // A future that is not ready would have to be polled, which sends a call for nothing.
        let peek = self.account.decide(Op::Peek, 1);
        let now = peek.as_ready()?.ok()?;
        Some(now.clone().of_cost(cost))
    }

    /// Reports the result of a settlement. `now` is the time of the storage's clock if it is known.
    /// Otherwise the hit has expired if it has `elapsed` for long enough.
    fn report_settled(
        &self,
        decision: &Decision,
        actual: u32,
        now: Option<Timestamp>,
        elapsed: Duration,
        done: Result<(), &StorageError>,
    ) {
        let now = now.unwrap_or_else(|| decision.at().plus(micros(elapsed)));
        match done {
            Ok(()) => {
                let expired = actual < decision.cost() && decision.has_expired(now);
                self.report(EventKind::Settled { decision, actual, expired });
            }
            Err(error) => self.report(EventKind::NotSettled { decision, actual, error }),
        }
    }

    pub(crate) fn report(&self, kind: EventKind<'_>) {
        let Account { policy, key, .. } = &self.account;
        self.reporter.report_in_drop(&Event { kind, policy, key: Some(key), shadow: self.shadow });
    }
}

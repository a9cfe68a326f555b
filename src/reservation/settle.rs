//! Settling hits: the storage calls that correct their costs, and the events about them.

use std::sync::LazyLock;
use std::time::Duration;

use tokio::time::Instant;

use super::future::{ReportWhen, SettleFuture, run_or_spawn};
use crate::decision::Decision;
use crate::key::Key;
use crate::observe::{Event, EventKind, Reporter};
use crate::policy::{Op, Policy};
use crate::storage::{AnyStorage, Storage, StorageError, StorageFuture, StorageRequest};
use crate::strategy::Lock;
use crate::time::{Timestamp, micros};

/// The correction of a hit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Correction {
    /// Refunds or charges the difference to the actual cost in units.
    Cost(u32),
    /// Clears the key.
    Clear,
}

impl Correction {
    /// Returns `true` if the correction gives back units of a hit of this cost.
    pub(super) const fn refunds(self, cost: u32) -> bool {
        matches!(self, Self::Clear) || self.actual() < cost
    }

    /// Returns the actual cost of the hit in units.
    pub(super) const fn actual(self) -> u32 {
        match self {
            Self::Cost(actual) => actual,
            Self::Clear => 0,
        }
    }
}

/// A key that a policy limits on a storage. It keeps the policy of a hit, so that a change of a
/// live policy does not affect the settlement of the hit.
#[derive(Clone, Debug)]
pub(crate) struct LimitedKey {
    pub(crate) storage: AnyStorage,
    pub(crate) policy: Policy,
    pub(crate) key: Key,
}

/// Writes the log lines of limiters, which have no observer.
static LOG: LazyLock<Reporter> = LazyLock::new(Reporter::default);

impl LimitedKey {
    pub(crate) fn request(&self, op: Op, cost: u32) -> StorageRequest<'_> {
        StorageRequest::new(&self.policy, &self.key, op, cost)
    }

    pub(crate) fn decide(&self, op: Op, cost: u32) -> StorageFuture<Decision> {
        self.storage.decide(self.request(op, cost))
    }

    /// Corrects a hit. Calls the storage immediately.
    fn correct(&self, hit: &Decision, correction: Correction) -> StorageFuture<()> {
        match correction {
            Correction::Cost(actual) => self.storage.settle(&self.policy, &self.key, hit, actual),
            Correction::Clear => self.storage.clear(&self.policy, &self.key),
        }
        .polled_once()
    }

    /// Corrects a limiter's hit. A failure is logged if no caller gets it.
    pub(super) fn settle(self, hit: Decision, correction: Correction) -> SettleFuture {
        let actual = correction.actual();
        if correction != Correction::Clear && (actual == hit.cost() || !hit.has_spent()) {
            return SettleFuture::without_report(StorageFuture::ok(()));
        }
        let call = self.correct(&hit, correction);
        if matches!(call.as_ready(), Some(Ok(()))) {
            return SettleFuture::without_report(call);
        }
        SettleFuture::pending(call, ReportWhen::Dropped, move |done| {
            if let Err(error) = done {
                self.report_not_settled(&LOG, &hit, actual, error);
            }
        })
    }

    /// Refunds a hit whose caller is gone: immediately if the storage is ready, else in a task.
    /// Drops `kept` after that. A failed refund is reported, and leaves the units spent.
    pub(crate) fn refund<T: Send + 'static>(self, hit: Decision, reporter: Option<Reporter>, kept: T) {
        if !hit.has_spent() {
            return;
        }
        run_or_spawn(self.correct(&hit, Correction::Cost(0)), move |done| {
            drop(kept);
            if let Err(error) = done {
                self.report_not_settled(reporter.as_ref().unwrap_or(&LOG), &hit, 0, &error);
            }
        });
    }

    fn report_not_settled(&self, reporter: &Reporter, decision: &Decision, actual: u32, error: &StorageError) {
        let kind = EventKind::NotSettled { decision, actual, error };
        reporter.report_in_drop(&Event { kind, policy: &self.policy, key: Some(&self.key), shadow: false });
    }
}

/// A key of a layer, with the observer to report to.
#[derive(Clone)]
pub(crate) struct ObservedKey {
    pub(crate) limited: LimitedKey,
    pub(crate) reporter: Reporter,
    pub(crate) shadow: bool,
    /// The time at which the hit was sent to the storage, or a little later.
    pub(crate) since: Instant,
}

/// A lock that a hit has started. It is reported when this is dropped, unless the hit was refunded.
pub(crate) struct StartedLock {
    observed: ObservedKey,
    /// `None` after the hit was refunded.
    lock: Option<Lock>,
}

impl StartedLock {
    pub(crate) fn of(observed: &ObservedKey, decision: &Decision) -> Option<Self> {
        let lock = decision.new_lock()?;
        Some(Self { observed: observed.clone(), lock: Some(lock) })
    }

    /// Reports the lock, unless the correction refunds the hit.
    pub(super) fn report_unless_refunded(mut self, correction: Option<Correction>, cost: u32) {
        self.lock = self.lock.filter(|_| !correction.is_some_and(|correction| correction.refunds(cost)));
    }
}

impl Drop for StartedLock {
    fn drop(&mut self) {
        if let Some(lock) = self.lock {
            self.observed.report(EventKind::Locked(lock));
        }
    }
}

impl ObservedKey {
    /// Corrects a hit, and reports the result.
    pub(crate) fn settle(&self, hit: &Decision, correction: Correction) -> SettleFuture {
        if correction == Correction::Cost(hit.cost()) {
            return SettleFuture::without_report(StorageFuture::ok(()));
        }
        let (call, elapsed) = (self.limited.correct(hit, correction), self.since.elapsed());
        if let Some(done) = call.as_ready() {
            // The storage is immediately ready, so its own clock can be read.
            let is_refund = matches!(correction, Correction::Cost(actual) if actual < hit.cost());
            let now = if is_refund { self.peek_now(0).map(|peek| peek.at()) } else { None };
            self.report_settled(hit, correction, now, elapsed, done.copied());
            return SettleFuture::without_report(call);
        }
        let (observed, hit) = (self.clone(), hit.clone());
        SettleFuture::pending(call, ReportWhen::Ended, move |done| {
            observed.report_settled(&hit, correction, None, elapsed, done);
        })
    }

    /// Returns the state of the limits, for the header fields of an admitted request of `cost`
    /// units. Returns `None` if the storage is not immediately ready or fails.
    ///
    /// The peek itself is about at most one unit. A refused peek would report the limit with the longest
    /// wait instead of the one with the fewest remaining units.
    pub(crate) fn peek_now(&self, cost: u32) -> Option<Decision> {
        // A future that is not ready would have to be polled, which sends a call for nothing.
        let peek = self.limited.decide(Op::Peek, cost.min(1));
        let now = peek.as_ready()?.ok()?;
        Some(now.clone().of_cost(cost))
    }

    /// Reports the result of a settlement. `now` is the time of the storage's clock if it is known.
    /// Otherwise the hit has expired if it has `elapsed` for long enough.
    fn report_settled(
        &self,
        decision: &Decision,
        correction: Correction,
        now: Option<Timestamp>,
        elapsed: Duration,
        done: Result<(), &StorageError>,
    ) {
        let now = now.unwrap_or_else(|| decision.at().plus(micros(elapsed)));
        let actual = correction.actual();
        match done {
            Ok(()) if correction == Correction::Clear => self.report(EventKind::Cleared(decision)),
            Ok(()) => {
                let expired = actual < decision.cost() && decision.has_expired(now);
                self.report(EventKind::Settled { decision, actual, expired });
            }
            Err(error) => {
                self.report(EventKind::NotSettled { decision, actual, error });
                if correction.refunds(decision.cost()) {
                    // The hit keeps its units, and so the lock that it has started.
                    drop(StartedLock::of(self, decision));
                }
            }
        }
    }

    pub(crate) fn report(&self, kind: EventKind<'_>) {
        let LimitedKey { policy, key, .. } = &self.limited;
        self.reporter.report_in_drop(&Event { kind, policy, key: Some(key), shadow: self.shadow });
    }
}

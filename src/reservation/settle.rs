//! Settling hits: the storage calls that correct their costs, and the events about them.

use std::sync::LazyLock;
use std::time::Duration;

use super::future::{ReportWhen, SettleFuture, run_or_spawn};
use super::limited_key::{LimitedKey, ObservedKey};
use crate::decision::Decision;
use crate::observe::{Event, EventKind, Reporter};
use crate::storage::{Storage, StorageError, StorageFuture};
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

/// Writes the log lines of limiters, which have no observer.
static LOG: LazyLock<Reporter> = LazyLock::new(Reporter::default);

impl LimitedKey {
    /// Corrects a hit. Calls the storage immediately.
    fn call_storage(&self, hit: &Decision, correction: Correction) -> StorageFuture<()> {
        match correction {
            Correction::Cost(actual) => self.storage.settle(&self.policy, &self.key, hit, actual),
            Correction::Clear => self.storage.clear(&self.policy, &self.key),
        }
        .polled_once()
    }

    /// Corrects a hit of a limiter. A failure is logged if no caller gets it.
    pub(super) fn settle(self, hit: Decision, correction: Correction) -> SettleFuture {
        let actual = correction.actual();
        if correction != Correction::Clear && (actual == hit.cost() || !hit.has_spent()) {
            return SettleFuture::without_report(StorageFuture::ok(()));
        }
        let call = self.call_storage(&hit, correction);
        if matches!(call.as_ready(), Some(Ok(()))) {
            return SettleFuture::without_report(call);
        }
        SettleFuture::with_report(call, ReportWhen::Dropped, move |done| {
            if let Err(error) = done {
                self.report_settle_failed(&LOG, &hit, actual, error);
            }
        })
    }

    /// Refunds a hit whose caller is gone: immediately if the storage is ready, else in a task.
    /// Drops `kept` after that. A failed refund is reported, and leaves the units spent.
    pub(crate) fn refund<T: Send + 'static>(self, hit: Decision, reporter: Option<Reporter>, kept: T) {
        if !hit.has_spent() {
            return;
        }
        run_or_spawn(self.call_storage(&hit, Correction::Cost(0)), move |done| {
            drop(kept);
            if let Err(error) = done {
                self.report_settle_failed(reporter.as_ref().unwrap_or(&LOG), &hit, 0, &error);
            }
        });
    }

    fn report_settle_failed(&self, reporter: &Reporter, decision: &Decision, actual: u32, error: &StorageError) {
        let kind = EventKind::SettleFailed { decision, actual, error };
        reporter.report_in_drop(&Event { kind, policy: &self.policy, key: Some(&self.key), shadow: false });
    }
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
        let (call, elapsed) = (self.limited.call_storage(hit, correction), self.since.elapsed());
        if let Some(done) = call.as_ready() {
            // The storage is immediately ready, so its own clock can be read.
            let now = if correction.refunds(hit.cost()) { self.peek_now(0).map(|peek| peek.at()) } else { None };
            self.report_settled(hit, correction, now, elapsed, done.copied());
            return SettleFuture::without_report(call);
        }
        let (observed, hit) = (self.clone(), hit.clone());
        SettleFuture::with_report(call, ReportWhen::Ended, move |done| {
            observed.report_settled(&hit, correction, None, elapsed, done);
        })
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
        // A hit that keeps its units keeps the lock that it has started. A refund after the end of the
        // lock does not change it either.
        let keeps_lock = match done {
            Ok(()) => {
                self.report(match correction {
                    Correction::Clear => EventKind::Cleared(decision),
                    Correction::Cost(actual) => {
                        let expired = actual < decision.cost() && self.limited.policy.has_expired(decision, now);
                        EventKind::Settled { decision, actual, expired }
                    }
                });
                decision.new_lock().is_some_and(|lock| decision.at().plus(micros(lock.ends_after())) <= now)
            }
            Err(error) => {
                self.report(EventKind::SettleFailed { decision, actual, error });
                true
            }
        };
        if keeps_lock && correction.refunds(decision.cost()) {
            drop(StartedLock::of(self, decision));
        }
    }
}

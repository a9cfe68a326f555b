//! Log events. They contain keys only with `RateLimitLayer::log_keys`.

use std::error::Error;
use std::iter::successors;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

// tokio's instant, because tests pause tokio's clock.
use tokio::time::Instant;

use super::{Event, EventKind};
use crate::decision::Decision;
use crate::error::chain;
use crate::key::Key;
use crate::lint::Lint;
#[cfg(feature = "lookup")]
use crate::lookup::LookupError;
use crate::storage::StorageError;
use crate::sync::unpoisoned;

/// The maximum number of bytes of a key in the log.
const MAX_KEY: usize = 256;

/// The log of one layer. During an outage of the storage, it writes at most one line per second,
/// and one more line after the outage has ended.
#[derive(Debug)]
pub(super) struct EventLog {
    storage_failures: Throttle,
    #[cfg(feature = "lookup")]
    lookup_failures: Throttle,
    settle_failures: Throttle,
    setup_mistakes: Throttle,
}

impl Default for EventLog {
    fn default() -> Self {
        let (second, minute) = (Duration::from_secs(1), Duration::from_secs(60));
        Self {
            storage_failures: Throttle::new(second),
            #[cfg(feature = "lookup")]
            lookup_failures: Throttle::new(second),
            settle_failures: Throttle::new(second),
            setup_mistakes: Throttle::new(minute),
        }
    }
}

impl EventLog {
    /// Logs an event. A decision shows that the storage works.
    #[inline]
    pub(super) fn event(&self, event: &Event<'_>, with_key: bool) {
        if let EventKind::Decided(_) = event.kind
            && let Some(failed) = self.storage_failures.ended()
        {
            tracing::info!(policy = event.policy.identity(), failed, "rate limit storage recovered");
        }
        self.event_without_storage(event, with_key);
    }

    /// Like [`event`](Self::event), but a decision does not show that the storage works.
    #[inline]
    pub(super) fn event_without_storage(&self, event: &Event<'_>, with_key: bool) {
        if let EventKind::Decided(decision) = event.kind {
            if decision.is_refused() {
                refused(event, decision, with_key);
            }
            return;
        }
        self.unusual_event(event, with_key);
    }

    fn unusual_event(&self, event: &Event<'_>, with_key: bool) {
        let (policy, outcome, shadow) = (event.policy.identity(), event.outcome(), event.shadow);
        // Text is written in quotes, so a key cannot imitate other fields.
        let key = event.key.filter(|_| with_key).map(shortened);
        let key = key.as_deref();
        match event.kind {
            // Logged without these fields, which take longer than the test of the level.
            EventKind::Decided(_) => {}
            EventKind::Failed { error, .. } if is_circuit_open_error(error) => {
                let error = chain(error);
                tracing::debug!(
                    policy,
                    outcome,
                    shadow,
                    error,
                    key,
                    "rate limit storage skipped, circuit breaker is open"
                );
            }
            #[cfg(feature = "lookup")]
            EventKind::Failed { error, .. } if error.is::<LookupError>() => {
                if let Some(failed) = self.lookup_failures.due() {
                    let error = chain(error);
                    tracing::warn!(outcome, shadow, failed, error, "lookup of a rate limit policy failed");
                }
            }
            EventKind::Failed { error, .. } => {
                if let Some(failed) = self.storage_failures.due() {
                    let error = chain(error);
                    tracing::warn!(policy, outcome, shadow, failed, error, key, "rate limit storage failed");
                }
            }
            EventKind::KeyError(missing) if missing.is_clients_fault() => {
                tracing::debug!(policy, outcome, shadow, reason = missing.reason(), "request has no rate limit key");
            }
            EventKind::KeyError(missing) => {
                if let Some(requests) = self.setup_mistakes.due() {
                    let reason = missing.reason();
                    tracing::error!(
                        policy,
                        outcome,
                        shadow,
                        requests,
                        reason,
                        "no rate limit key in requests: check the server's setup"
                    );
                }
            }
            EventKind::SettleFailed { decision, actual, error } => {
                if let Some(failed) = self.settle_failures.due() {
                    let error = chain(error);
                    let cost = decision.cost();
                    tracing::warn!(policy, outcome, shadow, failed, cost, actual, error, key, "settlement failed");
                }
            }
            EventKind::Settled { decision, actual, .. } => {
                let cost = decision.cost();
                tracing::trace!(policy, outcome, shadow, cost, actual, key, "hit settled");
            }
            EventKind::Cleared(_) => {
                tracing::trace!(policy, outcome, shadow, key, "key cleared");
            }
            EventKind::Locked(lock) => {
                let (level, ends_after) = (lock.level(), tracing::field::debug(lock.ends_after()));
                tracing::info!(policy, outcome, shadow, level, ends_after, key, "key locked");
            }
            EventKind::NearLimit { status, .. } => {
                let (capacity, remaining) = (status.capacity(), status.remaining());
                let reset_after = tracing::field::debug(status.reset_after());
                tracing::debug!(policy, outcome, shadow, capacity, remaining, reset_after, key, "key near its limit");
            }
            EventKind::Unsettled(decision) => {
                let cost = decision.cost();
                tracing::debug!(policy, outcome, shadow, cost, key, "reservation dropped without a settlement");
            }
        }
    }
}

/// Computes the fields only if the line is written, because refusals are frequent.
fn refused(event: &Event<'_>, decision: &Decision, with_key: bool) {
    tracing::debug!(
        policy = event.policy.identity(),
        outcome = event.outcome(),
        shadow = event.shadow,
        cost = decision.cost(),
        retry_after = decision.retry_after().map(tracing::field::debug),
        key = event.key.filter(|_| with_key).map(shortened).as_deref(),
        "request refused"
    );
}

/// Escapes a key to printable ASCII. Cuts off a long key, because a client may choose it.
fn shortened(key: &Key) -> String {
    let bytes = key.as_bytes();
    match bytes.get(..MAX_KEY) {
        Some(start) if bytes.len() > MAX_KEY => format!("{}... ({} bytes)", start.escape_ascii(), bytes.len()),
        _ => bytes.escape_ascii().to_string(),
    }
}

/// Returns `true` for the error of an open circuit breaker. Its cause has already been logged.
fn is_circuit_open_error(error: &(dyn Error + 'static)) -> bool {
    let mut sources = successors(Some(error), |error: &&(dyn Error + 'static)| Error::source(*error));
    sources.any(|error| error.downcast_ref().is_some_and(StorageError::is_circuit_open))
}

pub(super) fn lint(lint: Lint) {
    tracing::warn!(code = lint.code(), docs = lint.docs(), "{lint}");
}

/// Permits one line per interval, and counts the suppressed events.
#[derive(Debug)]
pub(super) struct Throttle {
    interval: Duration,
    counters: Mutex<ThrottleCounts>,
    /// `true` from the first event until [`ended`](Self::ended) returns the total.
    is_active: AtomicBool,
}

#[derive(Debug, Default)]
struct ThrottleCounts {
    /// The events since the last line.
    suppressed: u64,
    total: u64,
    last_line: Option<Instant>,
    last_event: Option<Instant>,
}

impl Throttle {
    pub(super) fn new(interval: Duration) -> Self {
        Self { interval, counters: Mutex::default(), is_active: AtomicBool::new(false) }
    }

    /// Counts an event. Returns the number of events since the last line if a line is due.
    pub(super) fn due(&self) -> Option<u64> {
        let now = Instant::now();
        let mut counters = self.counters();
        self.is_active.store(true, Ordering::Relaxed);
        counters.last_event = Some(now);
        counters.total += 1;
        counters.suppressed += 1;
        if counters.last_line.is_some_and(|line| now.duration_since(line) < self.interval) {
            return None;
        }
        counters.last_line = Some(now);
        Some(std::mem::take(&mut counters.suppressed))
    }

    /// Returns the total number of events if the last one was at least one interval ago. Then
    /// restarts the count, so the total is returned only once.
    #[inline]
    pub(super) fn ended(&self) -> Option<u64> {
        if self.is_active.load(Ordering::Relaxed) { self.ended_by_now() } else { None }
    }

    #[cold]
    fn ended_by_now(&self) -> Option<u64> {
        let mut counters = self.counters();
        if counters.last_event?.elapsed() < self.interval || !self.is_active.swap(false, Ordering::Relaxed) {
            return None;
        }
        let total = counters.total;
        *counters = ThrottleCounts::default();
        Some(total)
    }

    fn counters(&self) -> MutexGuard<'_, ThrottleCounts> {
        unpoisoned(self.counters.lock())
    }
}

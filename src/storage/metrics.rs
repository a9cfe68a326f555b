//! The metrics of calls to servers (feature `metrics`), and the counters of wrappers.

use std::sync::atomic::{AtomicU64, Ordering};

#[cfg(feature = "metrics")]
pub(super) use self::enabled::measured;
#[cfg(feature = "metrics")]
pub(crate) use self::enabled::{IN_FLIGHT, LATENCY};
use super::StorageError;
use crate::policy::Policy;

/// Returns the result of `call`. With the feature `metrics`, also measures the call. `storage` is
/// the value of the label `storage`, for example `redis`.
#[cfg(not(feature = "metrics"))]
#[inline]
pub(super) fn measured<F, T>(_storage: &'static str, call: F) -> F
where
    F: Future<Output = Result<T, StorageError>>,
{
    call
}

#[cfg(feature = "metrics")]
mod enabled {
    use std::time::Instant;

    use super::StorageError;
    use crate::storage::StorageErrorKind;

    /// The name of the histogram of the latency of calls.
    pub(crate) const LATENCY: &str = "ratelimit_storage_duration_seconds";

    /// The name of the gauge of the number of calls in flight.
    pub(crate) const IN_FLIGHT: &str = "ratelimit_storage_in_flight";

    /// Records the latency and the outcome of `call`, and returns its result.
    pub(in crate::storage) async fn measured<F, T>(storage: &'static str, call: F) -> Result<T, StorageError>
    where
        F: Future<Output = Result<T, StorageError>>,
    {
        let mut measurement = Measurement::begin(storage);
        let result = call.await;
        measurement.outcome = match &result {
            Ok(_) => "ok",
            Err(error) => word(error.kind()),
        };
        result
    }

    /// The measurement of a call in flight. Dropping it records the latency and the outcome, so a
    /// call whose future is dropped early is recorded too, with the outcome `dropped`.
    struct Measurement {
        storage: &'static str,
        begun: Instant,
        outcome: &'static str,
    }

    impl Measurement {
        fn begin(storage: &'static str) -> Self {
            metrics::gauge!(IN_FLIGHT, "storage" => storage).increment(1.0);
            Self { storage, begun: Instant::now(), outcome: "dropped" }
        }
    }

    impl Drop for Measurement {
        fn drop(&mut self) {
            let Self { storage, begun, outcome } = *self;
            metrics::gauge!(IN_FLIGHT, "storage" => storage).decrement(1.0);
            metrics::histogram!(LATENCY, "storage" => storage, "outcome" => outcome).record(begun.elapsed());
        }
    }

    /// Returns the value of the label `outcome` for a failed call.
    fn word(kind: StorageErrorKind) -> &'static str {
        match kind {
            StorageErrorKind::Unreachable => "unreachable",
            StorageErrorKind::Overloaded => "overloaded",
            StorageErrorKind::Timeout => "timeout",
            StorageErrorKind::ConnectionLost => "connection_lost",
            StorageErrorKind::Refused => "refused",
            StorageErrorKind::UnexpectedReply => "unexpected_reply",
            StorageErrorKind::Contended => "contended",
            StorageErrorKind::CircuitOpen => "circuit_open",
            StorageErrorKind::Unsupported => "unsupported",
            StorageErrorKind::Cancelled => "cancelled",
            StorageErrorKind::Other => "other",
        }
    }
}

/// Counts the requests that a wrapper answered itself, and those that it sent to its inner storage.
#[derive(Debug)]
pub(super) struct Counters {
    /// The name of the metric (feature `metrics`).
    metric: &'static str,
    /// The number of local answers.
    here: AtomicU64,
    /// The number of requests to the inner storage.
    asked: AtomicU64,
}

impl Counters {
    pub(super) const fn new(metric: &'static str) -> Self {
        Self { metric, here: AtomicU64::new(0), asked: AtomicU64::new(0) }
    }

    /// Counts a local answer.
    pub(super) fn here(&self, policy: &Policy) {
        self.here.fetch_add(1, Ordering::Relaxed);
        count(self.metric, policy, "here");
    }

    /// Counts a request to the inner storage.
    pub(super) fn asked(&self, policy: &Policy) {
        self.asked.fetch_add(1, Ordering::Relaxed);
        count(self.metric, policy, "storage");
    }

    /// Returns the number of local answers, and of requests to the inner storage.
    pub(super) fn counted(&self) -> (u64, u64) {
        (self.here.load(Ordering::Relaxed), self.asked.load(Ordering::Relaxed))
    }
}

#[cfg(feature = "metrics")]
fn count(metric: &'static str, policy: &Policy, by: &'static str) {
    metrics::counter!(metric, "policy" => policy.identity().to_owned(), "by" => by).increment(1);
}

#[cfg(not(feature = "metrics"))]
const fn count(_: &'static str, _: &Policy, _: &'static str) {}

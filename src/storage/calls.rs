//! The defaults and bounds of timeouts and clock skew, the metrics of calls to servers (feature
//! `metrics`), and the counters of wrappers.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

#[cfg(feature = "metrics")]
pub(super) use self::enabled::measured;
#[cfg(feature = "metrics")]
pub(crate) use self::enabled::{IN_FLIGHT, LATENCY};
use super::StorageError;
use crate::error::ConfigError;
use crate::policy::Policy;

/// The default timeout of a call.
pub(super) const TIMEOUT: Duration = Duration::from_millis(100);

/// The default of `max_skew`. The clocks of machines with NTP differ by less. In the worst case, a
/// client waits this much too long.
pub(super) const MAX_SKEW: Duration = Duration::from_secs(5);

/// The largest `max_skew`.
const LONGEST_SKEW: Duration = Duration::from_secs(86_400);

/// Returns an error if `timeout` is less than a millisecond or more than an hour.
pub(super) fn checked_timeout(timeout: Duration) -> Result<(), ConfigError> {
    if (Duration::from_millis(1)..=Duration::from_secs(3_600)).contains(&timeout) {
        return Ok(());
    }
    Err(ConfigError::new(format!(
        "invalid timeout {timeout:?}: use at least a millisecond and at most an hour, \
         for example Duration::from_millis(100)"
    )))
}

/// Returns `max`, or an error if it is more than a day.
pub(super) fn checked_skew(max: Duration) -> Result<Duration, ConfigError> {
    if max <= LONGEST_SKEW {
        return Ok(max);
    }
    Err(ConfigError::new(format!("invalid max_skew {max:?}: use at most a day, for example Duration::from_secs(5)")))
}

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

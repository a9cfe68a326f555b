//! Log events (feature `tracing`) and metrics (feature `metrics`) of the breakers.

use crate::storage::StorageError;

/// The name of the counter of decisions, by storage.
#[cfg(feature = "metrics")]
pub(crate) const PATHS: &str = "ratelimit_path_total";

/// The name of the gauge of breakers that are open.
#[cfg(feature = "metrics")]
const OPEN: &str = "ratelimit_breakers_open";

pub(super) fn opened(failures: u32, error: &StorageError) {
    #[cfg(feature = "tracing")]
    tracing::warn!(failures, error = crate::error::chain(error), "circuit breaker opened");
    #[cfg(feature = "metrics")]
    metrics::gauge!(OPEN).increment(1.0);
    let _ = (failures, error);
}

pub(super) fn closed() {
    #[cfg(feature = "tracing")]
    tracing::info!("circuit breaker closed");
    left_open();
}

/// Records that a breaker is not open anymore, because it closed or was dropped.
pub(super) fn left_open() {
    #[cfg(feature = "metrics")]
    metrics::gauge!(OPEN).decrement(1.0);
}

#[inline]
pub(super) fn decided(path: &'static str) {
    #[cfg(feature = "metrics")]
    metrics::counter!(PATHS, "path" => path).increment(1);
    let _ = path;
}

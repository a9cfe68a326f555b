//! What an operator is told: events for the log (feature `tracing`), counters (feature `metrics`).

use std::error::Error;

/// Counts decisions by which storage made them.
#[cfg(feature = "metrics")]
pub(crate) const PATHS: &str = "ratelimit_path_total";

pub(super) fn opened(failures: u32, error: &(dyn Error + 'static)) {
    #[cfg(feature = "tracing")]
    tracing::warn!(failures, error, "the rate limit storage keeps failing and is left alone for now");
    let _ = (failures, error);
}

pub(super) fn closed() {
    #[cfg(feature = "tracing")]
    tracing::info!("the rate limit storage is back");
}

#[inline]
pub(super) fn answered(path: &'static str) {
    #[cfg(feature = "metrics")]
    metrics::counter!(PATHS, "path" => path).increment(1);
    let _ = path;
}

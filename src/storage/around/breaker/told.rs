//! What an operator is told: events for the log (feature `tracing`), counters (feature `metrics`).

use super::circuit::Shared;

/// Counts decisions by which storage made them.
#[cfg(feature = "metrics")]
pub(crate) const PATHS: &str = "ratelimit_path_total";

pub(super) fn opened(failures: u32, error: &Shared) {
    #[cfg(feature = "tracing")]
    {
        let error: &(dyn std::error::Error + 'static) = &**error;
        tracing::warn!(failures, error, "the rate limit storage keeps failing and is left alone for now");
    }
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

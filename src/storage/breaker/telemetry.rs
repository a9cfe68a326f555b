//! What an operator is told: events for the log (feature `tracing`), counters (feature `metrics`).

use std::error::Error;

/// Counts decisions by which storage made them.
#[cfg(feature = "metrics")]
pub(crate) const PATHS: &str = "ratelimit_path_total";

/// How many breakers leave their primary alone.
#[cfg(feature = "metrics")]
const OPEN: &str = "ratelimit_breakers_open";

pub(super) fn opened(failures: u32, error: &(dyn Error + 'static)) {
    #[cfg(feature = "tracing")]
    tracing::warn!(failures, error, "the rate limit storage keeps failing and is left alone for now");
    #[cfg(feature = "metrics")]
    metrics::gauge!(OPEN).increment(1.0);
    let _ = (failures, error);
}

pub(super) fn closed() {
    #[cfg(feature = "tracing")]
    tracing::info!("the rate limit storage is back");
    ended();
}

/// One that was open is not any more: it is closed, or nobody has it.
pub(super) fn ended() {
    #[cfg(feature = "metrics")]
    metrics::gauge!(OPEN).decrement(1.0);
}

#[inline]
pub(super) fn answered(path: &'static str) {
    #[cfg(feature = "metrics")]
    metrics::counter!(PATHS, "path" => path).increment(1);
    let _ = path;
}

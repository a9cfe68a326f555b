//! The metrics of slots (feature `metrics`), and the warning about renewals that fail (feature `tracing`).

use crate::storage::StorageError;

/// Changes the gauge of the slots in use.
#[inline]
pub(super) fn add_in_use(slots: f64) {
    #[cfg(feature = "metrics")]
    metrics::gauge!("ratelimit_slots_in_use").increment(slots);
    let _ = slots;
}

/// Changes the gauge of the requests that wait for slots.
pub(super) fn add_waiting(requests: f64) {
    #[cfg(feature = "metrics")]
    metrics::gauge!("ratelimit_slots_waiting").increment(requests);
    let _ = requests;
}

/// Reports the keys whose slots could not be renewed, with one of the errors.
#[cold]
pub(super) fn report_failed_renewals(keys: u64, error: &StorageError) {
    #[cfg(feature = "metrics")]
    metrics::counter!("ratelimit_slot_renewals_failed_total").increment(keys);
    #[cfg(feature = "tracing")]
    tracing::warn!(keys, error = crate::error::chain(error), "slots of requests in flight were not renewed");
    let _ = (keys, error);
}

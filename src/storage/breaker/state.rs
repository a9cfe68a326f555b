//! The snapshot of a breaker's state, the counts of its decisions, log events (feature `tracing`) and
//! metrics (feature `metrics`).

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::storage::StorageError;

/// The phase of a [`Breaker`](super::Breaker).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Phase {
    /// The primary is called.
    Closed,
    /// The primary is not called. The fallback decides, or decisions fail if there is none.
    Open,
    /// Half-open: one hit, charge, settlement or clear is probing the primary. Other calls are
    /// handled as in the phase [`Open`](Self::Open).
    #[doc(alias = "half-open")]
    Probing,
}

/// A snapshot of the state of a [`Breaker`](super::Breaker), returned by
/// [`Circuit::state`](super::Circuit::state).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CircuitState {
    /// The phase: closed, open or probing.
    pub phase: Phase,
    /// The number of consecutive failures of the primary, including failed probes.
    ///
    /// It is reset to 0 when the primary admits a hit, charges units, settles a hit or clears a
    /// key, and when the breaker closes. Refusals, peeks, hits of cost 0 and those that it admits in
    /// [`try_admit`](crate::Storage::try_admit) do not reset it, because the primary may have decided
    /// them without a write.
    pub failures: u32,
    /// The time until the next probe is due, or `None` if the breaker is not [open](Phase::Open).
    /// If it is zero, the next hit, charge, settlement or clear probes the primary.
    pub probe_in: Option<Duration>,
    /// The number of decisions by the primary since the breaker was created. Hits, peeks and
    /// charges count.
    pub by_primary: u64,
    /// The number of decisions by the fallback since the breaker was created. Hits, peeks and
    /// charges count.
    pub by_fallback: u64,
    /// The number of decisions that failed since the breaker was created, because neither storage
    /// made them. Hits, peeks and charges count.
    pub by_none: u64,
}

/// Counts the decisions by the storage that made them.
#[derive(Debug, Default)]
pub(super) struct PathCounts {
    pub(super) primary: AtomicU64,
    pub(super) fallback: AtomicU64,
    pub(super) none: AtomicU64,
}

impl PathCounts {
    #[inline]
    pub(super) fn primary(&self) {
        self.primary.fetch_add(1, Ordering::Relaxed);
        decided("primary");
    }

    pub(super) fn fallback(&self) {
        self.fallback.fetch_add(1, Ordering::Relaxed);
        decided("fallback");
    }

    pub(super) fn none(&self) {
        self.none.fetch_add(1, Ordering::Relaxed);
        decided("none");
    }
}

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

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::telemetry;

/// The phase of a [`Breaker`](super::Breaker).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Phase {
    /// The primary decides.
    Closed,
    /// The primary is not called.
    Open,
    /// One hit, refund or clear is probing the primary.
    Probing,
}

/// A snapshot of the state of a [`Breaker`](super::Breaker), returned by
/// [`Circuit::state`](super::Circuit::state).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CircuitState {
    /// The phase.
    pub phase: Phase,
    /// The number of consecutive failures of the primary. It is reset to 0 when the primary admits
    /// a hit, refunds a hit or clears a key, and when the breaker closes.
    pub failures: u32,
    /// The time until the next probe, or `None` if the breaker is not [open](Phase::Open). Zero
    /// means that the next hit, refund or clear probes the primary.
    pub probe_in: Option<Duration>,
    /// The number of decisions by the primary, including peeks.
    pub by_primary: u64,
    /// The number of decisions by the fallback, including peeks.
    pub by_fallback: u64,
    /// The number of hits and peeks that neither storage decided.
    pub by_none: u64,
}

/// Counts the decisions by the storage that made them.
#[derive(Debug, Default)]
pub(super) struct Counts {
    pub(super) primary: AtomicU64,
    pub(super) fallback: AtomicU64,
    pub(super) none: AtomicU64,
}

impl Counts {
    #[inline]
    pub(super) fn primary(&self) {
        self.primary.fetch_add(1, Ordering::Relaxed);
        telemetry::decided("primary");
    }

    pub(super) fn fallback(&self) {
        self.fallback.fetch_add(1, Ordering::Relaxed);
        telemetry::decided("fallback");
    }

    pub(super) fn none(&self) {
        self.none.fetch_add(1, Ordering::Relaxed);
        telemetry::decided("none");
    }
}

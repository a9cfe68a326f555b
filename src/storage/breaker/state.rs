//! The snapshot of a breaker's state, and the counts of its decisions.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::telemetry;

/// The phase of a [`Breaker`](super::Breaker).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Phase {
    /// The primary is called.
    Closed,
    /// The primary is not called. The fallback decides, or decisions fail if there is none.
    Open,
    /// One hit, charge, settlement or clear is probing the primary. Other calls are handled as in
    /// the phase [`Open`](Self::Open).
    Probing,
}

/// A snapshot of the state of a [`Breaker`](super::Breaker), returned by
/// [`Circuit::state`](super::Circuit::state).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CircuitState {
    /// The phase.
    pub phase: Phase,
    /// The number of consecutive failures of the primary, including failed probes.
    ///
    /// It is reset to 0 when the primary admits a hit, charges units, settles a hit or clears a
    /// key, and when the breaker closes. Refusals, peeks and hits of cost 0 do not reset it,
    /// because the primary may have decided them without a write.
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

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::told;

/// Whether a [`Breaker`](super::Breaker)'s primary is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Phase {
    /// It is.
    Closed,
    /// It is left alone.
    Open,
    /// One hit is trying it.
    Probing,
}

/// How a [`Breaker`](super::Breaker) stands, as [`Circuit::state`](super::Circuit::state) says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CircuitState {
    /// Whether the primary is asked.
    pub phase: Phase,
    /// How often the primary has failed since it last admitted a hit, gave one back or cleared a key.
    pub failures: u32,
    /// While it is [open](Phase::Open), how long until a hit tries the primary: zero when the next one does.
    pub probe_in: Option<Duration>,
    /// Decisions of the primary, peeks too.
    pub by_primary: u64,
    /// Decisions of the fallback, peeks too.
    pub by_fallback: u64,
    /// What was answered with an error.
    pub by_none: u64,
}

/// How many decisions have come each way.
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
        told::answered("primary");
    }

    pub(super) fn fallback(&self) {
        self.fallback.fetch_add(1, Ordering::Relaxed);
        told::answered("fallback");
    }

    pub(super) fn none(&self) {
        self.none.fetch_add(1, Ordering::Relaxed);
        told::answered("none");
    }
}

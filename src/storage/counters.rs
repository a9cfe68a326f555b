//! How often the storage inside was spared.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::Policy;

/// Counts answers given here, and questions to the storage.
#[derive(Debug)]
pub(super) struct Counters {
    /// What the counter is called (feature `metrics`).
    counter: &'static str,
    here: AtomicU64,
    asked: AtomicU64,
}

impl Counters {
    pub(super) const fn new(counter: &'static str) -> Self {
        Self { counter, here: AtomicU64::new(0), asked: AtomicU64::new(0) }
    }

    pub(super) fn here(&self, policy: &Policy) {
        self.here.fetch_add(1, Ordering::Relaxed);
        count(self.counter, policy, "here");
    }

    pub(super) fn asked(&self, policy: &Policy) {
        self.asked.fetch_add(1, Ordering::Relaxed);
        count(self.counter, policy, "storage");
    }

    /// How often it was answered here, and how often the storage was asked.
    pub(super) fn counted(&self) -> (u64, u64) {
        (self.here.load(Ordering::Relaxed), self.asked.load(Ordering::Relaxed))
    }
}

#[cfg(feature = "metrics")]
fn count(counter: &'static str, policy: &Policy, by: &'static str) {
    metrics::counter!(counter, "policy" => policy.identity().to_owned(), "by" => by).increment(1);
}

#[cfg(not(feature = "metrics"))]
const fn count(_: &'static str, _: &Policy, _: &'static str) {}

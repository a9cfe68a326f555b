//! Hit and miss counters of a wrapper that answers some requests itself.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::policy::Policy;

/// Counts the requests that a wrapper answered itself, and those that it sent to its inner storage.
#[derive(Debug)]
pub(super) struct Counters {
    /// The name of the metric (feature `metrics`).
    metric: &'static str,
    /// The number of local answers.
    here: AtomicU64,
    /// The number of requests to the inner storage.
    asked: AtomicU64,
}

impl Counters {
    pub(super) const fn new(metric: &'static str) -> Self {
        Self { metric, here: AtomicU64::new(0), asked: AtomicU64::new(0) }
    }

    /// Counts a local answer.
    pub(super) fn here(&self, policy: &Policy) {
        self.here.fetch_add(1, Ordering::Relaxed);
        count(self.metric, policy, "here");
    }

    /// Counts a request to the inner storage.
    pub(super) fn asked(&self, policy: &Policy) {
        self.asked.fetch_add(1, Ordering::Relaxed);
        count(self.metric, policy, "storage");
    }

    /// Returns the number of local answers, and of requests to the inner storage.
    pub(super) fn counted(&self) -> (u64, u64) {
        (self.here.load(Ordering::Relaxed), self.asked.load(Ordering::Relaxed))
    }
}

#[cfg(feature = "metrics")]
fn count(metric: &'static str, policy: &Policy, by: &'static str) {
    metrics::counter!(metric, "policy" => policy.identity().to_owned(), "by" => by).increment(1);
}

#[cfg(not(feature = "metrics"))]
const fn count(_: &'static str, _: &Policy, _: &'static str) {}

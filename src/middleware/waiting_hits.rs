//! The hits of a request that waits for a decision, for its turn, or for its delay.

use std::iter::once;
use std::mem;

use tokio::time::Instant;

use crate::decision::Decision;
use crate::observe::EventKind;
use crate::policy::{Op, Policy};
use crate::reservation::{Correction, ObservedKey};
use crate::storage::StorageRequest;

/// The hits of a request that waits, one on each of its keys.
pub(crate) struct WaitingHits {
    first: WaitingHit,
    others: Vec<WaitingHit>,
}

/// A hit on one key.
struct WaitingHit {
    observed: ObservedKey,
    cost: u32,
}

impl WaitingHit {
    fn request(&self) -> StorageRequest<'_> {
        let op = if self.cost == 0 { Op::Peek } else { Op::Hit };
        self.observed.limited.request(op, self.cost)
    }
}

impl WaitingHits {
    /// Creates the hits of the requests, of which there is at least one. `observed` returns what belongs
    /// to a request.
    pub(super) fn new(requests: &[StorageRequest<'_>], observed: impl Fn(&StorageRequest<'_>) -> ObservedKey) -> Self {
        let hit = |request: &StorageRequest<'_>| WaitingHit { observed: observed(request), cost: request.cost };
        Self { first: hit(&requests[0]), others: requests[1..].iter().map(hit).collect() }
    }

    fn iter(&self) -> impl Iterator<Item = &WaitingHit> {
        once(&self.first).chain(&self.others)
    }

    /// Sets the policy, which may have changed while the request waited in a queue. A request with
    /// several keys does not.
    pub(crate) fn set_policy(&mut self, policy: Policy) {
        self.first.observed.limited.policy = policy;
    }

    /// Calls `f` with a request for each key.
    pub(crate) fn with_requests<T>(&self, f: impl FnOnce(&[StorageRequest<'_>]) -> T) -> T {
        if self.others.is_empty() {
            return f(&[self.first.request()]);
        }
        f(&self.iter().map(WaitingHit::request).collect::<Vec<_>>())
    }
}

/// The admitted hits of a request that is delayed. Dropping this refunds the hits, which frees their
/// places in the queues of leaky buckets if no later hits are in the queues.
pub(crate) struct DelayedHits {
    pub(super) hits: WaitingHits,
    /// Empty after the request was forwarded.
    decisions: Vec<Decision>,
}

impl DelayedHits {
    /// Reports the decisions when this has them, so that the drop of this refunds the hits if the
    /// observer panics.
    pub(super) fn new(hits: WaitingHits, decisions: Vec<Decision>) -> Self {
        let delayed = Self { hits, decisions };
        for (hit, decision) in delayed.hits.iter().zip(&delayed.decisions) {
            hit.observed.report(EventKind::Decided(decision));
        }
        delayed
    }

    /// Returns the decisions, or none after the request was forwarded.
    pub(super) fn decisions(&self) -> &[Decision] {
        &self.decisions
    }

    /// Returns the time of the decisions, or later by at most the timeout of the call.
    pub(super) fn since(&self) -> Instant {
        self.hits.first.observed.since
    }

    /// Peeks at the keys. Returns `None` if the storage fails or is not immediately ready.
    pub(super) fn peek_now(&self) -> Option<Vec<Decision>> {
        self.hits.iter().map(|hit| hit.observed.peek_now(hit.cost)).collect()
    }

    /// Takes the decisions. The hits are not refunded after that.
    pub(super) fn take_decisions(&mut self) -> Vec<Decision> {
        mem::take(&mut self.decisions)
    }
}

impl Drop for DelayedHits {
    fn drop(&mut self) {
        for (hit, decision) in self.hits.iter().zip(&self.decisions) {
            drop(hit.observed.settle(decision, Correction::Cost(0)));
        }
    }
}

//! A key with its policy and its storage, for limiters and layers.

use tokio::time::Instant;

use crate::decision::Decision;
use crate::key::Key;
use crate::observe::{Event, EventKind, Reporter};
use crate::policy::{Op, Policy};
use crate::storage::{AnyStorage, Storage, StorageFuture, StorageRequest};

/// A key that a policy limits on a storage. It keeps the policy of a hit, so that a change of a
/// live policy does not affect the settlement of the hit.
#[derive(Clone, Debug)]
pub(crate) struct LimitedKey {
    pub(crate) storage: AnyStorage,
    pub(crate) policy: Policy,
    pub(crate) key: Key,
}

/// A key of a layer, with the observer to report to.
#[derive(Clone)]
pub(crate) struct ObservedKey {
    pub(crate) limited: LimitedKey,
    pub(crate) reporter: Reporter,
    pub(crate) shadow: bool,
    /// The time at which the hit was sent to the storage, or later by at most the timeout of the call.
    pub(crate) since: Instant,
}

impl LimitedKey {
    pub(crate) fn request(&self, op: Op, cost: u32) -> StorageRequest<'_> {
        StorageRequest::new(&self.policy, &self.key, op, cost)
    }

    pub(crate) fn decide(&self, op: Op, cost: u32) -> StorageFuture<Decision> {
        self.storage.decide(self.request(op, cost))
    }
}

impl ObservedKey {
    /// Returns the state of the limits, for the header fields of an admitted request of `cost`
    /// units. Returns `None` if the storage is not immediately ready or fails.
    ///
    /// The peek itself is about at most one unit. A refused peek would report the limit with the longest
    /// wait instead of the one with the fewest remaining units.
    pub(crate) fn peek_now(&self, cost: u32) -> Option<Decision> {
        // A future that is not ready would have to be polled, which sends a call for nothing.
        let peek = self.limited.decide(Op::Peek, cost.min(1));
        let now = peek.as_ready()?.ok()?;
        Some(now.clone().of_cost(cost))
    }

    pub(crate) fn report(&self, kind: EventKind<'_>) {
        let LimitedKey { policy, key, .. } = &self.limited;
        self.reporter.report_in_drop(&Event { kind, policy, key: Some(key), shadow: self.shadow });
    }
}

//! Several keys on a storage that decides on one key at a time.

use super::contract::{OwnedRequest, forward_storage};
use super::{AnyStorage, Storage, StorageError, StorageFuture, StorageRequest, Summary};
use crate::decision::Decision;
use crate::error::ConfigError;
use crate::key::Key;
use crate::policy::{Op, Policy};

/// Decides on several keys one after the other, on a storage that cannot decide on them together.
///
/// A layer with [several keys](crate::RateLimitLayer::and) needs this wrapper on a storage that
/// does not implement [`decide_all`](Storage::decide_all), such as memcached. The
/// [guide](crate::guide::plans_and_tenants#storages) lists the storages. Put `InOrder` around a
/// [`Breaker`](super::Breaker) or a [`RefusalCache`](super::RefusalCache).
///
/// ```
/// use tower_ratelimit::extract::Header;
/// use tower_ratelimit::storage::InOrder;
/// use tower_ratelimit::{Global, MemoryStorage, OnError, Policy, RateLimitLayer};
///
/// let per_user: Policy = "100/minute".parse()?;
/// let for_all: Policy = "10000/minute".parse()?;
/// // Stands for a storage that decides on one key at a time.
/// let storage = MemoryStorage::new();
/// let layer = RateLimitLayer::new(per_user, Header::new("x-user"))
///     .and(for_all, Global::new())
///     .storage(InOrder::new(storage), OnError::Admit);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// `InOrder` hits the members of a decision in their order. If a member refuses, it refunds the
/// earlier hits. So the member that refuses most often should be the first, in most cases the user.
///
/// | aspect | difference from a decision on all keys together |
/// |---|---|
/// | limits | none: no member admits more than its limits. A token bucket is an exception, if a refund takes longer than the bucket needs to refill the units, and other refunds overlap it |
/// | units of a refused request | spent until the refund, for about one round trip. Meanwhile they can be the reason that another request is refused |
/// | round trips | one per member, and up to three per member for a refusal |
/// | a hit that fails | the earlier hits are refunded, and the error is returned. If a refund fails too, the error [may have counted](StorageError::may_have_counted) |
/// | a failure after a refusal | the request stays refused. Units whose refund failed stay spent, and a warning is logged (feature `tracing`). A member whose peek failed has no limits in its decision, so the lists of header fields leave it out |
/// | a request that is dropped | the units of the earlier hits stay spent |
///
/// A refund does not move the end of an [`ElasticWindow`](crate::ElasticWindow) back, and a
/// [leaky bucket](crate::LeakyBucket) gets units back only if no later hit is in its queue.
#[derive(Clone, Debug)]
pub struct InOrder {
    inner: AnyStorage,
}

impl InOrder {
    /// Wraps a storage.
    pub fn new(storage: impl Storage) -> Self {
        Self { inner: AnyStorage::new(storage) }
    }

    /// Returns the inner storage.
    pub fn get_ref(&self) -> &AnyStorage {
        &self.inner
    }
}

/// Hits the members until one refuses. Then refunds the hits before it.
async fn decide(storage: AnyStorage, members: Vec<OwnedRequest>) -> Result<Vec<Decision>, StorageError> {
    let mut decisions = Vec::with_capacity(members.len());
    for member in &members {
        match storage.decide(member.borrow()).await {
            Ok(decision) => decisions.push(decision),
            Err(error) => {
                let refunded = refund(&storage, &members, &decisions).await;
                return Err(if refunded.is_ok() { error } else { error.with_may_have_counted(true) });
            }
        }
        if member.op == Op::Hit && decisions.last().is_some_and(Decision::is_refused) {
            break;
        }
    }
    let refusing = decisions.len() - 1;
    if members[refusing].op != Op::Hit || decisions[refusing].is_admitted() {
        return Ok(decisions);
    }
    // From here on, no failure turns the refusal into an error, because an error can admit the request.
    if let Err(error) = refund(&storage, &members, &decisions).await {
        log_kept_units(&error);
    }
    let refusal = decisions.remove(refusing);
    decisions.clear();
    for (position, member) in members.iter().enumerate() {
        if position == refusing {
            decisions.push(refusal.clone());
            continue;
        }
        // The others report the units that remain after the refunds.
        let peek = StorageRequest { op: Op::Peek, ..member.borrow() };
        let peek = storage.decide(peek).await;
        decisions.push(peek.unwrap_or_else(|_| Decision::from_statuses(refusal.at(), member.cost, [].into_iter())));
    }
    Ok(decisions)
}

/// Logs that earlier hits of a refused request were not refunded.
pub(super) fn log_kept_units(error: &StorageError) {
    #[cfg(feature = "tracing")]
    tracing::warn!(error = crate::error::chain(error), "refund of a refused request failed, its units stay spent");
    let _ = error;
}

/// Refunds the hits that were admitted. Returns the first error.
async fn refund(storage: &AnyStorage, members: &[OwnedRequest], decisions: &[Decision]) -> Result<(), StorageError> {
    let mut refunded = Ok(());
    for (member, decision) in members.iter().zip(decisions) {
        if member.op == Op::Hit && decision.has_spent() {
            refunded = refunded.and(storage.settle(&member.policy, &member.key, decision, 0).await);
        }
    }
    refunded
}

impl Storage for InOrder {
    fn decide_all(&self, members: &[StorageRequest<'_>]) -> StorageFuture<Vec<Decision>> {
        if let Err(error) = StorageRequest::check_members(members) {
            return StorageFuture::ready(Err(error));
        }
        if members.is_empty() {
            return StorageFuture::ok(Vec::new());
        }
        let members = members.iter().map(StorageRequest::owned).collect();
        StorageFuture::new(decide(self.inner.clone(), members))
    }

    fn validate_members(&self, _: &[Policy]) -> Result<(), ConfigError> {
        Ok(())
    }

    forward_storage!(self => self.inner; decide, try_admit, clear, settle, check, clear_all, keys, validate);

    fn wrapped(&self) -> Option<&dyn Storage> {
        Some(&self.inner)
    }
}

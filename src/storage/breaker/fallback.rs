//! What stands in for the primary: a storage, and each policy's share.

use std::collections::HashMap;
use std::convert::Infallible;
use std::fmt;
use std::future::Pending;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::num::NonZeroU32;
use std::sync::{PoisonError, RwLock};

use crate::storage::{Storage, StorageRequest};
use crate::strategy::Status;
use crate::{ConfigError, Decision, Key, Policy};

/// So many policies' shares are kept; then it starts afresh.
const SHARES: usize = 1_024;

pub(super) struct Fallback<F> {
    pub(super) storage: F,
    pub(super) replicas: NonZeroU32,
    /// By a hash of their names and numbers, policies and their shares.
    shares: RwLock<HashMap<u64, Vec<(Policy, Policy)>>>,
}

impl<F> Fallback<F> {
    pub(super) fn new(storage: F, replicas: NonZeroU32) -> Self {
        Self { storage, replicas, shares: RwLock::default() }
    }

    /// The policy's share, made once.
    pub(super) fn divide(&self, policy: &Policy) -> Result<Policy, ConfigError> {
        if self.replicas == NonZeroU32::MIN {
            return Ok(policy.clone());
        }
        let hash = hash(policy);
        let kept = self.shares.read().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, share)) = kept.get(&hash).and_then(|kept| kept.iter().find(|(whole, _)| whole == policy)) {
            return Ok(share.clone());
        }
        drop(kept);
        let share = policy.divide(self.replicas)?;
        let mut kept = self.shares.write().unwrap_or_else(PoisonError::into_inner);
        if kept.values().map(Vec::len).sum::<usize>() >= SHARES {
            kept.clear();
        }
        kept.entry(hash).or_default().push((policy.clone(), share.clone()));
        Ok(share)
    }
}

/// Of one name there may be a policy for each tenant, and comparing them takes long: so their numbers are looked at first.
fn hash(policy: &Policy) -> u64 {
    let mut hasher = DefaultHasher::new();
    policy.digest().hash(&mut hasher);
    policy.limits().iter().for_each(|limit| (limit.quota(), limit.capacity()).hash(&mut hasher));
    hasher.finish()
}

/// What the share has decided, as it is told: a cost that only the whole has room for may come back when the primary may be
/// asked, in `wait` microseconds.
pub(super) fn told(whole: &Policy, decision: Decision, wait: u64) -> Decision {
    let can_fit = |position: usize, status: &Status| {
        !status.is_admitted()
            && status.retry_after().is_none()
            && whole.limits().get(position).is_some_and(|limit| decision.cost() <= limit.capacity())
    };
    let (limits, cost) = (decision.limits(), decision.cost());
    let is_no_refusal_of_a_limit = decision.is_admitted() || decision.is_storage_full() || decision.is_contended();
    if is_no_refusal_of_a_limit || !limits.iter().enumerate().any(|(position, status)| can_fit(position, status)) {
        return decision;
    }
    let finite = |(position, status): (usize, &Status)| {
        if !can_fit(position, status) {
            return *status;
        }
        Status::refused(status.capacity(), status.remaining(), status.reset_after_micros(), Some(wait))
    };
    let statuses: Vec<Status> = limits.iter().enumerate().map(finite).collect();
    Decision::of_limits(decision.at(), cost, statuses.into_iter())
}

impl<F: fmt::Debug> fmt::Debug for Fallback<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fallback")
            .field("storage", &self.storage)
            .field("replicas", &self.replicas)
            .finish_non_exhaustive()
    }
}

/// Marks a [`Breaker`](super::Breaker) without a fallback.
#[derive(Clone, Copy, Debug)]
#[expect(clippy::exhaustive_enums, reason = "it has no value")]
pub enum NoFallback {}

impl Storage for NoFallback {
    type Error = Infallible;
    type DecideFuture = Pending<Result<Decision, Infallible>>;
    type UpdateFuture = Pending<Result<(), Infallible>>;

    fn decide(&self, _: StorageRequest<'_>) -> Self::DecideFuture {
        match *self {}
    }

    fn clear(&self, _: &Policy, _: &Key) -> Self::UpdateFuture {
        match *self {}
    }

    fn refund(&self, _: &Policy, _: &Key, _: &Decision) -> Self::UpdateFuture {
        match *self {}
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{MemoryStorage, Quota, Timestamp};

    #[test]
    fn policies_without_number_are_not_kept_without_number() {
        let fallback = Fallback::new(MemoryStorage::new(), NonZeroU32::new(2).unwrap());
        let kept = || fallback.shares.read().unwrap().values().map(Vec::len).sum::<usize>();
        for amount in 2..5_000 {
            // Half of them share a name.
            let policy = Policy::from(Quota::per_minute(amount));
            let policy = if amount % 2 == 0 { policy.with_name("tier") } else { policy };
            for _ in 0..2 {
                let share = fallback.divide(&policy).unwrap();
                assert_eq!(share.limits()[0].capacity(), amount / 2);
            }
            assert!((1..=SHARES).contains(&kept()), "{}", kept());
        }
    }

    #[test]
    fn a_fallback_that_could_not_decide_is_told_as_it_says() {
        let whole = Policy::from(Quota::per_minute(9));
        let never = Decision::of(Timestamp::EPOCH, 5, Status::refused(4, 4, 0, None));
        assert_eq!(told(&whole, never.clone(), 7).retry_after(), Some(Duration::from_micros(7)));
        for undecided in [never.clone().storage_full(), never.contended()] {
            assert_eq!(told(&whole, undecided.clone(), 7), undecided);
        }
    }

    #[test]
    fn policies_of_one_name_are_not_compared_with_each_other() {
        let fallback = Fallback::new(MemoryStorage::new(), NonZeroU32::new(2).unwrap());
        for amount in 1..=SHARES {
            let amount = u32::try_from(amount).unwrap();
            let bucket = Policy::from(Quota::per_minute(7).burst(amount));
            let queue: Policy = format!("leaky-bucket 7/minute queue {amount}").parse().unwrap();
            for policy in [Quota::per_minute(amount).into(), bucket, queue] {
                let _ = fallback.divide(&policy.with_name("tenant")).unwrap();
            }
        }
        let kept = fallback.shares.read().unwrap();
        assert!(kept.values().all(|kept| kept.len() == 1));
    }
}

//! The fallback of a breaker: a storage that decides by divided policies.
//!
//! A divided policy has the same identity and the same digests, so clients see the same names. A
//! cost that fits the whole quota but not the divided one is refused until the next probe, because
//! "never" would not be true.

use std::collections::HashMap;
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::num::NonZeroU32;
use std::sync::RwLock;

use crate::decision::Decision;
use crate::error::ConfigError;
use crate::policy::Policy;
use crate::storage::AnyStorage;
use crate::strategy::Status;
use crate::sync::unpoisoned;

/// The maximum number of divided policies in the cache. A full cache is cleared.
const MAX_CACHED: usize = 1_024;

/// The fallback storage, with a cache of the policies that were divided for it.
pub(super) struct Fallback {
    pub(super) storage: AnyStorage,
    pub(super) replicas: NonZeroU32,
    /// Pairs of an original policy and its divided policy, by the `hash` of the original. No two
    /// originals are equal.
    divided: RwLock<HashMap<u64, Vec<(Policy, Policy)>>>,
}

impl Fallback {
    pub(super) fn new(storage: AnyStorage, replicas: NonZeroU32) -> Self {
        Self { storage, replicas, divided: RwLock::default() }
    }

    /// Returns the policy divided by the number of replicas, from the cache if possible.
    ///
    /// Equal policies can decide differently, because their text does not contain the settings of a
    /// custom strategy or the data of a time zone. So a policy that is equal but not interchangeable
    /// replaces the cached one.
    pub(super) fn divide(&self, policy: &Policy) -> Result<Policy, ConfigError> {
        if self.replicas == NonZeroU32::MIN {
            return Ok(policy.clone());
        }
        let hash = hash(policy);
        let cached = unpoisoned(self.divided.read());
        if let Some((_, divided)) =
            cached.get(&hash).and_then(|all| all.iter().find(|(original, _)| original.is_interchangeable_with(policy)))
        {
            return Ok(divided.clone());
        }
        drop(cached);
        let divided = policy.divide(self.replicas)?;
        let mut cached = unpoisoned(self.divided.write());
        if let Some(all) = cached.get_mut(&hash) {
            all.retain(|(original, _)| original != policy);
        }
        if cached.values().map(Vec::len).sum::<usize>() >= MAX_CACHED {
            cached.clear();
        }
        cached.entry(hash).or_default().push((policy.clone(), divided.clone()));
        Ok(divided)
    }
}

/// Hashes the digest, the quotas and the capacities of a policy. Quotas and capacities are part of
/// the hash because many tenants can have policies with the same name, and comparing policies is
/// slow.
fn hash(policy: &Policy) -> u64 {
    let mut hasher = DefaultHasher::new();
    policy.digest().hash(&mut hasher);
    policy.limits().iter().for_each(|limit| (limit.quota(), limit.capacity()).hash(&mut hasher));
    hasher.finish()
}

/// Adds a `retry_after` to a refusal by the fallback whose cost exceeds the divided capacity but
/// fits into the original one. The fallback can never admit this cost, but the primary can. `wait`
/// is the time until the primary is called again, in microseconds.
pub(super) fn adjust_retry_after(original: &Policy, mut decision: Decision, wait: u64) -> Decision {
    let can_fit = |position: usize, status: &Status| {
        !status.is_admitted()
            && status.retry_after().is_none()
            && original.limits().get(position).is_some_and(|limit| limit.needed(decision.cost()) <= limit.capacity())
    };
    let limits = decision.statuses();
    let is_not_refused_by_a_limit = decision.is_admitted() || decision.is_storage_full() || decision.is_contended();
    if is_not_refused_by_a_limit || !limits.iter().enumerate().any(|(position, status)| can_fit(position, status)) {
        return decision;
    }
    let finite = |(position, status): (usize, &Status)| {
        if !can_fit(position, status) {
            return *status;
        }
        Status::refused(status.capacity(), status.remaining(), status.reset_after_micros(), Some(wait))
            .with_lock_of(status)
    };
    let statuses: Vec<Status> = limits.iter().enumerate().map(finite).collect();
    decision.statuses_mut().copy_from_slice(&statuses);
    decision
}

impl fmt::Debug for Fallback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fallback")
            .field("storage", &self.storage)
            .field("replicas", &self.replicas)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::quota::Quota;
    use crate::storage::MemoryStorage;
    use crate::time::Timestamp;

    #[test]
    fn cache_of_divided_policies_is_bounded() {
        let fallback = Fallback::new(MemoryStorage::new().into(), NonZeroU32::new(2).unwrap());
        let cached = || fallback.divided.read().unwrap().values().map(Vec::len).sum::<usize>();
        for amount in 2..5_000 {
            // Half of the policies share a name.
            let policy = Policy::from(Quota::per_minute(amount));
            let policy = if amount % 2 == 0 { policy.with_name("tier") } else { policy };
            for _ in 0..2 {
                let divided = fallback.divide(&policy).unwrap();
                assert_eq!(divided.limits()[0].capacity(), amount / 2);
            }
            assert!((1..=MAX_CACHED).contains(&cached()), "{}", cached());
        }
    }

    /// Guards against this defect: a clock that is ahead of the wall clock shifts the reset.
    #[test]
    fn adjusted_decision_keeps_the_time_of_the_wall_clock() {
        let original = Policy::from(Quota::per_minute(9));
        let now = Timestamp::from_micros(9_000_000_000);
        let mut decision = Decision::new(now, 5, Status::refused(4, 4, 0, None));
        decision.set_ahead(3_600);
        let adjusted = adjust_retry_after(&original, decision.clone(), 7);
        assert_eq!((adjusted.wall_at(), adjusted.at()), (decision.wall_at(), now));
        assert_eq!(adjusted.retry_after(), Some(Duration::from_micros(7)));
    }

    #[test]
    fn storage_full_and_contended_decisions_are_not_adjusted() {
        let original = Policy::from(Quota::per_minute(9));
        let never = Decision::new(Timestamp::EPOCH, 5, Status::refused(4, 4, 0, None));
        assert_eq!(adjust_retry_after(&original, never.clone(), 7).retry_after(), Some(Duration::from_micros(7)));
        for undecided in [never.clone().storage_full(), never.contended()] {
            assert_eq!(adjust_retry_after(&original, undecided.clone(), 7), undecided);
        }
    }

    #[test]
    fn equal_policies_are_divided_once() {
        let fallback = Fallback::new(MemoryStorage::new().into(), NonZeroU32::new(2).unwrap());
        let [first, second] = [(); 2].map(|()| fallback.divide(&"9/minute; shadow 5/day".parse().unwrap()).unwrap());
        assert_eq!(first.limits().as_ptr(), second.limits().as_ptr());
    }

    #[cfg(feature = "calendar")]
    #[test]
    fn policy_that_is_not_interchangeable_replaces_the_cached_one() {
        let fallback = Fallback::new(MemoryStorage::new().into(), NonZeroU32::new(2).unwrap());
        let [first, second] = [(); 2].map(|()| "calendar 9/day in Europe/Berlin".parse::<Policy>().unwrap());
        let divided = [&first, &second, &second.clone()].map(|policy| fallback.divide(policy).unwrap());
        let [first, second, clone] = divided.each_ref().map(|divided| divided.limits().as_ptr());
        assert!(first != second && second == clone);
        assert_eq!(fallback.divided.read().unwrap().values().map(Vec::len).sum::<usize>(), 1);
    }

    #[test]
    fn policies_with_the_same_name_have_different_hashes() {
        let fallback = Fallback::new(MemoryStorage::new().into(), NonZeroU32::new(2).unwrap());
        for amount in 1..=MAX_CACHED {
            let amount = u32::try_from(amount).unwrap();
            let bucket = Policy::from(Quota::per_minute(7).burst(amount));
            let queue: Policy = format!("leaky-bucket 7/minute queue {amount}").parse().unwrap();
            for policy in [Quota::per_minute(amount).into(), bucket, queue] {
                let _ = fallback.divide(&policy.with_name("tenant")).unwrap();
            }
        }
        let cached = fallback.divided.read().unwrap();
        assert!(cached.values().all(|cached| cached.len() == 1));
    }
}

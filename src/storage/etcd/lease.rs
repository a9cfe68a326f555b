//! Leases, which delete expired keys.
//!
//! All keys of this process that expire at about the same time share a lease.
//!
//! Each lease is a write. So ends are rounded up to steps of a power of two seconds: an eighth to a
//! quarter of the lifetime, at least 4 seconds. After 5,000 keys a new lease is used, because etcd
//! removes all keys of a lease in one step that blocks other calls.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::Instant;

use super::members::Members;
use super::wire::LeaseGrantRequest;
use crate::storage::StorageError;
use crate::storage::net::{Reconnecting, Usable};
use crate::sync::unpoisoned;

/// The shortest step, in seconds. The end of a lease is rounded up to a multiple of a step.
///
/// Rounding lets keys share leases, because granting a lease is a write to etcd. Steps are powers
/// of two. A step longer than this one is at most a quarter of the time to live.
const SHORTEST_STEP: u64 = 4;

/// The longest time to live of a key. After rounding up, the lease is still shorter than
/// 9,000,000,000 seconds, the maximum that etcd grants.
const LONGEST_TTL: Duration = Duration::from_secs(7_000_000_000);

/// The maximum number of writes that share a lease. When the lease ends, etcd deletes all its keys
/// in one step, and other calls wait meanwhile.
const MAX_KEYS: u32 = 5_000;

/// The shortest time of a call that grants a lease. Later callers wait for it too, which may have more
/// time than the first one.
const MIN_TIME: Duration = Duration::from_millis(100);

/// The leases that this process uses.
#[derive(Debug)]
pub(super) struct EtcdLeases {
    /// The instant from which each [`LeaseEnd`] is measured. It differs between processes, so their
    /// leases end at different times.
    origin: Instant,
    granted: Mutex<HashMap<LeaseEnd, Arc<Reconnecting<EtcdLease>>>>,
}

/// A lease that has been granted.
#[derive(Debug)]
pub(super) struct EtcdLease {
    id: i64,
    /// The number of writes that have used this lease.
    keys: AtomicU32,
}

impl Usable for EtcdLease {
    fn is_usable(&self) -> bool {
        self.keys.load(Ordering::Relaxed) < MAX_KEYS
    }
}

/// The end of a lease in seconds since the origin, and the step in seconds to which it was rounded
/// up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct LeaseEnd {
    at: u64,
    step: u64,
}

impl LeaseEnd {
    /// Returns the end of the lease for a key with the time to live `keep`.
    ///
    /// `now` is the time since the origin.
    fn for_key(now: Duration, keep: Duration) -> Self {
        let keep = keep.min(LONGEST_TTL);
        let step = (keep.as_secs() / 8).next_power_of_two().max(SHORTEST_STEP);
        let until = (now + keep).as_secs() + 1;
        Self { at: until.div_ceil(step) * step, step }
    }

    /// Returns the lease's time to live in whole seconds. `now` is the time since the origin.
    fn ttl(self, now: Duration) -> u64 {
        // `now` is rounded down, so the lease does not end too early.
        self.at.saturating_sub(now.as_secs()).max(1)
    }
}

/// The use of a lease by one key.
pub(super) struct KeyLease {
    source: Arc<Reconnecting<EtcdLease>>,
    lease: Arc<EtcdLease>,
}

impl KeyLease {
    pub(super) fn id(&self) -> i64 {
        self.lease.id
    }

    /// Discards the lease, because etcd no longer has it. The next key gets a new one.
    pub(super) fn discard(self) {
        self.source.give_up(&self.lease, None);
    }
}

impl EtcdLeases {
    pub(super) fn new() -> Self {
        Self { origin: Instant::now(), granted: Mutex::default() }
    }

    /// Returns a lease that lasts at least as long as `keep`. Requests one from etcd if necessary.
    pub(super) async fn get(
        &self,
        keep: Duration,
        members: &Members,
        deadline: Instant,
    ) -> Result<KeyLease, StorageError> {
        let now = self.origin.elapsed();
        let end = LeaseEnd::for_key(now, keep);
        let source = self.source(end, now, members);
        let grant = || {
            let (members, ttl) = (members.clone(), end.ttl(self.origin.elapsed()));
            async move {
                let call = LeaseGrantRequest { ttl: i64::try_from(ttl).unwrap_or(i64::MAX) };
                let granted = members.call(&call, deadline.max(Instant::now() + MIN_TIME)).await?;
                Ok(EtcdLease { id: granted.id, keys: AtomicU32::new(0) })
            }
        };
        let lease = source.get(deadline, grant).await?;
        lease.keys.fetch_add(1, Ordering::Relaxed);
        Ok(KeyLease { source, lease })
    }

    fn source(&self, end: LeaseEnd, now: Duration, members: &Members) -> Arc<Reconnecting<EtcdLease>> {
        let mut granted = unpoisoned(self.granted.lock());
        if let Some(source) = granted.get(&end) {
            return Arc::clone(source);
        }
        granted.retain(|end, _| end.at > now.as_secs());
        Arc::clone(granted.entry(end).or_insert_with(|| Reconnecting::new(&members.names())))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn lease_lasts_as_long_as_the_key_and_not_much_longer(
            now in 0..1_000_000_000_000_u64,
            keep in prop_oneof![0..100_000_000_u64, 0..7_000_000_000_000_000_u64],
            delay in 0..10_000_000_u64,
        ) {
            let (now, keep) = (Duration::from_micros(now), Duration::from_micros(keep));
            let end = LeaseEnd::for_key(now, keep);
            let lasts = Duration::from_secs(end.ttl(now));
            prop_assert!(lasts >= keep);
            prop_assert!(lasts <= keep + keep / 4 + Duration::from_secs(2 + SHORTEST_STEP));
            // A key that is written later, and ends in the same step, uses the same lease.
            let later = now + Duration::from_micros(delay);
            let other = keep.saturating_sub(later.saturating_sub(now));
            if LeaseEnd::for_key(later, other) == end {
                prop_assert!(Duration::from_secs(end.ttl(later)) >= other);
            }
        }
    }

    #[test]
    fn longest_lease_is_within_the_limit_of_etcd() {
        let end = LeaseEnd::for_key(Duration::ZERO, Duration::MAX);
        assert!(end.ttl(Duration::ZERO) < 9_000_000_000);
    }

    #[test]
    fn keys_that_live_for_a_minute_share_leases() {
        let end = |second| LeaseEnd::for_key(Duration::from_secs(second), Duration::from_secs(60));
        let leases: std::collections::HashSet<LeaseEnd> = (0..600).map(end).collect();
        assert!(leases.len() <= 76, "{}", leases.len());
    }
}

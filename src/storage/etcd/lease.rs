//! How long keys stay: leases, each shared by all keys of this process that end at about the same time.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::error::EtcdStorageError;
use super::link::Members;
use super::wire::LeaseGrant;
use crate::storage::net::{Reconnecting, Usable};

/// Leases end in steps of so many seconds and a power of two, or of up to a quarter of what is to be kept: a grant is a write.
const SHORTEST_STEP: u64 = 4;

/// etcd grants no more than 9,000,000,000 seconds, steps included.
const LONGEST: Duration = Duration::from_secs(7_000_000_000);

/// All that hangs on a lease goes in one stroke, while others wait.
const KEYS: u32 = 5_000;

#[derive(Debug)]
pub(super) struct Leases {
    /// What ends are counted from. Seconds of other processes begin elsewhere, so not all leases end at once.
    since: Instant,
    granted: Mutex<HashMap<Ends, Arc<Reconnecting<Lease, EtcdStorageError>>>>,
}

/// A lease that has been granted.
#[derive(Debug)]
pub(super) struct Lease {
    id: i64,
    keys: AtomicU32,
}

impl Usable for Lease {
    fn is_usable(&self) -> bool {
        self.keys.load(Ordering::Relaxed) < KEYS
    }
}

/// When a lease ends, and the step to which that was rounded, in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Ends {
    at: u64,
    step: u64,
}

impl Ends {
    /// For what is to be kept for so long, `now` being the time since the beginning.
    fn after(now: Duration, keep: Duration) -> Self {
        let keep = keep.min(LONGEST);
        let step = (keep.as_secs() / 8).next_power_of_two().max(SHORTEST_STEP);
        let until = (now + keep).as_secs() + 1;
        Self { at: until.div_ceil(step) * step, step }
    }

    /// How many seconds that is.
    fn seconds_from(self, now: Duration) -> u64 {
        // What has begun of a second is not taken off.
        self.at.saturating_sub(now.as_secs()).max(1)
    }
}

/// A lease in use.
pub(super) struct Taken {
    of: Arc<Reconnecting<Lease, EtcdStorageError>>,
    lease: Arc<Lease>,
}

impl Taken {
    pub(super) fn id(&self) -> i64 {
        self.lease.id
    }

    /// The lease is no more: who comes next takes another.
    pub(super) fn give_up(self) {
        self.of.give_up(&self.lease, None);
    }
}

impl Leases {
    pub(super) fn new() -> Self {
        Self { since: Instant::now(), granted: Mutex::default() }
    }

    /// A lease that lasts for at least so long.
    pub(super) async fn take(
        &self,
        keep: Duration,
        members: &Members,
        deadline: Instant,
    ) -> Result<Taken, EtcdStorageError> {
        let now = self.since.elapsed();
        let ends = Ends::after(now, keep);
        let of = self.of(ends, now, members);
        let grant = || {
            let (members, ttl) = (members.clone(), ends.seconds_from(self.since.elapsed()));
            async move {
                let call = LeaseGrant { ttl: i64::try_from(ttl).unwrap_or(i64::MAX) };
                let granted = members.ask(&call, deadline).await?;
                Ok(Lease { id: granted.id, keys: AtomicU32::new(0) })
            }
        };
        let lease = of.get(deadline, grant).await?;
        lease.keys.fetch_add(1, Ordering::Relaxed);
        Ok(Taken { of, lease })
    }

    fn of(&self, ends: Ends, now: Duration, members: &Members) -> Arc<Reconnecting<Lease, EtcdStorageError>> {
        let mut granted = self.granted.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(renewed) = granted.get(&ends) {
            return Arc::clone(renewed);
        }
        granted.retain(|ends, _| ends.at > now.as_secs());
        Arc::clone(granted.entry(ends).or_insert_with(|| Reconnecting::new(&members.names())))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_lease_lasts_as_long_as_the_key_and_not_much_longer(
            now in 0..1_000_000_000_000_u64, keep in prop_oneof![0..100_000_000_u64, 0..7_000_000_000_000_000_u64], late in 0..10_000_000_u64,
        ) {
            let (now, keep) = (Duration::from_micros(now), Duration::from_micros(keep));
            let ends = Ends::after(now, keep);
            let lasts = Duration::from_secs(ends.seconds_from(now));
            prop_assert!(lasts >= keep);
            prop_assert!(lasts <= keep + keep / 4 + Duration::from_secs(2 + SHORTEST_STEP));
            // Granted later, for a key that comes later and ends in the same step.
            let later = now + Duration::from_micros(late);
            let other = keep.saturating_sub(later.saturating_sub(now));
            if Ends::after(later, other) == ends {
                prop_assert!(Duration::from_secs(ends.seconds_from(later)) >= other);
            }
        }
    }

    #[test]
    fn no_time_is_too_long() {
        let ends = Ends::after(Duration::ZERO, Duration::MAX);
        assert!(ends.seconds_from(Duration::ZERO) < 9_000_000_000);
    }

    #[test]
    fn keys_of_a_minute_share_a_few_leases() {
        let ends = |second| Ends::after(Duration::from_secs(second), Duration::from_secs(60));
        let leases: std::collections::HashSet<Ends> = (0..600).map(ends).collect();
        assert!(leases.len() <= 76, "{}", leases.len());
    }
}

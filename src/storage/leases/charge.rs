//! Charges, which take units from a slice even if it has too few.

use std::sync::Arc;

use super::entry::LeaseEntry;
use super::lease::{Charged, Lease};
use super::shared::LeaseTable;
use crate::key::Key;
use crate::policy::Policy;
use crate::storage::StorageRequest;
use crate::time::Timestamp;

/// Units that a charge took from a slice. Dropping this value puts them back, unless
/// [`keep`](Self::keep) was called.
pub(super) struct Taken {
    shared: Arc<LeaseTable>,
    policy: Policy,
    key: Key,
    units: u32,
    window: (Timestamp, u32),
}

impl LeaseTable {
    /// Charges units to the key's slice, as many as the slice has. If they are only a part of the
    /// charge, also returns them as [`Taken`]. A key without a slice pays nothing.
    pub(super) fn charge(self: &Arc<Self>, request: &StorageRequest<'_>) -> (Charged, Option<Taken>) {
        let (place, now) = (self.place(request.policy, request.key), self.clock.now());
        let mut bucket = self.table.lock(place);
        let Some(lease) = bucket.find().and_then(|entry| lease_to_charge(entry, request.policy, now)) else {
            return (Charged::Partly(request.cost), None);
        };
        let (charged, window) = (lease.charge(request.cost, now), lease.window);
        let taken = match charged {
            Charged::Fully(_) => None,
            Charged::Partly(rest) => Some(Taken {
                shared: Arc::clone(self),
                policy: request.policy.clone(),
                key: request.key.clone(),
                units: request.cost - rest,
                window,
            }),
        };
        (charged, taken)
    }

    /// Takes up to `units` of the key's slice for a charge. Returns `None` if the key has no slice.
    pub(super) fn take_for_charge(self: &Arc<Self>, policy: &Policy, key: &Key, units: u32) -> Option<Taken> {
        let (place, now) = (self.place(policy, key), self.clock.now());
        let mut bucket = self.table.lock(place);
        let lease = lease_to_charge(bucket.find()?, policy, now)?;
        let (units, window) = (lease.take_for_charge(units), lease.window);
        Some(Taken { shared: Arc::clone(self), policy: policy.clone(), key: key.clone(), units, window })
    }

    /// Puts back the units that a failed charge took, if the slice still exists.
    fn put_back_taken(&self, taken: &Taken) {
        let mut bucket = self.table.lock(self.place(&taken.policy, &taken.key));
        let lease = bucket.find().and_then(|entry| entry.lease.as_mut());
        if let Some(lease) = lease.filter(|lease| lease.policy == taken.policy) {
            lease.put_back_charge(taken.window, taken.units);
        }
    }
}

/// Returns the lease that a charge by this policy can take units from. If another policy of the same
/// name has the lease, the charge goes to the storage, and so do later refunds.
fn lease_to_charge<'a>(entry: &'a mut LeaseEntry, policy: &Policy, now: Timestamp) -> Option<&'a mut Lease> {
    let lease = entry.lease.as_mut().filter(|lease| lease.is_live(now))?;
    lease.is_charged |= lease.policy != *policy;
    (lease.policy == *policy).then_some(lease)
}

impl Taken {
    pub(super) fn units(&self) -> u32 {
        self.units
    }

    /// Spends the units for good.
    pub(super) fn keep(mut self) {
        self.units = 0;
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        if self.units > 0 {
            self.shared.put_back_taken(self);
        }
    }
}

//! The routing of hits and charges: to a lease, to the key's worker, or to the storage. Also refunds
//! all leases at shutdown.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tokio::runtime::Handle;

use super::lease::Lease;
use super::table::{LeaseJob, LeaseTable};
use super::worker::LeaseWorker;
use crate::decision::Decision;
use crate::key::Key;
use crate::policy::Policy;
use crate::storage::contract::OwnedRequest;
use crate::storage::ticket::{Caller, Ticket};
use crate::storage::{Storage, StorageError, StorageErrorKind, StorageFuture, runtime_with_time};
use crate::sync::join_all;

/// The route of a hit that found no lease.
enum HitRoute {
    /// The hit was admitted from a lease that has arrived since.
    Local(Decision),
    /// The key's worker answers.
    Wait(Caller<Result<Option<Decision>, StorageError>>),
    /// The caller sends the hit to the storage.
    Inner,
}

impl LeaseTable {
    /// Decides a hit that found no lease.
    pub(super) async fn decide(self: Arc<Self>, hit: OwnedRequest) -> Result<Decision, StorageError> {
        match self.route(&hit) {
            HitRoute::Local(decision) => return Ok(decision),
            HitRoute::Wait(caller) => {
                let answer = caller.answer().await.ok_or_else(cancelled)??;
                if let Some(decision) = answer {
                    return Ok(decision);
                }
            }
            HitRoute::Inner => {}
        }
        self.counters.asked(&hit.policy);
        let decided = self.inner.decide(hit.borrow()).await;
        let (now, span) = (self.now(), self.ttl(&hit.policy));
        self.with_entry(self.place(&hit.policy, &hit.key), |entry| {
            entry.record(&decided);
            if decided.as_ref().is_ok_and(Decision::is_admitted) {
                entry.count(hit.cost, now, span);
            }
        });
        decided
    }

    fn route(self: &Arc<Self>, hit: &OwnedRequest) -> HitRoute {
        let (place, now) = (self.place(&hit.policy, &hit.key), self.now());
        let mut bucket = self.table.lock(place);
        let Some(entry) = Self::entry(&mut bucket, now) else { return HitRoute::Inner };
        if let Some(decision) = entry.take(&hit.policy, hit.cost, now) {
            self.counters.here(&hit.policy);
            return HitRoute::Local(decision);
        }
        // The rest of a lease is refunded before the storage decides, so that it does not refuse units
        // that this process has.
        let has_rest = entry.lease.as_ref().is_some_and(|lease| lease.unspent > 0);
        if !has_rest && entry.requests == 0 && self.slice(&hit.policy, entry, now) == 0 {
            return HitRoute::Inner;
        }
        let Some(runtime) = runtime_with_time() else { return HitRoute::Inner };
        let (ticket, caller) = Ticket::new();
        let worker = (runtime.id(), place);
        let starts = self.queues.add(&worker, LeaseJob { policy: hit.policy.clone(), cost: hit.cost, ticket });
        drop(bucket);
        if starts {
            runtime.spawn(LeaseWorker::new(Arc::clone(self), worker, hit.key.clone()).run());
        }
        HitRoute::Wait(caller)
    }
}

/// A lease that a charge has taken out of the table. If the charge fails or is dropped, the lease
/// returns.
struct TakenLease {
    shared: Arc<LeaseTable>,
    lease: Option<Box<Lease>>,
    /// The number of clears of the key when the lease was taken out.
    clears: u64,
    runtime: Option<Handle>,
}

impl TakenLease {
    /// Puts the lease back. Returns the lease to refund, as [`LeaseTable::keep`] does.
    fn give_back(&mut self) -> Option<Box<Lease>> {
        self.shared.keep(self.lease.take()?, self.clears, self.runtime.as_ref())
    }
}

impl Drop for TakenLease {
    fn drop(&mut self) {
        if let Some(lease) = self.give_back()
            && let Some(runtime) = &self.runtime
        {
            let shared = Arc::clone(&self.shared);
            runtime.spawn(async move { shared.refund(&lease).await });
        }
    }
}

/// The error of a caller whose worker was dropped.
fn cancelled() -> StorageError {
    StorageError::new(StorageErrorKind::Cancelled, "lease task was cancelled: its tokio runtime has shut down")
}

impl LeaseTable {
    /// Charges units: from the lease if it has enough. Otherwise the whole lease pays a part, and
    /// `charge_storage` charges the rest. Returns `None` if the lease has paid all.
    ///
    /// A refund pays off a charge before it makes units available. So after a charge to the storage,
    /// refunds must not return to a lease.
    pub(super) async fn charge<T>(
        self: Arc<Self>,
        (policy, key, units): (Policy, Key, u32),
        from_lease: impl FnOnce(Decision) -> T,
        charge_storage: impl FnOnce(u32) -> StorageFuture<T>,
        is_charged: impl FnOnce(&T) -> bool,
    ) -> Result<T, StorageError> {
        let (place, now) = (self.place(&policy, &key), self.now());
        let paid =
            self.with_entry(place, |entry| match entry.lease_at(&policy, now).map(|lease| lease.charge(units)) {
                Some(Some(charged)) => Ok(charged),
                _ => Err((entry.lease.take(), entry.clears)),
            });
        let (lease, clears) = match paid {
            Some(Ok(charged)) => return Ok(from_lease(charged)),
            Some(Err(taken)) => taken,
            None => (None, 0),
        };
        let (mine, others) = match lease {
            Some(lease) if lease.policy == policy && lease.time_left(now).is_some() => (Some(lease), None),
            others => (None, others),
        };
        let paid = mine.as_ref().map_or(0, |lease| lease.unspent);
        let mut mine = TakenLease { shared: Arc::clone(&self), lease: mine, clears, runtime: runtime_with_time() };
        if let Some(lease) = others {
            drop(self.refund(&lease).await);
        }
        let result = charge_storage(units - paid).await;
        if result.as_ref().is_ok_and(is_charged) {
            mine.lease = None;
        } else if let Some(lease) = mine.give_back() {
            drop(self.refund(&lease).await);
        }
        result
    }

    /// Puts units of a hit back into the lease that it was spent from, if it has not ended.
    pub(super) fn put_back(&self, policy: &Policy, key: &Key, hit: &Decision, units: u32) -> bool {
        let now = self.now();
        let put_back = |lease: &mut Lease| lease.put_back(hit, units);
        !hit.is_from_fallback()
            && self.with_entry(self.place(policy, key), |entry| entry.lease_at(policy, now).is_some_and(put_back))
                == Some(true)
    }

    /// Refunds all leases, also those of the workers of this runtime.
    pub(super) async fn close(&self) -> Result<(), StorageError> {
        self.is_closed.store(true, Ordering::SeqCst);
        let runtime = Handle::try_current().ok().map(|runtime| runtime.id());
        loop {
            let mut idle = pin!(self.idle.notified());
            // A worker that ends from here on is noticed.
            idle.as_mut().enable();
            if !self.queues.is_busy(|(id, _)| Some(*id) == runtime) {
                break;
            }
            idle.await;
        }
        let (mut bucket, mut result, mut leases) = (0, Ok(()), Vec::new());
        while self.table.visit(bucket, |entry| leases.extend(entry.lease.take())) {
            let now = self.now();
            let refunds = leases.drain(..).filter_map(|lease| {
                let (hit, spent) = lease.leftover(now)?;
                Some(self.inner.settle(&lease.policy, &lease.key, &hit, spent))
            });
            let refunded: Result<(), _> = join_all(refunds.collect()).await.into_iter().collect();
            result = result.and(refunded);
            bucket += 1;
        }
        result
    }
}

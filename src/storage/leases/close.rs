//! Refunds all slices when a node shuts down.

use std::future::poll_fn;
use std::iter::from_fn;
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::task::Poll;

use tokio::runtime::Handle;
use tokio::sync::oneshot;

use super::entry::{LeaseEntry, WorkerState};
use super::shared::LeaseTable;
use crate::decision::Decision;
use crate::key::Key;
use crate::policy::Policy;
use crate::storage::{AnyStorage, Storage, StorageError, StorageFuture};

/// The maximum number of refunds in flight.
const IN_FLIGHT: usize = 64;

/// The unspent units of one lease, as a hit that can be refunded.
struct Unspent {
    policy: Policy,
    key: Key,
    hit: Decision,
}

impl LeaseTable {
    /// Refunds all leases, and waits for the workers of this runtime. Each worker refunds the units
    /// that it still receives.
    pub(super) async fn close(&self) -> Result<(), StorageError> {
        // The flag is set before `visit` takes the lock of a bucket. A worker starts under the same
        // lock, so a worker that starts after the visit finds the flag set.
        self.closed.store(true, Ordering::SeqCst);
        let runtime = Handle::try_current().ok().map(|runtime| runtime.id());
        let (mut bucket, mut taken, mut worker) = (0, Vec::new(), Vec::new());
        let slices = from_fn(|| {
            while taken.is_empty() {
                let exists = self.table.visit(bucket, |entry| {
                    taken.extend(self.take_unspent(entry));
                    if runtime.is_some() && entry.worker == WorkerState::Running(runtime) {
                        let (when_idle, idle) = oneshot::channel();
                        entry.when_idle.push(when_idle);
                        worker.push(idle);
                    }
                });
                if !exists {
                    return None;
                }
                bucket += 1;
            }
            taken.pop()
        });
        let mut refunded = refund_all(&self.inner, slices).await;
        for idle in worker {
            if let Ok(error) = idle.await {
                refunded = refunded.and(Err(error));
            }
        }
        refunded
    }

    /// Removes the lease of a key. Returns its unspent units, or `None` if there are none or their
    /// window has ended.
    fn take_unspent(&self, entry: &mut LeaseEntry) -> Option<Unspent> {
        let lease = entry.lease.take().filter(|lease| self.clock.now() < lease.end)?;
        let hit = lease.as_hit()?;
        Some(Unspent { policy: lease.policy, key: entry.key.clone(), hit })
    }
}

/// Refunds all leases in a background task. Outside of a tokio runtime, does not refund them. This
/// runs when the last handle and all workers have been dropped.
impl Drop for LeaseTable {
    fn drop(&mut self) {
        let Ok(runtime) = Handle::try_current() else { return };
        let mut slices = Vec::new();
        self.table.visit_all(|entry| slices.extend(self.take_unspent(entry)));
        if !slices.is_empty() {
            let inner = self.inner.clone();
            runtime.spawn(async move { drop(refund_all(&inner, slices.into_iter()).await) });
        }
    }
}

/// Refunds the slices, up to [`IN_FLIGHT`] at a time. Continues after a failure, and returns the
/// first error.
async fn refund_all(inner: &AnyStorage, mut slices: impl Iterator<Item = Unspent>) -> Result<(), StorageError> {
    let mut in_flight = Vec::<StorageFuture<()>>::new();
    let mut refunded = Ok(());
    poll_fn(|cx| {
        let mut is_pending = |refund: &mut StorageFuture<()>| match Pin::new(refund).poll(cx) {
            Poll::Pending => true,
            Poll::Ready(Ok(())) => false,
            Poll::Ready(Err(error)) => {
                if refunded.is_ok() {
                    refunded = Err(StorageError::from_boxed(error));
                }
                false
            }
        };
        in_flight.retain_mut(&mut is_pending);
        while in_flight.len() < IN_FLIGHT
            && let Some(slice) = slices.next()
        {
            let mut refund = inner.settle(&slice.policy, &slice.key, &slice.hit, 0);
            if is_pending(&mut refund) {
                in_flight.push(refund);
            }
        }
        if in_flight.is_empty() { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    refunded
}

//! The link of a process to the storage of its fleet.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use tokio::task::yield_now;
use tower_ratelimit::storage::{StorageError, StorageFuture, StorageRequest};
use tower_ratelimit::{Decision, Key, MemoryStorage, Op, Policy, Storage};

use super::spending::Windows;
use crate::random::Numbers;

/// The link of a process to the storage. It delays requests and replies, and loses some of them.
#[derive(Clone, Debug)]
pub(super) struct Link {
    storage: MemoryStorage,
    windows: Windows,
    numbers: Arc<Mutex<Numbers>>,
    /// The number of losses in 100 messages.
    losses: u64,
    /// `false` during an outage, in which every message is lost.
    is_up: Arc<AtomicBool>,
    /// The units of charges that the storage has executed, which it cannot refuse.
    charged: Arc<AtomicU64>,
}

impl Link {
    pub(super) fn new(storage: &MemoryStorage, windows: &Windows, losses: u64, numbers: &mut Numbers) -> Self {
        let numbers = Arc::new(Mutex::new(Numbers(numbers.below(u64::MAX) + 1)));
        let (storage, windows) = (storage.clone(), windows.clone());
        Self { storage, windows, numbers, losses, is_up: Arc::new(AtomicBool::new(true)), charged: Arc::default() }
    }

    /// Begins or ends an outage.
    pub(super) fn toggle(&self) {
        self.is_up.fetch_xor(true, Ordering::SeqCst);
    }

    /// Returns the units of the charges that were executed since the last call.
    pub(super) fn take_charged(&self) -> u64 {
        self.charged.swap(0, Ordering::SeqCst)
    }

    fn below(&self, limit: u64) -> u64 {
        self.numbers.lock().unwrap().below(limit)
    }

    async fn pass(&self, what: &'static str) -> Result<(), StorageError> {
        // Tasks are polled about once per step of the fleet.
        for _ in 0..self.below(4) {
            yield_now().await;
        }
        if self.below(100) < self.losses || !self.is_up.load(Ordering::SeqCst) {
            return Err(StorageError::from_boxed(what));
        }
        Ok(())
    }

    fn call<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T, StorageError>> + Send + 'static,
    ) -> StorageFuture<T> {
        let link = self.clone();
        StorageFuture::new(async move {
            link.pass("the request was lost").await?;
            let result = work.await;
            link.pass("the reply was lost").await?;
            result
        })
    }
}

impl Storage for Link {
    fn decide(&self, request: StorageRequest<'_>) -> StorageFuture<Decision> {
        let (link, policy, key) = (self.clone(), request.policy.clone(), request.key.clone());
        let (op, cost) = (request.op, request.cost);
        self.call(async move {
            let decision = link.storage.decide(StorageRequest::new(&policy, &key, op, cost)).await?;
            match op {
                Op::Hit if decision.is_admitted() => link.windows.record(&policy, &key, &decision),
                Op::Charge => drop(link.charged.fetch_add(u64::from(cost), Ordering::SeqCst)),
                _ => {}
            }
            Ok(decision)
        })
    }

    fn clear(&self, policy: &Policy, key: &Key) -> StorageFuture<()> {
        self.storage.clear(policy, key)
    }

    fn settle(&self, policy: &Policy, key: &Key, decision: &Decision, actual: u32) -> StorageFuture<()> {
        let (link, policy, key, decision) = (self.clone(), policy.clone(), key.clone(), decision.clone());
        self.call(async move {
            link.storage.settle(&policy, &key, &decision, actual).await?;
            link.charged.fetch_add(u64::from(actual.saturating_sub(decision.cost())), Ordering::SeqCst);
            Ok(())
        })
    }
}

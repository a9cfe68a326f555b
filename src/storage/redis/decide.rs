//! The [`Storage`] implementation: a script in one round trip, or compare-and-swap.

use std::sync::Arc;

use tokio::time::Instant;

use super::combine::run_alone;
use super::error::unexpected_script_reply;
use super::script::Scripts;
use super::{LABEL, RedisStorage, reply, size};
use crate::decision::Decision;
use crate::error::ConfigError;
use crate::key::Key;
use crate::policy::{Op, Policy};
use crate::storage::calls::measured;
use crate::storage::net::overloaded;
use crate::storage::{Storage, StorageError, StorageFuture, StorageRequest};
use crate::time::Timestamp;

impl Storage for RedisStorage {
    fn decide(&self, request: StorageRequest<'_>) -> StorageFuture<Decision> {
        if let Err(error) = size::check(request.policy) {
            return StorageFuture::ready(Err(StorageError::unsupported_policy(error)));
        }
        if let Some(error) = self.link.overload() {
            return StorageFuture::new(measured(LABEL, overloaded(error, self.deadline)));
        }
        let Some(call) = self.scripts.decide(&self.prefix, request, self.now()) else {
            return self.cas.decide(request);
        };
        let (storage, request) = (self.clone(), request.owned());
        StorageFuture::new(measured(LABEL, async move {
            let call = Arc::new(call);
            let deadline = Instant::now() + storage.deadline;
            let reply = storage.combiner.run(&storage.link, &call, deadline).await?;
            reply::decision(request.borrow(), &call, &reply).ok_or_else(|| unexpected_script_reply(&reply))
        }))
    }

    fn clear(&self, policy: &Policy, key: &Key) -> StorageFuture<()> {
        let Some(call) = self.scripts.clear(&self.prefix, policy, key, self.now()) else {
            return self.cas.clear(policy, key);
        };
        let storage = self.clone();
        let cleared = async move { run_alone(&storage.link, &call, Instant::now() + storage.deadline).await.map(drop) };
        StorageFuture::new(measured(LABEL, cleared))
    }

    fn settle(&self, policy: &Policy, key: &Key, decision: &Decision, actual: u32) -> StorageFuture<()> {
        if !decision.has_spent() || actual == decision.cost() {
            return StorageFuture::ok(());
        }
        let call = if actual > decision.cost() {
            let charge = StorageRequest::new(policy, key, Op::Charge, actual - decision.cost());
            self.scripts.decide(&self.prefix, charge, self.now())
        } else {
            self.scripts.refund(&self.prefix, policy, key, self.now(), decision, decision.cost() - actual)
        };
        let Some(call) = call else {
            return self.cas.settle(policy, key, decision, actual);
        };
        let storage = self.clone();
        let settled = async move { run_alone(&storage.link, &call, Instant::now() + storage.deadline).await.map(drop) };
        StorageFuture::new(measured(LABEL, settled))
    }

    /// Makes one check within the [timeout](RedisStorage::timeout), like those of
    /// [`ready`](RedisStorage::ready).
    fn check(&self) -> StorageFuture<()> {
        let storage = self.clone();
        StorageFuture::new(async move {
            storage.probe(Instant::now() + storage.deadline).await.map_err(StorageError::uncounted)
        })
    }

    /// Deletes all keys with the [prefix](RedisStorage::prefix), and returns their number. Visits
    /// every key on every server with `SCAN`, in steps. Each step has its own
    /// [timeout](RedisStorage::timeout).
    ///
    /// # Errors
    ///
    /// Returns the error of the first step that fails. Keys that were deleted before stay deleted.
    fn clear_all(&self) -> StorageFuture<u64> {
        let storage = self.clone();
        StorageFuture::new(async move { storage.delete_all().await })
    }

    fn validate(&self, policy: &Policy) -> Result<(), ConfigError> {
        size::check(policy)?;
        if Scripts::support(policy) { Ok(()) } else { self.cas.validate(policy) }
    }
}

impl RedisStorage {
    /// Returns the time of the clock that replaces the server's in tests, if there is one.
    fn now(&self) -> Option<Timestamp> {
        self.clock.as_ref().map(|clock| clock.now())
    }
}

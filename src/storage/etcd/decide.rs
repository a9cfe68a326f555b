//! What a storage is asked, done by comparing and swapping.

use std::pin::Pin;

use super::{EtcdStorage, EtcdStorageError};
use crate::storage::net::overloaded;
use crate::storage::{CasError, Storage, StorageRequest};
use crate::{ConfigError, Decision, Key, Policy};

type Later<T> = Pin<Box<dyn Future<Output = Result<T, EtcdStorageError>> + Send>>;

impl Storage for EtcdStorage {
    type Error = EtcdStorageError;
    type DecideFuture = Later<Decision>;
    type UpdateFuture = Later<()>;

    fn decide(&self, ask: StorageRequest<'_>) -> Self::DecideFuture {
        if let Some(error) = self.store.members.overload(self.deciding.busy_keys()) {
            return Box::pin(overloaded(error, self.store.deadline));
        }
        self.told(self.deciding.decide(ask))
    }

    fn clear(&self, policy: &Policy, key: &Key) -> Self::UpdateFuture {
        self.told(self.deciding.clear(policy, key))
    }

    fn refund(&self, policy: &Policy, key: &Key, decision: &Decision) -> Self::UpdateFuture {
        self.told(self.deciding.refund(policy, key, decision))
    }

    fn validate(&self, policy: &Policy) -> Result<(), ConfigError> {
        self.deciding.validate(policy)
    }
}

impl EtcdStorage {
    fn told<T>(&self, answer: impl Future<Output = Result<T, CasError>> + Send + 'static) -> Later<T> {
        let members = self.store.members.clone();
        Box::pin(async move { answer.await.map_err(|error| EtcdStorageError::of_deciding(&members.names(), error)) })
    }
}

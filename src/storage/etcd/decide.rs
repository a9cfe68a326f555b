//! The [`Storage`] implementation, on compare-and-swap.

use std::pin::Pin;

use super::{EtcdStorage, EtcdStorageError};
use crate::storage::net::overloaded;
use crate::storage::{CasError, Storage, StorageRequest};
use crate::{ConfigError, Decision, Key, Policy};

type BoxFuture<T> = Pin<Box<dyn Future<Output = Result<T, EtcdStorageError>> + Send>>;

impl Storage for EtcdStorage {
    type Error = EtcdStorageError;
    type DecideFuture = BoxFuture<Decision>;
    type UpdateFuture = BoxFuture<()>;

    fn decide(&self, request: StorageRequest<'_>) -> Self::DecideFuture {
        if let Some(error) = self.store.members.overload(self.cas.busy_keys()) {
            return Box::pin(overloaded(error, self.store.deadline));
        }
        self.with_storage_error(self.cas.decide(request))
    }

    fn clear(&self, policy: &Policy, key: &Key) -> Self::UpdateFuture {
        self.with_storage_error(self.cas.clear(policy, key))
    }

    fn settle(&self, policy: &Policy, key: &Key, decision: &Decision, actual: u32) -> Self::UpdateFuture {
        self.with_storage_error(self.cas.settle(policy, key, decision, actual))
    }

    fn validate(&self, policy: &Policy) -> Result<(), ConfigError> {
        self.cas.validate(policy)
    }
}

impl EtcdStorage {
    /// Converts the errors of [`Cas`](crate::storage::Cas).
    fn with_storage_error<T>(
        &self,
        result: impl Future<Output = Result<T, CasError>> + Send + 'static,
    ) -> BoxFuture<T> {
        let members = self.store.members.clone();
        Box::pin(async move { result.await.map_err(|error| EtcdStorageError::from_cas(&members.names(), error)) })
    }
}

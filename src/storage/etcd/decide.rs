//! The [`Storage`] implementation, on compare-and-swap.

use std::pin::Pin;

use super::{EtcdStorage, LABEL};
use crate::storage::calls::measured;
use crate::storage::net::overloaded;
use crate::storage::{Storage, StorageError, StorageRequest};
use crate::{ConfigError, Decision, Key, Policy};

type BoxFuture<T> = Pin<Box<dyn Future<Output = Result<T, StorageError>> + Send>>;

impl Storage for EtcdStorage {
    type Error = StorageError;
    type DecideFuture = BoxFuture<Decision>;
    type UpdateFuture = BoxFuture<()>;

    fn decide(&self, request: StorageRequest<'_>) -> Self::DecideFuture {
        if let Some(error) = self.store.members.overload(self.cas.busy_keys()) {
            return Box::pin(measured(LABEL, overloaded(error, self.store.deadline)));
        }
        self.naming_members(self.cas.decide(request))
    }

    fn clear(&self, policy: &Policy, key: &Key) -> Self::UpdateFuture {
        self.naming_members(self.cas.clear(policy, key))
    }

    fn settle(&self, policy: &Policy, key: &Key, decision: &Decision, actual: u32) -> Self::UpdateFuture {
        self.naming_members(self.cas.settle(policy, key, decision, actual))
    }

    /// Checks that etcd replies, and that the user may read.
    fn check(&self) -> impl Future<Output = Result<(), StorageError>> + Send + 'static {
        self.cas.check()
    }

    /// Deletes all keys with the prefix in one call. If that times out, the keys may have been
    /// deleted.
    fn clear_all(&self) -> impl Future<Output = Result<u64, StorageError>> + Send + 'static {
        let store = self.store.clone();
        async move { store.delete_all().await }
    }

    fn validate(&self, policy: &Policy) -> Result<(), ConfigError> {
        self.cas.validate(policy)
    }
}

impl EtcdStorage {
    /// Names the members in timeout errors of [`Cas`](crate::storage::Cas), which does not know
    /// them.
    fn naming_members<T: 'static>(&self, result: BoxFuture<T>) -> BoxFuture<T> {
        let members = self.store.members.clone();
        Box::pin(async move {
            result.await.map_err(|error| {
                if !error.is_timeout() {
                    return error;
                }
                StorageError::timed_out(&members.names()).with_may_have_counted(error.may_have_counted())
            })
        })
    }
}

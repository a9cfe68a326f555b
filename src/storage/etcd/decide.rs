//! The [`Storage`] implementation, on compare-and-swap.

use super::{EtcdStorage, LABEL};
use crate::decision::Decision;
use crate::error::ConfigError;
use crate::key::Key;
use crate::policy::Policy;
use crate::storage::calls::measured;
use crate::storage::net::overloaded;
use crate::storage::{Storage, StorageError, StorageFuture, StorageRequest};

impl Storage for EtcdStorage {
    fn decide(&self, request: StorageRequest<'_>) -> StorageFuture<Decision> {
        if let Some(error) = self.store.members.overload(self.cas.busy_keys()) {
            return StorageFuture::new(measured(LABEL, overloaded(error, self.store.deadline)));
        }
        self.naming_members(self.cas.decide(request))
    }

    fn clear(&self, policy: &Policy, key: &Key) -> StorageFuture<()> {
        self.naming_members(self.cas.clear(policy, key))
    }

    fn settle(&self, policy: &Policy, key: &Key, decision: &Decision, actual: u32) -> StorageFuture<()> {
        self.naming_members(self.cas.settle(policy, key, decision, actual))
    }

    /// Checks that etcd replies, and that the user may read.
    fn check(&self) -> StorageFuture<()> {
        self.cas.check()
    }

    /// Deletes all keys with the prefix in one call. If that times out, the keys may have been
    /// deleted.
    fn clear_all(&self) -> StorageFuture<u64> {
        let store = self.store.clone();
        StorageFuture::new(async move { store.delete_all().await })
    }

    fn validate(&self, policy: &Policy) -> Result<(), ConfigError> {
        self.cas.validate(policy)
    }
}

impl EtcdStorage {
    /// Names the members in timeout errors of [`Cas`](crate::storage::Cas), which does not know
    /// them.
    fn naming_members<T: Send + 'static>(&self, result: StorageFuture<T>) -> StorageFuture<T> {
        let members = self.store.members.clone();
        result.map(move |result| {
            result.map_err(|error| {
                if !error.is_timeout() {
                    return error;
                }
                StorageError::timed_out(&members.names()).with_may_have_counted(error.may_have_counted())
            })
        })
    }
}

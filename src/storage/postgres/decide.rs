//! The [`Storage`] implementation, on compare-and-swap.

use super::{LABEL, PostgresStorage};
use crate::decision::Decision;
use crate::error::ConfigError;
use crate::key::Key;
use crate::policy::Policy;
use crate::storage::calls::measured;
use crate::storage::net::{MOST, overloaded};
use crate::storage::{Storage, StorageError, StorageFuture, StorageRequest};

impl Storage for PostgresStorage {
    fn decide(&self, request: StorageRequest<'_>) -> StorageFuture<Decision> {
        if let Some(error) = self.overload() {
            return StorageFuture::new(measured(LABEL, overloaded(error, self.store.deadline)));
        }
        self.cas.decide(request)
    }

    fn clear(&self, policy: &Policy, key: &Key) -> StorageFuture<()> {
        self.cas.clear(policy, key)
    }

    fn settle(&self, policy: &Policy, key: &Key, decision: &Decision, actual: u32) -> StorageFuture<()> {
        self.cas.settle(policy, key, decision, actual)
    }

    /// Checks that the server replies, and that the table can be read.
    fn check(&self) -> StorageFuture<()> {
        self.cas.check()
    }

    /// Deletes all keys with the prefix in one statement. If that times out, either all of the keys
    /// were deleted or none.
    fn clear_all(&self) -> StorageFuture<u64> {
        let store = self.store.clone();
        StorageFuture::new(async move { store.delete_all().await })
    }

    fn validate(&self, policy: &Policy) -> Result<(), ConfigError> {
        self.cas.validate(policy)
    }
}

impl PostgresStorage {
    /// Returns an error if too many calls are in flight.
    fn overload(&self) -> Option<StorageError> {
        let (busy, most) = (self.cas.busy_keys(), MOST * self.store.link.connections().max(1));
        let error = || StorageError::overloaded(self.store.link.server(), busy);
        (busy >= most).then(error).or_else(|| self.store.link.overload())
    }
}

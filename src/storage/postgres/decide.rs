//! The [`Storage`] implementation, on compare-and-swap.

use std::pin::Pin;

use super::{LABEL, PostgresStorage};
use crate::storage::calls::measured;
use crate::storage::net::{MOST, overloaded};
use crate::storage::{Storage, StorageError, StorageRequest};
use crate::{ConfigError, Decision, Key, Policy};

type BoxFuture<T> = Pin<Box<dyn Future<Output = Result<T, StorageError>> + Send>>;

impl Storage for PostgresStorage {
    type Error = StorageError;
    type DecideFuture = BoxFuture<Decision>;
    type UpdateFuture = BoxFuture<()>;

    fn decide(&self, request: StorageRequest<'_>) -> Self::DecideFuture {
        if let Some(error) = self.overload() {
            return Box::pin(measured(LABEL, overloaded(error, self.store.deadline)));
        }
        self.cas.decide(request)
    }

    fn clear(&self, policy: &Policy, key: &Key) -> Self::UpdateFuture {
        self.cas.clear(policy, key)
    }

    fn settle(&self, policy: &Policy, key: &Key, decision: &Decision, actual: u32) -> Self::UpdateFuture {
        self.cas.settle(policy, key, decision, actual)
    }

    /// Checks that the server replies, and that the table can be read.
    fn check(&self) -> impl Future<Output = Result<(), StorageError>> + Send + 'static {
        self.cas.check()
    }

    /// Deletes all keys with the prefix in one statement. If that times out, either all of the keys
    /// were deleted or none.
    fn clear_all(&self) -> impl Future<Output = Result<u64, StorageError>> + Send + 'static {
        let store = self.store.clone();
        async move { store.delete_all().await }
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

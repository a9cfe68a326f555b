//! The [`CasStorage`], on etcd transactions.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::error::is_lease_not_found;
use super::lease::Leases;
use super::link::Members;
use super::wire::{Compare, Delete, DeleteRange, OpKind, Put, Range, RangeResponse, Txn};
use crate::storage::{CasStorage, Loaded, StorageError, Swapped};

/// The longest value, in bytes. By default, etcd accepts calls of at most 1,572,864 bytes,
/// including the key (`--max-request-bytes`).
const MAX_LEN: usize = 1_500_000;

#[derive(Clone, Debug)]
pub(super) struct Store {
    pub(super) members: Members,
    pub(super) leases: Arc<Leases>,
    pub(super) prefix: Arc<str>,
    pub(super) deadline: Duration,
}

impl CasStorage for Store {
    type Error = StorageError;
    /// The revision of the last change, or 0 for a missing key. Revisions are never reused.
    type Version = i64;

    async fn load(&self, key: &str) -> Result<Loaded<i64>, StorageError> {
        let response = self.members.call(&Range { key: self.key(key) }, self.deadline()).await;
        response.map(loaded).map_err(StorageError::uncounted)
    }

    async fn swap(&self, key: &str, version: &i64, text: &str, keep: Duration) -> Result<Swapped<i64>, StorageError> {
        let (key, deadline) = (self.key(key), self.deadline());
        let mut is_first = true;
        loop {
            let lease = if text.is_empty() {
                None
            } else {
                let lease = self.leases.get(keep, &self.members, deadline).await;
                Some(lease.map_err(StorageError::uncounted)?)
            };
            let change = match &lease {
                None => OpKind::Delete(Delete { key: key.clone() }),
                Some(lease) => OpKind::Put(Put { key: key.clone(), value: text.into(), lease: lease.id() }),
            };
            // If another process has changed the value, the same call loads it.
            let txn = Txn {
                when: vec![Compare::last_changed_in(&key, *version)],
                then: vec![change.into()],
                otherwise: vec![OpKind::Range(Range { key: key.clone() }).into()],
            };
            match (self.members.call(&txn, deadline).await, lease) {
                (Ok(response), _) if response.succeeded => return Ok(Swapped::Stored),
                (Ok(response), _) => {
                    let found = response.responses.into_iter().next().and_then(|response| response.range);
                    return Ok(Swapped::Lost(found.map(loaded)));
                }
                // The lease has ended. Nothing was written, so a retry is safe.
                (Err(error), Some(lease)) if is_lease_not_found(&error) && is_first => lease.discard(),
                (Err(error), _) => return Err(error),
            }
            is_first = false;
        }
    }

    async fn check(&self) -> Result<(), StorageError> {
        self.ping(self.deadline()).await
    }

    fn longest(&self) -> Option<usize> {
        Some(MAX_LEN)
    }
}

impl Store {
    /// Checks that etcd replies, and that the user may read.
    pub(super) async fn ping(&self, deadline: Instant) -> Result<(), StorageError> {
        let response = self.members.call(&Range { key: self.key("") }, deadline).await;
        response.map(drop).map_err(StorageError::uncounted)
    }

    /// Deletes all keys of the prefix, and returns their number.
    pub(super) async fn delete_all(&self) -> Result<u64, StorageError> {
        let all = DeleteRange { key: self.key(""), end: format!("{};", self.prefix).into() };
        let response = self.members.call(&all, self.deadline()).await?;
        Ok(u64::try_from(response.deleted).unwrap_or(0))
    }

    fn key(&self, key: &str) -> Vec<u8> {
        format!("{}:{key}", self.prefix).into()
    }

    fn deadline(&self) -> Instant {
        Instant::now() + self.deadline
    }
}

/// Converts the response. A missing key is an empty text of version 0.
fn loaded(response: RangeResponse) -> Loaded<i64> {
    let found = response.found.into_iter().next();
    let (value, version) = found.map_or((Vec::new(), 0), |found| (found.value, found.mod_revision));
    Loaded { text: String::from_utf8_lossy(&value).into_owned(), version, now: None }
}

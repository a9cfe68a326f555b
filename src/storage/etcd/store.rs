//! The [`CasStorage`], on etcd transactions.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::connection::is_lease_not_found;
use super::lease::EtcdLeases;
use super::members::Members;
use super::wire::{Compare, DeleteRangeRequest, OpKind, PutRequest, RangeRequest, RangeResponse, TxnRequest};
use crate::storage::cas::ServerStore;
use crate::storage::{CasStorage, Loaded, StorageError, Swapped, names};

/// The longest value, in bytes. By default, etcd accepts calls of at most 1,572,864 bytes,
/// including the key (`--max-request-bytes`).
const MAX_LEN: usize = 1_500_000;

/// The keys of a cluster.
#[derive(Clone)]
pub(super) struct EtcdStore {
    pub(super) members: Members,
    leases: Arc<EtcdLeases>,
}

impl EtcdStore {
    pub(super) fn new(members: Members) -> Self {
        Self { members, leases: Arc::new(EtcdLeases::new()) }
    }
}

impl CasStorage for EtcdStore {
    type Error = StorageError;
    /// The revision of the last change, or 0 for a missing key. Revisions are never reused.
    type Version = i64;

    async fn load(&self, key: &str, deadline: Instant) -> Result<Loaded<i64>, StorageError> {
        let response = self.members.call(&RangeRequest { key: key.into() }, deadline.into()).await;
        response.map(loaded).map_err(StorageError::uncounted)
    }

    async fn swap(
        &self,
        key: &str,
        version: &i64,
        text: &str,
        keep: Duration,
        deadline: Instant,
    ) -> Result<Swapped<i64>, StorageError> {
        let (key, deadline) = (Vec::from(key), deadline.into());
        let mut is_first = true;
        loop {
            let lease = if text.is_empty() {
                None
            } else {
                let lease = self.leases.get(keep, &self.members, deadline).await;
                Some(lease.map_err(StorageError::uncounted)?)
            };
            let change = match &lease {
                None => OpKind::Delete(DeleteRangeRequest { key: key.clone(), end: Vec::new() }),
                Some(lease) => OpKind::Put(PutRequest { key: key.clone(), value: text.into(), lease: lease.id() }),
            };
            // If another process has changed the value, the same call loads it.
            let txn = TxnRequest {
                when: vec![Compare::last_changed_in(&key, *version)],
                then: vec![change.into()],
                otherwise: vec![OpKind::Range(RangeRequest { key: key.clone() }).into()],
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

    fn longest(&self) -> Option<usize> {
        Some(MAX_LEN)
    }
}

impl ServerStore for EtcdStore {
    const LABEL: &'static str = "etcd";

    fn name(&self) -> String {
        self.members.names()
    }

    fn overload(&self, busy_keys: usize) -> Option<StorageError> {
        self.members.overload(busy_keys)
    }

    async fn delete_all(&self, prefix: &str, deadline: Instant) -> Result<u64, StorageError> {
        let all = DeleteRangeRequest { key: prefix.into(), end: names::after(prefix).into() };
        let response = self.members.call(&all, deadline.into()).await?;
        Ok(u64::try_from(response.deleted).unwrap_or(0))
    }
}

impl fmt::Debug for EtcdStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.members.fmt(f)
    }
}

/// Converts the response. A missing key is an empty text of version 0.
fn loaded(response: RangeResponse) -> Loaded<i64> {
    let found = response.found.into_iter().next();
    let (value, version) = found.map_or((Vec::new(), 0), |found| (found.value, found.mod_revision));
    Loaded { text: String::from_utf8_lossy(&value).into_owned(), version, now: None }
}

//! The [`CasStorage`], on etcd transactions.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::connection::is_lease_not_found;
use super::lease::{EtcdLeases, KeyLease};
use super::members::Members;
use super::wire::{
    Compare, DeleteRangeRequest, OpKind, PutRequest, RangeRequest, RangeResponse, ReadTxnRequest, RequestOp,
    TxnRequest, TxnResponse,
};
use crate::storage::cas::{KeySwap, ServerStore, SeveralFuture, SeveralKeys, SwappedAll};
use crate::storage::{CasStorage, Loaded, StorageError, Swapped, names};
use crate::sync::join_all;

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
        let swap = KeySwap { key: &key.into(), version, change: Some((text, keep)) };
        Ok(match self.transact(&[swap], deadline).await? {
            SwappedAll::Stored => Swapped::Stored,
            SwappedAll::Lost(found) => Swapped::Lost(found.and_then(|mut found| found.pop())),
        })
    }

    fn longest(&self) -> Option<usize> {
        Some(MAX_LEN)
    }
}

impl SeveralKeys<i64> for EtcdStore {
    fn load_all<'a>(&'a self, keys: &'a [Arc<str>], deadline: Instant) -> SeveralFuture<'a, Vec<Loaded<i64>>> {
        Box::pin(async move {
            let reads = keys.iter().map(|key| read(key)).collect();
            let response = self.members.call(&ReadTxnRequest { reads }, deadline.into()).await?;
            all_loaded(response, keys.len()).ok_or_else(|| self.unexpected_reply())
        })
    }

    fn swap_all<'a>(&'a self, swaps: &'a [KeySwap<'a, i64>], deadline: Instant) -> SeveralFuture<'a, SwappedAll<i64>> {
        Box::pin(self.transact(swaps, deadline))
    }
}

impl EtcdStore {
    /// Stores all texts in one transaction. If another process has changed one of them, the same call
    /// loads them.
    async fn transact(&self, swaps: &[KeySwap<'_, i64>], deadline: Instant) -> Result<SwappedAll<i64>, StorageError> {
        let deadline = deadline.into();
        let when = swaps.iter().map(|swap| Compare::last_changed_in(swap.key.as_bytes(), *swap.version));
        let (when, otherwise): (Vec<_>, Vec<_>) = when.zip(swaps.iter().map(|swap| read(swap.key))).unzip();
        let mut is_first = true;
        loop {
            let keeps = swaps.iter().filter_map(|swap| swap.change).filter(|(text, _)| !text.is_empty());
            let granted = keeps.map(|(_, keep)| Box::pin(self.leases.get(keep, &self.members, deadline)));
            let granted = join_all(granted.collect()).await.into_iter().collect::<Result<Vec<_>, _>>();
            let leases = granted.map_err(StorageError::uncounted)?;
            let mut ids = leases.iter().map(KeyLease::id);
            let write = |swap: &KeySwap<'_, i64>| {
                let key = Vec::from(swap.key.as_bytes());
                Some(match swap.change? {
                    ("", _) => OpKind::Delete(DeleteRangeRequest { key, end: Vec::new() }).into(),
                    (text, _) => OpKind::Put(PutRequest { key, value: text.into(), lease: ids.next()? }).into(),
                })
            };
            let then = swaps.iter().filter_map(write).collect();
            let txn = TxnRequest { when: when.clone(), then, otherwise: otherwise.clone() };
            match self.members.call(&txn, deadline).await {
                Ok(response) if response.succeeded => return Ok(SwappedAll::Stored),
                Ok(response) => return Ok(SwappedAll::Lost(all_loaded(response, swaps.len()))),
                // A lease has ended. Nothing was written, so a retry is safe.
                Err(error) if is_lease_not_found(&error) && is_first => {
                    leases.into_iter().for_each(KeyLease::discard);
                }
                Err(error) => return Err(error),
            }
            is_first = false;
        }
    }

    fn unexpected_reply(&self) -> StorageError {
        StorageError::unexpected_reply(&self.members.names(), "the response has not all keys of the call")
    }
}

impl ServerStore for EtcdStore {
    const LABEL: &'static str = "etcd";

    fn name(&self) -> String {
        self.members.names()
    }

    fn several(&self) -> Option<Arc<dyn SeveralKeys<i64>>> {
        Some(Arc::new(self.clone()))
    }

    fn overload(&self, busy_keys: usize) -> Option<StorageError> {
        self.members.overload(busy_keys)
    }

    async fn first_connection(&self) {
        self.members.first_connection().await;
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

/// Returns the operation that reads a key.
fn read(key: &str) -> RequestOp {
    OpKind::Range(RangeRequest { key: key.into() }).into()
}

/// Returns the texts of the keys of a transaction, or `None` if the response has not all of them.
fn all_loaded(response: TxnResponse, keys: usize) -> Option<Vec<Loaded<i64>>> {
    let found: Option<Vec<_>> = response.responses.into_iter().map(|response| response.range.map(loaded)).collect();
    found.filter(|found| found.len() == keys)
}

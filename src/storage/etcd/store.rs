//! The [`CasStorage`], on etcd transactions.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::connection::is_lease_not_found;
use super::lease::{EtcdLeases, KeyLease};
use super::members::Members;
use super::wire::{
    Compare, DeleteRangeRequest, Header, ListRequest, OpKind, PutRequest, RangeRequest, RangeResponse, ReadTxnRequest,
    RequestOp, TxnRequest, TxnResponse,
};
use crate::storage::cas::{
    KeySwap, RecentTexts, ServerStore, SeveralFuture, SeveralKeys, SwapCombiner, SwapEach, SwappedAll, TextSwap,
    VERSION_LASTS,
};
use crate::storage::listing::NameRange;
use crate::storage::{CasStorage, Loaded, StorageError, Swapped, names};
use crate::sync::join_all;

/// The longest value, in bytes. By default, etcd accepts calls of at most 1,572,864 bytes,
/// including the key (`--max-request-bytes`).
const MAX_LEN: usize = 1_500_000;

/// The number of swaps in flight from which others wait, to go together in one transaction.
const LANES: usize = 4;

/// The keys of a cluster.
#[derive(Clone)]
pub(super) struct EtcdStore {
    pub(super) members: Members,
    leases: Arc<EtcdLeases>,
    recent: Arc<RecentTexts<i64>>,
    combiner: SwapCombiner<i64>,
}

impl EtcdStore {
    pub(super) fn new(members: Members) -> Self {
        let (leases, combiner) = (Arc::new(EtcdLeases::new()), SwapCombiner::new(LANES));
        Self { members, leases, recent: Arc::default(), combiner }
    }
}

impl CasStorage for EtcdStore {
    type Error = StorageError;
    /// The revision of the last change, or 0 for a missing key. Revisions are never reused.
    type Version = i64;

    /// Knows no text after a failed swap, so the next hit on the key reads first. Another member can
    /// execute a read if this one hangs.
    fn recall(&self, key: &str) -> Option<Loaded<i64>> {
        let (text, version) = self.recent.recall(key, VERSION_LASTS)?;
        Some(Loaded { text, version, now: None })
    }

    async fn load(&self, key: &str, deadline: Instant) -> Result<Loaded<i64>, StorageError> {
        let response = self.members.call(&RangeRequest { key: key.into() }, deadline.into()).await;
        response.map(loaded).map_err(StorageError::uncounted)
    }

    async fn swap(
        &self,
        key: &str,
        version: &i64,
        text: &str,
        time_to_live: Duration,
        deadline: Instant,
    ) -> Result<Swapped<i64>, StorageError> {
        let swap = TextSwap { key: key.into(), version: *version, text: text.to_owned(), time_to_live };
        self.combiner.swap(self, swap, deadline).await
    }

    fn max_text_len(&self) -> Option<usize> {
        Some(MAX_LEN)
    }
}

impl SwapEach for EtcdStore {
    const IS_CANCELLED: bool = false;

    fn name(&self) -> String {
        self.members.names()
    }

    async fn swap_alone(&self, swap: &TextSwap<i64>, deadline: Instant) -> Result<Swapped<i64>, StorageError> {
        Ok(match self.transact(&[swap.as_key_swap()], deadline).await? {
            SwappedAll::Stored => Swapped::Stored,
            SwappedAll::Lost(found) => Swapped::Lost(found.and_then(|mut found| found.pop())),
        })
    }

    /// Sends a transaction that contains one for each key.
    async fn swap_each(
        &self,
        swaps: &[TextSwap<i64>],
        deadline: Instant,
    ) -> Result<Vec<Option<Swapped<i64>>>, StorageError> {
        for swap in swaps {
            self.recent.forget(&swap.key);
        }
        let leases = self.leases(swaps.iter().map(TextSwap::as_key_swap), deadline).await?;
        let mut ids = leases.iter().map(KeyLease::id);
        let txns = swaps.iter().map(|swap| OpKind::Txn(txn(&[swap.as_key_swap()], &mut ids)).into());
        let all = TxnRequest { when: Vec::new(), then: txns.collect(), otherwise: Vec::new() };
        let response = match self.members.call(&all, deadline.into()).await {
            // A lease has ended. Nothing was written.
            Err(error) if is_lease_not_found(&error) => {
                leases.into_iter().for_each(KeyLease::discard);
                return Ok(Vec::new());
            }
            response => response?,
        };
        if response.responses.len() != swaps.len() {
            return Err(self.unexpected_reply());
        }
        let header = response.header;
        let swapped = swaps.iter().zip(response.responses).map(|(swap, response)| {
            let response = response.txn.ok_or_else(|| self.unexpected_reply())?;
            if response.succeeded {
                self.record(&swap.as_key_swap(), header);
                return Ok(Some(Swapped::Stored));
            }
            let found = self.lost(&[swap.as_key_swap()], response);
            Ok(Some(Swapped::Lost(found.and_then(|mut found| found.pop()))))
        });
        swapped.collect()
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
        let mut is_first = true;
        for swap in swaps.iter().filter(|swap| swap.change.is_some()) {
            self.recent.forget(swap.key);
        }
        loop {
            let leases = self.leases(swaps.iter().copied(), deadline).await?;
            let txn = txn(swaps, &mut leases.iter().map(KeyLease::id));
            match self.members.call(&txn, deadline.into()).await {
                Ok(response) if response.succeeded => {
                    for swap in swaps {
                        self.record(swap, response.header);
                    }
                    return Ok(SwappedAll::Stored);
                }
                Ok(response) => return Ok(SwappedAll::Lost(self.lost(swaps, response))),
                // A lease has ended. Nothing was written, so a retry is safe.
                Err(error) if is_lease_not_found(&error) && is_first => {
                    leases.into_iter().for_each(KeyLease::discard);
                }
                Err(error) => return Err(error),
            }
            is_first = false;
        }
    }

    /// Returns the lease of each text that is stored.
    async fn leases<'a>(
        &self,
        swaps: impl Iterator<Item = KeySwap<'a, i64>>,
        deadline: Instant,
    ) -> Result<Vec<KeyLease>, StorageError> {
        let keeps = swaps.filter_map(|swap| swap.change).filter(|(text, _)| !text.is_empty());
        let granted =
            keeps.map(|(_, time_to_live)| Box::pin(self.leases.get(time_to_live, &self.members, deadline.into())));
        let granted = join_all(granted.collect()).await.into_iter().collect::<Result<Vec<_>, _>>();
        granted.map_err(StorageError::uncounted)
    }

    /// Records a text that a transaction has stored.
    fn record(&self, swap: &KeySwap<'_, i64>, header: Option<Header>) {
        if let (Some((text, _)), Some(Header { revision })) = (swap.change, header) {
            self.recent.record(swap.key, text, revision);
        }
    }

    /// Returns the texts to which a transaction was lost, or `None` if the response has not all of them.
    fn lost(&self, swaps: &[KeySwap<'_, i64>], response: TxnResponse) -> Option<Vec<Loaded<i64>>> {
        let found = all_loaded(response, swaps.len())?;
        for (swap, found) in swaps.iter().zip(&found).filter(|(swap, found)| found.version != *swap.version) {
            // The key has expired, or was cleared. Otherwise, another process has changed it.
            if found.version == 0 { self.recent.forget(swap.key) } else { self.recent.set_shared(swap.key) }
        }
        Some(found)
    }

    fn unexpected_reply(&self) -> StorageError {
        StorageError::unexpected_reply(&self.members.names(), "the response has not all keys of the call")
    }
}

impl ServerStore for EtcdStore {
    const LABEL: &'static str = "etcd";

    fn name(&self) -> String {
        SwapEach::name(self)
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

    async fn list(&self, range: &NameRange, deadline: Instant) -> Result<Vec<String>, StorageError> {
        // The first text after another one is the text with a zero byte.
        let next = format!("{}\0", range.after);
        let key = if range.after.is_empty() { range.first.clone() } else { next.max(range.first.clone()) };
        let limit = i64::try_from(range.limit).unwrap_or(i64::MAX);
        let list = ListRequest { key: key.into(), end: range.end.clone().into(), limit, keys_only: true };
        let response = self.members.call(&list, deadline.into()).await?;
        Ok(response.found.into_iter().map(|found| String::from_utf8_lossy(&found.key).into_owned()).collect())
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

/// Returns the texts of the keys of a transaction, or `None` if the response has not all of them.
fn all_loaded(response: TxnResponse, keys: usize) -> Option<Vec<Loaded<i64>>> {
    let found: Option<Vec<_>> = response.responses.into_iter().map(|response| response.range.map(loaded)).collect();
    found.filter(|found| found.len() == keys)
}

/// Returns the transaction that stores all texts if no version has changed, and loads them otherwise.
/// Takes the next lease for each text.
fn txn(swaps: &[KeySwap<'_, i64>], leases: &mut impl Iterator<Item = i64>) -> TxnRequest {
    let write = |swap: &KeySwap<'_, i64>| {
        let key = Vec::from(swap.key.as_bytes());
        Some(match swap.change? {
            ("", _) => OpKind::Delete(DeleteRangeRequest { key, end: Vec::new() }).into(),
            (text, _) => OpKind::Put(PutRequest { key, value: text.into(), lease: leases.next()? }).into(),
        })
    };
    TxnRequest {
        when: swaps.iter().map(|swap| Compare::last_changed_in(swap.key.as_bytes(), *swap.version)).collect(),
        then: swaps.iter().filter_map(write).collect(),
        otherwise: swaps.iter().map(|swap| read(swap.key)).collect(),
    }
}

/// Returns the operation that reads a key.
fn read(key: &str) -> RequestOp {
    OpKind::Range(RangeRequest { key: key.into() }).into()
}

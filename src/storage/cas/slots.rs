//! Slots on a store with compare-and-swap.

use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::time::{Instant, sleep, timeout_at};

use super::job::late;
use super::shared::{CasShared, store_deadline};
use super::worker::backoff;
use super::{Cas, CasStorage, Swapped};
use crate::key::Key;
use crate::policy::Policy;
use crate::storage::metrics::measured;
use crate::storage::slots::{Claim, Granted, Ledger, SlotStore};
use crate::storage::{StorageError, StorageErrorKind, StorageFuture, names};

/// The begin of the names of ledgers. No name of a policy begins with it, because it is encoded there.
const NAMESPACE: char = '*';

/// The number of lost races after which a claim fails as contended.
const MAX_LOST_SWAPS: u32 = 24;

/// The number of retries without a delay.
const IMMEDIATE_RETRIES: u32 = 4;

impl<S: CasStorage> SlotStore for Cas<S> {
    fn claim(&self, policy: &Policy, key: &Key, claim: Claim) -> StorageFuture<Granted> {
        let name = format!("{}{NAMESPACE}{}", self.prefix, names::of(policy, key));
        let claimed = run(Arc::clone(&self.shared), name, claim, self.timeout);
        StorageFuture::new(measured(self.label, claimed))
    }
}

async fn run<S: CasStorage>(
    shared: Arc<CasShared<S>>,
    name: String,
    claim: Claim,
    timeout: Duration,
) -> Result<Granted, StorageError> {
    Handle::try_current().map_err(|_| StorageError::no_runtime())?;
    let (deadline, store_deadline) = (Instant::now() + timeout, store_deadline(timeout));
    let (store, mut newest) = (&shared.store, None);
    for attempt in 0..MAX_LOST_SWAPS {
        let loaded = match newest.take() {
            Some(loaded) => loaded,
            // A call that begins after the store's deadline could not wait for the reply.
            None if Instant::now() >= store_deadline.into() => return Err(contended()),
            None => timeout_at(deadline, store.load(&name, store_deadline))
                .await
                .map_err(|_| late(&shared.store_name, false))?
                .map_err(|error| StorageError::from_boxed(error).uncounted())?,
        };
        let now = shared.now(&loaded);
        let mut ledger = Ledger::parse(&loaded.text).ok_or_else(unknown_ledger)?;
        let granted = ledger.claim(now, &claim);
        let text = ledger.to_text();
        let swap = store.swap(&name, &loaded.version, &text, ledger.keep(now), store_deadline);
        let swapped = timeout_at(deadline, swap).await.map_err(|_| late(&shared.store_name, true))?;
        match swapped.map_err(StorageError::from_boxed)? {
            Swapped::Stored => return Ok(granted),
            Swapped::Lost(newer) => newest = newer.filter(|_| attempt < IMMEDIATE_RETRIES),
        }
        if newest.is_none() {
            sleep(backoff(attempt)).await;
        }
    }
    Err(contended())
}

/// Creates the error of a claim that lost every race.
fn contended() -> StorageError {
    let message = "other processes changed the slots of the key before every swap, nothing was claimed; try again";
    StorageError::new(StorageErrorKind::Contended, message)
}

/// Creates the error of a claim on a ledger of another version of this crate.
fn unknown_ledger() -> StorageError {
    let message = "the slots of the key have an unknown format, which another version of this program wrote; upgrade \
                   all processes, or use another prefix for each version";
    StorageError::new(StorageErrorKind::Unsupported, message)
}

//! The claims of a layer whose slots are shared with other processes.
//!
//! One task makes the claims of a key, one after the other, while requests wait or slots are to be given
//! back. Another task, in `renewing.rs`, renews the slots of all keys.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::runtime::{Handle, Id};
use tokio::sync::Notify;
use tokio::time::timeout;

use super::row::{Ask, Next};
use super::slots::number_of_slots;
use super::table::SlotTable;
use crate::storage::{Claim, Granted, SlotStore, StorageError, StorageFuture, TableKey};
use crate::sync::unpoisoned;

/// The time between two claims while requests wait for slots of other processes.
const POLL: Duration = Duration::from_millis(100);

/// The number of runtimes that a layer remembers.
const RUNTIMES: usize = 64;

/// The source of the claims of a layer.
pub(super) struct Claims {
    store: Arc<dyn SlotStore>,
    /// Identifies this layer in this process.
    process: u64,
    sequence: AtomicU64,
    time_to_live: Duration,
    /// The runtimes of claims. That of the last claim is the last one. A body can be dropped on a thread
    /// without a runtime.
    runtimes: Mutex<Vec<Handle>>,
    /// Notified when the task of a row has ended.
    pub(super) idle: Notify,
}

impl Claims {
    pub(super) fn new(store: Arc<dyn SlotStore>, time_to_live: Duration) -> Arc<Self> {
        Arc::new(Self {
            store,
            process: RandomState::new().hash_one(time_to_live),
            sequence: AtomicU64::new(1),
            time_to_live,
            runtimes: Mutex::default(),
            idle: Notify::new(),
        })
    }

    /// Returns the current runtime, or else that of the last claim.
    pub(super) fn runtime(&self) -> Option<Handle> {
        let mut runtimes = unpoisoned(self.runtimes.lock());
        if let Ok(current) = Handle::try_current()
            && runtimes.last().is_none_or(|last| last.id() != current.id())
        {
            runtimes.retain(|runtime| runtime.id() != current.id());
            if runtimes.len() == RUNTIMES {
                runtimes.remove(0);
            }
            runtimes.push(current);
        }
        runtimes.last().cloned()
    }

    /// Forgets a runtime that has ended. Returns the last one of the others.
    pub(super) fn runtime_after(&self, ended: Id) -> Option<Handle> {
        let mut runtimes = unpoisoned(self.runtimes.lock());
        runtimes.retain(|runtime| runtime.id() != ended);
        runtimes.last().cloned()
    }

    /// Returns the task that makes the claims of a row.
    pub(super) fn task(self: &Arc<Self>, table: &Arc<SlotTable>, row: TableKey) -> RowTask {
        RowTask { claims: Arc::clone(self), table: Arc::clone(table), row, entered: table.entered(row), is_done: false }
    }

    pub(super) fn time_to_live(&self) -> Duration {
        self.time_to_live
    }

    fn claim(&self, ask: &Ask) -> StorageFuture<Granted> {
        let &Ask { ref policy, ref key, least, first, most, .. } = ask;
        let sequence = self.sequence.fetch_add(1, Ordering::Relaxed);
        let (process, time_to_live, slots) = (self.process, self.time_to_live, number_of_slots(policy));
        self.store.claim(policy, key, Claim { process, sequence, least, first, most, slots, time_to_live })
    }
}

/// The task that makes the claims of a row. If it is dropped early, the waiting requests fail.
pub(super) struct RowTask {
    claims: Arc<Claims>,
    table: Arc<SlotTable>,
    row: TableKey,
    /// Notified when a request enters the queue of the row.
    entered: Arc<Notify>,
    is_done: bool,
}

impl RowTask {
    pub(super) async fn run(mut self) {
        let notify = Arc::clone(&self.entered);
        loop {
            // A request that enters after the claim makes the next one, because it may hold a
            // permit of the inner service until it has an answer.
            let entered = notify.notified();
            match self.step().await {
                (Next::Done, _) => return,
                (Next::Again, _) => {}
                (Next::Poll, _) => _ = timeout(POLL, entered).await,
            }
        }
    }

    /// Makes a claim. Returns the next step, and the error of the claim.
    pub(super) async fn step(&mut self) -> (Next, Option<StorageError>) {
        let (next, error) = match self.table.ask(self.row, self.claims.time_to_live) {
            None => (Next::Done, None),
            Some(ask) => {
                let claimed = self.claims.claim(&ask).await;
                (self.table.apply(self.row, &ask, &claimed), claimed.err())
            }
        };
        self.is_done = next == Next::Done;
        (next, error)
    }
}

impl Drop for RowTask {
    fn drop(&mut self) {
        if !self.is_done {
            self.table.abandon(self.row);
        }
        self.claims.idle.notify_waiters();
    }
}

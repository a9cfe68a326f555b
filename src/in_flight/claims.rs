//! The claims of a layer whose slots are shared with other processes.
//!
//! One task makes the claims of a key, one after the other, while requests wait or slots are to be given
//! back. Another task renews the slots of all keys every third of their time to live.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, sleep};

use super::metrics::report_failed_renewals;
use super::row::{Ask, Next};
use super::slots::number_of_slots;
use super::table::SlotTable;
use crate::storage::{Claim, Granted, SlotStore, StorageError, StorageFuture, TableKey};
use crate::sync::unpoisoned;

/// The time between two claims while requests wait for slots of other processes.
const POLL: Duration = Duration::from_millis(100);

/// The number of claims that are in flight at once while slots are renewed.
const RENEWALS: usize = 64;

/// The source of the claims of a layer.
pub(super) struct Claims {
    store: Arc<dyn SlotStore>,
    /// Identifies this layer in this process.
    process: u64,
    sequence: AtomicU64,
    time_to_live: Duration,
    /// The runtime of the last claim. A body can be dropped on a thread without one.
    runtime: Mutex<Option<Handle>>,
    is_renewing: AtomicBool,
}

impl Claims {
    pub(super) fn new(store: Arc<dyn SlotStore>, time_to_live: Duration) -> Arc<Self> {
        Arc::new(Self {
            store,
            process: RandomState::new().hash_one(time_to_live),
            sequence: AtomicU64::new(1),
            time_to_live,
            runtime: Mutex::default(),
            is_renewing: AtomicBool::new(false),
        })
    }

    /// Starts a task that makes the claims of a row. Without a runtime, its waiting requests fail.
    pub(super) fn start(self: &Arc<Self>, table: &Arc<SlotTable>, row: TableKey) {
        let task = self.task(table, row);
        let Some(runtime) = self.runtime() else { return };
        if !self.is_renewing.swap(true, Ordering::Relaxed) {
            runtime.spawn(Renewing { claims: Arc::clone(self), table: Arc::downgrade(table) }.run());
        }
        runtime.spawn(task.run());
    }

    /// Returns the current runtime, or else that of the last claim.
    fn runtime(&self) -> Option<Handle> {
        let mut last = unpoisoned(self.runtime.lock());
        if let Ok(current) = Handle::try_current() {
            *last = Some(current);
        }
        last.clone()
    }

    fn task(self: &Arc<Self>, table: &Arc<SlotTable>, row: TableKey) -> RowTask {
        RowTask { claims: Arc::clone(self), table: Arc::clone(table), row, is_done: false }
    }

    fn claim(&self, ask: &Ask) -> StorageFuture<Granted> {
        let &Ask { ref policy, ref key, least, first, most, .. } = ask;
        let sequence = self.sequence.fetch_add(1, Ordering::Relaxed);
        let (process, time_to_live, slots) = (self.process, self.time_to_live, number_of_slots(policy));
        self.store.claim(policy, key, Claim { process, sequence, least, first, most, slots, time_to_live })
    }
}

/// The task that makes the claims of a row. If it is dropped early, the waiting requests fail.
struct RowTask {
    claims: Arc<Claims>,
    table: Arc<SlotTable>,
    row: TableKey,
    is_done: bool,
}

impl RowTask {
    async fn run(mut self) {
        loop {
            match self.step().await {
                (Next::Done, _) => return,
                (Next::Again, _) => {}
                (Next::Poll, _) => sleep(POLL).await,
            }
        }
    }

    /// Makes a claim. Returns the next step, and the error of the claim.
    async fn step(&mut self) -> (Next, Option<StorageError>) {
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
    }
}

/// The task that renews slots. It ends when the layer and all of its requests are gone.
struct Renewing {
    claims: Arc<Claims>,
    table: Weak<SlotTable>,
}

impl Renewing {
    async fn run(self) {
        let mut rounds = interval(self.claims.time_to_live / 3);
        rounds.set_missed_tick_behavior(MissedTickBehavior::Delay);
        rounds.tick().await;
        loop {
            rounds.tick().await;
            let Some(table) = self.table.upgrade() else { return };
            let (mut renewals, mut failures) = (JoinSet::new(), Vec::new());
            for renewal in table.renewals() {
                if renewals.len() >= RENEWALS {
                    failures.extend(renewals.join_next().await.and_then(Result::ok).flatten());
                }
                // Until then, requests of the key make their own claims.
                if !table.begin_renewal(&renewal) {
                    continue;
                }
                let mut task = self.claims.task(&table, renewal.row);
                renewals.spawn(async move {
                    let (next, error) = task.step().await;
                    if next != Next::Done {
                        // Requests wait for the row. The other rows do not wait for them.
                        tokio::spawn(task.run());
                    }
                    error
                });
            }
            while let Some(renewed) = renewals.join_next().await {
                failures.extend(renewed.ok().flatten());
            }
            if let Some(error) = failures.first() {
                report_failed_renewals(failures.len() as u64, error);
            }
        }
    }
}

impl Drop for Renewing {
    fn drop(&mut self) {
        self.claims.is_renewing.store(false, Ordering::Relaxed);
    }
}

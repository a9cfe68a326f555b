//! The claims for all keys of a layer: every third of their time to live, and when the process ends.
//!
//! Each key has a call of its own, because keys of a cluster are on different nodes, and a lost race of one
//! key must not delay the others. Calls to one server share its connections, and on Redis the writes.

use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use tokio::runtime::{Handle, Id};
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval};

use super::claims::Claims;
use super::metrics::report_failed_renewals;
use super::row::Next;
use super::table::SlotTable;
use crate::storage::{StorageError, TableKey};

/// The number of claims that are in flight at once. They share the connections of the storage.
const CLAIMS: usize = 64;

/// The claims of a layer, and the task that renews its slots.
pub(super) struct Renewals {
    claims: Arc<Claims>,
    is_running: AtomicBool,
    /// `true` if a task that renews slots has ended.
    has_ended: AtomicBool,
}

/// The task that renews slots. It ends when the layer and all of its requests are gone. If its runtime ends
/// before that, another one goes on with it.
struct Running {
    renewals: Arc<Renewals>,
    table: Weak<SlotTable>,
    runtime: Id,
    /// `true` if the slots have to be renewed at once, because another task may not have done it for long.
    is_late: bool,
}

impl Renewals {
    pub(super) fn new(claims: Arc<Claims>) -> Arc<Self> {
        Arc::new(Self { claims, is_running: AtomicBool::new(false), has_ended: AtomicBool::new(false) })
    }

    /// Starts the task that renews slots, unless it runs, and one that makes the claims of `row`. Without a
    /// runtime, the waiting requests of the row fail.
    pub(super) fn start(self: &Arc<Self>, table: &Arc<SlotTable>, row: Option<TableKey>) {
        let task = row.map(|row| self.claims.task(table, row));
        // Remembers the runtime, also of a request that starts no task: the renewals move to it if theirs ends.
        let Some(runtime) = self.claims.runtime() else { return };
        if !self.is_running.load(Ordering::Relaxed) && !self.is_running.swap(true, Ordering::Acquire) {
            self.run_on(&runtime, Arc::downgrade(table), self.has_ended.load(Ordering::Relaxed));
        }
        if let Some(task) = task {
            runtime.spawn(task.run());
        }
    }

    fn run_on(self: &Arc<Self>, runtime: &Handle, table: Weak<SlotTable>, is_late: bool) {
        runtime.spawn(Running { renewals: Arc::clone(self), table, runtime: runtime.id(), is_late }.run());
    }

    /// Gives the slots of all keys back to the store, also those in use.
    pub(super) async fn close(&self, table: &Arc<SlotTable>) -> Result<(), StorageError> {
        table.close();
        loop {
            let mut idle = pin!(self.claims.idle.notified());
            // A task that ends from here on is noticed.
            idle.as_mut().enable();
            if table.is_busy() {
                idle.await;
                continue;
            }
            match claim_all(&self.claims, table).await {
                None => return Ok(()),
                Some(errors) => errors.into_iter().next().map_or(Ok(()), Err)?,
            }
        }
    }
}

impl Running {
    async fn run(self) {
        let claims = &self.renewals.claims;
        let mut rounds = interval(claims.time_to_live() / 3);
        rounds.set_missed_tick_behavior(MissedTickBehavior::Delay);
        if !self.is_late {
            rounds.tick().await;
        }
        loop {
            rounds.tick().await;
            let Some(table) = self.table.upgrade() else { return };
            let errors = claim_all(claims, &table).await.unwrap_or_default();
            if let Some(error) = errors.first() {
                report_failed_renewals(errors.len() as u64, error);
            }
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let Self { renewals, table, runtime, .. } = self;
        renewals.has_ended.store(true, Ordering::Relaxed);
        renewals.is_running.store(false, Ordering::Release);
        // A request that has seen the flag before has remembered its runtime by now.
        let next = renewals.claims.runtime_after(*runtime).filter(|_| table.strong_count() > 0);
        if let Some(next) = next
            && !renewals.is_running.swap(true, Ordering::Relaxed)
        {
            // If this one has ended, too, the task is dropped again.
            renewals.run_on(&next, Weak::clone(table), true);
        }
    }
}

/// Makes a claim for each row that no other task claims. Returns the errors, or `None` without such a
/// row.
async fn claim_all(claims: &Arc<Claims>, table: &Arc<SlotTable>) -> Option<Vec<StorageError>> {
    let (mut in_flight, mut errors) = (JoinSet::new(), Vec::new());
    let rows = table.renewals();
    if rows.is_empty() {
        return None;
    }
    if Handle::try_current().is_err() {
        return Some(vec![StorageError::no_runtime()]);
    }
    for renewal in rows {
        if in_flight.len() >= CLAIMS {
            errors.extend(in_flight.join_next().await.and_then(Result::ok).flatten());
        }
        // Until then, requests of the key make their own claims.
        if !table.begin_renewal(&renewal) {
            continue;
        }
        let mut task = claims.task(table, renewal.row);
        in_flight.spawn(async move {
            let (next, error) = task.step().await;
            if next != Next::Done {
                // Requests wait for the row. The other rows do not wait for them.
                tokio::spawn(task.run());
            }
            error
        });
    }
    while let Some(claimed) = in_flight.join_next().await {
        errors.extend(claimed.ok().flatten());
    }
    Some(errors)
}

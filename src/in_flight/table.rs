//! The rows of all keys. A key has a row only while a request of it is in flight or waits. So the number
//! of rows is bounded by that of the requests, and no row is ever evicted.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};

use super::metrics;
use super::row::{Ask, Grant, Next, NotTaken, Row, Waiting};
use super::slots::number_of_slots;
use crate::key::Key;
use crate::policy::{Policy, SharedPolicy};
use crate::storage::{Granted, KeyTable, StorageError, StorageErrorKind, TableKey};
use crate::waiting::{Seat, Seats};

/// The number of keys in flight up to which a lookup compares about 16 rows. More keys are slower, but
/// not refused.
const KEYS: usize = 16 * 1_024;

/// The slots in use, and the requests that wait for slots.
pub(super) struct SlotTable {
    rows: KeyTable<Row<Taken>>,
    /// The number of requests that have waited so far. It numbers their tickets.
    tickets: AtomicU64,
    /// Starts a task that makes claims for a row, if the slots are shared with other processes.
    claims: Option<StartClaims>,
}

/// Starts the task of a row.
pub(super) type StartClaims = Box<dyn Fn(&Arc<SlotTable>, TableKey) + Send + Sync>;

/// The slots of a request. Dropping it gives them back.
#[derive(Debug)]
pub(super) struct Slot {
    table: Arc<SlotTable>,
    row: TableKey,
    cost: u32,
}

/// The slots that a request has taken.
#[derive(Debug)]
pub(super) struct Taken {
    pub(super) slot: Slot,
    /// The free slots of the key afterwards.
    pub(super) remaining: u32,
}

/// The result of an attempt to take slots.
pub(super) enum Take {
    Taken(Taken),
    /// Contains the free slots of the key.
    Full(u32),
    Waits(QueuePlace),
}

/// The place of a request in the queue of its key. Dropping it leaves the queue.
pub(super) struct QueuePlace {
    table: Arc<SlotTable>,
    row: TableKey,
    number: u64,
    answer: oneshot::Receiver<Result<Taken, NotTaken>>,
    seat: Option<Seat>,
}

impl SlotTable {
    /// Creates a table. `claims` starts a task for a row of a table whose slots are shared.
    pub(super) fn new(claims: Option<StartClaims>) -> Arc<Self> {
        Arc::new(Self { rows: KeyTable::new(KEYS), tickets: AtomicU64::new(0), claims })
    }

    /// Takes `cost` slots, at least 1, if they are free and no request of the key waits. Otherwise the
    /// request waits in the queue of its key if there are `seats`, one of them is free for the key, and
    /// the slots can ever suffice. `shared` returns the policy that a waiting request follows.
    ///
    /// If the slots are shared, a request without a seat waits for the next claim, behind no request that
    /// has one.
    pub(super) fn take(
        self: &Arc<Self>,
        policy: &Policy,
        key: &Key,
        cost: u32,
        seats: Option<&Arc<Seats>>,
        shared: impl FnOnce() -> SharedPolicy,
    ) -> Take {
        let at = self.rows.place(policy, 0, key);
        let slots = number_of_slots(policy);
        let mut bucket = self.rows.lock(at);
        let row = bucket.find_or_insert(Row::default);
        if self.claims.is_some() {
            row.share(at, policy, key);
        }
        if let Some(remaining) = row.take(cost, slots) {
            return Take::Taken(Taken { slot: self.slot(at, cost), remaining });
        }
        let seat = seats.filter(|_| cost <= slots).and_then(|seats| seats.take(key, || row.waiting()));
        let is_once = seat.is_none();
        if is_once && (self.claims.is_none() || cost > slots || row.has_seats()) {
            let free = row.free(slots);
            if row.is_unused() {
                bucket.remove();
            }
            return Take::Full(free);
        }
        let (sender, receiver) = oneshot::channel();
        let number = self.tickets.fetch_add(1, Ordering::Relaxed);
        row.enter(number, Waiting { policy: shared(), cost, is_once, answer: sender });
        let begins = row.begin_task();
        drop(bucket);
        metrics::add_waiting(1.0);
        self.start_claims(begins, at);
        Take::Waits(QueuePlace { table: Arc::clone(self), row: at, number, answer: receiver, seat })
    }

    /// Returns the free slots of a key.
    pub(super) fn free(&self, policy: &Policy, key: &Key) -> u32 {
        let slots = number_of_slots(policy);
        self.rows.lock(self.rows.place(policy, 0, key)).find().map_or(slots, |row| row.free(slots))
    }

    /// Returns `true` if the slots are shared with other processes.
    pub(super) fn is_shared(&self) -> bool {
        self.claims.is_some()
    }

    /// Returns the slots that all keys use.
    pub(super) fn in_use(&self) -> u64 {
        let mut sum = 0;
        self.rows.visit_all(|row| sum += u64::from(row.in_use()));
        sum
    }

    fn slot(self: &Arc<Self>, row: TableKey, cost: u32) -> Slot {
        metrics::add_in_use(cost.into());
        Slot { table: Arc::clone(self), row, cost }
    }

    fn start_claims(self: &Arc<Self>, begins: bool, row: TableKey) {
        if let Some(start) = self.claims.as_ref().filter(|_| begins) {
            start(self, row);
        }
    }

    /// Changes the row of a request that ends. Gives the slots that are free then to the first requests
    /// of the queue.
    fn leave(self: &Arc<Self>, at: TableKey, change: impl FnOnce(&mut Row<Taken>)) {
        let mut bucket = self.rows.lock(at);
        let Some(row) = bucket.find() else { return };
        change(row);
        let (granted, begins) = (row.grant(), row.begin_task());
        if row.is_unused() {
            bucket.remove();
        }
        // A request that has left drops its slots, which locks the bucket again.
        drop(bucket);
        self.send(granted, at);
        self.start_claims(begins, at);
    }

    fn send(self: &Arc<Self>, granted: Vec<Grant<Taken>>, at: TableKey) {
        for Grant { waiting, remaining } in granted {
            drop(waiting.answer.send(Ok(Taken { slot: self.slot(at, waiting.cost), remaining })));
        }
    }
}

/// The claims of a table whose slots are shared.
impl SlotTable {
    /// Returns the claim to make for a row, or `None` if the row is gone.
    pub(super) fn ask(&self, at: TableKey) -> Option<Ask> {
        self.rows.lock(at).find()?.ask()
    }

    /// Applies the result of a claim: requests get their slots or are refused. The slots can be used
    /// before `alive_until`. Returns the next step.
    pub(super) fn apply(
        self: &Arc<Self>,
        at: TableKey,
        ask: &Ask,
        claimed: &Result<Granted, StorageError>,
        alive_until: Instant,
    ) -> Next {
        let mut bucket = self.rows.lock(at);
        let Some(row) = bucket.find() else { return Next::Done };
        row.apply(claimed, alive_until);
        let granted = row.grant();
        let refused = row.refuse(ask, claimed);
        let next = row.next(ask);
        if next == Next::Done {
            row.end_task();
            if row.is_unused() {
                bucket.remove();
            }
        }
        drop(bucket);
        self.send(granted, at);
        for (waiting, reason) in refused {
            drop(waiting.answer.send(Err(reason)));
        }
        next
    }

    /// Ends the task of a row early, because its runtime shuts down. Its waiting requests fail.
    pub(super) fn abandon(&self, at: TableKey) {
        let mut bucket = self.rows.lock(at);
        let Some(row) = bucket.find() else { return };
        row.end_task();
        let dropped = row.take_queue();
        drop(bucket);
        drop(dropped);
    }

    /// Returns the shared rows for which no task makes claims, and counts a task for each.
    pub(super) fn begin_renewals(&self) -> Vec<TableKey> {
        let mut rows = Vec::new();
        self.rows.visit_all(|row| rows.extend(row.begin_renewal()));
        rows
    }
}

impl fmt::Debug for SlotTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SlotTable").field("in_use", &self.in_use()).finish_non_exhaustive()
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        metrics::add_in_use(-f64::from(self.cost));
        self.table.leave(self.row, |row| row.give_back(self.cost));
    }
}

impl QueuePlace {
    /// Waits for the slots. A request that has a seat gets `None` if they are not free at the deadline.
    pub(super) async fn taken_by(mut self, deadline: Instant) -> Option<Result<Taken, NotTaken>> {
        let answer = match self.seat {
            Some(_) => timeout_at(deadline, &mut self.answer).await.ok()?,
            // The timeout of the store ends the wait.
            None => (&mut self.answer).await,
        };
        Some(answer.unwrap_or_else(|_| Err(NotTaken::Failed(cancelled()))))
    }
}

fn cancelled() -> StorageError {
    let message = "the task that claims slots has ended: no tokio runtime, or its runtime was shut down";
    StorageError::new(StorageErrorKind::Cancelled, message)
}

impl Drop for QueuePlace {
    fn drop(&mut self) {
        metrics::add_waiting(-1.0);
        self.table.leave(self.row, |row| row.leave(self.number));
    }
}

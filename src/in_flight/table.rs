//! The rows of all keys. A key has a row only while a request of it is in flight or waits. So the number
//! of rows is bounded by that of the requests, and no row is ever evicted.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::{Notify, oneshot};
use tokio::time::{Instant, timeout_at};

use super::metrics;
use super::row::{Ask, Next, Renewal, Row};
use super::slots::number_of_slots;
use super::waiting::{Answer, Left, Reason, Waiting};
use crate::key::Key;
use crate::policy::{Policy, SharedPolicy};
use crate::storage::{Bucket, Granted, KeyTable, StorageError, StorageErrorKind, TableKey, runtime_with_time};
use crate::waiting::{Seats, later};

/// The number of keys in flight up to which a lookup compares about 16 rows. More keys are slower, but
/// not refused.
const KEYS: usize = 16 * 1_024;

/// The slots in use, and the requests that wait for slots.
pub(super) struct SlotTable {
    rows: KeyTable<Row<Taken>>,
    /// The number of requests that have waited so far. It numbers their tickets.
    tickets: AtomicU64,
    /// Starts the tasks that make claims, if the slots are shared with other processes.
    claims: Option<StartClaims>,
    /// Set when the slots have been given back, because the process ends. No request takes any from then on.
    is_closed: AtomicBool,
}

/// Starts the task that renews slots, unless it runs, and that of a row.
pub(super) type StartClaims = Box<dyn Fn(&Arc<SlotTable>, Option<TableKey>) + Send + Sync>;

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
    Failed(StorageError),
    Waits(QueuePlace),
}

/// The place of a request in the queue of its key. Dropping it leaves the queue.
pub(super) struct QueuePlace {
    table: Arc<SlotTable>,
    row: TableKey,
    number: u64,
    /// The policy that the request follows.
    policy: SharedPolicy,
    answer: oneshot::Receiver<Answer<Taken>>,
    /// `true` if all slots are in use. Otherwise the request waits for a claim.
    pub(super) is_seated: bool,
}

impl SlotTable {
    /// Creates a table. `claims` starts the tasks of a table whose slots are shared.
    pub(super) fn new(claims: Option<StartClaims>) -> Arc<Self> {
        let (rows, is_closed) = (KeyTable::new(KEYS), AtomicBool::new(false));
        Arc::new(Self { rows, tickets: AtomicU64::new(0), claims, is_closed })
    }

    /// Takes `cost` slots, at least 1, of a key that is in flight in this process alone, if they
    /// are free and no request of the key waits. Otherwise changes nothing, and the caller calls
    /// [`take`](Self::take).
    #[inline]
    pub(super) fn try_take(self: &Arc<Self>, policy: &Policy, key: &Key, cost: u32) -> Option<Taken> {
        if self.is_shared() {
            return None;
        }
        let at = self.rows.place(policy, key);
        let mut bucket = self.rows.lock(at);
        let row = bucket.find_or_insert(Row::default);
        let Some(remaining) = row.take_alone(cost, number_of_slots(policy)) else {
            if row.is_unused() {
                bucket.remove();
            }
            return None;
        };
        drop(bucket);
        Some(Taken { slot: self.slot(at, cost), remaining })
    }

    /// Takes `cost` slots, at least 1, if they are free and no request of the key waits. Otherwise the
    /// request waits in the queue of its key if there are `seats`, one of them is free for the key, and
    /// the slots can ever suffice. `shared` returns the policy that a waiting request follows.
    ///
    /// If the slots are shared, each request can wait for a claim. It needs a seat to wait for longer.
    pub(super) fn take(
        self: &Arc<Self>,
        policy: &Policy,
        key: &Key,
        cost: u32,
        seats: Option<&Arc<Seats>>,
        shared: impl FnOnce() -> SharedPolicy,
    ) -> Take {
        let at = self.rows.place(policy, key);
        let slots = number_of_slots(policy);
        let mut bucket = self.rows.lock(at);
        // Checked under the lock, so that `close` finds the slots of every request before it.
        if self.is_closed.load(Ordering::Relaxed) {
            return Take::Failed(closed());
        }
        let row = bucket.find_or_insert(Row::default);
        if self.claims.is_some() {
            row.share(at, policy, key);
        }
        // The number of slots may have been raised.
        let left = if row.waiting() > 0 { row.grant() } else { Vec::new() };
        let take = match row.take(cost, slots) {
            Some(remaining) => Take::Taken(Taken { slot: self.slot(at, cost), remaining }),
            None => self.enter(row, at, (key, cost, slots), seats, shared),
        };
        let begins = row.begin_task();
        if let (Take::Waits(_), Some(entered)) = (&take, row.entered()) {
            entered.notify_waiters();
        }
        if row.is_unused() {
            bucket.remove();
        }
        drop(bucket);
        self.send(left, at);
        self.start_claims(begins.then_some(at));
        take
    }

    /// Adds a request to the queue of its key, or returns [`Take::Full`].
    fn enter(
        self: &Arc<Self>,
        row: &mut Row<Taken>,
        at: TableKey,
        (key, cost, slots): (&Key, u32, u32),
        seats: Option<&Arc<Seats>>,
        shared: impl FnOnce() -> SharedPolicy,
    ) -> Take {
        let seat = seats.filter(|_| self.claims.is_none() && cost <= slots);
        let seat = seat.and_then(|seats| seats.take(key));
        let is_seated = seat.is_some();
        if cost > slots || self.claims.is_none() && !is_seated {
            return Take::Full(row.free(slots));
        }
        let (sender, receiver) = oneshot::channel();
        let (number, policy) = (self.tickets.fetch_add(1, Ordering::Relaxed), shared());
        row.enter(number, Waiting { policy: policy.clone(), cost, seats: seats.cloned(), seat, answer: sender });
        metrics::add_waiting(1.0);
        Take::Waits(QueuePlace { table: Arc::clone(self), row: at, number, policy, answer: receiver, is_seated })
    }

    /// Returns the free slots of a key.
    pub(super) fn free(&self, policy: &Policy, key: &Key) -> u32 {
        let slots = number_of_slots(policy);
        self.free_of(self.rows.place(policy, key), slots)
    }

    fn free_of(&self, row: TableKey, slots: u32) -> u32 {
        self.rows.lock(row).find().map_or(slots, |row| row.free(slots))
    }

    /// Returns `true` if the slots are shared with other processes.
    #[inline]
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

    fn start_claims(self: &Arc<Self>, row: Option<TableKey>) {
        if let Some(start) = &self.claims {
            start(self, row);
        }
    }

    /// Changes the row of a request that ends. Gives the slots that are free then to the first requests
    /// of the queue.
    fn leave(self: &Arc<Self>, at: TableKey, change: impl FnOnce(&mut Row<Taken>)) {
        let mut bucket = self.rows.lock(at);
        let Some(row) = bucket.find() else { return };
        change(row);
        if !row.is_alone() {
            return self.pass_on(bucket, at);
        }
        if row.in_use() == 0 {
            bucket.remove();
        }
    }

    /// Gives the free slots of a row to the first requests of its queue, or back to the store.
    fn pass_on(self: &Arc<Self>, mut bucket: Bucket<'_, Row<Taken>>, at: TableKey) {
        let Some(row) = bucket.find() else { return };
        let (left, begins) = (row.grant(), row.begin_task());
        if row.is_unused() {
            bucket.remove();
        }
        // A request that has left drops its slots, which locks the bucket again.
        drop(bucket);
        self.send(left, at);
        self.start_claims(begins.then_some(at));
    }

    fn send(self: &Arc<Self>, left: Vec<Left<Taken>>, at: TableKey) {
        for Left { waiting, reason } in left {
            let answer = match reason {
                Reason::Granted(remaining, policy) => {
                    Answer::Taken(Taken { slot: self.slot(at, waiting.cost), remaining }, policy)
                }
                Reason::Full(free, policy) => Answer::Full(free, policy),
                Reason::Failed(error) => Answer::Failed(error),
            };
            drop(waiting.answer.send(answer));
        }
    }
}

/// The claims of a table whose slots are shared.
impl SlotTable {
    /// Returns the claim to make for a row, or `None` if the row is gone.
    pub(super) fn ask(&self, at: TableKey, time_to_live: Duration) -> Option<Ask> {
        self.rows.lock(at).find()?.ask(time_to_live)
    }

    /// Returns the notification of requests that enter the queue of a shared row.
    pub(super) fn entered(&self, at: TableKey) -> Arc<Notify> {
        self.rows.lock(at).find().and_then(|row| row.entered().cloned()).unwrap_or_default()
    }

    /// Applies the result of a claim: requests get their slots or are refused. Returns the next step.
    pub(super) fn apply(self: &Arc<Self>, at: TableKey, ask: &Ask, claimed: &Result<Granted, StorageError>) -> Next {
        let mut bucket = self.rows.lock(at);
        let Some(row) = bucket.find() else { return Next::Done };
        let (left, next) = row.apply(ask, claimed);
        if next == Next::Done {
            row.end_task();
            if row.is_unused() {
                bucket.remove();
            }
        }
        drop(bucket);
        self.send(left, at);
        next
    }

    /// Ends the task of a row early, because its runtime shuts down. Its waiting requests fail.
    pub(super) fn abandon(&self, at: TableKey) {
        let mut bucket = self.rows.lock(at);
        let Some(row) = bucket.find() else { return };
        row.end_task();
        let dropped = row.take_queue();
        if row.is_unused() {
            bucket.remove();
        }
        drop(bucket);
        drop(dropped);
    }

    /// Counts all slots as given back, and ends all waits. Later requests fail.
    pub(super) fn close(&self) {
        self.is_closed.store(true, Ordering::Relaxed);
        let mut dropped = Vec::new();
        self.rows.visit_all(|row| dropped.push(row.give_all_back()));
    }

    /// Returns `true` if a task makes claims for a row.
    pub(super) fn is_busy(&self) -> bool {
        self.rows.count(Row::is_busy) > 0
    }

    /// Returns the shared rows for which no task makes claims. The oldest slots are first.
    pub(super) fn renewals(&self) -> Vec<Renewal> {
        let mut renewals = Vec::new();
        self.rows.visit_all(|row| renewals.extend(row.renewal()));
        renewals.sort_unstable_by_key(|renewal: &Renewal| renewal.alive_until);
        renewals
    }

    /// Returns `true` if the slots of a row have to be renewed still, and no task makes claims for it.
    /// Counts a task then.
    pub(super) fn begin_renewal(&self, renewal: &Renewal) -> bool {
        self.rows.lock(renewal.row).find().is_some_and(|row| row.begin_renewal(renewal))
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
    /// Waits for the slots: with a seat for at most `max_wait`, and otherwise for a claim, for at most
    /// `time_to_live`. Returns the policy by which the request was decided, unless it has failed. Returns a
    /// request that waited for a claim without success and has a seat now.
    pub(super) fn take(
        mut self,
        max_wait: Duration,
        time_to_live: Duration,
    ) -> impl Future<Output = (Take, Option<Policy>)> {
        let deadline = later(Instant::now(), if self.is_seated { max_wait } else { time_to_live });
        async move {
            // Without a timer, only the claim ends the wait.
            let answer = if self.is_seated || runtime_with_time().is_some() {
                timeout_at(deadline, &mut self.answer).await
            } else {
                Ok((&mut self.answer).await)
            };
            match answer {
                Ok(Ok(Answer::Taken(taken, policy))) => (Take::Taken(taken), Some(policy)),
                Ok(Ok(Answer::Full(free, policy))) => (Take::Full(free), Some(policy)),
                Ok(Ok(Answer::Failed(error))) => (Take::Failed(error), None),
                Ok(Ok(Answer::Seated(next))) => {
                    (self.answer, self.is_seated) = (next, true);
                    (Take::Waits(self), None)
                }
                Ok(Err(_)) => (Take::Failed(closed()), None),
                Err(_) if self.is_seated => {
                    let policy = self.policy.read().into_owned();
                    (Take::Full(self.table.free_of(self.row, number_of_slots(&policy))), Some(policy))
                }
                Err(_) => (Take::Failed(unclaimed()), None),
            }
        }
    }
}

/// Creates the error of a request that waits for a claim for too long.
fn unclaimed() -> StorageError {
    let message = "no claim of slots has ended within their time to live: nothing polls its runtime, or the timeout of \
                   the storage is longer";
    StorageError::new(StorageErrorKind::Timeout, message)
}

fn closed() -> StorageError {
    let message =
        "slots are no longer claimed: the layer was closed, or there is no tokio runtime, or it was shut down";
    StorageError::new(StorageErrorKind::Cancelled, message)
}

impl Drop for QueuePlace {
    fn drop(&mut self) {
        metrics::add_waiting(-1.0);
        self.table.leave(self.row, |row| row.leave(self.number));
    }
}

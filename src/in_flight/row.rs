//! The slots in use and the waiting requests of one key.

use std::collections::BTreeMap;
use std::mem;

use tokio::sync::oneshot;
use tokio::time::Instant;

use super::slots::number_of_slots;
use crate::key::Key;
use crate::policy::{Policy, SharedPolicy};
use crate::storage::{Granted, StorageError, StorageErrorKind, TableKey};

/// The row of a key. `T` is what a waiting request gets when it has its slots.
///
/// Most rows have no `more`, and are small.
#[derive(Debug)]
pub(super) struct Row<T> {
    in_use: u32,
    more: Option<Box<More<T>>>,
}

#[derive(Debug)]
struct More<T> {
    /// The waiting requests by their tickets, which are in the order of arrival.
    queue: BTreeMap<u64, Waiting<T>>,
    held: Option<Held>,
}

/// A request that waits for slots.
#[derive(Debug)]
pub(super) struct Waiting<T> {
    /// Read again when slots become free, to follow the changes of live slots.
    pub(super) policy: SharedPolicy,
    pub(super) cost: u32,
    /// `true` if the request is refused when the store has no slots for it.
    pub(super) is_once: bool,
    pub(super) answer: oneshot::Sender<Result<T, NotTaken>>,
}

/// The reason why a request gets no slots.
#[derive(Debug)]
pub(super) enum NotTaken {
    /// Contains the free slots of the key.
    Full(u32),
    Failed(StorageError),
}

/// The slots of a key that this process holds in a store.
#[derive(Debug)]
struct Held {
    row: TableKey,
    policy: Policy,
    key: Key,
    /// The slots that the store counts for this process. While a claim is in flight, those in use when it
    /// began, because the claim may give the others back.
    counted: u32,
    /// Those of them that a request can take.
    usable: u32,
    /// The instant from which the slots may belong to others, unless a claim has renewed them. Nothing is
    /// granted from then on, for example after the process was paused.
    alive_until: Instant,
    /// The slots that no process holds.
    free: u32,
    /// `true` while a task makes claims for this row.
    is_busy: bool,
    /// The number of claims that have failed in a row. Then the store may have other numbers.
    failures: u32,
}

/// A request that has its slots.
pub(super) struct Grant<T> {
    pub(super) waiting: Waiting<T>,
    /// The free slots of the key afterwards.
    pub(super) remaining: u32,
}

/// A claim to be sent to the store.
pub(super) struct Ask {
    pub(super) policy: Policy,
    pub(super) key: Key,
    /// The slots that are in use.
    pub(super) least: u32,
    /// The slots that are in use when the first request of the queue has its own.
    pub(super) first: u32,
    /// The slots that are in use when all requests of the queue have their own.
    pub(super) most: u32,
    /// The last ticket in the queue when the claim began.
    last_ticket: Option<u64>,
}

/// The next step of the task that makes claims for a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    Done,
    /// The numbers have changed during the claim.
    Again,
    /// Requests wait for slots of other processes.
    Poll,
}

/// After this many failed claims, which are made every third of the time to live, the store has
/// forgotten the slots of this process.
const FORGOTTEN: u32 = 4;

impl<T> Default for Row<T> {
    fn default() -> Self {
        Self { in_use: 0, more: None }
    }
}

impl<T> Row<T> {
    pub(super) fn in_use(&self) -> u32 {
        self.in_use
    }

    /// Returns the number of requests that wait.
    pub(super) fn waiting(&self) -> usize {
        self.more.as_ref().map_or(0, |more| more.queue.len())
    }

    /// Returns `true` if a request with a seat waits, unless later ones have none.
    pub(super) fn has_seats(&self) -> bool {
        let last = self.more.as_ref().and_then(|more| more.queue.last_key_value());
        last.is_some_and(|(_, waiting)| !waiting.is_once)
    }

    /// Returns `true` if the row says nothing that an empty one does not.
    pub(super) fn is_unused(&self) -> bool {
        let is_held = |held: &Held| held.is_busy || held.counted > 0 || (1..FORGOTTEN).contains(&held.failures);
        let has_more = |more: &More<T>| !more.queue.is_empty() || more.held.as_ref().is_some_and(is_held);
        self.in_use == 0 && !self.more.as_deref().is_some_and(has_more)
    }

    /// Returns the free slots.
    pub(super) fn free(&self, slots: u32) -> u32 {
        match self.held() {
            None => slots.saturating_sub(self.in_use),
            Some(held) => held.free.saturating_add(held.usable.saturating_sub(self.in_use)).min(slots),
        }
    }

    /// Takes slots if they are free and no request waits. Returns the free slots afterwards.
    pub(super) fn take(&mut self, cost: u32, slots: u32) -> Option<u32> {
        (self.waiting() == 0 && self.fits(cost, slots)).then(|| {
            self.in_use += cost;
            self.free(slots)
        })
    }

    /// Gives slots back.
    pub(super) fn give_back(&mut self, cost: u32) {
        self.in_use = self.in_use.saturating_sub(cost);
    }

    /// Adds a request to the end of the queue.
    pub(super) fn enter(&mut self, ticket: u64, waiting: Waiting<T>) {
        self.more().queue.insert(ticket, waiting);
    }

    /// Removes a request from the queue, if it is still there.
    pub(super) fn leave(&mut self, ticket: u64) {
        if let Some(more) = &mut self.more {
            more.queue.remove(&ticket);
        }
    }

    /// Takes the free slots for the first requests of the queue. A request behind one that needs more
    /// slots waits, so that small ones do not starve it.
    pub(super) fn grant(&mut self) -> Vec<Grant<T>> {
        let mut granted = Vec::new();
        while let Some((cost, slots)) = self.first_waiting().filter(|(cost, slots)| self.fits(*cost, *slots)) {
            let first = self.more.as_mut().and_then(|more| more.queue.pop_first());
            self.in_use += cost;
            let remaining = self.free(slots);
            granted.extend(first.map(|(_, waiting)| Grant { waiting, remaining }));
        }
        if self.more.as_ref().is_some_and(|more| more.queue.is_empty() && more.held.is_none()) {
            self.more = None;
        }
        granted
    }

    /// Returns the cost and the slots of the first request of the queue.
    fn first_waiting(&self) -> Option<(u32, u32)> {
        let (_, first) = self.more.as_ref()?.queue.first_key_value()?;
        Some((first.cost, first.policy.with(number_of_slots)))
    }

    fn fits(&self, cost: u32, slots: u32) -> bool {
        let capacity = match self.held() {
            None => slots,
            Some(held) if held.alive_until > Instant::now() => held.usable.min(slots),
            Some(_) => 0,
        };
        self.in_use.checked_add(cost).is_some_and(|sum| sum <= capacity)
    }

    fn held(&self) -> Option<&Held> {
        self.more.as_ref()?.held.as_ref()
    }

    fn more(&mut self) -> &mut More<T> {
        self.more.get_or_insert_with(|| Box::new(More { queue: BTreeMap::new(), held: None }))
    }
}

/// The slots that the process holds in a store.
impl<T> Row<T> {
    /// Marks the row as shared with other processes.
    pub(super) fn share(&mut self, row: TableKey, policy: &Policy, key: &Key) {
        let (slots, more) = (number_of_slots(policy), self.more());
        let held = more.held.get_or_insert_with(|| Held {
            row,
            policy: policy.clone(),
            key: key.clone(),
            counted: 0,
            usable: 0,
            alive_until: Instant::now(),
            free: slots,
            is_busy: false,
            failures: 0,
        });
        if number_of_slots(&held.policy) != slots {
            held.policy = policy.clone();
        }
    }

    /// Returns the key of a shared row for which no task makes claims, and counts a task.
    pub(super) fn begin_renewal(&mut self) -> Option<TableKey> {
        let held = self.more.as_mut()?.held.as_mut().filter(|held| !held.is_busy)?;
        held.is_busy = true;
        Some(held.row)
    }

    /// Returns `true` if a claim has to be made, and no task makes it. Counts a task then.
    pub(super) fn begin_task(&mut self) -> bool {
        let (in_use, waiting) = (self.in_use, self.waiting());
        let Some(held) = self.more.as_mut().and_then(|more| more.held.as_mut()) else { return false };
        let begins = !held.is_busy && (waiting > 0 || held.counted > in_use);
        held.is_busy |= begins;
        begins
    }

    /// Removes all waiting requests.
    pub(super) fn take_queue(&mut self) -> BTreeMap<u64, Waiting<T>> {
        self.more.as_mut().map(|more| mem::take(&mut more.queue)).unwrap_or_default()
    }

    /// Ends a task.
    pub(super) fn end_task(&mut self) {
        if let Some(held) = self.more.as_mut().and_then(|more| more.held.as_mut()) {
            held.is_busy = false;
        }
    }

    /// Returns the claim for the slots in use and those of the queue.
    pub(super) fn ask(&mut self) -> Option<Ask> {
        let in_use = self.in_use;
        let first = self.first_waiting();
        let More { queue, held } = self.more.as_deref_mut()?;
        let held = held.as_mut()?;
        let slots = number_of_slots(&held.policy);
        let waiting = queue.values().fold(in_use, |sum, waiting| sum.saturating_add(waiting.cost));
        (held.counted, held.usable) = (in_use, held.usable.min(in_use));
        Some(Ask {
            policy: held.policy.clone(),
            key: held.key.clone(),
            least: in_use,
            first: in_use.saturating_add(first.map_or(0, |(cost, _)| cost)),
            most: waiting.min(slots).max(in_use),
            last_ticket: queue.last_key_value().map(|(ticket, _)| *ticket),
        })
    }

    /// Applies the result of a claim. The slots can be used before `alive_until`. After that,
    /// [`grant`](Self::grant) gives them to the queue, and [`refuse`](Self::refuse) removes the others.
    pub(super) fn apply(&mut self, claimed: &Result<Granted, StorageError>, alive_until: Instant) {
        let Some(held) = self.more.as_mut().and_then(|more| more.held.as_mut()) else { return };
        match claimed {
            Ok(granted) => {
                let Granted { count, usable, free } = *granted;
                (held.counted, held.usable, held.free, held.failures) = (count, usable, free, 0);
                held.alive_until = alive_until;
            }
            Err(_) => held.failures = held.failures.saturating_add(1),
        }
    }

    /// Removes the requests that get no slots by this claim, with the reason.
    pub(super) fn refuse(&mut self, ask: &Ask, claimed: &Result<Granted, StorageError>) -> Vec<(Waiting<T>, NotTaken)> {
        let free = self.free(number_of_slots(&ask.policy));
        let Some(more) = &mut self.more else { return Vec::new() };
        // Other processes were faster each time, and nothing was stored. The store has not failed.
        let failure = claimed.as_ref().err().filter(|error| error.kind() != StorageErrorKind::Contended);
        let asked = ask.last_ticket.map(|last| more.queue.range(..=last)).into_iter().flatten();
        let refused = asked.filter(|(_, waiting)| waiting.is_once || failure.is_some());
        let tickets: Vec<u64> = refused.map(|(ticket, _)| *ticket).collect();
        let reason = || failure.map_or(NotTaken::Full(free), |error| NotTaken::Failed(error.clone()));
        tickets.iter().filter_map(|ticket| Some((more.queue.remove(ticket)?, reason()))).collect()
    }

    /// Returns the next step after a claim.
    pub(super) fn next(&self, ask: &Ask) -> Next {
        let Some(More { queue, held: Some(held) }) = self.more.as_deref() else { return Next::Done };
        let is_new = queue.last_key_value().is_some_and(|(ticket, _)| Some(*ticket) > ask.last_ticket);
        match held.failures {
            _ if is_new => Next::Again,
            0 if held.counted > self.in_use => Next::Again,
            _ if !queue.is_empty() => Next::Poll,
            _ => Next::Done,
        }
    }
}

//! The slots in use and the waiting requests of one key.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::mem;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;

use super::slots::number_of_slots;
use super::waiting::{Answer, Left, Reason, Waiting};
use crate::key::Key;
use crate::policy::Policy;
use crate::storage::{Granted, StorageError, StorageErrorKind, TableKey};
use crate::waiting::later;

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

/// The slots of a key that this process holds in a store.
#[derive(Debug)]
struct Held {
    row: TableKey,
    policy: Policy,
    key: Key,
    /// The slots that the store may count for this process.
    counted: u32,
    /// Those of them that a request can take. While a claim is in flight, only those in use, because it
    /// may give the others back.
    usable: u32,
    /// The instant from which the slots may belong to others, unless a claim has renewed them. Nothing is
    /// granted from then on, for example after the process was paused.
    alive_until: Instant,
    /// The slots that no process holds.
    free: u32,
    /// `true` while a task makes claims for this row.
    is_busy: bool,
    /// Notified when a request enters the queue while a task makes claims.
    entered: Arc<Notify>,
    /// The instant from which the store counts no slots of this process, unless a claim has renewed them.
    forgotten_at: Instant,
}

/// A claim to be sent to the store.
pub(super) struct Ask {
    /// The policy of the first request of the queue.
    pub(super) policy: Policy,
    pub(super) key: Key,
    /// The slots that are in use.
    pub(super) least: u32,
    /// The slots that are in use when the first request of the queue has its own.
    pub(super) first: u32,
    /// The slots that are in use when all requests of the queue have their own.
    pub(super) most: u32,
    /// The first and the last ticket in the queue when the claim began.
    tickets: Option<(u64, u64)>,
    /// The instant until which the claim lasts. The store counts the time to live from a later instant.
    alive_until: Instant,
    before: Before,
}

/// The numbers before a claim, which hold again if it has not reached the store.
struct Before {
    counted: u32,
    usable: u32,
    forgotten_at: Instant,
}

/// A row whose slots are to be renewed. The oldest is the least.
#[derive(Clone, Copy, Debug)]
pub(super) struct Renewal {
    pub(super) alive_until: Instant,
    pub(super) row: TableKey,
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

    /// Returns `true` if the row can be removed, because an empty one is equivalent.
    pub(super) fn is_unused(&self) -> bool {
        let is_held = |held: &Held| held.is_busy || held.counted > 0 && Instant::now() < held.forgotten_at;
        let has_more = |more: &More<T>| !more.queue.is_empty() || more.held.as_ref().is_some_and(is_held);
        self.in_use == 0 && !self.more.as_deref().is_some_and(has_more)
    }

    /// Returns the free slots.
    pub(super) fn free(&self, slots: u32) -> u32 {
        match self.held() {
            None => slots.saturating_sub(self.in_use),
            Some(held) => {
                let free = held.free.saturating_add(held.usable.saturating_sub(self.in_use));
                free.min(slots.saturating_sub(self.in_use))
            }
        }
    }

    /// Returns `true` if no request waits, and no slots are held in a store.
    #[inline]
    pub(super) fn is_alone(&self) -> bool {
        self.more.is_none()
    }

    /// Takes slots of a row that is [alone](Self::is_alone), if they are free. Returns the free
    /// slots afterwards.
    #[inline]
    pub(super) fn take_alone(&mut self, cost: u32, slots: u32) -> Option<u32> {
        let in_use = self.in_use.checked_add(cost).filter(|in_use| self.is_alone() && *in_use <= slots)?;
        self.in_use = in_use;
        Some(slots - in_use)
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
    /// slots waits, so that small ones do not starve it. Removes a request that needs more slots than there
    /// are since their number was lowered.
    pub(super) fn grant(&mut self) -> Vec<Left<T>> {
        let mut left = Vec::new();
        while let Some((ticket, cost, policy)) = self.first_waiting() {
            let slots = number_of_slots(&policy);
            if self.fits(cost, slots) {
                self.in_use += cost;
                left.extend(self.remove(ticket, Reason::Granted(self.free(slots), policy)));
            } else if cost > slots {
                left.extend(self.remove(ticket, Reason::Full(self.free(slots), policy)));
            } else {
                break;
            }
        }
        if self.more.as_ref().is_some_and(|more| more.queue.is_empty() && more.held.is_none()) {
            self.more = None;
        }
        left
    }

    /// Returns the ticket, the cost and the current policy of the first request of the queue.
    fn first_waiting(&self) -> Option<(u64, u32, Policy)> {
        let (ticket, first) = self.more.as_ref()?.queue.first_key_value()?;
        Some((*ticket, first.cost, first.policy.read().into_owned()))
    }

    fn remove(&mut self, ticket: u64, reason: Reason) -> Option<Left<T>> {
        let waiting = self.more.as_mut()?.queue.remove(&ticket)?;
        Some(Left { waiting, reason })
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
            entered: Arc::default(),
            forgotten_at: Instant::now(),
        });
        if number_of_slots(&held.policy) != slots {
            held.policy = policy.clone();
        }
    }

    /// Returns the key of a shared row for which no task makes claims, and the age of its slots.
    pub(super) fn renewal(&self) -> Option<Renewal> {
        let held = self.held().filter(|held| !held.is_busy)?;
        Some(Renewal { alive_until: held.alive_until, row: held.row })
    }

    /// Returns `true` if the slots have to be renewed still, and no task makes claims. Counts a task then.
    pub(super) fn begin_renewal(&mut self, renewal: &Renewal) -> bool {
        let Some(held) = self.more.as_mut().and_then(|more| more.held.as_mut()) else { return false };
        let begins = !held.is_busy && held.alive_until <= renewal.alive_until;
        held.is_busy |= begins;
        begins
    }

    /// Returns `true` if a claim has to be made, and no task makes it. Counts a task then.
    pub(super) fn begin_task(&mut self) -> bool {
        let (in_use, waiting) = (self.in_use, self.waiting());
        let Some(held) = self.more.as_mut().and_then(|more| more.held.as_mut()) else { return false };
        let begins = !held.is_busy && (waiting > 0 || held.counted > in_use);
        held.is_busy |= begins;
        begins
    }

    /// Returns the [`entered`](Held::entered) of a shared row.
    pub(super) fn entered(&self) -> Option<&Arc<Notify>> {
        self.held().map(|held| &held.entered)
    }

    /// Returns `true` if a task makes claims.
    pub(super) fn is_busy(&self) -> bool {
        self.held().is_some_and(|held| held.is_busy)
    }

    /// Counts all slots as given back, also those in use. Returns the waiting requests.
    pub(super) fn give_all_back(&mut self) -> BTreeMap<u64, Waiting<T>> {
        self.in_use = 0;
        self.take_queue()
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
    pub(super) fn ask(&mut self, time_to_live: Duration) -> Option<Ask> {
        let in_use = self.in_use;
        let More { queue, held } = self.more.as_deref_mut()?;
        let held = held.as_mut()?;
        let first = queue.first_key_value().map(|(_, first)| first);
        let policy = first.map_or_else(|| held.policy.clone(), |first| first.policy.read().into_owned());
        let waiting = queue.values().fold(in_use, |sum, waiting| sum.saturating_add(waiting.cost));
        let most = waiting.min(number_of_slots(&policy)).max(in_use);
        let before = Before { counted: held.counted, usable: held.usable, forgotten_at: held.forgotten_at };
        let alive_until = later(Instant::now(), time_to_live);
        // Until the claim is answered, the store may count the slots of before or those of the claim.
        (held.counted, held.usable) = (held.counted.max(most), held.usable.min(in_use));
        if most > 0 {
            held.forgotten_at = later(alive_until, time_to_live);
        }
        Some(Ask {
            policy,
            key: held.key.clone(),
            least: in_use,
            first: in_use.saturating_add(first.map_or(0, |first| first.cost)),
            most,
            tickets: queue.first_key_value().zip(queue.last_key_value()).map(|((first, _), (last, _))| (*first, *last)),
            alive_until,
            before,
        })
    }

    /// Applies the result of a claim. Returns the requests that leave the queue, and the next step.
    pub(super) fn apply(&mut self, ask: &Ask, claimed: &Result<Granted, StorageError>) -> (Vec<Left<T>>, Next) {
        self.count(ask, claimed);
        let mut left = self.grant();
        let was_granted = !left.is_empty();
        // Other processes were faster each time, and nothing was stored. The store has not failed.
        let failure = claimed.as_ref().err().filter(|error| error.kind() != StorageErrorKind::Contended);
        let mut asks_again = false;
        while let Some((ticket, cost, policy)) = self.first_waiting().filter(|(ticket, ..)| ask.is_for(*ticket)) {
            let slots = number_of_slots(&policy);
            asks_again = claimed.is_ok() && self.may_fit(ticket, cost, slots, ask);
            if asks_again || failure.is_none() && self.seat(ticket) {
                break;
            }
            let full = || Reason::Full(self.free(slots), policy);
            let reason = failure.map_or_else(full, |error| Reason::Failed(error.clone()));
            left.extend(self.remove(ticket, reason));
            left.extend(self.grant());
        }
        if !asks_again {
            left.extend(self.seat_others(ask));
        }
        (left, self.next(ask, claimed, asks_again, was_granted))
    }

    /// Stores the numbers of the store.
    fn count(&mut self, ask: &Ask, claimed: &Result<Granted, StorageError>) {
        let Some(held) = self.more.as_mut().and_then(|more| more.held.as_mut()) else { return };
        match claimed {
            Ok(granted) => {
                (held.counted, held.usable, held.free) = (granted.count, granted.usable, granted.free);
                held.alive_until = ask.alive_until;
            }
            Err(error) if error.may_have_counted() => {}
            Err(_) => {
                let Before { counted, usable, forgotten_at } = ask.before;
                (held.counted, held.usable, held.forgotten_at) = (counted, usable, forgotten_at);
            }
        }
    }

    /// Returns `true` if another claim may grant the slots of the first request. The last claim was for
    /// another request, or for another number of slots.
    fn may_fit(&self, ticket: u64, cost: u32, slots: u32, ask: &Ask) -> bool {
        let Some(held) = self.held() else { return false };
        let is_first = ask.tickets.is_some_and(|(first, _)| first == ticket);
        let is_same = number_of_slots(&ask.policy) == slots;
        let needed = self.in_use.saturating_add(cost);
        let is_free = needed <= held.usable.saturating_add(held.free) || !is_same;
        !(is_first && is_same) && needed <= slots && is_free
    }

    /// Returns `true` if the request has a seat, or gets one.
    fn seat(&mut self, ticket: u64) -> bool {
        let Some(More { queue, held: Some(held) }) = self.more.as_deref_mut() else { return false };
        let Some(standing) = queue.get(&ticket).filter(|waiting| waiting.seat.is_none()) else { return true };
        let Some(seat) = standing.seats.as_ref().and_then(|seats| seats.take(&held.key)) else { return false };
        if let Some(waiting) = queue.get_mut(&ticket) {
            let (sender, next) = oneshot::channel();
            waiting.seat = Some(seat);
            drop(mem::replace(&mut waiting.answer, sender).send(Answer::Seated(next)));
        }
        true
    }

    /// Gives seats to the requests of a claim behind the first, which waits. Returns those that get none.
    fn seat_others(&mut self, ask: &Ask) -> Vec<Left<T>> {
        let Some(More { queue, .. }) = self.more.as_deref() else { return Vec::new() };
        let standing = queue.iter().filter(|(ticket, waiting)| ask.is_for(**ticket) && waiting.seat.is_none());
        let standing: Vec<(u64, Policy)> =
            standing.map(|(ticket, waiting)| (*ticket, waiting.policy.read().into_owned())).collect();
        let refused = standing.into_iter().filter_map(|(ticket, policy)| {
            let free = self.free(number_of_slots(&policy));
            if self.seat(ticket) { None } else { self.remove(ticket, Reason::Full(free, policy)) }
        });
        refused.collect()
    }

    fn next(&self, ask: &Ask, claimed: &Result<Granted, StorageError>, asks_again: bool, was_granted: bool) -> Next {
        let Some(More { queue, held: Some(held) }) = self.more.as_deref() else { return Next::Done };
        let is_new = queue.last_key_value().is_some_and(|(ticket, _)| !ask.is_for(*ticket));
        // The store counts slots that no request uses.
        let is_unused = held.counted > self.in_use;
        match claimed {
            _ if is_new || asks_again => Next::Again,
            Ok(_) if is_unused && (queue.is_empty() || was_granted) => Next::Again,
            _ if !queue.is_empty() => Next::Poll,
            Err(error) if is_unused && error.kind() == StorageErrorKind::Contended => Next::Poll,
            _ => Next::Done,
        }
    }
}

impl Ask {
    /// Returns `true` if the request was in the queue when the claim began.
    fn is_for(&self, ticket: u64) -> bool {
        self.tickets.is_some_and(|(_, last)| ticket <= last)
    }
}

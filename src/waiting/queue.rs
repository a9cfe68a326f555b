//! The queue of the waiting hits of a policy and key, and the refusal for which they wait.

use std::collections::BTreeMap;
use std::mem;
use std::sync::{Mutex, MutexGuard};
use std::task::{Context, Waker};
use std::time::Duration;

use tokio::time::Instant;

use super::HitResult;
use crate::decision::Decision;
use crate::policy::Policy;
use crate::sync::unpoisoned;
use crate::time::micros;

/// The maximum number of hits of a queue that ask the storage at the same time.
const MAX_TURNS: usize = 32;

/// The time that a hit has to act when it is due. After that, its turn passes on, because nothing
/// polls its future.
const TURN_GRACE: Duration = Duration::from_millis(200);

/// The queue of the waiting hits of a policy and key. It gives them turns to ask the storage, in
/// the order of their tickets.
#[derive(Default)]
pub(super) struct WaitQueue(Mutex<QueueState>);

struct QueueState {
    last_ticket: u64,
    /// The hits that wait for a turn, by their tickets.
    waiting: BTreeMap<u64, QueuedHit>,
    /// The number of hits that may have a turn at the same time.
    turns: usize,
    /// The hits that have a turn, and the instants at which they are due. `None` while a storage
    /// call is in flight.
    holders: BTreeMap<u64, Option<Instant>>,
    /// Set if the last storage call failed.
    is_failing: bool,
    /// The last refusal, if no hit of the queue was admitted since.
    refusal: Option<Refusal>,
}

struct QueuedHit {
    cost: u32,
    waker: Waker,
    /// The instant at which a turn was offered, or else at which the hit looks for hits ahead of it
    /// that are overdue.
    due: Instant,
}

impl WaitQueue {
    pub(super) fn take_ticket(&self) -> u64 {
        let mut state = self.lock();
        state.last_ticket += 1;
        state.last_ticket
    }

    /// Takes a turn, if the hit has none and there are more free ones than hits that wait with
    /// smaller tickets. Otherwise the hit waits, and is woken when it can take a turn. It then has
    /// to ask again at the returned instant, at which a hit ahead of it may be overdue.
    ///
    /// Passes over the hits ahead that are overdue. They keep their tickets.
    pub(super) fn poll_turn(&self, ticket: u64, cost: u32, cx: &Context<'_>) -> Result<(), Instant> {
        let now = Instant::now();
        let mut state = self.lock();
        if let Some(due) = state.holders.get_mut(&ticket) {
            *due = None;
            return Ok(());
        }
        let passes = state.pass_over(ticket, now);
        let free = state.free_turns();
        if state.waiting.range(..ticket).take(free).count() == free {
            let next_check = state.next_check(now);
            let waiting = QueuedHit { cost, waker: cx.waker().clone(), due: next_check };
            state.waiting.insert(ticket, waiting);
            if passes {
                wake(state, now);
            }
            return Err(next_check);
        }
        state.waiting.remove(&ticket);
        state.holders.insert(ticket, None);
        Ok(())
    }

    /// Sets the instant at which a hit that has a turn is due. `None` while its storage call is in
    /// flight.
    pub(super) fn set_due(&self, ticket: u64, due: Option<Instant>) {
        if let Some(holder) = self.lock().holders.get_mut(&ticket) {
            *holder = due;
        }
    }

    /// Stores a refusal, and takes the turn back from the refused hit, which keeps its ticket.
    /// Reduces the number of turns to one.
    pub(super) fn refused(&self, ticket: u64, refusal: &Refusal) {
        let now = Instant::now();
        let mut state = self.lock();
        state.refusal = Some(refusal.clone());
        // Waits again, so that no later hit takes the turn before the next poll of this one.
        let waiting = QueuedHit { cost: refusal.cost(), waker: Waker::noop().clone(), due: now };
        state.waiting.insert(ticket, waiting);
        state.holders.remove(&ticket);
        (state.turns, state.is_failing) = (1, false);
        wake(state, now);
    }

    /// Allows as many turns as the remaining units can admit hits, if all of them cost as much as
    /// the next hit in the queue, or `cost` if there is none. Allows at least one turn and at most
    /// [`MAX_TURNS`]. Forgets the last refusal.
    pub(super) fn admitted(&self, cost: u32, remaining: u32) {
        let mut state = self.lock();
        let next_cost = state.waiting.values().next().map_or(cost, |next| next.cost);
        let turns = remaining.checked_div(next_cost).unwrap_or(1);
        state.turns = usize::try_from(turns).unwrap_or(MAX_TURNS).clamp(1, MAX_TURNS);
        (state.refusal, state.is_failing) = (None, false);
    }

    /// Allows two turns after the first failure in a row, and one more after each further failure,
    /// up to [`MAX_TURNS`]. A failed hit leaves the queue, so each round of failures ends the wait
    /// of twice as many hits.
    pub(super) fn failed(&self) {
        let mut state = self.lock();
        let turns = if mem::replace(&mut state.is_failing, true) { state.turns } else { 1 };
        state.turns = (turns + 1).min(MAX_TURNS);
    }

    /// Removes a hit, and passes its turn on.
    pub(super) fn leave(&self, ticket: u64) {
        let mut state = self.lock();
        state.waiting.remove(&ticket);
        state.holders.remove(&ticket);
        wake(state, Instant::now());
    }

    /// Stores the refusal of a hit that enters the queue.
    pub(super) fn record(&self, refusal: &Refusal) {
        self.lock().refusal = Some(refusal.clone());
    }

    /// Returns the last refusal if it is for this cost.
    pub(super) fn last_refusal(&self, cost: u32) -> Option<Refusal> {
        self.lock().refusal.as_ref().filter(|last| last.cost() == cost).cloned()
    }

    /// Returns the instant until which the last refusal also refuses a hit of this cost, if it is
    /// known.
    pub(super) fn refused_until(&self, cost: u32) -> Option<Instant> {
        self.lock().refusal.as_ref().and_then(|last| last.end_for(cost))
    }

    fn lock(&self) -> MutexGuard<'_, QueueState> {
        unpoisoned(self.0.lock())
    }
}

impl Default for QueueState {
    fn default() -> Self {
        let (waiting, holders) = (BTreeMap::new(), BTreeMap::new());
        Self { last_ticket: 0, waiting, turns: 1, holders, is_failing: false, refusal: None }
    }
}

impl QueueState {
    fn free_turns(&self) -> usize {
        self.turns.saturating_sub(self.holders.len())
    }

    /// Takes the turns of overdue hits, and removes overdue hits that wait with smaller tickets as
    /// long as a turn is free for them. Returns `true` if there were any.
    fn pass_over(&mut self, ticket: u64, now: Instant) -> bool {
        let (holders, waiting) = (self.holders.len(), self.waiting.len());
        self.holders.retain(|_, due| due.is_none_or(|due| !is_overdue(due, now)));
        let (mut on_time, free) = (0, self.free_turns());
        let mut overdue = Vec::new();
        for (ahead, hit) in self.waiting.range(..ticket) {
            if on_time == free {
                break;
            }
            if is_overdue(hit.due, now) {
                overdue.push(*ahead);
            } else {
                on_time += 1;
            }
        }
        for ahead in overdue {
            self.waiting.remove(&ahead);
        }
        (self.holders.len(), self.waiting.len()) != (holders, waiting)
    }

    /// Returns the first instant at which a hit that has a turn, or can take one, may be overdue.
    fn next_check(&self, now: Instant) -> Instant {
        let holders = self.holders.values().map(|due| due.unwrap_or(now));
        let offered = self.waiting.values().take(self.free_turns()).map(|hit| hit.due.min(now));
        holders.chain(offered).min().unwrap_or(now) + TURN_GRACE
    }
}

fn is_overdue(due: Instant, now: Instant) -> bool {
    due + TURN_GRACE <= now
}

/// Wakes the hits that can take a turn, after the lock is released.
fn wake(mut state: MutexGuard<'_, QueueState>, now: Instant) {
    let free = state.free_turns();
    let offered = state.waiting.values_mut().take(free).map(|next| {
        next.due = next.due.min(now);
        next.waker.clone()
    });
    let wakers: Vec<_> = offered.collect();
    drop(state);
    wakers.into_iter().for_each(Waker::wake);
}

/// A refusal, and the instant until which it holds.
#[derive(Clone)]
pub(crate) struct Refusal {
    decision: Decision,
    policy: Policy,
    received: Instant,
    /// The instant at which the hit would be admitted. `None` if that is unknown or never.
    end: Option<Instant>,
}

impl Refusal {
    /// Creates a refusal from a decision that the storage has just returned.
    pub(crate) fn new(decision: Decision, policy: Policy) -> Self {
        let received = Instant::now();
        let end = decision.retry_after().map(|wait| later(received, wait));
        // Other hits get it too, which have not started the lock.
        Self { decision: decision.of_next_hit(), policy, received, end }
    }

    /// Returns `true` if the hit would be admitted at the deadline or earlier.
    pub(crate) fn ends_by(&self, deadline: Instant) -> bool {
        self.end.is_some_and(|end| end <= deadline)
    }

    /// Returns the instant until which a hit of this cost is refused, if it is known.
    pub(super) fn end_for(&self, cost: u32) -> Option<Instant> {
        self.end.filter(|_| cost >= self.decision.cost())
    }

    pub(super) fn policy(&self) -> &Policy {
        &self.policy
    }

    pub(super) fn cost(&self) -> u32 {
        self.decision.cost()
    }

    /// Returns a refusal that holds at least until `end`.
    pub(super) fn lasting_until(self, end: Instant) -> Self {
        Self { end: self.end.max(Some(end)), ..self }
    }

    /// Returns the refusal with the waits that are left now.
    pub(super) fn into_result(self) -> HitResult {
        let now = Instant::now();
        let mut decision = self.decision.after(now.saturating_duration_since(self.received));
        if let (Some(end), Some(retry_after)) = (self.end, decision.retry_after()) {
            let missing = end.saturating_duration_since(now).saturating_sub(retry_after);
            decision.lengthen_waits(micros(missing));
        }
        HitResult { policy: self.policy, decided: Ok(decision) }
    }
}

/// The maximum wait. An `Instant` in a more distant future can overflow on some systems.
const LONGEST_WAIT: Duration = Duration::from_secs(30 * 365 * 86_400);

/// Returns the instant that is `wait` later, but at most [`LONGEST_WAIT`] later.
pub(crate) fn later(instant: Instant, wait: Duration) -> Instant {
    instant.checked_add(wait.min(LONGEST_WAIT)).unwrap_or(instant)
}

use std::collections::BTreeMap;
use std::mem;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use tokio::time::Instant;

use super::Refusal;

/// The maximum number of hits of a queue that ask the storage at the same time.
const MAX_TURNS: usize = 32;

/// The queue of the waiting hits of a policy and key. It gives them turns to ask the storage, in
/// the order of their tickets.
#[derive(Default)]
pub(super) struct Queue(Mutex<State>);

struct State {
    last_ticket: u64,
    /// The hits that wait for a turn, by their tickets.
    waiting: BTreeMap<u64, Waiting>,
    /// The number of hits that may have a turn at the same time.
    turns: usize,
    /// The number of hits that have a turn.
    taken: usize,
    /// Set if the last storage call failed.
    is_failing: bool,
    /// The last refusal, if no hit of the queue was admitted since.
    refusal: Option<Refusal>,
}

struct Waiting {
    cost: u32,
    waker: Waker,
}

impl Queue {
    pub(super) fn take_ticket(&self) -> u64 {
        let mut state = self.lock();
        state.last_ticket += 1;
        state.last_ticket
    }

    /// Takes a turn, if there are more free ones than hits that wait with smaller tickets.
    /// Otherwise the hit waits, and is woken when it can take a turn.
    pub(super) fn poll_turn(&self, ticket: u64, cost: u32, cx: &mut Context<'_>) -> Poll<()> {
        let mut state = self.lock();
        let free = state.free_turns();
        if state.waiting.range(..ticket).take(free).count() == free {
            state.waiting.insert(ticket, Waiting { cost, waker: cx.waker().clone() });
            return Poll::Pending;
        }
        state.waiting.remove(&ticket);
        state.taken += 1;
        Poll::Ready(())
    }

    /// Stores a refusal, and takes the turn back from the refused hit, which keeps its ticket.
    /// Reduces the number of turns to one.
    pub(super) fn refused(&self, ticket: u64, refusal: &Refusal) {
        let mut state = self.lock();
        state.refusal = Some(refusal.clone());
        // Waits again, so that no later hit takes the turn before the next poll of this one.
        let waiting = Waiting { cost: refusal.cost(), waker: Waker::noop().clone() };
        state.waiting.insert(ticket, waiting);
        state.taken -= 1;
        (state.turns, state.is_failing) = (1, false);
        wake(state);
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
    pub(super) fn leave(&self, ticket: u64, has_turn: bool) {
        let mut state = self.lock();
        state.waiting.remove(&ticket);
        state.taken -= usize::from(has_turn);
        wake(state);
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

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for State {
    fn default() -> Self {
        let waiting = BTreeMap::new();
        Self { last_ticket: 0, waiting, turns: 1, taken: 0, is_failing: false, refusal: None }
    }
}

impl State {
    fn free_turns(&self) -> usize {
        self.turns.saturating_sub(self.taken)
    }
}

/// Wakes the hits that can take a turn, after the lock is released.
fn wake(state: MutexGuard<'_, State>) {
    let next: Vec<_> = state.waiting.values().take(state.free_turns()).map(|next| next.waker.clone()).collect();
    drop(state);
    next.into_iter().for_each(Waker::wake);
}

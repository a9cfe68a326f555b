use std::collections::BTreeMap;
use std::future::poll_fn;
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use tokio::time::Instant;

use super::queues::{Id, Queues};
use super::Refusal;

/// The maximum number of hits of a queue that ask the storage at the same time.
const MAX_TURNS: usize = 32;

/// The waiting hits of a policy and key.
#[derive(Default)]
pub(super) struct Queue(Mutex<State>);

struct State {
    next_ticket: u64,
    /// The hits that wait for a turn, in the order of their arrival.
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

/// The place of a hit in a queue. Dropping it leaves the queue and passes the turn on.
pub(crate) struct Place {
    queues: Arc<Queues>,
    id: Id,
    queue: Arc<Queue>,
    cost: u32,
    /// The position in the order of arrival.
    ticket: u64,
    has_turn: bool,
}

impl Place {
    pub(super) fn new(queues: Arc<Queues>, id: Id, queue: Arc<Queue>, cost: u32) -> Self {
        let ticket = queue.lock().take_ticket();
        Self { queues, id, queue, cost, ticket, has_turn: false }
    }

    /// Waits for a turn to ask the storage. Turns are given in the order of arrival.
    pub(super) async fn turn(&mut self) {
        poll_fn(|cx| self.poll_turn(cx)).await;
    }

    fn poll_turn(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.has_turn {
            return Poll::Ready(());
        }
        let mut state = self.queue.lock();
        let free = state.free_turns();
        if state.waiting.range(..self.ticket).take(free).count() == free {
            let waiting = Waiting { cost: self.cost, waker: cx.waker().clone() };
            state.waiting.insert(self.ticket, waiting);
            return Poll::Pending;
        }
        state.waiting.remove(&self.ticket);
        state.taken += 1;
        self.has_turn = true;
        Poll::Ready(())
    }

    /// Stores a refusal of this hit, and gives back its turn. It keeps its place in the order. Only
    /// one hit at a time asks again.
    pub(super) fn refused(&mut self, refusal: &Refusal) {
        self.queue.record(refusal);
        let mut state = self.queue.lock();
        // Waits again, so that no later hit takes the turn before the next poll of this one.
        let waiting = Waiting { cost: self.cost, waker: Waker::noop().clone() };
        state.waiting.insert(self.ticket, waiting);
        (state.turns, state.is_failing) = (1, false);
        state.taken -= usize::from(mem::take(&mut self.has_turn));
        wake(state);
    }

    /// Lets as many hits ask at the same time as the remaining units admit, and forgets the last
    /// refusal.
    pub(super) fn admitted(&self, remaining: u32) {
        let mut state = self.queue.lock();
        let next_cost = state.waiting.values().next().map_or(self.cost, |next| next.cost);
        let turns = remaining.checked_div(next_cost).unwrap_or(1);
        state.turns = usize::try_from(turns).unwrap_or(MAX_TURNS).clamp(1, MAX_TURNS);
        (state.refusal, state.is_failing) = (None, false);
    }

    /// Lets one more hit ask, so that each round of failures ends the wait of twice as many hits.
    pub(super) fn failed(&self) {
        let mut state = self.queue.lock();
        let turns = if mem::replace(&mut state.is_failing, true) { state.turns } else { 1 };
        state.turns = (turns + 1).min(MAX_TURNS);
    }

    /// Returns the queue's last refusal if it is for the same cost.
    pub(super) fn last_refusal(&self) -> Option<Refusal> {
        self.queue.lock().refusal.as_ref().filter(|last| last.cost() == self.cost).cloned()
    }

    /// Returns the instant until which this hit is refused, by its `own` refusal and by the queue's
    /// last one, if it is known.
    pub(super) fn end_of(&self, own: Option<&Refusal>) -> Option<Instant> {
        let of_queue = self.queue.lock().refusal.as_ref().and_then(|last| last.end_for(self.cost));
        of_queue.max(own.and_then(|own| own.end_for(self.cost)))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut state = self.queue.lock();
        state.waiting.remove(&self.ticket);
        state.taken -= usize::from(self.has_turn);
        wake(state);
        self.queues.leave(&self.id);
    }
}

impl Queue {
    /// Stores the queue's last refusal.
    pub(super) fn record(&self, refusal: &Refusal) {
        self.lock().refusal = Some(refusal.clone());
    }

    /// Returns `true` if the last refusal also refuses a hit of this cost until after the deadline.
    pub(super) fn refuses_until_after(&self, deadline: Instant, cost: u32) -> bool {
        self.lock().refusal.as_ref().and_then(|last| last.end_for(cost)).is_some_and(|end| end > deadline)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for State {
    fn default() -> Self {
        let waiting = BTreeMap::new();
        Self { next_ticket: 0, waiting, turns: 1, taken: 0, is_failing: false, refusal: None }
    }
}

impl State {
    fn take_ticket(&mut self) -> u64 {
        self.next_ticket += 1;
        self.next_ticket
    }

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

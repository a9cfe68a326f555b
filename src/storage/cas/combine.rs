//! Swaps of different keys that wait for the server at the same time, and go to it together.
//!
//! A call, and on most servers a commit, costs more than a swap. Swaps in one call share both.
//!
//! A swap is sent at once if a lane is free. Otherwise it waits until a call ends. All swaps that wait
//! by then are the next call. So a swap that is alone never waits, and the calls grow with the load.
//!
//! A task sends the call on the runtime of its swaps. If a swap has waited for a quarter of its time, those
//! that wait on its runtime are sent without a lane, because the lanes may belong to a runtime that does not
//! run for a while. A lane is free again at the deadline of its call, even if its runtime never runs again.
//!
//! Each swap of a call succeeds or is lost on its own. If the server refuses the call, all its swaps
//! are sent alone, because one of them may be the cause. If the reply is lost, all of them fail.

#[cfg(test)]
mod tests;

use std::collections::{HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::time::timeout_at;

#[cfg(feature = "etcd")]
use super::several::KeySwap;
use super::several::MAX_KEYS;
use super::{CasStorage, Swapped};
use crate::storage::StorageError;
use crate::sync::unpoisoned;

/// The maximum number of swaps in a call. An operation of a nested transaction of etcd counts on top of
/// those around it.
const MAX_SWAPS: usize = MAX_KEYS - 1;

/// The length of all keys and texts of a call from which it takes no further swap, in bytes.
const MAX_BYTES: usize = 100_000;

/// A store that swaps the texts of several keys in one call, each independent of the others.
pub(in crate::storage) trait SwapEach: CasStorage<Error = StorageError, Version: Clone> {
    /// `true` if a call is cancelled shortly before its deadline, and then has had no effect.
    const IS_CANCELLED: bool;

    /// Returns the addresses of the servers, for errors.
    fn name(&self) -> String;

    /// See [`CasStorage::swap`].
    fn swap_alone(
        &self,
        swap: &TextSwap<Self::Version>,
        deadline: Instant,
    ) -> impl Future<Output = Result<Swapped<Self::Version>, StorageError>> + Send;

    /// Swaps the texts of different keys. Returns the results in the same order, or `None` for a swap
    /// that was not executed and has to be sent alone.
    fn swap_each(
        &self,
        swaps: &[TextSwap<Self::Version>],
        deadline: Instant,
    ) -> impl Future<Output = Result<Vec<Option<Swapped<Self::Version>>>, StorageError>> + Send;
}

/// The arguments of [`CasStorage::swap`].
#[derive(Clone, Debug)]
pub(in crate::storage) struct TextSwap<V> {
    pub(in crate::storage) key: Arc<str>,
    pub(in crate::storage) version: V,
    pub(in crate::storage) text: String,
    pub(in crate::storage) time_to_live: Duration,
}

impl<V> TextSwap<V> {
    #[cfg(feature = "etcd")]
    pub(in crate::storage) fn as_key_swap(&self) -> KeySwap<'_, V> {
        KeySwap { key: &self.key, version: &self.version, change: Some((&self.text, self.time_to_live)) }
    }
}

/// Sends the swaps of one store. Clones share the lanes.
#[derive(Debug)]
pub(in crate::storage) struct SwapCombiner<V> {
    /// The number of calls in flight from which swaps wait.
    lanes: usize,
    queue: Arc<Mutex<Queue<V>>>,
}

#[derive(Debug)]
struct Queue<V> {
    /// The calls that have a lane.
    calls: Vec<Call>,
    waiting: VecDeque<Waiting<V>>,
    /// The number of the next call, or of the next swap that waits.
    next: u64,
}

/// A call that has a lane until its deadline.
#[derive(Debug)]
struct Call {
    number: u64,
    deadline: Instant,
}

/// A swap that waits for a call.
#[derive(Debug)]
struct Waiting<V> {
    number: u64,
    swap: TextSwap<V>,
    deadline: Instant,
    runtime: Handle,
    answer: oneshot::Sender<Answer<V>>,
}

/// The result of a swap, or `None` if it was not executed and has to be sent alone.
type Answer<V> = Option<Result<Swapped<V>, StorageError>>;

/// The right to have a call in flight. When it is dropped, the swaps that wait get it, unless it has
/// passed on at the deadline.
struct Lane<S: SwapEach> {
    combiner: SwapCombiner<S::Version>,
    store: S,
    /// The number of the call.
    number: u64,
}

impl<V> SwapCombiner<V> {
    pub(in crate::storage) fn new(lanes: usize) -> Self {
        let queue = Queue { calls: Vec::new(), waiting: VecDeque::new(), next: 0 };
        Self { lanes: lanes.max(1), queue: Arc::new(Mutex::new(queue)) }
    }

    fn lock(&self) -> MutexGuard<'_, Queue<V>> {
        unpoisoned(self.queue.lock())
    }
}

impl<V: Clone + Send> SwapCombiner<V> {
    /// Sends a swap, together with others if all lanes are taken.
    pub(in crate::storage) async fn swap<S>(
        &self,
        store: &S,
        swap: TextSwap<V>,
        deadline: Instant,
    ) -> Result<Swapped<V>, StorageError>
    where
        S: SwapEach<Version = V>,
    {
        let (number, answer) = self.enter(&swap, deadline);
        let Some(mut answer) = answer else {
            let _lane = Lane { combiner: self.clone(), store: store.clone(), number };
            return store.swap_alone(&swap, deadline).await;
        };
        let now = tokio::time::Instant::now();
        let patience = deadline.saturating_duration_since(now.into_std()) / 4;
        let answer = if let Ok(answer) = timeout_at(now + patience, &mut answer).await {
            Ok(answer)
        } else {
            let taken = self.lock().take_from(number, S::IS_CANCELLED);
            if let Some(first) = taken.first() {
                first.runtime.clone().spawn(send(store.clone(), None, taken));
            }
            timeout_at(deadline.into(), answer).await
        };
        match answer {
            Ok(Ok(Some(result))) => result,
            Ok(Ok(None)) => store.swap_alone(&swap, deadline).await,
            Err(_) => Err(StorageError::timed_out(&SwapEach::name(store))),
            // The call may have been sent.
            Ok(Err(_)) => Err(StorageError::connection_lost(&SwapEach::name(store), "the runtime has ended")),
        }
    }

    /// Takes a lane, or joins the swaps that wait for an answer. Returns the number of the call or swap.
    fn enter(&self, swap: &TextSwap<V>, deadline: Instant) -> (u64, Option<oneshot::Receiver<Answer<V>>>) {
        let mut queue = self.lock();
        let runtime = Handle::try_current().ok().filter(|_| !queue.has_free_lane(self.lanes));
        let Some(runtime) = runtime else { return (queue.begin_call(deadline), None) };
        let (sender, answer) = oneshot::channel();
        let number = queue.next_number();
        queue.waiting.push_back(Waiting { number, swap: swap.clone(), deadline, runtime, answer: sender });
        (number, Some(answer))
    }
}

impl<V> Clone for SwapCombiner<V> {
    fn clone(&self) -> Self {
        Self { lanes: self.lanes, queue: Arc::clone(&self.queue) }
    }
}

impl<V> Queue<V> {
    /// Returns `true` if a call can begin. A call whose deadline has passed no longer counts.
    fn has_free_lane(&mut self, lanes: usize) -> bool {
        if self.calls.len() >= lanes {
            let now = tokio::time::Instant::now().into_std();
            self.calls.retain(|call| call.deadline > now);
        }
        self.calls.len() < lanes
    }

    /// Gives a lane to a call. Returns the number of the call.
    fn begin_call(&mut self, deadline: Instant) -> u64 {
        let number = self.next_number();
        self.calls.push(Call { number, deadline });
        number
    }

    /// Ends a call. Returns `false` if its lane was taken away.
    fn end_call(&mut self, number: u64) -> bool {
        let position = self.calls.iter().position(|call| call.number == number);
        position.map(|position| self.calls.swap_remove(position)).is_some()
    }

    fn next_number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Takes the swap with this number, unless a call has taken it, and others for a call.
    fn take_from(&mut self, number: u64, is_cancelled: bool) -> Vec<Waiting<V>> {
        let position = self.waiting.iter().position(|waiting| waiting.number == number);
        let first = position.and_then(|position| self.waiting.remove(position));
        first.map(|first| self.take_with(first, is_cancelled)).unwrap_or_default()
    }

    /// Takes the swap that has waited for the longest time, and others for a call.
    fn take(&mut self, is_cancelled: bool) -> Vec<Waiting<V>> {
        let first = self.waiting.pop_front();
        first.map(|first| self.take_with(first, is_cancelled)).unwrap_or_default()
    }

    /// Takes swaps of different keys for the call of the first one, all on its runtime. A call that is
    /// cancelled ends at the first deadline of its swaps, so those with much more time are left.
    fn take_with(&mut self, first: Waiting<V>, is_cancelled: bool) -> Vec<Waiting<V>> {
        let now = tokio::time::Instant::now().into_std();
        let time_left = |waiting: &Waiting<V>| waiting.deadline.saturating_duration_since(now);
        let first_left = time_left(&first);
        let fits = |left: Duration| !is_cancelled || left <= 4 * first_left && first_left <= 4 * left;
        let (mut keys, mut bytes) = (HashSet::from([Arc::clone(&first.swap.key)]), first.len());
        let mut taken = vec![first];
        let mut at = 0;
        while at < self.waiting.len() && taken.len() < MAX_SWAPS && bytes < MAX_BYTES {
            let waiting = &self.waiting[at];
            let is_alike = waiting.runtime.id() == taken[0].runtime.id() && fits(time_left(waiting));
            if is_alike && keys.insert(Arc::clone(&waiting.swap.key)) {
                bytes += waiting.len();
                taken.extend(self.waiting.remove(at));
            } else {
                at += 1;
            }
        }
        taken
    }
}

impl<V> Waiting<V> {
    fn len(&self) -> usize {
        self.swap.key.len() + self.swap.text.len()
    }
}

impl<S: SwapEach> Drop for Lane<S> {
    fn drop(&mut self) {
        let (taken, number) = {
            let mut queue = self.combiner.lock();
            if !queue.end_call(self.number) {
                return;
            }
            queue.waiting.retain(|waiting| !waiting.answer.is_closed());
            let taken = queue.take(S::IS_CANCELLED);
            let Some(deadline) = deadline_of::<S>(&taken) else { return };
            (taken, queue.begin_call(deadline))
        };
        let Some(first) = taken.first() else { return };
        let runtime = first.runtime.clone();
        let lane = Self { combiner: self.combiner.clone(), store: self.store.clone(), number };
        // A runtime that has shut down drops the task, which then gives the lane to other swaps. Those can be
        // many, so the task is not on the stack.
        runtime.spawn(Box::pin(send(self.store.clone(), Some(lane), taken)));
    }
}

/// Returns the deadline of a call with these swaps. A call that is cancelled is so in time for each of its
/// swaps. Otherwise, a swap with little time does not end the call of the others.
fn deadline_of<S: SwapEach>(taken: &[Waiting<S::Version>]) -> Option<Instant> {
    let deadlines = taken.iter().map(|waiting| waiting.deadline);
    if S::IS_CANCELLED { deadlines.min() } else { deadlines.max() }
}

/// Sends the swaps in one call, and answers their callers.
async fn send<S: SwapEach>(store: S, lane: Option<Lane<S>>, taken: Vec<Waiting<S::Version>>) {
    let Some(deadline) = deadline_of::<S>(&taken) else { return };
    let begun = tokio::time::Instant::now();
    let (swaps, callers): (Vec<_>, Vec<_>) =
        taken.into_iter().map(|waiting| (waiting.swap, (waiting.deadline, waiting.answer))).unzip();
    let result = match &swaps[..] {
        [swap] => store.swap_alone(swap, deadline).await.map(|swapped| vec![Some(swapped)]),
        swaps => store.swap_each(swaps, deadline).await,
    };
    drop(lane);
    match result {
        Ok(swapped) => {
            let mut swapped = swapped.into_iter();
            for (_, answer) in callers {
                let _ = answer.send(swapped.next().flatten().map(Ok));
            }
        }
        Err(error) => {
            let duration = begun.elapsed();
            let now = (begun + duration).into_std();
            for (deadline, answer) in callers {
                // A swap that would be cancelled again is not sent again.
                let is_late = error.is_timeout() && deadline.saturating_duration_since(now) < duration;
                let is_final = error.may_have_counted() || is_late;
                let _ = answer.send(is_final.then(|| Err(error.clone())));
            }
        }
    }
}

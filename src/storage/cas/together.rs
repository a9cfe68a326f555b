//! Swaps of different keys that wait for the server at the same time, and go to it together.
//!
//! A call, and on most servers a commit, costs more than a swap. Swaps in one call share both.
//!
//! A swap is sent at once if a lane is free. Otherwise it waits until a call ends. All swaps that wait
//! by then are the next call. So a swap that is alone never waits, and the calls grow with the load.
//!
//! A task sends the call on the runtime of its swaps. If a swap has waited for a quarter of its time, those
//! that wait on its runtime are sent without a lane, because the lanes may belong to a runtime that does not
//! run for a while.
//!
//! Each swap of a call succeeds or is lost on its own. If the server refuses the call, all its swaps
//! are sent alone, because one of them may be the cause. If the reply is lost, all of them fail.

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
    pub(in crate::storage) keep: Duration,
}

impl<V> TextSwap<V> {
    #[cfg(feature = "etcd")]
    pub(in crate::storage) fn as_key_swap(&self) -> KeySwap<'_, V> {
        KeySwap { key: &self.key, version: &self.version, change: Some((&self.text, self.keep)) }
    }
}

/// Sends the swaps of one store. Clones share the lanes.
#[derive(Debug)]
pub(in crate::storage) struct Together<V> {
    /// The number of calls in flight from which swaps wait.
    lanes: usize,
    queue: Arc<Mutex<Queue<V>>>,
}

#[derive(Debug)]
struct Queue<V> {
    calls_in_flight: usize,
    waiting: VecDeque<Waiting<V>>,
    /// The number of the next swap that waits.
    next: u64,
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

/// The right to have a call in flight. When it is dropped, the swaps that wait get it.
struct Lane<S: SwapEach> {
    together: Together<S::Version>,
    store: S,
}

impl<V> Together<V> {
    pub(in crate::storage) fn new(lanes: usize) -> Self {
        let queue = Queue { calls_in_flight: 0, waiting: VecDeque::new(), next: 0 };
        Self { lanes: lanes.max(1), queue: Arc::new(Mutex::new(queue)) }
    }

    fn lock(&self) -> MutexGuard<'_, Queue<V>> {
        unpoisoned(self.queue.lock())
    }
}

impl<V: Clone + Send> Together<V> {
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
        let Some((number, mut answer)) = self.enter(&swap, deadline) else {
            let _lane = Lane { together: self.clone(), store: store.clone() };
            return store.swap_alone(&swap, deadline).await;
        };
        let now = tokio::time::Instant::now();
        let patience = deadline.saturating_duration_since(now.into_std()) / 4;
        let answer = if let Ok(answer) = timeout_at(now + patience, &mut answer).await {
            Ok(answer)
        } else {
            let taken = self.lock().take_from(number);
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

    /// Takes a lane and returns `None`, or joins the swaps that wait.
    fn enter(&self, swap: &TextSwap<V>, deadline: Instant) -> Option<(u64, oneshot::Receiver<Answer<V>>)> {
        let mut queue = self.lock();
        let runtime = Handle::try_current().ok().filter(|_| queue.calls_in_flight >= self.lanes);
        let Some(runtime) = runtime else {
            queue.calls_in_flight += 1;
            return None;
        };
        let (sender, answer) = oneshot::channel();
        let number = queue.next;
        queue.next += 1;
        queue.waiting.push_back(Waiting { number, swap: swap.clone(), deadline, runtime, answer: sender });
        Some((number, answer))
    }
}

impl<V> Clone for Together<V> {
    fn clone(&self) -> Self {
        Self { lanes: self.lanes, queue: Arc::clone(&self.queue) }
    }
}

impl<V> Queue<V> {
    /// Takes the swap with this number, unless a call has taken it, and others for a call.
    fn take_from(&mut self, number: u64) -> Vec<Waiting<V>> {
        let position = self.waiting.iter().position(|waiting| waiting.number == number);
        let first = position.and_then(|position| self.waiting.remove(position));
        first.map(|first| self.take_with(first)).unwrap_or_default()
    }

    /// Takes the swap that has waited for the longest time, and others for a call.
    fn take(&mut self) -> Vec<Waiting<V>> {
        let first = self.waiting.pop_front();
        first.map(|first| self.take_with(first)).unwrap_or_default()
    }

    /// Takes swaps of different keys for the call of the first one, all on its runtime.
    fn take_with(&mut self, first: Waiting<V>) -> Vec<Waiting<V>> {
        let (mut keys, mut bytes) = (HashSet::from([Arc::clone(&first.swap.key)]), first.len());
        let mut taken = vec![first];
        let mut at = 0;
        while at < self.waiting.len() && taken.len() < MAX_SWAPS && bytes < MAX_BYTES {
            let waiting = &self.waiting[at];
            if waiting.runtime.id() == taken[0].runtime.id() && keys.insert(Arc::clone(&waiting.swap.key)) {
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
        let taken = {
            let mut queue = self.together.lock();
            queue.waiting.retain(|waiting| !waiting.answer.is_closed());
            let taken = queue.take();
            if taken.is_empty() {
                queue.calls_in_flight -= 1;
            }
            taken
        };
        let Some(first) = taken.first() else { return };
        let runtime = first.runtime.clone();
        let lane = Self { together: self.together.clone(), store: self.store.clone() };
        // A runtime that has shut down drops the task, which then gives the lane to other swaps. Those can be
        // many, so the task is not on the stack.
        runtime.spawn(Box::pin(send(self.store.clone(), Some(lane), taken)));
    }
}

/// Sends the swaps in one call, and answers their callers.
async fn send<S: SwapEach>(store: S, lane: Option<Lane<S>>, taken: Vec<Waiting<S::Version>>) {
    let deadlines = taken.iter().map(|waiting| waiting.deadline);
    // A call that is cancelled is so in time for each of its swaps. Otherwise, a swap with little time does
    // not end the call of the others.
    let deadline = if S::IS_CANCELLED { deadlines.min() } else { deadlines.max() };
    let Some(deadline) = deadline else { return };
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

#[cfg(test)]
mod tests {
    use std::future::ready;

    use tokio::sync::Semaphore;
    use tokio::task::{JoinSet, yield_now};

    use super::*;
    use crate::storage::{Loaded, StorageErrorKind};

    const TIMEOUT: Duration = Duration::from_secs(4);

    /// The result of a call with this number of keys.
    type Several = fn(usize) -> Result<Vec<Option<Swapped<u64>>>, StorageError>;

    /// A store that records the keys of each call.
    #[derive(Clone, Debug)]
    struct Calls(Arc<CallsInner>);

    #[derive(Debug)]
    struct CallsInner {
        calls: Mutex<Vec<Vec<String>>>,
        /// The calls that may end.
        may_end: Semaphore,
        several: Several,
    }

    impl Calls {
        fn new(several: Several) -> Self {
            Self(Arc::new(CallsInner { calls: Mutex::default(), may_end: Semaphore::new(0), several }))
        }

        async fn call(&self, swaps: &[TextSwap<u64>]) {
            let mut keys: Vec<_> = swaps.iter().map(|swap| swap.key.to_string()).collect();
            keys.sort();
            self.0.calls.lock().unwrap().push(keys);
            self.0.may_end.acquire().await.unwrap().forget();
        }

        fn calls(&self) -> Vec<Vec<String>> {
            self.0.calls.lock().unwrap().clone()
        }
    }

    impl CasStorage for Calls {
        type Error = StorageError;
        type Version = u64;

        fn load(&self, _: &str, _: Instant) -> impl Future<Output = Result<Loaded<u64>, StorageError>> + Send {
            ready(Err(StorageError::new(StorageErrorKind::Unsupported, "only swaps")))
        }

        fn swap(
            &self,
            _: &str,
            _: &u64,
            _: &str,
            _: Duration,
            _: Instant,
        ) -> impl Future<Output = Result<Swapped<u64>, StorageError>> + Send {
            ready(Err(StorageError::new(StorageErrorKind::Unsupported, "only swaps of `Together`")))
        }
    }

    impl SwapEach for Calls {
        const IS_CANCELLED: bool = true;

        fn name(&self) -> String {
            "calls".to_owned()
        }

        async fn swap_alone(&self, swap: &TextSwap<u64>, _: Instant) -> Result<Swapped<u64>, StorageError> {
            self.call(std::slice::from_ref(swap)).await;
            Ok(Swapped::Stored)
        }

        async fn swap_each(
            &self,
            swaps: &[TextSwap<u64>],
            _: Instant,
        ) -> Result<Vec<Option<Swapped<u64>>>, StorageError> {
            self.call(swaps).await;
            (self.0.several)(swaps.len())
        }
    }

    type Swaps = JoinSet<(usize, Result<Swapped<u64>, StorageError>)>;

    /// Starts a swap for each key, one after the other.
    async fn start(swaps: &mut Swaps, together: &Together<u64>, store: &Calls, keys: &[&str]) {
        for key in keys {
            let swap = TextSwap { key: (*key).into(), version: 0, text: "text".to_owned(), keep: Duration::ZERO };
            let (together, store, number) = (together.clone(), store.clone(), swaps.len());
            swaps.spawn(async move {
                (number, together.swap(&store, swap, tokio::time::Instant::now().into_std() + TIMEOUT).await)
            });
            yield_now().await;
        }
    }

    /// Returns the results in the order of the starts.
    async fn results(swaps: Swaps) -> Vec<Result<Swapped<u64>, StorageError>> {
        let mut results = swaps.join_all().await;
        results.sort_by_key(|(number, _)| *number);
        results.into_iter().map(|(_, result)| result).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn swaps_that_wait_for_a_lane_are_one_call() {
        let store = Calls::new(|count| Ok((0..count).map(|_| Some(Swapped::Stored)).collect()));
        let (together, mut swaps) = (Together::new(2), Swaps::new());
        start(&mut swaps, &together, &store, &["a", "b", "c", "d", "c", "e"]).await;
        assert_eq!(store.calls(), [["a"], ["b"]], "others wait");
        store.0.may_end.add_permits(1);
        tokio::time::sleep(Duration::from_millis(1)).await;
        assert_eq!(store.calls()[2..], [["c", "d", "e"]], "a key is only once in a call");
        store.0.may_end.add_permits(3);
        for result in results(swaps).await {
            assert!(matches!(result, Ok(Swapped::Stored)), "{result:?}");
        }
        assert_eq!(store.calls()[3..], [["c"]]);
        assert_eq!(together.lock().calls_in_flight, 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_swap_that_a_call_did_not_execute_is_sent_alone() {
        let lost = |count: usize| {
            let lost = || Some(Swapped::Lost(None));
            Ok([lost(), None].into_iter().chain([lost()]).take(count).collect())
        };
        let refused = |_| Err(StorageError::new(StorageErrorKind::Refused, "no right to one of the keys"));
        for (several, sent) in [(Calls::new(lost), vec!["c"]), (Calls::new(refused), vec!["b", "c", "d"])] {
            let (together, mut swaps) = (Together::new(1), Swaps::new());
            start(&mut swaps, &together, &several, &["a", "b", "c", "d"]).await;
            several.0.may_end.add_permits(10);
            let results = results(swaps).await;
            let calls = several.calls();
            assert_eq!(calls[1], ["b", "c", "d"]);
            assert_eq!(calls[2..].concat(), sent);
            for (key, result) in ["a", "b", "c", "d"].iter().zip(results) {
                let is_stored = *key == "a" || sent.contains(key);
                assert_eq!(matches!(result, Ok(Swapped::Stored)), is_stored, "{key}: {result:?}");
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_cancelled_swap_without_time_is_not_sent_again() {
        let store = Calls::new(|_| Err(StorageError::timed_out("calls").uncounted()));
        let (together, mut swaps) = (Together::new(1), Swaps::new());
        start(&mut swaps, &together, &store, &["a", "b", "c"]).await;
        store.0.may_end.add_permits(1);
        tokio::time::sleep(TIMEOUT * 4 / 5).await;
        store.0.may_end.add_permits(10);
        let results = results(swaps).await;
        let is_definite =
            |result: &Result<_, StorageError>| result.as_ref().is_err_and(|error| !error.may_have_counted());
        assert!(results[1..].iter().all(is_definite), "{results:?}");
        assert_eq!(store.calls(), [vec!["a"], vec!["b", "c"]]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_lost_reply_fails_all_swaps_of_the_call() {
        let store = Calls::new(|_| Err(StorageError::connection_lost("calls", "closed")));
        let (together, mut swaps) = (Together::new(1), Swaps::new());
        start(&mut swaps, &together, &store, &["a", "b", "c"]).await;
        store.0.may_end.add_permits(10);
        let results = results(swaps).await;
        assert!(matches!(results[0], Ok(Swapped::Stored)), "{results:?}");
        assert!(results[1..].iter().all(|result| result.as_ref().is_err_and(StorageError::may_have_counted)));
        assert_eq!(store.calls(), [vec!["a"], vec!["b", "c"]], "none is sent again");
    }

    /// The future with the lane may be that of a runtime that does not run for a while.
    #[tokio::test(start_paused = true)]
    async fn a_swap_waits_for_a_quarter_of_its_time() {
        let store = Calls::new(|count| Ok((0..count).map(|_| Some(Swapped::Stored)).collect()));
        let (together, mut swaps) = (Together::new(1), Swaps::new());
        start(&mut swaps, &together, &store, &["a", "b", "c"]).await;
        tokio::time::sleep(TIMEOUT / 5).await;
        assert_eq!(store.calls(), [["a"]]);
        tokio::time::sleep(TIMEOUT / 10).await;
        assert_eq!(store.calls(), [vec!["a"], vec!["b", "c"]]);
        store.0.may_end.add_permits(2);
        assert!(results(swaps).await.iter().all(Result::is_ok));
    }

    /// A call that is dropped gives its lane away.
    #[tokio::test(start_paused = true)]
    async fn a_dropped_swap_is_not_sent() {
        let store = Calls::new(|_| Ok(Vec::new()));
        let (together, mut first, mut second) = (Together::new(1), Swaps::new(), Swaps::new());
        start(&mut first, &together, &store, &["a"]).await;
        start(&mut second, &together, &store, &["b"]).await;
        second.shutdown().await;
        first.shutdown().await;
        let mut third = Swaps::new();
        start(&mut third, &together, &store, &["c"]).await;
        assert_eq!(store.calls(), [["a"], ["c"]]);
        store.0.may_end.add_permits(1);
        assert!(results(third).await.iter().all(Result::is_ok));
    }
}

//! The calls of a combiner, on a store that records them.

use std::future::ready;

use futures_util::FutureExt;
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
        ready(Err(StorageError::new(StorageErrorKind::Unsupported, "only swaps of `SwapCombiner`")))
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

    async fn swap_each(&self, swaps: &[TextSwap<u64>], _: Instant) -> Result<Vec<Option<Swapped<u64>>>, StorageError> {
        self.call(swaps).await;
        (self.0.several)(swaps.len())
    }
}

type Swaps = JoinSet<(usize, Result<Swapped<u64>, StorageError>)>;

/// Starts a swap for each key, one after the other.
async fn start(swaps: &mut Swaps, combiner: &SwapCombiner<u64>, store: &Calls, keys: &[&str]) {
    for key in keys {
        let (number, swap) = (swaps.len(), swap(combiner, store, key));
        swaps.spawn(async move { (number, swap.await) });
        yield_now().await;
    }
}

fn swap(
    combiner: &SwapCombiner<u64>,
    store: &Calls,
    key: &str,
) -> impl Future<Output = Result<Swapped<u64>, StorageError>> + Send + use<> {
    swap_within(combiner, store, key, TIMEOUT)
}

fn swap_within(
    combiner: &SwapCombiner<u64>,
    store: &Calls,
    key: &str,
    timeout: Duration,
) -> impl Future<Output = Result<Swapped<u64>, StorageError>> + Send + use<> {
    let swap = TextSwap { key: key.into(), version: 0, text: "text".to_owned(), time_to_live: Duration::ZERO };
    let (combiner, store, deadline) = (combiner.clone(), store.clone(), tokio::time::Instant::now() + timeout);
    async move { combiner.swap(&store, swap, deadline.into_std()).await }
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
    let (combiner, mut swaps) = (SwapCombiner::new(2), Swaps::new());
    start(&mut swaps, &combiner, &store, &["a", "b", "c", "d", "c", "e"]).await;
    assert_eq!(store.calls(), [["a"], ["b"]], "others wait");
    store.0.may_end.add_permits(1);
    tokio::time::sleep(Duration::from_millis(1)).await;
    assert_eq!(store.calls()[2..], [["c", "d", "e"]], "a key is only once in a call");
    store.0.may_end.add_permits(3);
    for result in results(swaps).await {
        assert!(matches!(result, Ok(Swapped::Stored)), "{result:?}");
    }
    assert_eq!(store.calls()[3..], [["c"]]);
    assert_eq!(combiner.lock().calls.len(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_swap_that_a_call_did_not_execute_is_sent_alone() {
    let lost = |count: usize| {
        let lost = || Some(Swapped::Lost(None));
        Ok([lost(), None].into_iter().chain([lost()]).take(count).collect())
    };
    let refused = |_| Err(StorageError::new(StorageErrorKind::Refused, "no right to one of the keys"));
    for (several, sent) in [(Calls::new(lost), vec!["c"]), (Calls::new(refused), vec!["b", "c", "d"])] {
        let (combiner, mut swaps) = (SwapCombiner::new(1), Swaps::new());
        start(&mut swaps, &combiner, &several, &["a", "b", "c", "d"]).await;
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
    let (combiner, mut swaps) = (SwapCombiner::new(1), Swaps::new());
    start(&mut swaps, &combiner, &store, &["a", "b", "c"]).await;
    store.0.may_end.add_permits(1);
    tokio::time::sleep(TIMEOUT * 4 / 5).await;
    store.0.may_end.add_permits(10);
    let results = results(swaps).await;
    let is_definite = |result: &Result<_, StorageError>| result.as_ref().is_err_and(|error| !error.may_have_counted());
    assert!(results[1..].iter().all(is_definite), "{results:?}");
    assert_eq!(store.calls(), [vec!["a"], vec!["b", "c"]]);
}

#[tokio::test(start_paused = true)]
async fn a_lost_reply_fails_all_swaps_of_the_call() {
    let store = Calls::new(|_| Err(StorageError::connection_lost("calls", "closed")));
    let (combiner, mut swaps) = (SwapCombiner::new(1), Swaps::new());
    start(&mut swaps, &combiner, &store, &["a", "b", "c"]).await;
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
    let (combiner, mut swaps) = (SwapCombiner::new(1), Swaps::new());
    start(&mut swaps, &combiner, &store, &["a", "b", "c"]).await;
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
    let (combiner, mut first, mut second) = (SwapCombiner::new(1), Swaps::new(), Swaps::new());
    start(&mut first, &combiner, &store, &["a"]).await;
    start(&mut second, &combiner, &store, &["b"]).await;
    second.shutdown().await;
    first.shutdown().await;
    let mut third = Swaps::new();
    start(&mut third, &combiner, &store, &["c"]).await;
    assert_eq!(store.calls(), [["a"], ["c"]]);
    store.0.may_end.add_permits(1);
    assert!(results(third).await.iter().all(Result::is_ok));
}

/// A runtime that never runs again keeps its calls, so they neither end nor are dropped.
#[tokio::test(start_paused = true)]
async fn lane_is_free_again_at_the_deadline_of_its_call() {
    let store = Calls::new(|count| Ok((0..count).map(|_| Some(Swapped::Stored)).collect()));
    let (combiner, mut swaps) = (SwapCombiner::new(2), Swaps::new());
    let mut kept = ["a", "b"].map(|key| Box::pin(swap(&combiner, &store, key)));
    assert!(kept.iter_mut().all(|call| call.now_or_never().is_none()));
    tokio::time::sleep(TIMEOUT * 9 / 10).await;
    start(&mut swaps, &combiner, &store, &["c"]).await;
    assert_eq!(store.calls(), [["a"], ["b"]], "the calls have a tenth of their time");
    tokio::time::sleep(TIMEOUT / 8).await;
    start(&mut swaps, &combiner, &store, &["d", "e", "f"]).await;
    assert_eq!(store.calls()[2..], [["d"], ["e"]], "as many calls as there are lanes");
    // The old calls have no lanes to pass on.
    drop(kept);
    yield_now().await;
    assert_eq!(store.calls().len(), 4);
    store.0.may_end.add_permits(10);
    assert!(results(swaps).await.iter().all(Result::is_ok));
    assert_eq!(combiner.lock().calls.len(), 0);
}

/// Guards against this defect: a call is cancelled at the first deadline of its swaps, which fails those
/// that have time.
#[tokio::test(start_paused = true)]
async fn a_swap_with_little_time_takes_no_others_with_it() {
    let store = Calls::new(|count| Ok((0..count).map(|_| Some(Swapped::Stored)).collect()));
    let (combiner, mut swaps) = (SwapCombiner::new(1), Swaps::new());
    start(&mut swaps, &combiner, &store, &["a"]).await;
    let late = swap_within(&combiner, &store, "b", TIMEOUT / 40);
    swaps.spawn(async move { (1, late.await) });
    yield_now().await;
    start(&mut swaps, &combiner, &store, &["c", "d"]).await;
    tokio::time::sleep(TIMEOUT / 80).await;
    assert_eq!(store.calls(), [["a"], ["b"]]);
    store.0.may_end.add_permits(10);
    assert!(results(swaps).await.iter().all(Result::is_ok));
    assert_eq!(store.calls()[2..], [["c", "d"]]);
}

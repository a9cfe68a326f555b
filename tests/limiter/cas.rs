//! The compare-and-swap storage: its decisions, its calls of the store, and its deadlines.

use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::fake_cas_store::FakeCasStore;
use common::{Foreign, foreign, message, panic_message, policy};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tower_ratelimit::storage::{Cas, CasStorage, Loaded, ManualClock, StorageError, StorageRequest, Swapped};
use tower_ratelimit::strategy::{Hit, State, Status, Strategy};
use tower_ratelimit::{
    BoxError, Decision, FixedWindow, Global, IntoPolicy, Key, OnError, Op, Policy, Quota, RateLimitLayer, RateLimiter,
    Storage, Timestamp,
};

/// A timeout that no successful test reaches.
const LONG: Duration = Duration::from_secs(60);

/// The resolution of timers.
const MARGIN: Duration = Duration::from_millis(3);

fn over(store: &FakeCasStore) -> Cas<FakeCasStore> {
    Cas::new(store.clone()).timeout(LONG)
}

fn limiter(store: &FakeCasStore, policy: impl IntoPolicy) -> RateLimiter {
    RateLimiter::with_storage(policy, over(store))
}

/// A strategy that takes longer to decide than its callers wait.
#[derive(Debug)]
struct SlowStrategy;

impl Strategy for SlowStrategy {
    fn name(&self) -> &'static str {
        "ponders"
    }

    fn check(&self, quota: &Quota, state: &State, now: Timestamp, cost: u32) -> Status {
        std::thread::sleep(Duration::from_millis(60));
        Foreign.check(quota, state, now, cost)
    }

    fn spend(&self, quota: &Quota, state: &mut State, now: Timestamp, cost: u32) -> u64 {
        Foreign.spend(quota, state, now, cost)
    }

    fn refund(&self, quota: &Quota, state: &mut State, now: Timestamp, hit: &Hit, units: u32) {
        Foreign.refund(quota, state, now, hit, units);
    }
}

fn key() -> Key {
    Key::from("k")
}

/// Waits until no key is busy.
async fn quiet<S: Storage>(storage: &S) {
    let started = Instant::now();
    while !format!("{storage:?}").contains("busy: 0") {
        assert!(started.elapsed() < LONG, "{storage:?}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Several handles, each with concurrent hits. Contended hits are retried.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_handles_on_one_store_admit_exactly_the_limit() {
    const LIMIT: u32 = 400;
    for text in ["fixed-window 400/day", "moving-window 400/day; 500/day", "token-bucket 400/year"] {
        let store = FakeCasStore::default();
        let mut all = JoinSet::new();
        for _ in 0..8 {
            let limiter = limiter(&store, policy(text));
            for _ in 0..2 {
                let limiter = limiter.clone();
                all.spawn(async move {
                    let (mut admitted, mut contended) = (0, 0);
                    loop {
                        let decision = limiter.hit(&key()).await.unwrap();
                        match (decision.is_admitted(), decision.is_contended()) {
                            (true, _) => admitted += 1,
                            (false, true) => contended += 1,
                            (false, false) => return (admitted, contended),
                        }
                    }
                });
            }
        }
        let (admitted, contended) =
            all.join_all().await.into_iter().fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
        eprintln!("{text}: {contended} contended, {:?} loads and swaps", store.trips());
        assert_eq!(admitted, LIMIT, "{text}");
    }
}

#[tokio::test]
async fn waiting_hits_of_one_key_share_loads_and_swaps() {
    let store = FakeCasStore::default();
    let limiter = limiter(&store, policy("fixed-window 60/day"));
    let mut all = JoinSet::new();
    for _ in 0..100 {
        let limiter = limiter.clone();
        all.spawn(async move { limiter.hit(&key()).await.unwrap() });
    }
    let decisions = all.join_all().await;
    let mut left: Vec<u32> = decisions.iter().filter(|one| one.is_admitted()).map(Decision::remaining).collect();
    left.sort_unstable();
    assert!(left.iter().copied().eq(0..60), "one after another: {left:?}");
    let (loads, swaps) = store.trips();
    assert!((loads, swaps) <= (2, 2), "{loads} loads and {swaps} swaps of 100 hits");
    quiet(limiter.storage()).await;
}

#[tokio::test]
async fn unchanged_states_are_not_swapped() {
    let store = FakeCasStore::default();
    let window = limiter(&store, policy("fixed-window 1/day"));
    assert!(window.peek(&key()).await.unwrap().is_admitted());
    assert!(window.hit_with_cost(&key(), 0).await.unwrap().is_admitted());
    assert_eq!(store.trips(), (2, 0));
    assert!(window.hit(&key()).await.unwrap().is_admitted());
    assert_eq!(store.trips(), (1, 1));
    assert!(window.hit(&key()).await.unwrap().is_refused());
    let refused = window.hit(&key()).await.unwrap();
    let free = window.hit_with_cost(&key(), 0).await.unwrap();
    for unspent in [refused, free] {
        window.storage().settle(&window.policy(), &key(), &unspent, 0).await.unwrap();
        window.storage().settle(&window.policy(), &key(), &unspent, 5).await.unwrap();
    }
    assert_eq!(store.trips(), (3, 0));
    let elastic = limiter(&store, policy("elastic-window 1/day"));
    assert!(elastic.hit(&key()).await.unwrap().is_admitted());
    assert!(elastic.hit(&key()).await.unwrap().is_refused());
    assert_eq!(store.trips(), (2, 2), "a refusal that changes the state is stored");
    elastic.clear(&Key::from("never seen")).await.unwrap();
    assert_eq!(store.trips(), (1, 0));
}

/// Guards against this defect: exhausted compare-and-swap attempts are a storage error, which
/// fail-open admits.
#[tokio::test]
async fn losing_every_swap_is_a_contended_refusal() {
    let store = FakeCasStore::default();
    let limiter = limiter(&store, policy("fixed-window 5/day; elastic-window 9/day"));
    store.lose(1_000);
    let decision = limiter.hit(&key()).await.unwrap();
    assert!(decision.is_refused() && decision.is_contended(), "{decision:?}");
    assert!(decision.retry_after().is_some_and(|wait| wait <= Duration::from_millis(100)), "{decision:?}");
    let (_, swaps) = store.trips();
    assert!((2..=50).contains(&swaps), "{swaps} attempts");
    store.lose(0);
    let other = Key::from("other");
    let admitted = limiter.hit(&other).await.unwrap();
    store.lose(1_000);
    let error = common::settle(&limiter, &other, &admitted, 0).await.unwrap_err();
    assert!(error.to_string().starts_with("other processes changed the key before every swap"), "{error}");
    assert!(!error.is_timeout() && !error.may_have_counted());
    store.lose(3);
    let decision = limiter.hit(&key()).await.unwrap();
    assert!(decision.is_admitted(), "admitted after a few lost swaps: {decision:?}");
    assert_eq!(limiter.peek(&key()).await.unwrap().remaining(), 4, "the hit counts once");
}

/// The deadline passes before the last attempt.
#[tokio::test(start_paused = true)]
async fn losing_swaps_until_the_deadline_is_a_contended_refusal() {
    let store = FakeCasStore::default();
    let storage = Cas::new(store.clone()).timeout(Duration::from_millis(100));
    let limiter = RateLimiter::with_storage(policy("fixed-window 5/day"), storage);
    store.answer_after(10);
    store.lose(1_000);
    let started = Instant::now();
    let decision = limiter.hit(&key()).await.unwrap();
    assert!(decision.is_contended(), "{decision:?}");
    assert!(started.elapsed() < Duration::from_millis(100) + MARGIN);
}

/// Guards against this defect: hits that wait for a slow store behind other hits of their key are
/// storage errors, so a client that hits fast enough is admitted by fail-open.
#[tokio::test(start_paused = true)]
async fn hits_that_wait_behind_others_for_a_slow_store_are_contended_and_do_not_fail() {
    let store = FakeCasStore::default();
    let storage = Cas::new(store.clone()).timeout(Duration::from_millis(100));
    let limiter = RateLimiter::with_storage(policy("fixed-window 5/day"), storage);
    store.answer_after(40);
    let mut all = JoinSet::new();
    for number in 0..20 {
        let limiter = limiter.clone();
        all.spawn(async move {
            tokio::time::sleep(Duration::from_millis(5 * (number % 2))).await;
            limiter.hit(&key()).await.unwrap()
        });
    }
    let contended = all.join_all().await.iter().filter(|decision| decision.is_contended()).count();
    assert_eq!(contended, 10, "the hits of the second batch");
}

/// The hit lost a swap. Its next swap was in flight at the deadline and was stored afterwards.
#[tokio::test(start_paused = true)]
async fn contended_hit_in_flight_at_the_deadline_is_an_error_that_may_have_counted() {
    let store = FakeCasStore::default();
    let patient = over(&store);
    let hasty = patient.clone().timeout(Duration::from_millis(50));
    let [patient, hasty] =
        [patient, hasty].map(|storage| RateLimiter::with_storage(policy("fixed-window 9/day"), storage));
    store.lose(1);
    store.hang_from_swap(2);
    let key = key();
    let late = async {
        let error = hasty.hit(&key).await.unwrap_err();
        store.hang_from_swap(0);
        error
    };
    let (admitted, error) = tokio::join!(patient.hit(&key), late);
    assert!(admitted.unwrap().is_admitted());
    assert!(error.is_timeout() && error.may_have_counted(), "{error}");
    quiet(patient.storage()).await;
    assert_eq!(patient.peek(&key).await.unwrap().remaining(), 7, "the hit has counted");
}

/// The hit waited for another hit's swap. Its own swap was stored without a reply.
#[tokio::test(start_paused = true)]
async fn hit_whose_reply_is_lost_is_not_refused_as_contended() {
    let store = FakeCasStore::default();
    let patient = over(&store);
    let hasty = patient.clone().timeout(Duration::from_millis(600));
    let [patient, hasty] =
        [patient, hasty].map(|storage| RateLimiter::with_storage(policy("fixed-window 9/day"), storage));
    let key = key();
    store.answer_after(5);
    let second = async {
        tokio::task::yield_now().await;
        store.hang_from_swap(2);
        let answer = hasty.hit(&key).await;
        store.hang_from_swap(0);
        answer
    };
    let (first, second) = tokio::join!(patient.hit(&key), second);
    assert!(first.unwrap().is_admitted());
    assert!(second.unwrap_err().may_have_counted());
    quiet(patient.storage()).await;
    assert_eq!(patient.peek(&key).await.unwrap().remaining(), 7);
}

/// Law 9, with a store that is as slow as the deadlines: a refusal has spent nothing, and
/// `may_have_counted` of an error is correct.
#[tokio::test(start_paused = true)]
async fn only_admitted_hits_and_hits_that_may_have_counted_are_counted() {
    const LIMIT: u32 = 1_000_000;
    let (mut refused, mut doubts) = (0, 0);
    for seed in 0..30_u64 {
        let store = FakeCasStore::default();
        // Two processes.
        let processes = [over(&store), over(&store)];
        let policy = Policy::new(FixedWindow::new(), Quota::per_day(LIMIT));
        let mut all = JoinSet::new();
        for number in 0..40_u64 {
            let draw = (seed * 40 + number).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40;
            let storage = processes[usize::from(draw.is_multiple_of(2))].clone();
            let storage = storage.timeout(Duration::from_millis(20 + draw % 60));
            let (limiter, store) = (RateLimiter::with_storage(policy.clone(), storage), store.clone());
            all.spawn(async move {
                tokio::time::sleep(Duration::from_millis(draw % 90)).await;
                store.answer_after(draw % 31);
                limiter.hit(&key()).await
            });
        }
        let (mut admitted, mut maybe) = (0, 0);
        for answer in all.join_all().await {
            match answer {
                Ok(decision) if decision.is_admitted() => admitted += 1,
                Ok(decision) => refused += u32::from(decision.is_contended()),
                Err(error) => maybe += u32::from(error.may_have_counted()),
            }
        }
        tokio::time::sleep(LONG).await;
        let limiter = RateLimiter::with_storage(policy, over(&store));
        let used = LIMIT - limiter.peek(&key()).await.unwrap().remaining();
        assert!((admitted..=admitted + maybe).contains(&used), "{used} used, {admitted} admitted, {maybe} in doubt");
        doubts += maybe;
    }
    assert!(refused > 0 && doubts > 0, "the test needs both: {refused} refusals, {doubts} doubts");
}

#[tokio::test]
async fn time_to_live_of_a_state_includes_max_skew() {
    let store = FakeCasStore::default();
    for (max_skew, longer) in [(0, 500), (200, 500), (5_000, 5_000), (60_000, 60_000)] {
        let storage = over(&store).max_skew(Duration::from_millis(max_skew));
        let limiter = RateLimiter::with_storage(policy("fixed-window 9/day; fixed-window 9/hour"), storage);
        assert!(limiter.hit(&Key::from(max_skew)).await.unwrap().is_admitted());
        assert_eq!(store.keep(), Duration::from_secs(86_400) + Duration::from_millis(longer));
    }
}

/// A store that records the time until each deadline.
#[derive(Clone, Debug, Default)]
struct Deadlines(FakeCasStore, Arc<Mutex<Vec<Duration>>>);

impl Deadlines {
    fn record(&self, deadline: std::time::Instant) {
        self.1.lock().unwrap().push(Instant::from_std(deadline) - Instant::now());
    }
}

impl CasStorage for Deadlines {
    type Error = BoxError;
    type Version = u64;

    async fn load(&self, key: &str, deadline: std::time::Instant) -> Result<Loaded<u64>, BoxError> {
        self.record(deadline);
        self.0.load(key, deadline).await
    }

    async fn swap(
        &self,
        key: &str,
        version: &u64,
        text: &str,
        keep: Duration,
        deadline: std::time::Instant,
    ) -> Result<Swapped<u64>, BoxError> {
        self.record(deadline);
        self.0.swap(key, version, text, keep, deadline).await
    }

    async fn check(&self, deadline: std::time::Instant) -> Result<(), BoxError> {
        self.record(deadline);
        self.0.check(deadline).await
    }
}

#[tokio::test(start_paused = true)]
async fn deadline_of_the_store_is_shortly_before_the_timeout() {
    let store = Deadlines::default();
    let storage = Cas::new(store.clone()).timeout(Duration::from_millis(160));
    let limiter = RateLimiter::with_storage(policy("5/day"), storage.clone());
    assert!(limiter.hit(&key()).await.unwrap().is_admitted());
    assert!(limiter.peek(&key()).await.unwrap().is_admitted());
    storage.check().await.unwrap();
    // The load and the swap of the hit, the load of the peek, and the check.
    assert_eq!(*store.1.lock().unwrap(), [Duration::from_millis(150); 4]);
}

/// A statement that the store cancels at its deadline is a definite answer only if the caller still
/// waits for it.
#[tokio::test(start_paused = true)]
async fn deadline_of_a_swap_after_a_slow_load_is_before_the_caller_leaves() {
    let store = Deadlines::default();
    let storage = Cas::new(store.clone()).timeout(Duration::from_millis(160));
    let limiter = RateLimiter::with_storage(policy("5/day"), storage);
    store.0.answer_after(80);
    assert!(limiter.hit(&key()).await.is_err());
    // The load and the swap.
    assert_eq!(*store.1.lock().unwrap(), [Duration::from_millis(150), Duration::from_millis(75)]);
}

#[tokio::test(start_paused = true)]
async fn hanging_store_is_a_timeout_and_not_contention() {
    let store = FakeCasStore::default();
    let storage = Cas::new(store.clone()).timeout(Duration::from_millis(50));
    let limiter = RateLimiter::with_storage(policy("fixed-window 5/day"), storage.clone());
    let late = |error: StorageError| (error.is_timeout(), error.may_have_counted());
    store.hang(true);
    let started = Instant::now();
    assert_eq!(late(limiter.hit(&key()).await.unwrap_err()), (true, false));
    assert_eq!(late(limiter.peek(&key()).await.unwrap_err()), (true, false));
    assert_eq!(late(limiter.clear(&key()).await.unwrap_err()), (true, false));
    assert!(started.elapsed() < Duration::from_millis(150) + MARGIN);
    store.hang(false);
    assert!(limiter.hit(&key()).await.unwrap().is_admitted());
    // The load has a reply, but the swap has none, so the hit may have counted.
    store.hang_from_swap(1);
    assert_eq!(late(limiter.hit(&key()).await.unwrap_err()), (true, true));
    store.hang_from_swap(0);
    assert!(limiter.hit(&key()).await.is_ok());
    quiet(&storage).await;
}

#[tokio::test]
async fn store_error_reaches_all_waiting_callers() {
    let store = FakeCasStore::default();
    let limiter = limiter(&store, policy("fixed-window 5/day"));
    store.fail(true);
    let mut all = JoinSet::new();
    for _ in 0..5 {
        let limiter = limiter.clone();
        all.spawn(async move { limiter.hit(&key()).await.unwrap_err() });
    }
    for error in all.join_all().await {
        assert!(!error.may_have_counted());
        assert_eq!(message(error), "storage failed: the disk is full");
    }
    store.fail(false);
    assert_eq!(limiter.hit(&key()).await.unwrap().remaining(), 4, "nothing was counted");
    assert!(limiter.peek(&key()).await.is_ok());
}

/// Callers are dropped at random, in any state. Each polled hit counts once, and other callers are
/// not affected.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn callers_may_be_dropped_at_any_time() {
    const HITS: u32 = 600;
    let store = FakeCasStore::default();
    let limiter = limiter(&store, policy("fixed-window 100000/day"));
    store.answer_after(1);
    let mut all = JoinSet::new();
    for number in 0..HITS {
        let limiter = limiter.clone();
        all.spawn(async move {
            let mut hit = limiter.hit(&key());
            let patience = Duration::from_micros(u64::from(number % 7) * 700);
            // A hit counts once it has been polled.
            if number.is_multiple_of(3) {
                return hit.await.map(|decision| decision.is_admitted());
            }
            Ok(tokio::time::timeout(patience, &mut hit).await.is_ok_and(|hit| hit.unwrap().is_admitted()))
        });
    }
    let completed = all.join_all().await.into_iter().map(Result::unwrap).filter(|admitted| *admitted).count();
    assert!(completed >= HITS as usize / 3, "{completed}");
    quiet(limiter.storage()).await;
    let used = 100_000 - limiter.peek(&key()).await.unwrap().remaining();
    assert_eq!(used, HITS, "each is counted once");
}

#[tokio::test]
async fn future_that_is_never_polled_does_nothing() {
    let store = FakeCasStore::default();
    let limiter = limiter(&store, policy("fixed-window 5/day"));
    drop((limiter.hit(&key()), limiter.clear(&key()), limiter.peek(&key())));
    assert_eq!(store.trips(), (0, 0));
    quiet(limiter.storage()).await;
}

/// Guards against this defect: a slow key delays another key.
#[tokio::test]
async fn slow_key_does_not_delay_another() {
    let store = FakeCasStore::default();
    let limiter = limiter(&store, policy("fixed-window 5/day"));
    store.hang(true);
    let slow = limiter.clone();
    let slow = tokio::spawn(async move { slow.hit(&Key::from("slow")).await });
    while store.trips().0 == 0 {
        tokio::task::yield_now().await;
    }
    // Only the calls that have begun hang.
    store.hang(false);
    for _ in 0..5 {
        assert!(limiter.hit(&Key::from("quick")).await.unwrap().is_admitted());
    }
    assert!(!slow.is_finished());
    slow.abort();
}

/// The task of a stopped runtime never runs, so callers of another runtime must not wait for it.
#[test]
fn stopped_runtime_does_not_block_another() {
    let store = FakeCasStore::default();
    let limiter = limiter(&store, policy("fixed-window 5/day"));
    let [first, second] = [(); 2].map(|()| tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap());
    store.hang(true);
    first.block_on(async {
        let mut hit = Box::pin(limiter.hit(&key()));
        assert!(common::poll(&mut hit).is_pending());
        tokio::task::yield_now().await;
    });
    store.hang(false);
    assert!(second.block_on(limiter.hit(&key())).unwrap().is_admitted());
    drop(first);
    assert!(second.block_on(limiter.hit(&key())).unwrap().is_admitted());
    second.block_on(quiet(limiter.storage()));
    let outside = common::poll(&mut Box::pin(limiter.hit(&key())));
    assert!(matches!(outside, std::task::Poll::Ready(Err(error)) if error.to_string().contains("no tokio runtime")));
}

/// The error of a late hit is correct about its count.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn timed_out_hit_is_uncounted_or_its_error_may_have_counted() {
    let policy = Policy::new(SlowStrategy, Quota::per_day(100));
    let storage = Cas::new(FakeCasStore::default()).timeout(Duration::from_millis(30));
    // On a busy machine, a caller can be so late that it finds the answer.
    let mut counted = 0;
    let error = loop {
        match storage.decide(StorageRequest::new(&policy, &key(), Op::Hit, 1)).await {
            Ok(_) => counted += 1,
            Err(error) => break error,
        }
        assert!(counted < 100, "no hit times out");
    };
    quiet(&storage).await;
    let patient = storage.timeout(Duration::from_secs(60));
    let left = patient.decide(StorageRequest::new(&policy, &key(), Op::Peek, 1)).await.unwrap().remaining();
    assert!(error.may_have_counted() || left == 100 - counted, "{error}: {left} of {counted}");
}

#[test]
fn calls_are_dropped_with_a_runtime_that_never_ran_them() {
    let storage = Cas::new(FakeCasStore::default());
    let policy = policy("fixed-window 3/day");
    for _ in 0..3 {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let mut decided = storage.decide(StorageRequest::new(&policy, &key(), Op::Hit, 1));
        runtime.block_on(async { assert!(common::poll(&mut decided).is_pending()) });
    }
    assert!(format!("{storage:?}").contains("busy: 0"), "{storage:?}");
}

#[tokio::test]
async fn policies_of_one_name_have_separate_states_and_clears() {
    let store = FakeCasStore::default();
    let [hourly, daily] = ["fixed-window 5/hour", "fixed-window 5/day"].map(|text| policy(text).with_name("tier"));
    let (hourly, daily) = (limiter(&store, hourly), limiter(&store, daily));
    assert_eq!(hourly.hit_with_cost(&key(), 2).await.unwrap().remaining(), 3);
    assert_eq!(daily.hit_with_cost(&key(), 4).await.unwrap().remaining(), 1);
    let text = store.text("tier|t:k");
    assert!(
        text.starts_with("v1@")
            && text.contains("[1.fixed-window/86400000000 ")
            && text.contains("[1.fixed-window/3600000000 "),
        "{text}"
    );
    hourly.clear(&key()).await.unwrap();
    assert_eq!(hourly.peek(&key()).await.unwrap().remaining(), 5);
    assert_eq!(daily.peek(&key()).await.unwrap().remaining(), 1);
    daily.clear(&key()).await.unwrap();
    assert_eq!(store.text("tier|t:k"), "");
    // Concurrent hits and clears of both policies share one batch.
    let daily = RateLimiter::with_storage(daily.policy(), hourly.storage().clone());
    let key = key();
    store.trips();
    let all = tokio::join!(
        hourly.hit_with_cost(&key, 2),
        daily.hit(&key),
        hourly.clear(&key),
        hourly.hit(&key),
        daily.hit(&key)
    );
    let left = [all.0, all.1, all.3, all.4].map(|hit| hit.unwrap().remaining());
    assert_eq!((left, store.trips()), ([3, 4, 4, 3], (1, 1)));
}

#[tokio::test]
async fn unreadable_state_is_fresh() {
    for spoilt in [
        "garbage",
        "v",
        "v1",
        "v1[",
        "v1@x[",
        "[1.foreign%3A%7B1%7D/86400000000 9999999999999999,9,9]",
        "v1[1.foreign%3A%7B1%7D/86400000000 x,y,z]",
        "v1[1.foreign%3A%7B1%7D/86400000000 9999999999999999999,9,9]",
    ] {
        let store = FakeCasStore::default();
        let limiter = limiter(&store, foreign(2).with_name("p"));
        store.put("p|t:k", spoilt);
        for expected in [true, true, false] {
            assert_eq!(limiter.hit(&key()).await.unwrap().is_admitted(), expected, "{spoilt}");
        }
    }
}

#[tokio::test]
async fn store_time_is_used_unless_a_clock_is_set() {
    let store = FakeCasStore::with_clock();
    let here = Timestamp::wall_clock();
    let at = limiter(&store, Quota::per_minute(5)).hit(&key()).await.unwrap().at();
    assert!(at.since(here) < 60_000_000 && here.since(at) < 60_000_000, "{at:?}");
    let clock = ManualClock::new(Timestamp::from_micros(77));
    let chosen = RateLimiter::with_storage(Quota::per_minute(5), over(&store).clock(clock));
    assert_eq!(chosen.hit(&Key::from("other")).await.unwrap().at(), Timestamp::from_micros(77));
}

/// A log that cannot fit the store is an error when the limiter is built.
#[tokio::test]
async fn policy_too_large_for_the_store_is_rejected_when_the_limiter_is_built() {
    let store = FakeCasStore::with_max_len(10_000);
    let (fits, too_long) = (policy("moving-window 500/day"), policy("moving-window 600/day; 5/day"));
    let error = RateLimiter::try_with_storage(too_long.clone(), over(&store)).unwrap_err().to_string();
    assert!(error.contains("keeps at most 10000: use an amount of at most 5"), "{error}");
    assert!(error.contains("\"sliding-window-counter 600/day\""), "{error}");
    let layer = || RateLimitLayer::new(too_long.clone(), Global::new());
    assert!(layer().try_storage(over(&store), OnError::Admit).is_err());
    let shadow = policy("5/day; shadow moving-window 600/day");
    assert!(RateLimitLayer::new(shadow, Global::new()).try_storage(over(&store), OnError::Admit).is_err());
    let panics = std::panic::catch_unwind(AssertUnwindSafe(|| layer().storage(over(&store), OnError::Admit))).is_err();
    assert!(panics, "the constructor panics");
    // A policy that is chosen for a request fails at the request.
    let error = over(&store)
        .decide(tower_ratelimit::storage::StorageRequest::new(&too_long, &key(), tower_ratelimit::Op::Hit, 1))
        .await;
    assert!(!error.unwrap_err().may_have_counted());
    let fit = |longest: &usize| over(&FakeCasStore::with_max_len(*longest)).validate(&fits).is_ok();
    let least = (1..10_000).find(fit).expect("some length is enough");
    let store = FakeCasStore::with_max_len(least);
    let limiter = RateLimiter::with_storage(fits, over(&store));
    for _ in 0..500 {
        assert!(limiter.hit(&key()).await.unwrap().is_admitted(), "an accepted policy always fits");
    }
    assert!(limiter.hit(&key()).await.unwrap().is_refused());
    let longest = store.text("moving-window 500/day|t:k").len();
    assert!((least - 200..=least).contains(&longest), "{longest} bytes, and {least} were required");
}

/// The states of other policies with the same name make the text too long.
#[tokio::test]
async fn too_long_text_is_not_sent() {
    let store = FakeCasStore::with_max_len(230);
    let named = |text| limiter(&store, policy(text).with_name("n".repeat(90)));
    for text in ["fixed-window 3/hour", "fixed-window 3/day", "fixed-window 3/week"] {
        assert!(named(text).hit(&key()).await.unwrap().is_admitted(), "{text}");
    }
    store.trips();
    let error = named("elastic-window 3/day").hit(&key()).await.unwrap_err();
    assert!(error.to_string().contains("keeps at most 230") && !error.may_have_counted(), "{error}");
    assert_eq!(store.trips().1, 0);
}

/// The hits of a batch that fit are stored.
#[tokio::test]
async fn text_that_is_too_long_fails_only_the_hits_that_do_not_fit() {
    let store = FakeCasStore::with_max_len(230);
    let storage = over(&store);
    let named = |text| RateLimiter::with_storage(policy(text).with_name("n".repeat(90)), storage.clone());
    let [hour, day, elastic, week] =
        ["fixed-window 3/hour", "fixed-window 3/day", "elastic-window 3/day", "fixed-window 3/week"].map(named);
    let key = key();
    let hits = tokio::join!(hour.hit(&key), day.hit(&key), elastic.hit(&key), week.hit(&key), hour.hit(&key));
    for (hit, remaining) in [(hits.0, 2), (hits.1, 2), (hits.4, 1)] {
        assert_eq!(hit.unwrap().remaining(), remaining);
    }
    // The third and the fourth do not fit together.
    let error = [hits.2, hits.3].into_iter().find_map(Result::err).unwrap();
    assert!(error.to_string().contains("keeps at most 230") && !error.may_have_counted(), "{error}");
    assert!(store.text(&format!("{}|t:k", "n".repeat(90))).len() <= 230);
}

#[test]
fn timeout_outside_of_one_millisecond_to_one_hour_panics() {
    let cas = || Cas::new(FakeCasStore::default());
    for timeout in [Duration::ZERO, Duration::from_micros(999), Duration::from_secs(3_601)] {
        let error = panic_message(|| cas().timeout(timeout));
        assert!(error.contains("for example Duration::from_millis(100)"), "{error}");
    }
    assert!(format!("{:?}", cas().timeout(Duration::from_millis(1))).contains("timeout: 1ms"));
    assert!(format!("{:?}", cas()).contains("timeout: 100ms"));
}

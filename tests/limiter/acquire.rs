//! Waiting for units with `acquire`. Tokio's time is paused.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{Behavior, FAILURE, FakeStorage, failing, now, policy, poll, slow};
use tokio::task::{JoinHandle, yield_now};
use tokio::time::{Instant, advance, sleep, timeout};
use tower_ratelimit::storage::{AnyStorage, StorageError, TokioClock};
use tower_ratelimit::{Key, LivePolicy, MemoryStorage, RateLimiter, Reservation, Storage};

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);

/// The tolerated lateness of timers. Each of tokio's timers is up to a millisecond late.
const LATE: Duration = Duration::from_millis(2);

fn memory() -> MemoryStorage {
    MemoryStorage::builder().clock(TokioClock::new()).build().unwrap()
}

fn limiter(text: &str) -> RateLimiter {
    RateLimiter::with_storage(policy(text), FakeStorage::around(memory()))
}

fn alice() -> Key {
    Key::from("alice")
}

fn fake(limiter: &RateLimiter) -> &FakeStorage {
    limiter.storage().downcast_ref().unwrap()
}

/// Returns the units that remain for [`alice`].
async fn left(limiter: &RateLimiter) -> u32 {
    limiter.peek(&alice()).await.unwrap().remaining()
}

/// Lets the spawned tasks run until all of them wait.
async fn settle() {
    for _ in 0..20 {
        yield_now().await;
    }
}

/// Starts a call, and lets it run until it waits.
async fn start(limiter: &RateLimiter, cost: u32, max_wait: Duration) -> JoinHandle<Result<Reservation, StorageError>> {
    let call = tokio::spawn(limiter.acquire_with_cost(&alice(), cost, max_wait));
    settle().await;
    call
}

/// Asserts that `time` is `due`, or later by at most the jitter and the lateness of timers.
fn assert_due(time: Duration, due: Duration) {
    assert!((due..=due + due / 10 + LATE).contains(&time), "due after {due:?}, was after {time:?}");
}

#[tokio::test(start_paused = true)]
async fn call_is_admitted_when_the_next_window_starts() {
    async fn check(storage: impl Storage) {
        let limiter = RateLimiter::with_storage(policy("fixed-window 2 per 10 seconds"), storage);
        let begin = Instant::now();
        for due in [0, 0, 10, 10, 20].map(Duration::from_secs) {
            assert!(limiter.acquire(&alice(), MINUTE).await.unwrap().is_admitted());
            let time = begin.elapsed();
            assert!((due..due + 3 * SECOND).contains(&time), "due after {due:?}, was after {time:?}");
        }
        assert_eq!(left(&limiter).await, 1);
    }
    check(memory()).await;
    check(slow(memory())).await;
    check(AnyStorage::new(memory())).await;
}

#[tokio::test(start_paused = true)]
async fn jitter_is_at_most_a_tenth_of_the_wait() {
    let mut waits = Vec::new();
    for _ in 0..50 {
        let limiter = limiter("fixed-window 1/second");
        let _ = limiter.hit(&alice()).await.unwrap();
        let begin = Instant::now();
        assert!(limiter.acquire(&alice(), MINUTE).await.unwrap().is_admitted());
        assert_due(begin.elapsed(), SECOND);
        waits.push(begin.elapsed().as_millis());
    }
    waits.sort_unstable();
    waits.dedup();
    assert!(waits.len() > 10, "the waits differ: {waits:?}");
}

#[tokio::test(start_paused = true)]
async fn jitter_never_exceeds_max_wait() {
    for _ in 0..50 {
        let limiter = limiter("fixed-window 1/second");
        let _ = limiter.hit(&alice()).await.unwrap();
        let begin = Instant::now();
        let max_wait = SECOND + Duration::from_millis(3);
        assert!(limiter.acquire(&alice(), max_wait).await.unwrap().is_admitted());
        assert!(begin.elapsed() <= max_wait + LATE, "{:?}", begin.elapsed());
    }
}

#[tokio::test(start_paused = true)]
async fn call_that_would_wait_too_long_is_refused_at_once() {
    let limiter = limiter("fixed-window 2 per 10 seconds");
    let _ = limiter.hit(&alice()).await.unwrap();
    let begin = Instant::now();
    for (cost, max_wait, retry_after) in [
        (2, Duration::from_millis(9_999), Some(10 * SECOND)),
        (2, Duration::ZERO, Some(10 * SECOND)),
        (3, Duration::MAX, None),
    ] {
        let refused = limiter.acquire_with_cost(&alice(), cost, max_wait).await.unwrap();
        assert!(refused.is_refused());
        assert_eq!((refused.retry_after(), refused.cost(), begin.elapsed()), (retry_after, cost, Duration::ZERO));
    }
    assert_eq!(fake(&limiter).take_decisions(), 4, "one hit for each call");
    assert_eq!(left(&limiter).await, 1);
}

#[tokio::test(start_paused = true)]
async fn longest_max_wait_is_supported() {
    let limiter = limiter("fixed-window 1 per 20 years");
    let begin = Instant::now();
    for _ in 0..2 {
        assert!(limiter.acquire(&alice(), Duration::MAX).await.unwrap().is_admitted());
    }
    assert_due(begin.elapsed(), 20 * 365 * 86_400 * SECOND);
}

#[tokio::test(start_paused = true)]
async fn call_of_cost_zero_spends_nothing_and_never_waits() {
    let limiter = limiter("fixed-window 1/second");
    let _ = limiter.hit(&alice()).await.unwrap();
    let begin = Instant::now();
    assert!(limiter.acquire_with_cost(&alice(), 0, MINUTE).await.unwrap().is_admitted());
    assert_eq!(begin.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn dropped_call_spends_nothing() {
    let limiter = limiter("fixed-window 1/second");
    drop(limiter.acquire(&alice(), MINUTE));
    assert_eq!(
        (left(&limiter).await, fake(&limiter).take_decisions()),
        (1, 1),
        "a future that is not polled makes no hit"
    );
    let _ = limiter.hit(&alice()).await.unwrap();
    let [first, second] = [start(&limiter, 1, MINUTE).await, start(&limiter, 1, MINUTE).await];
    first.abort();
    second.abort();
    sleep(2 * SECOND).await;
    assert_eq!(left(&limiter).await, 1);
}

#[tokio::test(start_paused = true)]
async fn next_call_takes_the_turn_of_a_dropped_one() {
    let limiter = limiter("fixed-window 1/second");
    let _ = limiter.hit(&alice()).await.unwrap();
    let [first, second] = [start(&limiter, 1, MINUTE).await, start(&limiter, 1, MINUTE).await];
    let begin = Instant::now();
    first.abort();
    assert!(second.await.unwrap().unwrap().is_admitted());
    assert_due(begin.elapsed(), SECOND);
}

#[tokio::test(start_paused = true)]
async fn hit_in_flight_is_refunded_when_its_call_is_dropped() {
    let limiter = limiter("fixed-window 2/second");
    let storage = fake(&limiter);
    let behind_the_gate = RateLimiter::with_storage(limiter.policy(), storage.inner().clone());
    for is_retry in [false, true] {
        if is_retry {
            assert!(limiter.hit_with_cost(&alice(), 2).await.unwrap().is_admitted());
        } else {
            storage.close();
        }
        let call = start(&limiter, 2, MINUTE).await;
        if is_retry {
            storage.close();
            sleep(Duration::from_millis(1_105)).await;
        }
        call.abort();
        settle().await;
        assert_eq!(left(&behind_the_gate).await, 0, "the hit is in flight");
        storage.open();
        settle().await;
        assert_eq!(left(&behind_the_gate).await, 2, "it was refunded");
        sleep(2 * SECOND).await;
    }
}

#[tokio::test(start_paused = true)]
async fn calls_are_admitted_in_the_order_of_their_refusals() {
    let limiter = limiter("fixed-window 2/second");
    let _ = limiter.hit_with_cost(&alice(), 2).await.unwrap();
    let order = Arc::new(Mutex::new(Vec::new()));
    let calls: Vec<_> = (0..7)
        .map(|number| {
            let (limiter, order) = (limiter.clone(), Arc::clone(&order));
            tokio::spawn(async move {
                assert!(limiter.acquire(&alice(), MINUTE).await.unwrap().is_admitted());
                order.lock().unwrap().push(number);
            })
        })
        .collect();
    for call in calls {
        call.await.unwrap();
    }
    assert_eq!(*order.lock().unwrap(), [0, 1, 2, 3, 4, 5, 6]);
}

#[tokio::test(start_paused = true)]
async fn cheaper_call_waits_behind_an_expensive_one() {
    let limiter = limiter("token-bucket 10/second");
    let _ = limiter.hit_with_cost(&alice(), 10).await.unwrap();
    let begin = Instant::now();
    let expensive = start(&limiter, 8, MINUTE).await;
    let cheap = start(&limiter, 1, MINUTE).await;
    assert!(cheap.await.unwrap().unwrap().is_admitted());
    assert!(expensive.is_finished());
    assert_due(begin.elapsed(), Duration::from_millis(900));
}

#[tokio::test(start_paused = true)]
async fn new_calls_do_not_overtake_an_expensive_one() {
    let limiter = limiter("token-bucket 10/second");
    let _ = limiter.hit_with_cost(&alice(), 10).await.unwrap();
    let begin = Instant::now();
    let expensive = start(&limiter, 10, MINUTE).await;
    let mut cheap = Vec::new();
    for _ in 0..30 {
        cheap.push(start(&limiter, 1, 2 * SECOND).await);
        sleep(Duration::from_millis(70)).await;
    }
    assert!(expensive.is_finished());
    assert!(expensive.await.unwrap().unwrap().is_admitted());
    for call in cheap.drain(..5) {
        assert!(call.await.unwrap().unwrap().is_admitted());
    }
    assert!(begin.elapsed() < 3 * SECOND, "{:?}", begin.elapsed());
}

#[tokio::test(start_paused = true)]
async fn new_call_waits_behind_others_only_if_it_can_be_admitted_in_time() {
    let limiter = limiter("fixed-window 1 per 10 seconds");
    let _ = limiter.hit(&alice()).await.unwrap();
    let waiting = start(&limiter, 1, MINUTE).await;
    limiter.clear(&alice()).await.unwrap();
    fake(&limiter).take_decisions();
    let behind = start(&limiter, 1, MINUTE).await;
    assert_eq!((fake(&limiter).take_decisions(), behind.is_finished()), (0, false));
    assert!(limiter.acquire(&alice(), SECOND).await.unwrap().is_admitted());
    let free = limiter.acquire_with_cost(&alice(), 0, MINUTE).await.unwrap();
    assert!(free.is_admitted() && !waiting.is_finished());
}

#[tokio::test(start_paused = true)]
async fn queued_calls_hit_in_parallel_while_units_remain() {
    let limiter = limiter("fixed-window 100 per 10 seconds");
    let _ = limiter.hit_with_cost(&alice(), 100).await.unwrap();
    let refusals = Arc::new(AtomicU32::new(0));
    let admissions = Arc::new(Mutex::new(Vec::new()));
    for _ in 0..150 {
        let call = limiter.acquire(&alice(), 15 * SECOND);
        let (admissions, refusals) = (Arc::clone(&admissions), Arc::clone(&refusals));
        tokio::spawn(async move {
            if call.await.unwrap().is_admitted() {
                admissions.lock().unwrap().push(Instant::now());
            } else {
                refusals.fetch_add(1, Ordering::Relaxed);
            }
        });
    }
    settle().await;
    fake(&limiter).take_decisions();
    fake(&limiter).set(Behavior::WorksAfter(Duration::from_millis(5)));
    sleep(20 * SECOND).await;
    let admissions = admissions.lock().unwrap();
    assert_eq!((admissions.len(), refusals.load(Ordering::Relaxed)), (100, 50));
    // One hit, then up to 32 at a time.
    let time = admissions[99] - admissions[0];
    assert!(time < Duration::from_millis(40), "{time:?}");
    assert_eq!(fake(&limiter).take_decisions(), 100 + 1);
}

#[tokio::test(start_paused = true)]
async fn next_call_hits_after_the_refund_of_a_dropped_one() {
    let limiter = limiter("fixed-window 1 per 10 seconds");
    let _ = limiter.hit(&alice()).await.unwrap();
    let [first, second] = [start(&limiter, 1, MINUTE).await, start(&limiter, 1, MINUTE).await];
    fake(&limiter).close();
    sleep(12 * SECOND).await;
    first.abort();
    settle().await;
    fake(&limiter).open();
    let begin = Instant::now();
    assert!(second.await.unwrap().unwrap().is_admitted());
    assert_eq!(begin.elapsed(), Duration::ZERO);
}

/// Counts the storage calls in each millisecond.
async fn sample(limiter: &RateLimiter, time: Duration) -> Vec<u64> {
    let begin = Instant::now();
    let mut calls = Vec::new();
    while begin.elapsed() < time {
        settle().await;
        calls.push(fake(limiter).take_decisions());
        advance(Duration::from_millis(1)).await;
    }
    calls
}

#[tokio::test(start_paused = true)]
async fn waiting_calls_cause_one_storage_call_per_admission_and_one_more_per_window() {
    let limiter = limiter("fixed-window 10/second");
    let admitted = Arc::new(AtomicU32::new(0));
    for _ in 0..1_000 {
        let (call, admitted) = (limiter.acquire(&alice(), Duration::from_millis(20_500)), Arc::clone(&admitted));
        tokio::spawn(async move {
            admitted.fetch_add(u32::from(call.await.unwrap().is_admitted()), Ordering::Relaxed);
        });
    }
    for _ in 0..1_100 {
        yield_now().await;
    }
    assert_eq!(fake(&limiter).take_decisions(), 11, "the others join the queue of the first refused call");
    let calls = sample(&limiter, 22 * SECOND).await;
    // Each window is up to a tenth of a second longer, because its first hit begins it.
    let windows = calls.iter().filter(|calls| **calls > 1).count();
    assert!((18..=20).contains(&windows), "{windows}");
    assert_eq!(admitted.load(Ordering::Relaxed), 10 + 10 * u32::try_from(windows).unwrap());
    assert!(calls.iter().sum::<u64>() <= 11 * (windows as u64 + 1), "{}", calls.iter().sum::<u64>());
    assert!(calls.iter().all(|calls| *calls <= 11), "ten are admitted, and one is refused");
}

/// Returns the numbers of storage calls that start together, until all of these calls have ended.
/// `after_wave` is called after each.
async fn waves<T>(limiter: &RateLimiter, calls: &[JoinHandle<T>], mut after_wave: impl AsyncFnMut(usize)) -> Vec<u64> {
    let (mut waves, mut was_quiet) = (Vec::new(), true);
    while !calls.iter().all(JoinHandle::is_finished) {
        advance(Duration::from_millis(1)).await;
        settle().await;
        let calls = fake(limiter).take_decisions();
        if calls > 0 && was_quiet {
            waves.push(calls);
        } else if calls > 0 {
            *waves.last_mut().unwrap() += calls;
        } else if !was_quiet {
            after_wave(waves.len()).await;
        }
        was_quiet = calls == 0;
    }
    waves
}

#[tokio::test(start_paused = true)]
async fn at_most_32_queued_calls_hit_at_the_same_time() {
    let limiter = limiter("fixed-window 200 per 10 seconds");
    let _ = limiter.hit_with_cost(&alice(), 200).await.unwrap();
    let calls: Vec<_> = (0..100).map(|_| tokio::spawn(limiter.acquire(&alice(), MINUTE))).collect();
    settle().await;
    fake(&limiter).take_decisions();
    fake(&limiter).set(Behavior::WorksAfter(SECOND));
    assert_eq!(waves(&limiter, &calls, async |_| {}).await, [1, 32, 32, 32, 3]);
}

/// Another process spends the units while 32 calls hit.
#[tokio::test(start_paused = true)]
async fn only_one_queued_call_hits_after_a_refusal() {
    let memory = memory();
    let limiter =
        RateLimiter::with_storage(policy("fixed-window 200 per 10 seconds"), FakeStorage::around(memory.clone()));
    let other = RateLimiter::with_storage(policy("fixed-window 200 per 10 seconds"), memory);
    let _ = limiter.hit_with_cost(&alice(), 200).await.unwrap();
    let calls: Vec<_> = (0..100).map(|_| tokio::spawn(limiter.acquire(&alice(), MINUTE))).collect();
    settle().await;
    fake(&limiter).take_decisions();
    fake(&limiter).set(Behavior::WorksAfter(SECOND));
    let waves = waves(&limiter, &calls, async |wave| {
        if wave == 2 {
            assert!(other.hit_with_cost(&alice(), 199).await.unwrap().is_admitted());
        }
    });
    assert_eq!(waves.await, [1, 32, 1, 32, 32, 32, 2]);
    for call in calls {
        assert!(call.await.unwrap().unwrap().is_admitted());
    }
}

/// A failing storage gets at most 32 calls at the same time.
#[tokio::test(start_paused = true)]
async fn rounds_of_storage_failures_have_at_most_32_calls() {
    let limiter = limiter("fixed-window 1/second");
    let _ = limiter.hit(&alice()).await.unwrap();
    let calls: Vec<_> = (0..100).map(|_| tokio::spawn(limiter.acquire(&alice(), 2 * MINUTE))).collect();
    settle().await;
    fake(&limiter).set(Behavior::FailsAfter(SECOND));
    fake(&limiter).take_decisions();
    assert_eq!(waves(&limiter, &calls, async |_| {}).await, [1, 2, 4, 8, 16, 32, 32, 5]);
}

#[tokio::test(start_paused = true)]
async fn refusal_beyond_the_deadline_ends_the_wait_of_the_whole_queue() {
    let limiter = limiter("fixed-window 10 per 60 seconds");
    let calls: Vec<_> = (0..1_000).map(|_| tokio::spawn(limiter.acquire(&alice(), 70 * SECOND))).collect();
    let begin = Instant::now();
    let mut refused = Vec::new();
    for call in calls {
        refused.extend(call.await.unwrap().unwrap().retry_after());
    }
    assert_due(begin.elapsed(), MINUTE);
    assert_eq!(refused, vec![MINUTE; 980]);
    assert_eq!(fake(&limiter).take_decisions(), 11 + 11);
}

/// All calls have the same deadline, the start of the second window.
#[tokio::test(start_paused = true)]
async fn window_that_starts_at_the_deadline_admits_all_of_its_units() {
    async fn check(storage: impl Storage) {
        let limiter = RateLimiter::with_storage(policy("fixed-window 10 per 60 seconds"), storage);
        let calls: Vec<_> = (0..100).map(|_| tokio::spawn(limiter.acquire(&alice(), MINUTE))).collect();
        let begin = Instant::now();
        let mut admitted = 0;
        for call in calls {
            admitted += u32::from(call.await.unwrap().unwrap().is_admitted());
        }
        assert_eq!(admitted, 20);
        assert!(begin.elapsed() < MINUTE + Duration::from_millis(12), "{:?}", begin.elapsed());
    }
    check(memory()).await;
    check(slow(memory())).await;
}

#[tokio::test(start_paused = true)]
async fn refusal_at_the_deadline_reports_the_last_refusal_of_the_queue_as_of_now() {
    let limiter = limiter("fixed-window 1 per 10 seconds");
    let _ = limiter.hit(&alice()).await.unwrap();
    let first = start(&limiter, 1, MINUTE).await;
    let second = start(&limiter, 1, 13 * SECOND).await;
    assert!(first.await.unwrap().unwrap().is_admitted());
    let refused = second.await.unwrap().unwrap();
    let retry_after = refused.retry_after().unwrap();
    assert!(retry_after <= 10 * SECOND && retry_after > 9 * SECOND, "{retry_after:?}");
    let peeked = limiter.peek(&alice()).await.unwrap();
    assert_eq!((peeked.retry_after(), refused.remaining()), (Some(retry_after), 0));
}

/// The first call is at the front of the queue. The deadline of the second one passes behind it.
#[tokio::test(start_paused = true)]
async fn call_without_a_turn_gets_a_retry_after_of_a_microsecond_if_units_are_free() {
    let limiter = limiter("token-bucket 1/second burst 10");
    let _ = limiter.hit_with_cost(&alice(), 10).await.unwrap();
    let first = start(&limiter, 10, MINUTE).await;
    let begin = Instant::now();
    sleep(SECOND / 2).await;
    let second = start(&limiter, 1, 2 * SECOND).await;
    let refused = second.await.unwrap().unwrap();
    assert!(refused.is_refused());
    let time = begin.elapsed();
    assert!(time >= 5 * SECOND / 2 && time < Duration::from_millis(2_512), "{time:?}");
    // A unit is available, but the call ahead needs it.
    assert_eq!(refused.retry_after(), Some(Duration::from_micros(1)));
    assert!(first.await.unwrap().unwrap().is_admitted());
}

/// If all calls hit at the same time, they would flood a failing storage. If they hit one after the
/// other, each would wait for the timeouts of those before it.
#[tokio::test(start_paused = true)]
async fn each_round_of_storage_failures_ends_the_wait_of_twice_as_many_calls() {
    let limiter = limiter("fixed-window 1/second");
    let _ = limiter.hit(&alice()).await.unwrap();
    let calls = [(); 20].map(|()| tokio::spawn(limiter.acquire(&alice(), MINUTE)));
    settle().await;
    fake(&limiter).set(Behavior::FailsAfter(SECOND));
    fake(&limiter).take_decisions();
    sleep(SECOND / 2).await;
    let mut rounds = Vec::new();
    for _ in 0..5 {
        sleep(SECOND).await;
        rounds.push(fake(&limiter).take_decisions());
    }
    assert_eq!(rounds, [1, 2, 4, 8, 5]);
    for call in calls {
        assert_eq!(call.await.unwrap().unwrap_err().to_string(), FAILURE);
    }
}

#[tokio::test(start_paused = true)]
async fn failure_of_the_first_hit_is_returned_at_once() {
    let limiter = RateLimiter::with_storage(policy("1/second"), failing());
    let begin = Instant::now();
    assert_eq!(limiter.acquire(&alice(), MINUTE).await.unwrap_err().to_string(), FAILURE);
    assert_eq!(begin.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn queued_calls_are_admitted_after_a_storage_failure() {
    let limiter = limiter("fixed-window 1/second");
    let _ = limiter.hit(&alice()).await.unwrap();
    let first = start(&limiter, 1, MINUTE).await;
    let others = [(); 4].map(|()| tokio::spawn(limiter.acquire(&alice(), MINUTE)));
    settle().await;
    fake(&limiter).set(Behavior::FailsAfter(SECOND));
    sleep(3 * SECOND / 2).await;
    fake(&limiter).set(Behavior::Works);
    assert!(first.await.unwrap().is_err());
    for call in others {
        assert!(call.await.unwrap().unwrap().is_admitted());
    }
}

#[tokio::test(start_paused = true)]
async fn call_waits_for_all_limits_of_the_policy() {
    let limiter = limiter("fixed-window 1/second; fixed-window 2 per 10 seconds");
    let begin = Instant::now();
    for due in [0, 1, 10] {
        assert!(limiter.acquire(&alice(), MINUTE).await.unwrap().is_admitted());
        assert_due(begin.elapsed(), Duration::from_secs(due));
    }
    assert_eq!(fake(&limiter).take_decisions(), 5, "three hits and two refusals");
}

#[tokio::test(start_paused = true)]
async fn next_attempt_uses_the_current_live_policy() {
    let api = |text: &str| policy(text).with_name("api");
    for (text, admitted) in [("fixed-window 1/second", 1), ("fixed-window 5/second", 5)] {
        let live = LivePolicy::new(api("fixed-window 2/second"));
        let limiter = RateLimiter::with_storage(live.clone(), FakeStorage::around(memory()));
        let _ = limiter.hit_with_cost(&alice(), 2).await.unwrap();
        let calls = [(); 8].map(|()| tokio::spawn(limiter.acquire(&alice(), Duration::from_millis(1_500))));
        settle().await;
        live.set(api(text)).unwrap();
        let mut count = 0;
        for call in calls {
            count += u32::from(call.await.unwrap().unwrap().is_admitted());
        }
        assert_eq!(count, admitted, "{text}");
    }
}

#[tokio::test(start_paused = true)]
async fn newer_refusal_of_the_key_postpones_the_attempt() {
    for cost in [1, 2] {
        let limiter = limiter("elastic-window 2/second");
        let _ = limiter.hit_with_cost(&alice(), 2).await.unwrap();
        let begin = Instant::now();
        // The first hit of this call is in flight when the other call is refused. The hit extends
        // the window.
        fake(&limiter).set(Behavior::WorksAfter(SECOND / 2));
        let second = start(&limiter, 1, MINUTE).await;
        fake(&limiter).set(Behavior::Works);
        let waiting = start(&limiter, cost, MINUTE).await;
        assert!(waiting.await.unwrap().unwrap().is_admitted());
        let time = begin.elapsed();
        assert!(time >= Duration::from_millis(1_500) && time < Duration::from_millis(1_700), "{time:?}");
        second.abort();
    }
}

#[tokio::test(start_paused = true)]
async fn delay_of_a_leaky_bucket_is_part_of_the_wait() {
    let limiter = limiter("leaky-bucket 1 per 10 seconds queue 2");
    let begin = Instant::now();
    // The fourth call waits 10 s for a slot, and 20 s in the queue of the bucket.
    let calls = [(); 4].map(|()| tokio::spawn(limiter.acquire(&alice(), 40 * SECOND)));
    for (call, due) in calls.into_iter().zip([0, 10, 20, 30]) {
        assert!(call.await.unwrap().unwrap().is_admitted());
        let time = begin.elapsed();
        let due = Duration::from_secs(due);
        assert!((due..=due + SECOND + 2 * LATE).contains(&time), "due after {due:?}, was after {time:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn call_is_refused_and_spends_nothing_if_the_delay_is_too_long() {
    let limiter = limiter("leaky-bucket 1 per 10 seconds queue 2");
    let _ = limiter.hit(&alice()).await.unwrap();
    let begin = Instant::now();
    let refused = limiter.acquire(&alice(), 7 * SECOND).await.unwrap();
    assert!(refused.is_refused());
    assert_eq!((refused.retry_after(), refused.remaining()), (Some(3 * SECOND), 2));
    assert_eq!(left(&limiter).await, 2);
    assert_eq!(begin.elapsed(), Duration::ZERO);
    sleep(3 * SECOND).await;
    assert!(limiter.acquire(&alice(), 7 * SECOND).await.unwrap().is_admitted());
    assert_due(begin.elapsed(), 10 * SECOND);
}

/// A refund frees only the last slot of the bucket's queue. So slots of refused calls would fill
/// it.
#[tokio::test(start_paused = true)]
async fn call_whose_delay_is_too_long_takes_no_slot() {
    let limiter = limiter("leaky-bucket 10/second queue 100");
    fake(&limiter).set(Behavior::WorksAfter(Duration::from_millis(5)));
    let admitted = Arc::new(AtomicU32::new(0));
    for millis in (0..20_000).step_by(20) {
        if millis == 10_000 {
            admitted.store(0, Ordering::Relaxed);
        }
        // Two at the same time, so that a refund of the first is not that of the last slot.
        for _ in 0..2 {
            let (call, admitted) = (limiter.acquire(&alice(), SECOND), Arc::clone(&admitted));
            tokio::spawn(async move {
                admitted.fetch_add(u32::from(call.await.unwrap().is_admitted()), Ordering::Relaxed);
            });
        }
        sleep(Duration::from_millis(20)).await;
    }
    let admitted = admitted.load(Ordering::Relaxed);
    assert!((80..=101).contains(&admitted), "{admitted} in 10 seconds");
}

#[tokio::test(start_paused = true)]
async fn call_that_is_dropped_during_its_delay_is_refunded() {
    async fn check(storage: impl Storage) {
        let limiter = RateLimiter::with_storage(policy("leaky-bucket 1 per 10 seconds queue 2"), storage);
        let _ = limiter.hit(&alice()).await.unwrap();
        let mut waiting = Box::pin(limiter.acquire(&alice(), MINUTE));
        for _ in 0..4 {
            assert!(poll(&mut waiting).is_pending());
        }
        assert_eq!(left(&limiter).await, 1);
        drop(waiting);
        settle().await;
        assert_eq!(left(&limiter).await, 2);
    }
    check(memory()).await;
    check(slow(memory())).await;
}

#[tokio::test(start_paused = true)]
async fn keys_do_not_wait_for_each_other() {
    let limiter = limiter("fixed-window 1 per 10 seconds");
    let _ = limiter.hit(&alice()).await.unwrap();
    let waiting = start(&limiter, 1, MINUTE).await;
    let bob = timeout(SECOND, limiter.acquire(&Key::from("bob"), MINUTE)).await;
    assert!(bob.unwrap().unwrap().is_admitted());
    assert!(waiting.await.unwrap().unwrap().is_admitted());
}

/// A turn passes on this long after a call is due. Several calls in a row that nothing polls take
/// twice as long together.
const GRACE: Duration = Duration::from_millis(200);

/// Asserts that `time` is `due`, or later by at most the jitter, the grace of calls that nothing
/// polls, and the lateness of timers.
fn assert_due_after_grace(time: Duration, due: Duration) {
    assert!((due..=due + due / 10 + 2 * GRACE + 3 * LATE).contains(&time), "due after {due:?}, was after {time:?}");
}

/// Guards against this defect: a call that was polled in `select!`, and neither polled again nor
/// dropped, blocks the calls behind it.
#[tokio::test(start_paused = true)]
async fn turns_of_calls_that_nothing_polls_pass_on() {
    for left_calls in [1, 2, 40] {
        let limiter = limiter("fixed-window 3/second");
        let _ = limiter.hit_with_cost(&alice(), 3).await.unwrap();
        let mut left_behind: Vec<_> = (0..left_calls).map(|_| Box::pin(limiter.acquire(&alice(), MINUTE))).collect();
        for call in &mut left_behind {
            assert!(poll(call).is_pending());
        }
        let begin = Instant::now();
        let calls = [start(&limiter, 1, MINUTE).await, start(&limiter, 1, MINUTE).await];
        for call in calls {
            let decision = timeout(10 * SECOND, call).await.expect("the turns pass on");
            assert!(decision.unwrap().unwrap().is_admitted());
        }
        assert_due_after_grace(begin.elapsed(), SECOND);
        assert_eq!(left(&limiter).await, 1, "{left_calls} calls have spent nothing");

        // A call that is polled again has kept its place, and is served once.
        let last = left_behind.pop().unwrap();
        assert!(timeout(SECOND, last).await.unwrap().unwrap().is_admitted());
        assert_eq!(left(&limiter).await, 0);
        drop(left_behind);
        sleep(2 * SECOND).await;
        assert_eq!(left(&limiter).await, 3);
    }
}

#[tokio::test(start_paused = true)]
async fn call_that_is_polled_again_is_ahead_of_later_calls_that_have_no_turn() {
    let limiter = limiter("fixed-window 1/second");
    let _ = limiter.hit(&alice()).await.unwrap();
    let mut left_behind = Box::pin(limiter.acquire(&alice(), MINUTE));
    assert!(poll(&mut left_behind).is_pending());
    let order = Arc::new(Mutex::new(Vec::new()));
    let mut calls = Vec::new();
    for number in 1..=3 {
        let (call, order) = (limiter.acquire(&alice(), MINUTE), Arc::clone(&order));
        calls.push(tokio::spawn(async move {
            assert!(call.await.unwrap().is_admitted());
            order.lock().unwrap().push(number);
        }));
        settle().await;
    }
    sleep(Duration::from_millis(1_700)).await;
    assert_eq!(*order.lock().unwrap(), [1]);
    assert!(left_behind.await.unwrap().is_admitted());
    order.lock().unwrap().push(0);
    for call in calls {
        call.await.unwrap();
    }
    // The second call had its turn already.
    assert_eq!(*order.lock().unwrap(), [1, 2, 0, 3]);
}

#[tokio::test(start_paused = true)]
async fn call_that_does_not_take_an_offered_turn_is_passed_over() {
    let limiter = limiter("fixed-window 1/second");
    let _ = limiter.hit(&alice()).await.unwrap();
    let begin = Instant::now();
    let first = start(&limiter, 1, MINUTE).await;
    let mut left_behind = Box::pin(limiter.acquire(&alice(), MINUTE));
    assert!(poll(&mut left_behind).is_pending());
    let last = start(&limiter, 1, MINUTE).await;
    assert!(first.await.unwrap().unwrap().is_admitted());
    assert_due(begin.elapsed(), SECOND);
    let last = timeout(10 * SECOND, last).await.expect("the turn passes on");
    assert!(last.unwrap().unwrap().is_admitted());
    // The first call has jitter too, and its admission starts the next window.
    assert_due_after_grace(begin.elapsed(), 2 * SECOND);
    drop(left_behind);
    sleep(SECOND).await;
    assert_eq!(left(&limiter).await, 1);
}

#[tokio::test(start_paused = true)]
async fn hit_in_flight_whose_reply_nothing_polls_loses_its_turn_and_counts_once() {
    let limiter = limiter("fixed-window 3/second");
    let storage = fake(&limiter);
    let _ = limiter.hit_with_cost(&alice(), 3).await.unwrap();
    let mut left_behind = Box::pin(limiter.acquire(&alice(), MINUTE));
    assert!(poll(&mut left_behind).is_pending());
    let waiting = start(&limiter, 1, MINUTE).await;
    sleep(Duration::from_millis(1_110)).await;
    storage.close();
    assert!(poll(&mut left_behind).is_pending(), "its hit is in flight");
    sleep(5 * SECOND).await;
    assert_eq!(storage.decisions(), 3, "a slow storage gets one hit at a time");
    storage.open();
    let begin = Instant::now();
    let waiting = timeout(10 * SECOND, waiting).await.expect("the turn passes on");
    assert!(waiting.unwrap().unwrap().is_admitted());
    assert!(begin.elapsed() <= 2 * GRACE + 3 * LATE, "{:?}", begin.elapsed());
    assert!(timeout(GRACE, left_behind).await.unwrap().unwrap().is_admitted());
    assert_eq!(storage.take_decisions(), 4, "one hit for each call, and one that was refused");
}

/// Servers with a runtime for each thread share the queues of a limiter.
#[test]
fn call_of_a_runtime_that_does_not_run_is_passed_over() {
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let (stalled, running) = (runtime(), runtime());
    let limiter = RateLimiter::new(policy("fixed-window 1/second"));
    assert!(now(limiter.hit(&alice())).is_admitted());
    let mut left_behind = Box::pin(limiter.acquire(&alice(), MINUTE));
    stalled.block_on(async { assert!(poll(&mut left_behind).is_pending()) });
    running.block_on(async {
        let call = timeout(30 * SECOND, limiter.acquire(&alice(), MINUTE)).await;
        assert!(call.expect("it is passed over").unwrap().is_admitted());
    });
    assert!(stalled.block_on(left_behind).unwrap().is_admitted());
}

#[test]
fn call_that_need_not_wait_needs_no_runtime() {
    let limiter = RateLimiter::new(policy("fixed-window 1/hour"));
    for admitted in [true, false] {
        let mut call = Box::pin(limiter.acquire(&alice(), SECOND));
        let std::task::Poll::Ready(Ok(decision)) = poll(&mut call) else { panic!("it waits") };
        assert_eq!(decision.is_admitted(), admitted);
    }
}

/// Guards against this defect: the wait includes the lock that a refusal by another limit would
/// begin.
#[tokio::test(start_paused = true)]
async fn wait_for_a_shorter_delay_contains_no_lock() {
    let limiter = limiter("leaky-bucket 1/second queue 5; lockout 1 refusals/minute for 1h");
    assert!(limiter.acquire(&alice(), SECOND).await.unwrap().is_admitted());
    let refused = limiter.acquire(&alice(), SECOND / 4).await.unwrap();
    assert_eq!((refused.is_refused(), refused.retry_after()), (true, Some(3 * SECOND / 4)));
    assert_eq!(refused.remaining(), 5);
}

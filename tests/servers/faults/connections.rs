//! One connection to each server, for all callers.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::harness::SECOND;
use common::servers::{FaultyServer, Mode, Proxy};
use common::time::Stopwatch;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tower_ratelimit::storage::StorageError;
use tower_ratelimit::{Decision, Key, RateLimiter};

use super::backend::Backend;
use super::{LONG, QUICK, hit, limiter, quick_hit, recovers};

on_every_backend! { [tokio::test] [await] [
    silent_connection_is_replaced_after_three_timeouts,
    silent_connection_is_replaced_although_callers_stop_waiting_early,
    calls_beyond_the_limit_in_flight_are_not_sent,
    many_retrying_callers_on_one_thread_make_progress,
    calls_share_a_connection_and_do_not_wait_for_each_other,
] }

/// Guards against this defect: a connection is used forever although its server has vanished.
async fn silent_connection_is_replaced_after_three_timeouts<B: Backend>() {
    let server = B::Server::launch();
    let proxy = Proxy::start(server.port());
    let limiter = limiter::<B>(proxy.port(), QUICK);
    recovers(&limiter).await;
    let before = proxy.connections();
    server.stop();
    let mut tasks = JoinSet::new();
    for client in 0..20_u64 {
        let limiter = limiter.clone();
        tasks.spawn(async move { quick_hit::<B>(&limiter, &Key::from(client)).await.is_err() });
    }
    assert!(tasks.join_all().await.into_iter().all(|failed| failed));
    assert!(quick_hit::<B>(&limiter, &Key::global()).await.is_err());
    assert_eq!(proxy.connections(), before, "concurrent timeouts count as one");
    server.resume();
    assert!(recovers(&limiter).await < SECOND);
    let before = proxy.connections();
    server.stop();
    let (silent, mut timeouts, mut late) = (Stopwatch::start(), 0, 0);
    while proxy.connections() == before {
        silent.assert_below(5 * (QUICK + B::MARGIN), "the connection is replaced");
        let begun = Instant::now();
        assert!(quick_hit::<B>(&limiter, &Key::global()).await.is_err());
        timeouts += 1;
        // On a busy machine, the storage may not count a call as a timeout.
        late += usize::from(begun.elapsed() >= QUICK * 3 / 2);
    }
    let replaced = Instant::now();
    assert_three_timeouts(&silent);
    // On a busy machine, the proxy may also count a connection late.
    let is_busy = silent.excess() >= QUICK;
    let is_expected = is_busy || (4..=4 + late).contains(&timeouts);
    assert!(is_expected, "the call after three timeouts connects: {timeouts}, {late} late");
    server.resume();
    recovers(&limiter).await;
    assert_second_connection_is_used(&proxy, before, replaced);
}

/// Asserts that the connection was silent for more than two timeouts. On a busy machine, it may have
/// been silent before, too.
fn assert_three_timeouts(silent: &Stopwatch) {
    assert!(silent.wall() + silent.excess() > 2 * QUICK, "after {:?}", silent.wall());
}

/// Asserts that the connection that was opened just before `replaced` is the last one. On a busy
/// machine, it can be silent for so long that others follow, one for each two timeouts.
fn assert_second_connection_is_used(proxy: &Proxy, before: usize, replaced: Instant) {
    let others = (replaced.elapsed() + QUICK).as_millis() / (2 * QUICK).as_millis();
    let opened = proxy.connections() - before;
    assert!(opened as u128 <= 1 + others, "{opened} connections");
}

/// The callers' own timeout is shorter than the storage's.
async fn silent_connection_is_replaced_although_callers_stop_waiting_early<B: Backend>() {
    let server = B::Server::launch();
    let proxy = Proxy::start(server.port());
    let limiter = limiter::<B>(proxy.port(), QUICK);
    recovers(&limiter).await;
    let before = proxy.connections();
    server.stop();
    let silent = Stopwatch::start();
    while proxy.connections() == before {
        let _ = timeout(QUICK / 4, limiter.peek(&Key::global())).await;
        silent.assert_below(5 * (QUICK + B::MARGIN), "the connection is replaced");
    }
    let replaced = Instant::now();
    assert_three_timeouts(&silent);
    server.resume();
    recovers(&limiter).await;
    assert_second_connection_is_used(&proxy, before, replaced);
}

/// Guards against this defect: the queue of requests is unbounded while the server hangs.
async fn calls_beyond_the_limit_in_flight_are_not_sent<B: Backend>() {
    const CALLERS: u64 = 1_500;
    let server = B::Server::launch();
    let timeout = 2 * SECOND;
    let limiter = limiter::<B>(server.port(), timeout);
    recovers(&limiter).await;
    server.stop();
    let (watch, mut tasks, begun) = (Stopwatch::start(), JoinSet::new(), Arc::new(AtomicU64::new(0)));
    for client in 0..CALLERS {
        let (limiter, begun) = (limiter.clone(), Arc::clone(&begun));
        tasks.spawn(async move {
            begun.fetch_add(1, Ordering::Relaxed);
            limiter.peek(&Key::from(client)).await
        });
    }
    while begun.load(Ordering::Relaxed) < CALLERS {
        tokio::task::yield_now().await;
    }
    // The first calls in flight end a timeout after their start, and the last calls are refused
    // three quarters of a timeout after theirs.
    let is_slow = watch.wall() > timeout / 8;
    let mut overloaded = 0;
    while overloaded < CALLERS - 1_024 {
        let error = tasks.join_next().await.unwrap().unwrap().unwrap_err();
        // On a busy machine, the calls in flight may end first.
        if error.is_timeout() && (is_slow || watch.excuses(timeout)) {
            continue;
        }
        assert!(format!("{error:#}").starts_with("overloaded: 1024 calls to 127.0.0.1:"), "{error}");
        assert!(!error.may_have_counted() && !error.is_timeout());
        overloaded += 1;
    }
    server.resume();
    for answer in tasks.join_all().await {
        // On a busy machine the deadline may pass first.
        assert!(answer.as_ref().err().is_none_or(StorageError::is_timeout), "calls in flight are answered: {answer:?}");
    }
}

/// There are more callers than the server can answer within the deadline, and each retries
/// immediately.
async fn many_retrying_callers_on_one_thread_make_progress<B: Backend>() {
    let server = B::Server::launch();
    let mut timeout = QUICK;
    loop {
        let watch = Stopwatch::start();
        let answers = answers_of_retrying_callers(&limiter::<B>(server.port(), timeout)).await;
        if answers >= CALLERS {
            return;
        }
        // On a busy machine, the timeout may be too short even for a few calls.
        assert!(watch.excuses(PATIENCE) && timeout < LONG, "{answers} answers with a timeout of {timeout:?}");
        timeout *= 4;
    }
}

const CALLERS: u64 = 3_000;

/// The time in which that many calls are answered. An idle machine needs a second.
const PATIENCE: Duration = Duration::from_secs(10);

/// Returns the number of answers at the end of [`PATIENCE`], or when there are [`CALLERS`].
async fn answers_of_retrying_callers(limiter: &RateLimiter) -> u64 {
    recovers(limiter).await;
    let mut tasks = JoinSet::new();
    let (started, answers) = (Instant::now(), Arc::new(AtomicU64::new(0)));
    for client in 0..CALLERS {
        let (limiter, answers) = (limiter.clone(), Arc::clone(&answers));
        tasks.spawn(async move {
            while started.elapsed() < PATIENCE && answers.load(Ordering::Relaxed) < CALLERS {
                answers.fetch_add(u64::from(limiter.hit(&Key::from(client)).await.is_ok()), Ordering::Relaxed);
            }
        });
    }
    tasks.join_all().await;
    answers.load(Ordering::Relaxed)
}

/// Guards against this defect: a lock around each call. Sequential hits would take four seconds.
async fn calls_share_a_connection_and_do_not_wait_for_each_other<B: Backend>() {
    let server = B::Server::launch();
    let proxy = Proxy::start(server.port());
    let limiter = limiter::<B>(proxy.port(), LONG);
    // From here on the script is loaded, and the etcd lease exists.
    let _ = hit(&limiter, &Key::global()).await;
    let before = proxy.connections();
    proxy.set(Mode::Delay(QUICK / 5));
    let (watch, mut tasks) = (Stopwatch::start(), JoinSet::new());
    for client in 0..200_u64 {
        let limiter = limiter.clone();
        tasks.spawn(async move { limiter.hit(&Key::from(client)).await.unwrap() });
    }
    assert!(tasks.join_all().await.iter().all(Decision::is_admitted));
    watch.assert_below(B::TIMEOUT.max(SECOND / 2), "all hits");
    assert_eq!(proxy.connections(), before);
}

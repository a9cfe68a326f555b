//! One connection to each server, for all callers.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use common::harness::SECOND;
use common::servers::{FaultyServer, Mode, Proxy};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tower_ratelimit::storage::StorageError;
use tower_ratelimit::{Decision, Key};

use super::backend::Backend;
use super::{LONG, QUICK, limiter, quick_hit, recovers};

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
    recovers::<B>(&limiter).await;
    server.stop();
    let mut tasks = JoinSet::new();
    for client in 0..20_u64 {
        let limiter = limiter.clone();
        tasks.spawn(async move { quick_hit::<B>(&limiter, &Key::from(client)).await.is_err() });
    }
    assert!(tasks.join_all().await.into_iter().all(|failed| failed));
    server.resume();
    assert!(recovers::<B>(&limiter).await < SECOND);
    assert_eq!(proxy.connections(), 1, "concurrent timeouts count as one");
    server.stop();
    let (silent, mut timeouts) = (Instant::now(), 0);
    while proxy.connections() == 1 {
        assert!(silent.elapsed() < 5 * (QUICK + B::MARGIN));
        assert!(quick_hit::<B>(&limiter, &Key::everybody()).await.is_err());
        timeouts += 1;
    }
    let replaced = Instant::now();
    assert!(silent.elapsed() > 2 * QUICK);
    assert_eq!(timeouts, 4, "the call after three timeouts connects");
    server.resume();
    recovers::<B>(&limiter).await;
    assert_second_connection_is_used(&proxy, replaced);
}

/// Asserts that the connection that was opened just before `replaced` is the last one. On a busy
/// machine, it can be silent for so long that others follow, one for each two timeouts.
fn assert_second_connection_is_used(proxy: &Proxy, replaced: Instant) {
    let others = (replaced.elapsed() + QUICK).as_millis() / (2 * QUICK).as_millis();
    assert!(proxy.connections() as u128 <= 2 + others, "{} connections", proxy.connections());
}

/// The callers' own timeout is shorter than the storage's.
async fn silent_connection_is_replaced_although_callers_stop_waiting_early<B: Backend>() {
    let server = B::Server::launch();
    let proxy = Proxy::start(server.port());
    let limiter = limiter::<B>(proxy.port(), QUICK);
    recovers::<B>(&limiter).await;
    server.stop();
    let silent = Instant::now();
    while proxy.connections() == 1 {
        let _ = timeout(QUICK / 4, limiter.peek(&Key::everybody())).await;
        assert!(silent.elapsed() < 5 * (QUICK + B::MARGIN));
    }
    let replaced = Instant::now();
    assert!(silent.elapsed() > 2 * QUICK);
    server.resume();
    recovers::<B>(&limiter).await;
    assert_second_connection_is_used(&proxy, replaced);
}

/// Guards against this defect: the queue of requests is unbounded while the server hangs.
async fn calls_beyond_the_limit_in_flight_are_not_sent<B: Backend>() {
    const CALLERS: u64 = 1_500;
    let server = B::Server::launch();
    let limiter = limiter::<B>(server.port(), 2 * SECOND);
    recovers::<B>(&limiter).await;
    server.stop();
    let mut tasks = JoinSet::new();
    for client in 0..CALLERS {
        let limiter = limiter.clone();
        tasks.spawn(async move { limiter.peek(&Key::from(client)).await });
    }
    for _ in 1_024..CALLERS {
        let error = tasks.join_next().await.unwrap().unwrap().unwrap_err();
        assert!(format!("{error:#}").starts_with("overloaded: 1024 calls to 127.0.0.1:"), "{error}");
        assert!(!error.may_have_counted() && !error.is_timeout());
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
    const CALLERS: u64 = 3_000;
    let server = B::Server::launch();
    let limiter = limiter::<B>(server.port(), QUICK);
    recovers::<B>(&limiter).await;
    let mut tasks = JoinSet::new();
    let (started, answers) = (Instant::now(), Arc::new(AtomicU64::new(0)));
    for client in 0..CALLERS {
        let (limiter, answers) = (limiter.clone(), Arc::clone(&answers));
        tasks.spawn(async move {
            while started.elapsed() < LONG && answers.load(Ordering::Relaxed) < CALLERS {
                answers.fetch_add(u64::from(limiter.hit(&Key::from(client)).await.is_ok()), Ordering::Relaxed);
            }
        });
    }
    tasks.join_all().await;
    assert!(answers.load(Ordering::Relaxed) >= CALLERS, "{answers:?}");
}

/// Guards against this defect: a lock around each call. Sequential hits would take four seconds.
async fn calls_share_a_connection_and_do_not_wait_for_each_other<B: Backend>() {
    let server = B::Server::launch();
    let proxy = Proxy::start(server.port());
    let limiter = limiter::<B>(proxy.port(), B::TIMEOUT.max(SECOND / 2));
    // From here on the script is loaded, and the etcd lease exists.
    recovers::<B>(&limiter).await;
    while limiter.hit(&Key::everybody()).await.is_err() {}
    proxy.set(Mode::Delay(QUICK / 5));
    let mut tasks = JoinSet::new();
    for client in 0..200_u64 {
        let limiter = limiter.clone();
        tasks.spawn(async move { limiter.hit(&Key::from(client)).await.unwrap() });
    }
    assert!(tasks.join_all().await.iter().all(Decision::is_admitted));
    assert_eq!(proxy.connections(), 1);
}

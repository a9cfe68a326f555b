//! One connection to each server, for all callers.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::harness::{SECOND, within};
use common::servers::{FaultyServer, Mode, Proxy};
use common::time::{EVENTUALLY, Stopwatch, eventually};
use futures_util::future::join_all;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tower_ratelimit::storage::StorageError;
use tower_ratelimit::{Decision, Key, RateLimiter};

use super::backend::Backend;
use super::{LONG, QUICK, hit, limiter, most_connections, recovers};

on_every_backend! { [tokio::test] [await] [
    silent_connection_is_replaced_after_three_timeouts,
    silent_connection_is_replaced_although_callers_stop_waiting_early,
    calls_beyond_the_limit_in_flight_are_not_sent,
    many_retrying_callers_on_one_thread_make_progress,
    calls_share_a_connection_and_do_not_wait_for_each_other,
] }

/// Guards against this defect: a connection is used forever although its server has vanished.
async fn silent_connection_is_replaced_after_three_timeouts<B: Backend>() {
    let timeout = SECOND / 2;
    let server = B::Server::launch();
    let proxy = Proxy::start(server.port());
    let limiter = limiter::<B>(proxy.port(), timeout);
    let fails = async |key: &Key| within(timeout + B::MARGIN, limiter.hit(key)).await.is_err();
    recovers(&limiter).await;
    let before = proxy.connections();
    server.stop();
    let keys: Vec<_> = (0..20_u64).map(Key::from).collect();
    assert!(join_all(keys.iter().map(&fails)).await.into_iter().all(|failed| failed));
    assert!(fails(&Key::global()).await);
    assert_eq!(proxy.connections(), before, "concurrent timeouts count as one");
    server.resume();
    assert!(recovers(&limiter).await < SECOND);
    let before = proxy.connections();
    server.stop();
    let (mut timeouts, mut silent, mut replaced) = (0, Duration::ZERO, Instant::now());
    while timeouts < 3 {
        replaced = Instant::now();
        assert!(fails(&Key::global()).await);
        let took = replaced.elapsed();
        if proxy.connections() != before {
            assert!(silent >= timeout * 9 / 4, "the connection is replaced after {silent:?}");
            break;
        }
        silent += took;
        // A later result is a sign of a busy machine, so the storage does not count it.
        timeouts += u32::from(took < timeout * 5 / 4);
    }
    if timeouts == 3 {
        replaced = Instant::now();
        assert!(fails(&Key::global()).await);
    }
    // No call follows.
    eventually("the call after three timeouts connects", async || proxy.connections() > before).await;
    server.resume();
    recovers(&limiter).await;
    assert_second_connection_is_used(&proxy, before, replaced, timeout);
}

/// Asserts that the connection that was opened after `replaced` is the last one. On a busy machine, it
/// can be silent for so long that others follow, one for each two timeouts.
fn assert_second_connection_is_used(proxy: &Proxy, before: usize, replaced: Instant, timeout: Duration) {
    let others = replaced.elapsed().as_millis() / (2 * timeout).as_millis();
    let opened = proxy.connections() - before;
    let most = most_connections(replaced.elapsed()) as u128 + others;
    assert!(opened as u128 <= most, "{opened} connections");
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
    let replaced = Instant::now().checked_sub(QUICK).unwrap();
    // On a busy machine, the connection may have been silent before, too.
    assert!(silent.wall() + silent.excess() > 2 * QUICK, "after {:?}", silent.wall());
    server.resume();
    recovers(&limiter).await;
    assert_second_connection_is_used(&proxy, before, replaced, QUICK);
}

/// Guards against this defect: the queue of requests is unbounded while the server hangs.
async fn calls_beyond_the_limit_in_flight_are_not_sent<B: Backend>() {
    const CALLERS: u64 = 1_500;
    let server = B::Server::launch();
    let limiter = limiter::<B>(server.port(), 2 * EVENTUALLY);
    recovers(&limiter).await;
    server.stop();
    let (mut tasks, begun) = (JoinSet::new(), Arc::new(AtomicU64::new(0)));
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
    // The time of the runtime goes on to the next timer: calls are refused after three quarters of the
    // timeout, and those in flight have the last quarter.
    tokio::time::pause();
    let mut overloaded = 0;
    while overloaded < CALLERS - 1_024 {
        let error = tasks.join_next().await.unwrap().unwrap().unwrap_err();
        let text = format!("{error:#}");
        if B::HAS_KEEP_ALIVE && text.ends_with("keep-alive timed out") {
            continue;
        }
        assert!(text.starts_with("overloaded: 1024 calls to 127.0.0.1:"), "{error:?}");
        assert!(!error.may_have_counted() && !error.is_timeout());
        overloaded += 1;
    }
    tokio::time::resume();
    server.resume();
    for answer in tasks.join_all().await {
        let is_cancelled = B::CANCELS_CALLS && answer.as_ref().is_err_and(StorageError::is_timeout);
        assert!(answer.is_ok() || is_cancelled, "calls in flight are answered: {answer:?}");
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

/// Guards against this defect: a lock around each call. Sequential hits would wait for one delay each,
/// which is twice the bound. A proxy delays all replies together that arrive meanwhile.
async fn calls_share_a_connection_and_do_not_wait_for_each_other<B: Backend>() {
    let server = B::Server::launch();
    let proxy = Proxy::start(server.port());
    let limiter = limiter::<B>(proxy.port(), LONG);
    // From here on the script is loaded, and the etcd lease exists.
    let _ = hit(&limiter, &Key::global()).await;
    let before = proxy.connections();
    let (delay, clients) = (QUICK, 200);
    proxy.set(Mode::Delay(delay));
    let (watch, mut tasks) = (Stopwatch::start(), JoinSet::new());
    for client in 0..clients {
        let limiter = limiter.clone();
        tasks.spawn(async move { limiter.hit(&Key::from(u64::from(client))).await.unwrap() });
    }
    assert!(tasks.join_all().await.iter().all(Decision::is_admitted));
    watch.assert_below(clients * delay / 2, "all hits");
    assert_eq!(proxy.connections(), before);
}

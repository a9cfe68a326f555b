//! Servers that start late, die, hang and return.

use std::time::{Duration, Instant};

use common::harness::{AGAIN, Answer, SECOND, timely};
use common::message;
use common::servers::{FaultyServer, Mode, Proxy};
use common::time::{Stopwatch, eventually};
use futures_util::future::join;
use tokio::task::{JoinSet, spawn_blocking};
use tokio::time::sleep;
use tower_ratelimit::storage::StorageErrorKind;
use tower_ratelimit::{Key, RateLimiter, Storage};

use super::backend::Backend;
use super::{LONG, QUICK, entry_points, limiter, not_ready, quick_hit, ready, recovers};

on_every_backend! { [tokio::test] [await] [
    storage_recovers_from_network_faults,
    storage_connects_to_a_server_that_starts_later,
    storage_recovers_after_its_server_dies,
    hanging_server_delays_requests_until_the_timeout,
    hanging_server_does_not_delay_other_callers,
    calls_to_an_unreachable_server_fail_at_once,
    failed_connects_are_retried_with_backoff,
    storage_reconnects_although_an_earlier_connect_lost_its_packets,
] }

/// Guards against this defect: a limiter cannot start while its server is down.
async fn storage_connects_to_a_server_that_starts_later<B: Backend>() {
    let mut server = B::Server::launch();
    server.kill();
    let entry_points = entry_points::<B>(server.port());
    entry_points.fail().await;
    let error = entry_points.limiter.storage().check().await.unwrap_err();
    assert!(!error.may_have_counted(), "{error:?}");
    let error = loop {
        let check = Stopwatch::start();
        let error = not_ready::<B>(entry_points.limiter.storage()).await;
        if !(error.is_timeout() && check.excuses(QUICK)) {
            break error;
        }
    };
    assert_eq!(error.kind(), StorageErrorKind::Unreachable);
    let error = message(error);
    assert!(error.contains(&format!("cannot reach 127.0.0.1:{}: ", server.port())), "{error}");
    server.restart();
    let took = ready::<B>(entry_points.limiter.storage()).await;
    assert!(took < SECOND, "{took:?}");
    entry_points.limiter.storage().check().await.unwrap();
    entry_points.recover().await;
}

async fn storage_recovers_after_its_server_dies<B: Backend>() {
    let mut server = B::Server::launch();
    let entry_points = entry_points::<B>(server.port());
    entry_points.recover().await;
    for _ in 0..3 {
        let before = entry_points.used().await;
        server.kill();
        entry_points.fail().await;
        let check = Stopwatch::start();
        let error = not_ready::<B>(entry_points.limiter.storage()).await;
        assert!(!error.is_timeout() || check.excuses(QUICK), "{error}");
        server.restart();
        let recovery = entry_points.recover().await;
        let least = recovery.admitted + if B::KEEPS_COUNTS { before } else { 0 };
        let used = entry_points.used().await;
        assert!((least..=least + recovery.failed).contains(&used), "{before}, {recovery:?}: {used}");
    }
}

/// Guards against this defect: requests hang when the server stops replying.
async fn hanging_server_delays_requests_until_the_timeout<B: Backend>() {
    let server = B::Server::launch();
    let entry_points = entry_points::<B>(server.port());
    entry_points.recover().await;
    // The first outage is longer than the time to replace the connection, the second is shorter.
    for is_long in [true, false] {
        let before = entry_points.used().await;
        server.stop();
        let hits = if is_long {
            entry_points.fail().await;
            6
        } else {
            let hit = timely(entry_points.limiter.hit(&Key::global())).await;
            assert_eq!(Answer::of_result(&hit), Answer::Failed);
            1
        };
        server.resume();
        let watch = Stopwatch::start();
        while timely(entry_points.limiter.peek(&Key::global())).await.is_err() {
            watch.assert_below(SECOND, "the storage recovers");
            sleep(AGAIN).await;
        }
        let counted = entry_points.used().await - before;
        assert!(counted <= if B::READS_FIRST { 0 } else { hits }, "{counted} of {hits}");
        entry_points.recover().await;
    }
}

async fn hanging_server_does_not_delay_other_callers<B: Backend>() {
    let server = B::Server::launch();
    let [connected, new] = [(); 2].map(|()| limiter::<B>(server.port(), QUICK));
    recovers(&connected).await;
    server.stop();
    let (a, b, stopped) = (Key::from("a"), Key::from("b"), Instant::now());
    for _ in 0..6 {
        let (one, other) = tokio::join!(quick_hit::<B>(&connected, &a), quick_hit::<B>(&new, &b));
        // On a busy machine, the storage may have connected for a second in vain.
        assert!((one.unwrap_err().is_timeout() || stopped.elapsed() >= SECOND) && other.is_err());
    }
    for _ in 0..3 {
        tokio::join!(not_ready::<B>(connected.storage()), not_ready::<B>(new.storage()));
    }
    server.resume();
    for limiter in [&connected, &new] {
        let took = ready::<B>(limiter.storage()).await;
        assert!(took < SECOND, "{took:?}");
        let took = recovers(limiter).await;
        assert!(took < SECOND, "{took:?}");
    }
}

/// The duration of an outage.
const WHILE: Duration = Duration::from_millis(300);

/// Asserts that more than `least` calls fail in [`WHILE`]. Returns the elapsed time, which is longer
/// on a busy machine.
async fn fails_at_once(limiter: &RateLimiter, least: u32) -> Duration {
    let (watch, mut calls) = (Stopwatch::start(), 0);
    while watch.wall() < WHILE || calls <= least {
        let error = limiter.hit(&Key::from("k")).await.unwrap_err();
        assert!(!error.may_have_counted() && !error.is_timeout(), "{error}");
        calls += 1;
        if calls <= least {
            watch.assert_below(WHILE, "so many calls fail");
        }
    }
    watch.wall()
}

async fn calls_to_an_unreachable_server_fail_at_once<B: Backend>() {
    let mut server = B::Server::launch();
    let limiter = limiter::<B>(server.port(), LONG);
    server.kill();
    fails_at_once(&limiter, 100).await;
    server.restart();
    let took = recovers(&limiter).await;
    assert!(took < SECOND, "{took:?}");
}

async fn failed_connects_are_retried_with_backoff<B: Backend>() {
    let mut server = B::Server::launch();
    let proxy = Proxy::start(server.port());
    let limiter = limiter::<B>(proxy.port(), LONG);
    server.kill();
    let mut took = Duration::ZERO;
    while proxy.attempts() < 2 {
        took += fails_at_once(&limiter, 50).await;
    }
    // The backoff is 20, 40, 80 and 160 ms, and then at most 200 ms. A slow attempt starts another
    // one after 250 ms.
    let most = 6 + took.saturating_sub(WHILE).as_millis() / 100;
    let attempts = proxy.attempts();
    assert!(attempts as u128 <= most, "{attempts} connects in {took:?}");
    server.restart();
    let took = recovers(&limiter).await;
    assert!(took < SECOND, "{took:?}");
}

async fn storage_recovers_from_network_faults<B: Backend>() {
    let mut tasks = JoinSet::new();
    for mode in [Mode::Garbage, Mode::SwallowReplies, Mode::CutAtReply, Mode::SwallowRequests] {
        tasks.spawn(recovers_from::<B>(mode));
    }
    tasks.join_all().await;
}

async fn recovers_from<B: Backend>(mode: Mode) {
    // Starting a server blocks, and other tasks measure their time on this thread.
    let server = spawn_blocking(B::Server::launch).await.unwrap();
    let proxy = Proxy::start(server.port());
    let storage = B::storage(proxy.port(), QUICK);
    // The fault begins while the storage connects, on an open connection, and while it connects
    // again.
    for connects in [true, false, true] {
        if connects {
            proxy.cut();
        }
        proxy.set(mode);
        for _ in 0..2 {
            not_ready::<B>(&storage).await;
        }
        proxy.set(Mode::Pass);
        proxy.cut();
        let took = ready::<B>(&storage).await;
        assert!(took < SECOND, "{mode:?}: {took:?}");
    }
}

/// The network loses all packets for a short time, including those of a connect. A later connect
/// succeeds while that one still waits.
async fn storage_reconnects_although_an_earlier_connect_lost_its_packets<B: Backend>() {
    let server = B::Server::launch();
    let proxy = Proxy::start(server.port());
    let limiter = limiter::<B>(proxy.port(), QUICK);
    proxy.set(Mode::SwallowRequests);
    // A second attempt starts after 250 ms, and the first one ends after a second.
    let packet_loss = Stopwatch::start();
    let network = async {
        eventually("the storage connects", async || proxy.connections() > 0).await;
        sleep(QUICK / 2).await;
        proxy.set(Mode::Pass);
    };
    // The network recovers during the hit, because the first hit can wait for the first connection.
    let _ = join(quick_hit::<B>(&limiter, &Key::global()), network).await;
    recovers(&limiter).await;
    packet_loss.assert_below(SECOND * 3 / 4 + B::LOGIN, "the storage recovers");
}

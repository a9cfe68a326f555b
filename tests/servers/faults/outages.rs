//! Servers that start late, die, hang and return.

use std::time::{Duration, Instant};

use common::harness::{AGAIN, Answer, SECOND, timely};
use common::message;
use common::servers::{FaultyServer, Mode, Proxy};
use tokio::task::{JoinSet, spawn_blocking};
use tokio::time::sleep;
use tower_ratelimit::storage::StorageErrorKind;
use tower_ratelimit::{Key, Storage};

use super::backend::Backend;
use super::{QUICK, entry_points, limiter, not_ready, quick_hit, ready, recovers};

/// Creates the tests for every backend, and for an erased storage on each kind of server.
macro_rules! outages {
    ($tests:tt) => {
        on_every_backend! { [tokio::test] [await] $tests }
        on_backends! {
            [tokio::test] [await] $tests
            erased_redis: ErasedRedis, erased_memcached: ErasedMemcached, erased_etcd: ErasedEtcd,
            erased_postgres: ErasedPostgres
        }
    };
}

outages! { [
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
    let error = not_ready::<B>(entry_points.limiter.storage()).await;
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
        let error = not_ready::<B>(entry_points.limiter.storage()).await;
        assert!(!error.is_timeout(), "{error}");
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
            let hit = timely(entry_points.limiter.hit(&Key::everybody())).await;
            assert_eq!(Answer::of_result(&hit), Answer::Failed);
            1
        };
        server.resume();
        let started = Instant::now();
        while timely(entry_points.limiter.peek(&Key::everybody())).await.is_err() {
            assert!(started.elapsed() < SECOND);
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
    recovers::<B>(&connected).await;
    server.stop();
    let (a, b) = (Key::from("a"), Key::from("b"));
    for _ in 0..6 {
        let (one, other) = tokio::join!(quick_hit::<B>(&connected, &a), quick_hit::<B>(&new, &b));
        assert!(one.unwrap_err().is_timeout() && other.is_err());
    }
    for _ in 0..3 {
        tokio::join!(not_ready::<B>(connected.storage()), not_ready::<B>(new.storage()));
    }
    server.resume();
    for limiter in [&connected, &new] {
        let took = ready::<B>(limiter.storage()).await;
        assert!(took < SECOND, "{took:?}");
        let took = recovers::<B>(limiter).await;
        assert!(took < SECOND, "{took:?}");
    }
}

async fn calls_to_an_unreachable_server_fail_at_once<B: Backend>() {
    let mut server = B::Server::launch();
    let limiter = limiter::<B>(server.port(), QUICK);
    server.kill();
    let (started, mut calls) = (Instant::now(), 0);
    while started.elapsed() < Duration::from_millis(300) {
        let error = quick_hit::<B>(&limiter, &Key::from("k")).await.unwrap_err();
        assert!(!error.may_have_counted() && !error.is_timeout(), "{error}");
        calls += 1;
    }
    assert!(calls > 100, "{calls}");
    server.restart();
    let took = recovers::<B>(&limiter).await;
    assert!(took < SECOND, "{took:?}");
}

async fn failed_connects_are_retried_with_backoff<B: Backend>() {
    let mut server = B::Server::launch();
    let proxy = Proxy::start(server.port());
    let limiter = limiter::<B>(proxy.port(), QUICK);
    server.kill();
    let (started, mut calls) = (Instant::now(), 0);
    while started.elapsed() < Duration::from_millis(300) {
        let error = quick_hit::<B>(&limiter, &Key::from("k")).await.unwrap_err();
        assert!(!error.may_have_counted() && !error.is_timeout(), "{error}");
        calls += 1;
    }
    let attempts = proxy.attempts();
    // The backoff is 20, 40, 80 and 160 ms.
    assert!(calls > 50 && (2..=6).contains(&attempts), "{calls} calls, {attempts} connects");
    server.restart();
    let took = recovers::<B>(&limiter).await;
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

/// The network loses all packets for half a second, including those of a connect. A later connect
/// succeeds while that one still waits.
async fn storage_reconnects_although_an_earlier_connect_lost_its_packets<B: Backend>() {
    let server = B::Server::launch();
    let proxy = Proxy::start(server.port());
    let limiter = limiter::<B>(proxy.port(), QUICK);
    proxy.set(Mode::SwallowRequests);
    let packet_loss = Instant::now();
    while packet_loss.elapsed() < SECOND / 2 {
        assert!(quick_hit::<B>(&limiter, &Key::everybody()).await.is_err());
        sleep(AGAIN).await;
    }
    proxy.set(Mode::Pass);
    recovers::<B>(&limiter).await;
    assert!(packet_loss.elapsed() < SECOND + B::LOGIN, "after {:?}", packet_loss.elapsed());
}

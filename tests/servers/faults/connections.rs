//! One connection to each server, for all callers.

use std::time::Instant;

use common::harness::SECOND;
use common::servers::{FaultyServer, Mode, Proxy};
use tokio::task::JoinSet;
use tower_ratelimit::{Decision, Key};

use super::backend::Backend;
use super::{LITTLE, QUICK, limiter, quick_hit, recovers};

on_every_backend! { [tokio::test] [await] [
    silent_connection_is_replaced_after_three_timeouts,
    calls_share_a_connection_and_do_not_wait_for_each_other,
] }

/// Field defect: a connection whose server vanished without closing it is used for ever.
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
    server.go_on();
    assert!(recovers::<B>(&limiter).await < SECOND);
    assert_eq!(proxy.connections(), 1, "timeouts of many callers at once count as one");
    server.stop();
    let (silent, mut timeouts) = (Instant::now(), 0);
    while proxy.connections() == 1 {
        assert!(silent.elapsed() < 5 * (QUICK + LITTLE));
        assert!(quick_hit::<B>(&limiter, &Key::everybody()).await.is_err());
        timeouts += 1;
    }
    assert!(silent.elapsed() > 2 * QUICK);
    assert!(!B::COUNTS_TIMEOUTS || timeouts == 4, "the call after three timeouts connects: {timeouts}");
    server.go_on();
    recovers::<B>(&limiter).await;
    assert_eq!(proxy.connections(), 2);
}

/// Field defect: one lock around each call. One hit after the other would take four seconds.
async fn calls_share_a_connection_and_do_not_wait_for_each_other<B: Backend>() {
    let server = B::Server::launch();
    let proxy = Proxy::start(server.port());
    let limiter = limiter::<B>(proxy.port(), B::TIMEOUT);
    // From here on the server knows the script, and etcd the lease.
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

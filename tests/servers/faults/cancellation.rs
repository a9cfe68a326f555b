//! Callers that drop a hit before it is decided.

use std::time::{Duration, Instant};

use common::servers::{FaultyServer, Mode, Proxy};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tower_ratelimit::{Key, RateLimiter};

use super::backend::Backend;
use super::{LONG, hit, most_connections, recovers};

on_every_backend! { [tokio::test(flavor = "multi_thread", worker_threads = 2)] [await] [
    dropped_hit_does_not_affect_other_callers,
    many_dropped_hits_do_not_affect_other_callers,
] }

/// Guards against this defect: after a cancelled read, the next read returns its value.
async fn dropped_hit_does_not_affect_other_callers<B: Backend>() {
    let server = B::Server::launch();
    let proxy = Proxy::start(server.port());
    let limiter = RateLimiter::with_storage(B::policy(1_000), B::storage(proxy.port(), LONG));
    let delay = Duration::from_millis(40);
    proxy.set(Mode::Delay(delay));
    let dropped_after = async |millis| {
        let begun = Instant::now();
        let dropped = timeout(Duration::from_millis(millis), limiter.hit(&Key::from("dropped"))).await;
        assert!(dropped.is_err() || begun.elapsed() >= delay);
    };
    let hit = async |key| super::hit(&limiter, &Key::from(key)).await;
    let (begun, mut connections) = (Instant::now(), 0);
    // The first hit is dropped while the storage connects.
    for (round, patience) in (1..).zip([5, 0, 1, 5, 10, 15, 19]) {
        dropped_after(patience).await;
        let (b, c, ()) = tokio::join!(hit("b"), hit("c"), dropped_after(patience));
        assert_eq!([b, c].map(|decision| decision.remaining()), [1_000 - round; 2]);
        if round == 1 {
            let most = most_connections(begun.elapsed());
            // The proxy may count the last attempt to connect after the round.
            sleep(Duration::from_millis(250)).await;
            connections = proxy.connections();
            assert!(connections <= most, "{connections} connections, but {most} attempts");
        }
    }
    assert_eq!(proxy.connections(), connections);
}

async fn many_dropped_hits_do_not_affect_other_callers<B: Backend>() {
    let server = B::Server::launch();
    let proxy = Proxy::start(server.port());
    proxy.set(Mode::Delay(Duration::from_millis(2)));
    let limiter = RateLimiter::with_storage(B::policy(1_000), B::storage(proxy.port(), LONG));
    let (begun, mut tasks) = (Instant::now(), JoinSet::new());
    // On a busy machine, the first attempts to connect may take longer than their second.
    recovers(&limiter).await;
    for client in 0..20_u64 {
        let limiter = limiter.clone();
        tasks.spawn(async move {
            for round in 0..10 {
                let dropped = limiter.hit(&Key::from(1_000 + client % 3));
                let _ = timeout(Duration::from_millis(client % 7), dropped).await;
                let decision = hit(&limiter, &Key::from(client)).await;
                assert_eq!(decision.remaining(), 1_000 - round - 1, "client {client}");
            }
        });
    }
    tasks.join_all().await;
    let connections = proxy.connections();
    assert!(connections <= most_connections(begun.elapsed()), "{connections}");
}

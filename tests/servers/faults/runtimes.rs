//! Storages that are used on several runtimes, and runtimes that end.

use std::time::Instant;

use common::harness::{SECOND, used};
use common::servers::FaultyServer;
use common::time::{EVENTUALLY, Stopwatch};
use tokio::runtime::{Builder, Runtime};
use tower_ratelimit::Key;

use super::backend::Backend;
use super::{LONG, QUICK, hit, limiter};

on_every_backend! { [test] [] [storage_outlives_its_runtime, runtime_can_shut_down_while_the_storage_connects] }

fn current_thread() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

fn storage_outlives_its_runtime<B: Backend>() {
    let server = B::Server::launch();
    let limiter = limiter::<B>(server.port(), LONG);
    for _ in 0..3 {
        let watch = Stopwatch::start();
        assert!(current_thread().block_on(hit(&limiter, &Key::global())).is_admitted());
        // A call on the connection of the ended runtime would take the whole timeout.
        watch.assert_below(SECOND, "the hit on a new runtime");
    }
    let direct = super::limiter::<B>(server.port(), LONG);
    assert_eq!(current_thread().block_on(used(&direct)), 3);
}

/// A runtime that shuts down drops a new task inside the call of `spawn`. The drop must not need a
/// lock that the caller of `spawn` holds.
fn runtime_can_shut_down_while_the_storage_connects<B: Backend>() {
    let unreachable = limiter::<B>(1, QUICK);
    for _ in 0..50 {
        let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        for _ in 0..4 {
            let limiter = unreachable.clone();
            runtime.spawn(async move {
                loop {
                    let _ = limiter.hit(&Key::global()).await;
                    tokio::task::yield_now().await;
                }
            });
        }
        std::thread::yield_now();
        let started = Instant::now();
        runtime.shutdown_timeout(EVENTUALLY);
        assert!(started.elapsed() < EVENTUALLY, "{:?}", started.elapsed());
    }
}

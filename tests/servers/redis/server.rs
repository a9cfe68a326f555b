//! One Redis server: outages, flushed scripts, a full memory, and replicas.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use common::harness::{AGAIN, Answer, DEADLINE, EntryPoints, SECOND, timely};
use common::servers::{Server, wait_until};
use common::time::Stopwatch;
use common::{foreign, policy};
use tokio::task::JoinSet;
use tokio::time::sleep;
use tower_ratelimit::storage::Breaker;
use tower_ratelimit::{Global, Key, MemoryStorage, Policy, RateLimiter};

use super::{LONG, PLENTY, entry_points, not_ready, ready, storage, storage_within};

/// Returns a policy that a script decides, and one that compare-and-swap decides.
fn both() -> [Policy; 2] {
    [policy(PLENTY), foreign(1_000_000)]
}

/// Guards against this defect: the fallback gives each of three replicas the whole
/// quota.
#[tokio::test]
async fn fallback_decides_while_the_server_is_dead_or_hangs() {
    let policy = policy("fixed-window 3000000/day");
    let mut server = Server::start(&[]);
    let breaker = Breaker::new(storage_within(&server.url(), DEADLINE)).fallback(MemoryStorage::new(), 3);
    let (circuit, entry_points) = (breaker.circuit().clone(), EntryPoints::new(&policy, breaker.clone(), Global::new));
    let key = Key::global();
    let primary_again = async || {
        let watch = Stopwatch::start();
        while timely(entry_points.limiter.hit(&key)).await.unwrap().is_from_fallback() {
            watch.assert_below(2 * SECOND, "the primary decides");
            sleep(AGAIN).await;
        }
        eprintln!("the primary decides after {:?}", watch.wall());
        let hit = loop {
            let round = Stopwatch::start();
            let hit = timely(entry_points.limiter.hit(&key)).await.unwrap();
            if !(hit.is_from_fallback() && round.excuses(DEADLINE)) {
                break hit;
            }
        };
        assert_eq!((hit.is_from_fallback(), hit.capacity()), (false, 3_000_000));
    };
    primary_again().await;
    for hangs in [false, true] {
        if hangs {
            server.stop();
        } else {
            server.kill();
        }
        let (started, before) = (Instant::now(), circuit.state());
        while started.elapsed() < SECOND + SECOND / 2 || circuit.state().failures < 6 {
            assert!(started.elapsed() < LONG, "{:?}", circuit.state());
            // Each hit completes in time, including those that probe the server.
            assert_eq!(entry_points.hit().await, [Answer::Admitted; 3]);
            let hit = timely(entry_points.limiter.hit(&key)).await.unwrap();
            assert_eq!((hit.is_from_fallback(), hit.capacity()), (true, 1_000_000));
            sleep(AGAIN).await;
        }
        let now = circuit.state();
        assert_eq!((now.by_primary, now.by_none), (before.by_primary, 0));
        assert!((6..20).contains(&now.failures), "five failures and the probes: {now:?}");
        if hangs {
            server.resume();
        } else {
            server.restart();
        }
        primary_again().await;
    }
}

/// Guards against this defect: scripts are not loaded again after `SCRIPT FLUSH`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn flushed_scripts_are_loaded_again_under_load() {
    let server = Server::start(&[]);
    let policy = policy("fixed-window 400/day; moving-window 500/day");
    let storage = storage_within(&server.url(), LONG);
    ready(&storage).await;
    let limiter = RateLimiter::with_storage(policy, storage);
    let done = Arc::new(AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::SeqCst) {
                assert_eq!(server.ask(&["SCRIPT", "FLUSH"]).to_string(), "OK");
            }
        });
        let admitted = tokio::task::block_in_place(|| {
            tokio::runtime::Handle::current().block_on(async {
                let mut tasks = JoinSet::new();
                for _ in 0..4 {
                    let limiter = limiter.clone();
                    tasks.spawn(async move {
                        let mut admitted = 0;
                        for _ in 0..150 {
                            admitted += u32::from(limiter.hit(&Key::global()).await.unwrap().is_admitted());
                        }
                        admitted
                    });
                }
                tasks.join_all().await.into_iter().sum::<u32>()
            })
        });
        done.store(true, Ordering::SeqCst);
        assert_eq!(admitted, 400);
    });
}

/// A hit on several limits or on a log counts entirely or not at all.
#[tokio::test]
async fn server_out_of_memory_counts_nothing() {
    for policy in both() {
        let server = Server::start(&["--maxmemory-policy", "noeviction"]);
        let entry_points = entry_points(&server.url(), &policy);
        entry_points.recover().await;
        let before = entry_points.used().await;
        assert_eq!(server.ask(&["CONFIG", "SET", "maxmemory", "1"]).to_string(), "OK");
        entry_points.fail().await;
        let mut error = entry_points.limiter.hit(&Key::global()).await.unwrap_err();
        while error.is_timeout() {
            error = entry_points.limiter.hit(&Key::global()).await.unwrap_err();
        }
        assert!(format!("{error:#}").contains("OOM") && !error.may_have_counted(), "{error}");
        assert_eq!(entry_points.used().await, before);
        assert_eq!(server.ask(&["CONFIG", "SET", "maxmemory", "0"]).to_string(), "OK");
        let more = entry_points.admit().await;
        let least = before + more.admitted;
        assert!((least..=least + more.failed).contains(&entry_points.used().await), "{more:?}");
    }
}

#[tokio::test]
async fn replica_decides_as_soon_as_it_is_promoted() {
    for policy in both() {
        let primary = Server::start(&["--repl-diskless-sync-delay", "0"]);
        let port = primary.port().to_string();
        let replica = Server::start(&["--replicaof", "127.0.0.1", &port]);
        wait_until("the replica is in sync", || {
            replica.ask(&["INFO", "replication"]).to_string().contains("master_link_status:up")
        });
        let entry_points = entry_points(&replica.url(), &policy);
        entry_points.fail().await;
        assert_eq!(replica.ask(&["REPLICAOF", "NO", "ONE"]).to_string(), "OK");
        entry_points.recover().await;
    }
}

#[cfg(unix)]
#[tokio::test]
async fn server_is_reached_on_a_unix_socket() {
    let other = Server::start(&[]);
    let socket = other.folder().join("a b.sock");
    let storage = storage(&format!("redis+unix://{}?db=2", socket.display().to_string().replace(' ', "%20")));
    not_ready(&storage).await;
    let server = Server::start(&["--unixsocket", socket.to_str().unwrap()]);
    assert!(ready(&storage).await < SECOND);
    assert!(server.ask(&["CLIENT", "LIST"]).to_string().contains(" db=2 "));
}

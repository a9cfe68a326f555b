//! Hits on different keys that go to the server in one call.

use std::time::Duration;

use common::policy;
use common::servers::storage::RUNTIME;
use common::servers::{Etcd, Postgres, wait_until, with_timeout};
use tokio::task::JoinSet;
use tower_ratelimit::storage::AnyStorage;
use tower_ratelimit::{Key, RateLimiter, Storage};

/// A timeout that only a hanging test reaches.
const LONG: Duration = Duration::from_secs(60);

/// A timeout whose last fifth suffices for a cancel request and its reply, also on a busy machine.
const CANCELS: Duration = Duration::from_secs(20);

const KEYS: u64 = 32;
const TASKS: u64 = 64;
const HITS: u64 = 20;

fn ready(url: &str, timeout: Duration) -> AnyStorage {
    let storage: AnyStorage = with_timeout(url, timeout).parse().unwrap();
    RUNTIME.block_on(storage.ready(LONG)).unwrap();
    storage
}

/// Two storages, as of two processes, admit exactly the limit of each key.
fn is_exact(url: &str) {
    let limiters = [(); 2].map(|()| RateLimiter::with_storage(policy("fixed-window 37/day"), ready(url, LONG)));
    let admitted = RUNTIME.block_on(async {
        let mut tasks = JoinSet::new();
        for task in 0..TASKS {
            let limiter = limiters[usize::from(task % 2 == 0)].clone();
            tasks.spawn(async move {
                let mut admitted = 0;
                for hit in 0..HITS {
                    loop {
                        let decision = limiter.hit(&Key::from((task + hit * 7) % KEYS)).await.unwrap();
                        if !decision.is_contended() {
                            admitted += u64::from(decision.is_admitted());
                            break;
                        }
                    }
                }
                admitted
            });
        }
        tasks.join_all().await.into_iter().sum::<u64>()
    });
    let mut spent = 0;
    for key in 0..KEYS {
        let peek = RUNTIME.block_on(limiters[0].peek(&Key::from(key))).unwrap();
        spent += u64::from(37 - peek.remaining());
    }
    assert_eq!((admitted, spent), (KEYS * 37, KEYS * 37), "40 hits on each key");
}

#[test]
fn hits_on_many_keys_are_exact_on_postgres() {
    let server = Postgres::start(&["shared_preload_libraries=pg_stat_statements"]);
    server.ask("CREATE EXTENSION pg_stat_statements");
    is_exact(&server.url());
    let calls = "SELECT coalesce(sum(calls), 0) FROM pg_stat_statements \
                 WHERE query LIKE '%unnest%SKIP LOCKED%' AND query NOT LIKE '%pg_stat%'";
    let calls: u64 = server.ask(calls).parse().unwrap();
    assert!(calls > 0 && calls < TASKS * HITS / 2, "{calls} statements");
    assert_eq!(server.ask("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"), "0");
}

#[test]
fn hits_on_many_keys_are_exact_on_etcd() {
    is_exact(&Etcd::calm().url());
}

/// Waits until the storage has all connections. A statement that waits for a row delays those behind it on
/// its connection.
fn wait_until_all_are_open(server: &Postgres, limiter: &RateLimiter) {
    wait_until("all connections are open", || {
        let _ = RUNTIME.block_on(limiter.peek(&Key::from("other")));
        server.backends().len() == 4
    });
}

#[test]
fn a_locked_row_delays_no_hit_on_another_key() {
    let server = Postgres::start(&[]);
    let limiter = RateLimiter::with_storage(policy("fixed-window 1000/day"), ready(&server.url(), CANCELS));
    let hit_all = || {
        RUNTIME.block_on(async {
            let mut hits = JoinSet::new();
            for key in 0..TASKS {
                let limiter = limiter.clone();
                hits.spawn(async move { (key, limiter.hit(&Key::from(key)).await) });
            }
            hits.join_all().await
        })
    };
    assert!(hit_all().iter().all(|(_, result)| result.is_ok()));
    wait_until_all_are_open(&server, &limiter);
    let mut session = server.session();
    session.execute("BEGIN; SELECT * FROM tower_ratelimit ORDER BY key DESC LIMIT 1 FOR UPDATE");
    let failed: Vec<_> = hit_all().into_iter().filter(|(_, result)| result.is_err()).collect();
    let [(key, Err(error))] = &failed[..] else { panic!("one hit fails: {failed:?}") };
    assert!(error.is_timeout() && !error.may_have_counted(), "{error:?}");
    drop(session);
    assert_eq!(RUNTIME.block_on(limiter.peek(&Key::from(*key))).unwrap().remaining(), 999);
}

/// A process that does not know the texts adds rows, and skips those that exist.
#[test]
fn a_row_that_another_transaction_changes_delays_no_hit_of_a_new_process() {
    let server = Postgres::start(&[]);
    let hit_all = |storage| {
        let limiter = RateLimiter::with_storage(policy("fixed-window 1000/day"), storage);
        RUNTIME.block_on(async {
            let hits: JoinSet<_> = (0..TASKS)
                .map(|key| {
                    let limiter = limiter.clone();
                    async move { limiter.hit(&Key::from(key)).await.map(|decision| decision.remaining()) }
                })
                .collect();
            hits.join_all().await
        })
    };
    assert!(hit_all(ready(&server.url(), CANCELS)).iter().all(|hit| matches!(hit, Ok(999))));
    wait_until("the first process has closed its connections", || server.backends().is_empty());
    let storage = ready(&server.url(), CANCELS);
    let other = RateLimiter::with_storage(policy("fixed-window 1000/day"), storage.clone());
    wait_until_all_are_open(&server, &other);
    let mut session = server.session();
    session.execute(
        "BEGIN; UPDATE tower_ratelimit SET expires_at = expires_at WHERE key = (SELECT max(key) FROM tower_ratelimit)",
    );
    let (hits, failed): (Vec<_>, Vec<_>) = hit_all(storage).into_iter().partition(Result::is_ok);
    assert!(hits.iter().all(|hit| matches!(hit, Ok(998))), "{hits:?}");
    let [Err(error)] = &failed[..] else { panic!("one hit fails: {failed:?}") };
    assert!(!error.may_have_counted(), "{error:?}");
}

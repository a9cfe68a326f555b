//! The storage on a pool of `deadpool-postgres`.

use std::time::{Duration, Instant};

use common::policy;
use common::servers::Postgres;
use common::servers::storage::RUNTIME;
use common::time::{Stopwatch, eventually};
use deadpool_postgres::tokio_postgres::NoTls;
use deadpool_postgres::{Hook, Manager, Pool};
use tokio::task::JoinSet;
use tokio::time::sleep;
use tower_ratelimit::storage::{PostgresStorage, StorageErrorKind};
use tower_ratelimit::{Key, RateLimiter};

use super::LONG;

const QUICK: Duration = Duration::from_millis(300);

pub(super) fn pool(server: &Postgres, size: usize) -> Pool {
    let config = server.url().parse().unwrap();
    Pool::builder(Manager::new(config, NoTls)).max_size(size).build().unwrap()
}

/// A storage with this timeout.
pub(super) fn within(pool: &Pool, timeout: Duration) -> PostgresStorage {
    PostgresStorage::from_pool(pool.clone(), &format!("timeout={timeout:?}")).unwrap()
}

fn limiter(storage: PostgresStorage) -> RateLimiter {
    RateLimiter::with_storage(policy("fixed-window 100/day"), storage)
}

#[test]
fn storages_on_pools_admit_exactly_the_limit() {
    let server = Postgres::start(&[]);
    let storages = [4, 2].map(|size| within(&pool(&server, size), LONG));
    RUNTIME.block_on(async {
        storages[0].migrate().await.unwrap();
        let limiters = storages.map(limiter);
        let mut tasks = JoinSet::new();
        for task in 0..16 {
            let limiter = limiters[task % 2].clone();
            tasks.spawn(async move {
                let mut admitted = 0;
                for _ in 0..10 {
                    loop {
                        let decision = limiter.hit(&Key::global()).await.unwrap();
                        if !decision.is_contended() {
                            admitted += u32::from(decision.is_admitted());
                            break;
                        }
                    }
                }
                admitted
            });
        }
        assert_eq!(tasks.join_all().await.into_iter().sum::<u32>(), 100);
    });
}

#[test]
fn exhausted_pool_is_an_error_at_the_deadline_and_counts_nothing() {
    let server = Postgres::start(&[]);
    let pool = pool(&server, 1);
    let storage = within(&pool, LONG);
    let (limiter, quick) = (limiter(storage.clone()), limiter(within(&pool, QUICK)));
    RUNTIME.block_on(async {
        let error = limiter.hit(&Key::global()).await.unwrap_err();
        assert!(error.to_string().contains("call migrate()"), "{error:?}");
        storage.migrate().await.unwrap();
        let taken = pool.get().await.unwrap();
        let watch = Stopwatch::start();
        let error = quick.hit(&Key::global()).await.unwrap_err();
        watch.assert_below(QUICK + Duration::from_secs(1), "the hit fails");
        assert!(error.kind() == StorageErrorKind::Timeout && !error.may_have_counted(), "{error:?}");
        drop(taken);
        assert_eq!(limiter.hit(&Key::global()).await.unwrap().remaining(), 99);
    });
}

/// Guards against this defect: a pool lends a connection whose server hangs, to one caller after
/// another.
#[test]
fn connection_that_hangs_is_removed_from_the_pool() {
    let server = Postgres::start(&[]);
    let pool = pool(&server, 1);
    RUNTIME.block_on(within(&pool, QUICK).migrate()).unwrap();
    let (limiter, patient) = (limiter(within(&pool, QUICK)), limiter(within(&pool, LONG)));
    RUNTIME.block_on(async {
        assert_eq!(patient.hit(&Key::global()).await.unwrap().remaining(), 99);
        server.stop();
        assert!(limiter.hit(&Key::global()).await.unwrap_err().is_timeout());
        eventually("the connection is removed", async || pool.status().size == 0).await;
        server.resume();
        let started = Instant::now();
        while limiter.hit(&Key::global()).await.is_err() {
            assert!(started.elapsed() < LONG);
        }
    });
}

#[test]
fn options_of_a_pool_are_those_of_a_url() {
    let server = Postgres::start(&[]);
    let pool = pool(&server, 1);
    let new = |options: &str| PostgresStorage::from_pool(pool.clone(), options);
    for (options, part) in [
        ("timeout=0s", "invalid timeout \"0s\"; write at least 1ms"),
        ("connections=4", "unknown option \"connections\"; write one of prefix, timeout"),
        ("unlogged=yes", "write unlogged=true or unlogged=false"),
        ("table=a-b", "invalid schema or table \"a-b\""),
        ("schema", "has no value"),
    ] {
        let error = new(options).unwrap_err().to_string();
        assert!(error.starts_with("cannot read the options ") && error.contains(part), "{options}: {error}");
    }
    let storage = new("prefix=shop&schema=limits&table=states&unlogged=true&timeout=60s").unwrap();
    RUNTIME.block_on(storage.migrate()).unwrap();
    assert_eq!(RUNTIME.block_on(limiter(storage).hit(&Key::global())).unwrap().remaining(), 99);
    assert!(server.ask("SELECT key FROM limits.states").starts_with("shop:"));
    assert_eq!(server.ask("SELECT relpersistence FROM pg_class WHERE relname = 'states'"), "u");
}

/// The statements do not stay on the server, although the pool has no statement timeout.
#[test]
fn locked_row_is_an_error_that_counts_nothing() {
    let server = Postgres::start(&[]);
    let storage = within(&pool(&server, 2), super::locked_row::DEADLINE);
    RUNTIME.block_on(storage.migrate()).unwrap();
    super::locked_row::check(&server, &storage);
}

/// Guards against this defect: a login that takes longer than the timeout is given up with its hit, so
/// the pool never has a connection.
#[test]
fn login_that_takes_longer_than_the_timeout_is_of_use_to_later_hits() {
    let server = Postgres::start(&[]);
    RUNTIME.block_on(within(&pool(&server, 1), LONG).migrate()).unwrap();
    let slow = Hook::async_fn(|_, _| {
        Box::pin(async {
            sleep(QUICK * 2).await;
            Ok(())
        })
    });
    let manager = Manager::new(server.url().parse().unwrap(), NoTls);
    let pool = Pool::builder(manager).max_size(2).post_create(slow).build().unwrap();
    let limiter = limiter(within(&pool, QUICK));
    RUNTIME.block_on(async {
        let error = limiter.hit(&Key::global()).await.unwrap_err();
        assert!(error.kind() == StorageErrorKind::Timeout && !error.may_have_counted(), "{error:?}");
        eventually("a hit has a connection", async || limiter.hit(&Key::global()).await.is_ok()).await;
        assert!(pool.status().size <= 2, "{:?}", pool.status());
    });
}

//! The storage on a pool of `deadpool-postgres`.

use std::time::{Duration, Instant};

use common::policy;
use common::servers::Postgres;
use common::servers::storage::RUNTIME;
use common::time::Stopwatch;
use deadpool_postgres::tokio_postgres::NoTls;
use deadpool_postgres::{Manager, Pool};
use tokio::task::JoinSet;
use tower_ratelimit::storage::{PostgresStorage, StorageErrorKind};
use tower_ratelimit::{Key, RateLimiter};

use super::LONG;

const QUICK: Duration = Duration::from_millis(300);

fn pool(server: &Postgres, size: usize) -> Pool {
    let config = server.url().parse().unwrap();
    Pool::builder(Manager::new(config, NoTls)).max_size(size).build().unwrap()
}

fn limiter(storage: PostgresStorage) -> RateLimiter {
    RateLimiter::with_storage(policy("fixed-window 100/day"), storage)
}

#[test]
fn storages_on_pools_admit_exactly_the_limit() {
    let server = Postgres::start(&[]);
    let storages = [4, 2].map(|size| PostgresStorage::from_pool(pool(&server, size)).timeout(LONG));
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
    let storage = PostgresStorage::from_pool(pool.clone()).timeout(LONG);
    let (limiter, quick) = (limiter(storage.clone()), limiter(storage.clone().timeout(QUICK)));
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
    let storage = PostgresStorage::from_pool(pool.clone());
    RUNTIME.block_on(storage.migrate()).unwrap();
    let (limiter, patient) = (limiter(storage.clone().timeout(QUICK)), limiter(storage.timeout(LONG)));
    RUNTIME.block_on(async {
        assert_eq!(patient.hit(&Key::global()).await.unwrap().remaining(), 99);
        server.stop();
        assert!(limiter.hit(&Key::global()).await.unwrap_err().is_timeout());
        assert_eq!(pool.status().size, 0);
        server.resume();
        let started = Instant::now();
        while limiter.hit(&Key::global()).await.is_err() {
            assert!(started.elapsed() < LONG);
        }
    });
}

/// The statements do not stay on the server, although the pool has no statement timeout.
#[test]
fn locked_row_is_an_error_that_counts_nothing() {
    let server = Postgres::start(&[]);
    let storage = PostgresStorage::from_pool(pool(&server, 2)).timeout(super::locked_row::DEADLINE);
    RUNTIME.block_on(storage.migrate()).unwrap();
    super::locked_row::check(&server, &storage);
}

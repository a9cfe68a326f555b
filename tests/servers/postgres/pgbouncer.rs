//! PgBouncer in transaction mode: each statement runs on a connection that other programs use, too.

use common::policy;
use common::servers::storage::RUNTIME;
use common::servers::{PgBouncer, Postgres, with_timeout};
use tokio::task::JoinSet;
use tower_ratelimit::storage::PostgresStorage;
use tower_ratelimit::{Key, RateLimiter, Storage};

use super::LONG;

const HITS: u64 = 10_000;

#[test]
fn ten_thousand_hits_leave_nothing_on_the_connections_of_other_programs() {
    let server = Postgres::start(&[]);
    let pooler = PgBouncer::start(&server, 2);
    // The timeout of the statements that the server would keep.
    let quick = PostgresStorage::new(&pooler.url()).unwrap();
    let patient = PostgresStorage::new(&with_timeout(&pooler.url(), LONG)).unwrap();
    RUNTIME.block_on(async { tokio::try_join!(quick.ready(LONG), patient.ready(LONG)) }).unwrap();
    let limiter = RateLimiter::with_storage(policy("fixed-window 1000000/day"), patient);
    RUNTIME.block_on(async {
        let mut tasks = JoinSet::new();
        for task in 0..16_u64 {
            let limiter = limiter.clone();
            tasks.spawn(async move {
                for hit in 0..HITS / 16 {
                    let key = Key::from(task * 1_000 + hit % 10);
                    assert!(limiter.hit(&key).await.unwrap().is_admitted());
                }
            });
        }
        tasks.join_all().await;
        assert_eq!(limiter.peek(&Key::from(0_u64)).await.unwrap().remaining(), 1_000_000 - 63);
    });
    // PgBouncer uses the connection that was used last, so several at once are needed for all.
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                assert_eq!(pooler.ask("SELECT pg_sleep(0.5)"), "");
                assert_eq!(pooler.ask("SHOW statement_timeout"), "0");
                assert_eq!(pooler.ask("SHOW lock_timeout"), "0");
                assert_eq!(pooler.ask("SELECT count(*) FROM pg_prepared_statements"), "0");
            });
        }
    });
}

/// PgBouncer forwards the cancel request.
#[test]
fn locked_row_is_an_error_that_counts_nothing() {
    let server = Postgres::start(&[]);
    let pooler = PgBouncer::start(&server, 4);
    let storage = PostgresStorage::new(&with_timeout(&pooler.url(), super::locked_row::DEADLINE)).unwrap();
    super::locked_row::check(&server, &storage);
}

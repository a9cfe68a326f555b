//! A row that another transaction has locked.

use std::time::Duration;

use common::policy;
use common::servers::storage::RUNTIME;
use common::servers::{Postgres, wait_until};
use tokio::task::JoinSet;
use tower_ratelimit::storage::PostgresStorage;
use tower_ratelimit::{Key, RateLimiter, Storage};

use super::{LONG, within};

/// The last quarter is for the cancel request and its reply, also on a busy machine.
pub(super) const DEADLINE: Duration = Duration::from_secs(20);

/// Makes 120 hits on a locked row. Every error is definite, and nothing is counted.
pub(super) fn check(server: &Postgres, storage: &PostgresStorage) {
    let limiter = RateLimiter::with_storage(policy("fixed-window 1000/day"), storage.clone());
    let key = Key::from("k");
    RUNTIME.block_on(storage.ready(LONG)).unwrap();
    assert_eq!(RUNTIME.block_on(limiter.hit(&key)).unwrap().remaining(), 999);
    let mut session = server.session();
    session.execute("BEGIN; SELECT * FROM tower_ratelimit FOR UPDATE");
    let results = RUNTIME.block_on(async {
        let mut hits = JoinSet::new();
        for _ in 0..120 {
            let (limiter, key) = (limiter.clone(), key.clone());
            hits.spawn(async move { limiter.hit(&key).await });
            tokio::time::sleep(Duration::from_millis(25)).await;
        }
        hits.join_all().await
    });
    for result in results {
        let error = result.unwrap_err();
        assert!(error.is_timeout() && !error.may_have_counted(), "{error:?}");
    }
    drop(session);
    wait_until("hits succeed", || RUNTIME.block_on(limiter.hit(&key)).is_ok());
    assert_eq!(RUNTIME.block_on(limiter.peek(&key)).unwrap().remaining(), 998);
}

#[test]
fn hits_on_a_locked_row_are_errors_that_count_nothing() {
    let server = Postgres::start(&[]);
    check(&server, &within(&server, DEADLINE));
}

//! The plans of statements on a table that grows. The server keeps a plan after five executions.

use std::time::Duration;

use common::policy;
use common::servers::storage::RUNTIME;
use common::servers::{Postgres, wait_until};
use tower_ratelimit::storage::{PostgresStorage, StorageRequest};
use tower_ratelimit::{Key, Op, Storage};

use super::pool::{pool, within};
use super::with_options;

/// The rows that are added to a table of a few rows.
const ROWS: u32 = 100_000;

/// The server does not analyze tables, so plans are not made anew.
fn server() -> Postgres {
    Postgres::start(&["synchronous_commit=off", "autovacuum=off"])
}

/// Makes hits on one key and on several keys. Each eighth write deletes expired rows.
async fn hit_in_each_way(storage: &PostgresStorage, name: &str) {
    let policy = policy("100000/day");
    for number in 0..40 {
        let key = Key::from(name);
        let _ = storage.decide(StorageRequest::new(&policy, &key, Op::Hit, 1)).await.unwrap();
        let keys = [0, 1].map(|side| Key::from(format!("{name} {number} {side}")));
        for _ in 0..2 {
            let members = keys.each_ref().map(|key| StorageRequest::new(&policy, key, Op::Hit, 1));
            storage.decide_all(&members).await.unwrap();
        }
    }
}

fn add_rows(server: &Postgres) {
    server.ask(&format!(
        "INSERT INTO tower_ratelimit SELECT 'other' || i, 'x', now() + interval '1 day' FROM generate_series(1, {ROWS}) i"
    ));
}

/// Fails if a statement has read all rows. Connections report what they did when they are closed.
fn assert_no_scan(server: &Postgres, storage: PostgresStorage) {
    drop(storage);
    wait_until("the connections are closed", || server.backends().is_empty());
    let read = "SELECT seq_tup_read FROM pg_stat_all_tables WHERE relname = 'tower_ratelimit'";
    let read: u32 = server.ask(read).parse().unwrap();
    assert!(read < ROWS, "{read} rows read without an index");
}

#[test]
fn statements_of_a_new_table_use_its_index_when_it_has_grown() {
    let server = server();
    let pool = pool(&server, 1);
    let storage = within(&pool, super::LONG);
    RUNTIME.block_on(async {
        storage.migrate().await.unwrap();
        hit_in_each_way(&storage, "few").await;
        add_rows(&server);
        hit_in_each_way(&storage, "many").await;
    });
    pool.close();
    assert_no_scan(&server, storage);
}

#[test]
fn statements_of_an_analyzed_table_use_its_index_a_second_after_it_has_grown() {
    let server = server();
    let storage = with_options(&server, "connections=1");
    RUNTIME.block_on(async {
        storage.ready(super::LONG).await.unwrap();
        hit_in_each_way(&storage, "first").await;
        server.ask("DELETE FROM tower_ratelimit WHERE key LIKE '% %'");
        server.ask("VACUUM ANALYZE tower_ratelimit");
        hit_in_each_way(&storage, "few").await;
        add_rows(&server);
        tokio::time::sleep(Duration::from_millis(1_100)).await;
        hit_in_each_way(&storage, "many").await;
    });
    assert_no_scan(&server, storage);
}

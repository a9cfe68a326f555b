//! The table: migrations, names, and expired rows.

use common::servers::storage::{RUNTIME, failed_check};
use common::servers::{Postgres, with_timeout};
use common::{hit, message, policy};
use tokio::task::JoinSet;
use tower_ratelimit::storage::{PostgresStorage, StorageErrorKind};
use tower_ratelimit::{Key, RateLimiter, Storage};

use super::{LONG, connected, migrate, storage, with_options};

#[test]
fn ten_storages_can_create_the_table_at_once() {
    let server = Postgres::start(&[]);
    RUNTIME.block_on(async {
        let mut tasks = JoinSet::new();
        for _ in 0..10 {
            let storage = with_options(&server, "schema=limits&table=states");
            tasks.spawn(async move { migrate(&storage).await });
        }
        tasks.join_all().await;
        // Processes that create the table when they connect can do so at the same time, too.
        let mut tasks = JoinSet::new();
        for _ in 0..10 {
            let storage = with_options(&server, "table=others");
            tasks.spawn(async move { storage.ready(LONG).await });
        }
        for ready in tasks.join_all().await {
            ready.unwrap();
        }
    });
    let options = server.ask("SELECT reloptions FROM pg_class WHERE oid = 'limits.states'::regclass");
    assert!(options.contains("fillfactor=50"), "{options}");
}

#[test]
fn table_created_from_the_definition_can_be_used() {
    let server = Postgres::start(&[]);
    let storage = with_options(&server, "migrate=false&unlogged=true");
    let error = RUNTIME.block_on(failed_check(&storage));
    assert_eq!(error.kind(), StorageErrorKind::Refused);
    assert!(format!("{error:#}").contains("call migrate(), or create it"), "{error:?}");
    server.ask(&storage.definition());
    RUNTIME.block_on(storage.ready(LONG)).unwrap();
    assert_eq!(server.ask("SELECT relpersistence FROM pg_class WHERE relname = 'tower_ratelimit'"), "u");
    let limiter = RateLimiter::with_storage(policy("5/day"), storage);
    assert_eq!(RUNTIME.block_on(limiter.hit(&Key::from("k"))).unwrap().remaining(), 4);
}

/// The user of the program needs no right to create anything.
#[test]
fn user_without_the_right_to_create_tables_can_use_the_table() {
    let server = Postgres::start(&[]);
    RUNTIME.block_on(migrate(&with_options(&server, "schema=limits")));
    let url = format!("postgres://app@127.0.0.1:{}/postgres?schema=limits", server.port());
    server.ask("CREATE USER app");
    let app = PostgresStorage::new(&with_timeout(&url, LONG)).unwrap();
    let error = RUNTIME.block_on(failed_check(&app));
    let begin = format!("cannot find or create the table for the states on 127.0.0.1:{}: ", server.port());
    let text = message(error);
    assert!(text.starts_with(&begin) && text.contains("permission denied for schema limits"), "{text}");
    server.ask(
        "GRANT USAGE ON SCHEMA limits TO app; GRANT SELECT, INSERT, UPDATE, DELETE ON limits.tower_ratelimit TO app",
    );
    RUNTIME.block_on(app.ready(LONG)).unwrap();
    RUNTIME.block_on(app.migrate()).unwrap_err();
    let limiter = RateLimiter::with_storage(policy("5/day"), app);
    assert_eq!(RUNTIME.block_on(limiter.hit(&Key::from("k"))).unwrap().remaining(), 4);
}

#[test]
fn expired_rows_are_deleted_by_later_writes() {
    let server = Postgres::start(&["synchronous_commit=off"]);
    let storage = storage(&server);
    let rows = || server.ask("SELECT count(*) FROM tower_ratelimit").parse::<u32>().unwrap();
    RUNTIME.block_on(async {
        storage.ready(LONG).await.unwrap();
        server.ask(
            "INSERT INTO tower_ratelimit SELECT 'rl:old' || i, repeat('x', 100), now() - interval '1 second'
             FROM generate_series(1, 500) i",
        );
        let pages: u32 = server.ask("SELECT pg_relation_size('tower_ratelimit') / 8192").parse().unwrap();
        assert!(pages > 10, "{pages}");
        let policy = policy("fixed-window 100000/day");
        // Every eighth write sweeps four pages, unless a sweep is running.
        for _ in 0..pages {
            for _ in 0..40 {
                let _ = hit(&storage, &policy, "k", 1).await;
            }
            if rows() == 1 {
                break;
            }
        }
    });
    assert_eq!(rows(), 1);
    let plan = server.ask(
        "EXPLAIN SELECT ctid FROM tower_ratelimit WHERE ctid >= ('(' || 3 || ',0)')::tid AND ctid < ('(' || 4 || ',0)')::tid",
    );
    assert!(plan.contains("Tid Range Scan"), "{plan}");
}

/// An update that changes an index is slower, and leaves more rows to vacuum.
#[test]
fn updates_change_no_index() {
    let server = Postgres::start(&["synchronous_commit=off"]);
    let storage = connected(&server);
    let policy = policy("fixed-window 100000/day");
    RUNTIME.block_on(async {
        for number in 0..300 {
            let _ = hit(&storage, &policy, &(number % 10).to_string(), 1).await;
        }
    });
    // A connection reports its statistics when it is closed, and otherwise after ten seconds.
    drop(storage);
    let updates = "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_all_tables WHERE relname = 'tower_ratelimit'";
    common::servers::wait_until("the updates are counted", || server.ask(updates).starts_with("290|"));
    assert_eq!(server.ask(updates), "290|290");
}

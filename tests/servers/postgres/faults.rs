//! Faults that only a PostgreSQL server has, such as locked rows and dropped tables.

use std::time::{Duration, Instant};

use common::servers::storage::RUNTIME;
use common::servers::{Postgres, wait_until, with_timeout};
use common::time::Stopwatch;
use common::{message, policy};
use tokio::task::JoinSet;
use tower_ratelimit::storage::{PostgresStorage, StorageError, StorageErrorKind};
use tower_ratelimit::{Key, RateLimiter, Storage};

use super::{LONG, connected, storage, within};

const QUICK: Duration = Duration::from_millis(300);

fn limiter(storage: PostgresStorage) -> RateLimiter {
    RateLimiter::with_storage(policy("fixed-window 1000/day"), storage)
}

/// Makes a hit, and repeats it if the machine is so busy that an attempt to connect takes longer than
/// a second, which counts nothing.
fn hit(limiter: &RateLimiter) -> Result<u32, StorageError> {
    let watch = Stopwatch::start();
    loop {
        let hit = RUNTIME.block_on(limiter.hit(&Key::from("k")));
        let is_late = hit.as_ref().is_err_and(|error| format!("{error:#}").contains("connecting took longer"));
        if !is_late || !watch.excuses(Duration::from_secs(1)) {
            return hit.map(|decision| decision.remaining());
        }
    }
}

#[test]
fn wrong_password_is_a_clear_error_and_the_right_one_recovers() {
    let server = Postgres::start(&[]);
    server.ask("CREATE USER app PASSWORD 'secret'; GRANT ALL ON SCHEMA public TO app");
    server.set_access("local all all trust\nhost all all 127.0.0.1/32 scram-sha-256\n");
    let url = |password| format!("postgres://app:{password}@127.0.0.1:{}/postgres", server.port());
    let at = format!("127.0.0.1:{}/", server.port());
    for (login, expected) in [
        (format!("app@{at}postgres"), "the server requires a password: write postgres://user:password@"),
        (format!("app:secret@{at}other"), "database \"other\" does not exist"),
    ] {
        let storage = PostgresStorage::new(&with_timeout(&format!("postgres://{login}"), LONG)).unwrap();
        let error = message(hit(&limiter(storage)).unwrap_err());
        assert!(error.starts_with("cannot log in to 127.0.0.1:") && error.contains(expected), "{error}");
    }
    let storage = PostgresStorage::new(&with_timeout(&url("wrong"), LONG)).unwrap();
    let wrong = limiter(storage.clone());
    let error = hit(&wrong).unwrap_err();
    assert_eq!(error.kind(), StorageErrorKind::Unreachable);
    let text = format!("{error:#}");
    assert!(text.starts_with("cannot log in to 127.0.0.1:"), "{text}");
    assert!(text.contains("password authentication failed for user \"app\"") && !text.contains("wrong"), "{text}");
    assert!(!error.may_have_counted());
    assert_eq!(hit(&limiter(PostgresStorage::new(&with_timeout(&url("secret"), LONG)).unwrap())).unwrap(), 999);
    server.ask("ALTER USER app PASSWORD 'wrong'");
    RUNTIME.block_on(storage.ready(LONG)).unwrap();
    assert_eq!(hit(&wrong).unwrap(), 998);
}

/// As the page of the storage describes the rotation of logins.
#[test]
fn second_user_goes_on_with_the_counts_of_the_first() {
    let server = Postgres::start(&[]);
    server.ask("CREATE USER app PASSWORD 'old'; GRANT ALL ON SCHEMA public TO app");
    server.set_access("local all all trust\nhost all all 127.0.0.1/32 scram-sha-256\n");
    let login = |login: &str| {
        let url = format!("postgres://{login}@127.0.0.1:{}/postgres?connections=1", server.port());
        limiter(PostgresStorage::new(&with_timeout(&url, LONG)).unwrap())
    };
    let first = login("app:old");
    assert_eq!(hit(&first).unwrap(), 999);
    server.ask("ALTER USER app PASSWORD 'new'");
    assert_eq!(hit(&first).unwrap(), 998, "an open connection stays logged in");
    let error = hit(&login("app:old")).unwrap_err();
    assert!(format!("{error:#}").starts_with("cannot log in to 127.0.0.1:") && !error.may_have_counted(), "{error:#}");
    server.ask(
        "CREATE ROLE limits_b LOGIN PASSWORD 'new'; GRANT USAGE ON SCHEMA public TO limits_b; \
         GRANT SELECT, INSERT, UPDATE, DELETE ON tower_ratelimit TO limits_b",
    );
    assert_eq!(hit(&login("limits_b:new")).unwrap(), 997);
}

#[test]
fn dropped_table_is_a_clear_error_and_is_created_again() {
    let server = Postgres::start(&[]);
    // A second connection would create the table when it is opened.
    let one = PostgresStorage::new(&with_timeout(&format!("{}?connections=1", server.url()), LONG)).unwrap();
    let limiter = limiter(one.clone());
    assert_eq!(hit(&limiter).unwrap(), 999);
    server.ask("DROP TABLE tower_ratelimit");
    let error = hit(&limiter).unwrap_err();
    assert!(error.to_string().contains("has no table for the states") && !error.may_have_counted(), "{error:?}");
    RUNTIME.block_on(one.ready(LONG)).unwrap();
    assert_eq!(hit(&limiter).unwrap(), 999);
}

/// Another transaction holds the lock, for example in a session that is idle in transaction.
#[test]
fn locked_row_is_an_error_at_the_deadline_and_counts_nothing() {
    let server = Postgres::start(&[]);
    let storage = connected(&server);
    let quick = within(&server, QUICK);
    RUNTIME.block_on(quick.ready(LONG)).unwrap();
    let (patient, limiter) = (limiter(storage.clone()), limiter(quick));
    assert_eq!(hit(&patient).unwrap(), 999);
    let mut session = server.session();
    session.execute("BEGIN; SELECT * FROM tower_ratelimit FOR UPDATE");
    let watch = Stopwatch::start();
    let error = hit(&limiter).unwrap_err();
    assert!(error.is_timeout(), "{error:?}");
    watch.assert_below(QUICK + Duration::from_secs(1), "the hit fails");
    drop(session);
    // On a busy machine, the cancel request may come too late. The errors say so.
    let (started, mut in_doubt) = (Instant::now(), u32::from(error.may_have_counted()));
    let remaining = loop {
        match hit(&limiter) {
            Ok(remaining) => break remaining,
            Err(error) => {
                in_doubt += u32::from(error.may_have_counted());
                assert!(started.elapsed() < LONG, "{error:?}");
            }
        }
    };
    assert!((998 - in_doubt..=998).contains(&remaining), "{remaining}, {in_doubt} in doubt");
}

#[test]
fn serialization_failure_is_retried() {
    let server = Postgres::start(&["default_transaction_isolation=serializable"]);
    let storages: Vec<_> = (0..4).map(|_| storage(&server)).collect();
    let admitted: usize = RUNTIME.block_on(async {
        let mut tasks = JoinSet::new();
        for storage in storages {
            storage.ready(LONG).await.unwrap();
            let limiter = limiter(storage);
            tasks.spawn(async move {
                let mut admitted = 0;
                for _ in 0..30 {
                    admitted += usize::from(limiter.hit(&Key::from("k")).await.unwrap().is_admitted());
                }
                admitted
            });
        }
        tasks.join_all().await.into_iter().sum()
    });
    let direct = limiter(connected(&server));
    let peeked = RUNTIME.block_on(direct.peek(&Key::from("k"))).unwrap();
    assert_eq!(1_000 - peeked.remaining() as usize, admitted);
}

/// A server is read-only if it is a replica, or the old primary after a failover.
#[test]
fn read_only_server_is_a_clear_error_and_recovers() {
    let server = Postgres::start(&[]);
    let limiter = limiter(connected(&server));
    assert_eq!(hit(&limiter).unwrap(), 999);
    server.ask("ALTER SYSTEM SET default_transaction_read_only = on");
    server.ask("SELECT pg_reload_conf()");
    let started = Instant::now();
    let error = loop {
        assert!(started.elapsed() < LONG);
        if let Err(error) = hit(&limiter) {
            break error;
        }
    };
    assert!(format!("{error:#}").contains("read-only") && !error.may_have_counted(), "{error:?}");
    server.ask("ALTER SYSTEM RESET default_transaction_read_only");
    server.ask("SELECT pg_reload_conf()");
    while hit(&limiter).is_err() {
        assert!(started.elapsed() < LONG);
    }
}

#[test]
fn migration_fails_if_the_server_accepts_connections_and_hangs() {
    let server = Postgres::start(&[]);
    server.stop();
    let started = Instant::now();
    let error = RUNTIME.block_on(storage(&server).migrate()).unwrap_err();
    assert_eq!(error.kind(), StorageErrorKind::Unreachable, "{error:?}");
    assert!(started.elapsed() < LONG);
}

#[test]
fn full_disk_is_a_clear_error_that_counts_nothing_and_recovers() {
    let server = Postgres::start(&[]);
    // With one connection, the table is created before the disk is full.
    let one = PostgresStorage::new(&with_timeout(&format!("{}?connections=1", server.url()), LONG)).unwrap();
    RUNTIME.block_on(one.ready(LONG)).unwrap();
    let limiter = limiter(one);
    let first_hit = |client: u64| RUNTIME.block_on(limiter.hit(&Key::from(client)));
    assert_eq!(first_hit(0).unwrap().remaining(), 999);
    // A segment of the write-ahead log has 16 MiB and must fit, so the table has to be larger. Two
    // rows fill a page up to its fill factor.
    server.ask(
        "INSERT INTO tower_ratelimit SELECT 'filler:' || n, repeat('x', 1960), now() + interval '1 day' \
         FROM generate_series(1, 5000) AS n",
    );
    let size = server.ask("SELECT pg_relation_size('tower_ratelimit')").parse().unwrap();
    assert!(size > 17 << 20, "{size}");
    server.limit_files(Some(size));
    let (client, error) = (1..1_000).find_map(|client| Some((client, first_hit(client).err()?))).unwrap();
    assert_eq!(error.kind(), StorageErrorKind::Refused);
    assert!(format!("{error:#}").contains("could not extend file") && !error.may_have_counted(), "{error:?}");
    server.limit_files(None);
    assert_eq!(first_hit(client).unwrap().remaining(), 999);
    assert_eq!(first_hit(0).unwrap().remaining(), 998);
}

#[test]
fn server_without_free_connections_is_a_clear_error() {
    let server = Postgres::start(&["max_connections=4", "superuser_reserved_connections=0", "max_wal_senders=0"]);
    let one = limiter(connected(&server));
    // Connections are opened when several hits are made at the same time.
    wait_until("one storage has all connections", || {
        RUNTIME.block_on(async {
            let hits: JoinSet<_> = (0..20_u64)
                .map(|client| {
                    let one = one.clone();
                    async move { one.hit(&Key::from(client)).await.unwrap() }
                })
                .collect();
            hits.join_all().await;
        });
        server.backends().len() == 4
    });
    let error = hit(&limiter(storage(&server))).unwrap_err();
    assert_eq!(error.kind(), StorageErrorKind::Unreachable);
    assert!(format!("{error:#}").contains("too many clients"), "{error:?}");
    assert_eq!(hit(&one).unwrap(), 999);
}

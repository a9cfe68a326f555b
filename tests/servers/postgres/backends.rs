//! The number of connections on the server, also while a lock or a suspended process blocks it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use common::certificates::Certificates;
use common::policy;
use common::servers::storage::{RUNTIME, failed_check};
use common::servers::{PgBouncer, Postgres, Session, wait_until, with_timeout};
use common::time::Stopwatch;
use deadpool_postgres::{Manager, Pool};
use rustls::crypto::ring;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, RootCertStore};
use tokio::task::JoinSet;
use tokio_postgres_rustls::MakeRustlsConnect;
use tower_ratelimit::storage::{PostgresStorage, StorageErrorKind};
use tower_ratelimit::{Key, RateLimiter, Storage};

use super::{LONG, migrate, storage};
use crate::faults::hit;

/// The default number of connections, and one more.
const MOST: usize = 5;

/// The time for which each fault is observed.
const OBSERVED: Duration = Duration::from_secs(10);

/// Makes all migrations wait, until the session ends.
const LOCK_MIGRATIONS: &str = "BEGIN; SELECT pg_advisory_xact_lock(hashtext('tower_ratelimit'))";

/// Returns the number of migrations that wait.
const WAITING_MIGRATIONS: &str = "SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype = 'advisory'";

/// Hits 40 times a second, with the default timeout, for several keys.
struct Traffic {
    limiter: RateLimiter,
    ends: Arc<AtomicBool>,
    task: Option<tokio::task::JoinHandle<Vec<Duration>>>,
}

impl Traffic {
    fn start(server: &Postgres) -> Self {
        Self::on(PostgresStorage::new(&server.url()).unwrap())
    }

    fn on(storage: PostgresStorage) -> Self {
        let limiter = RateLimiter::with_storage(policy("fixed-window 1000000/day"), storage);
        let (ends, hitting) = (Arc::new(AtomicBool::new(false)), limiter.clone());
        let ended = Arc::clone(&ends);
        let task = RUNTIME.spawn(async move {
            let mut hits = JoinSet::new();
            let mut ticks = tokio::time::interval(Duration::from_millis(25));
            for hit in 0_u64.. {
                ticks.tick().await;
                if ended.load(Ordering::Relaxed) {
                    break;
                }
                let limiter = hitting.clone();
                hits.spawn(async move {
                    let begun = Instant::now();
                    let _ = limiter.hit(&Key::from(hit % 8)).await;
                    begun.elapsed()
                });
            }
            hits.join_all().await
        });
        Self { limiter, ends, task: Some(task) }
    }

    /// Waits until hits succeed on every key.
    fn recovers(&self) {
        for key in 0_u64..8 {
            wait_until("hits succeed", || RUNTIME.block_on(self.limiter.hit(&Key::from(key))).is_ok());
        }
    }

    /// Checks that no hit took much longer than its timeout.
    fn end(mut self) {
        self.ends.store(true, Ordering::Relaxed);
        let times = RUNTIME.block_on(self.task.take().unwrap()).unwrap();
        let longest = times.iter().max().unwrap();
        assert!(*longest < Duration::from_secs(5), "{longest:?}");
    }
}

/// Returns the largest number of backends during `time`.
fn most_backends(server: &Postgres, time: Duration) -> usize {
    let (begun, mut most) = (Instant::now(), 0);
    while begun.elapsed() < time {
        most = most.max(server.backends().len());
        thread::sleep(Duration::from_millis(20));
    }
    most
}

/// Returns the largest number of backends of a pool during `time`. A pool may open a connection before the
/// server has closed one that has replied, or a login that was given up. So in a second in which the machine
/// is late, only backends that last for the second count.
fn most_backends_of_pool(server: &Postgres, time: Duration) -> usize {
    let (begun, mut most) = (Instant::now(), 0);
    while begun.elapsed() < time {
        let (second, mut least, mut greatest) = (Stopwatch::start(), usize::MAX, 0);
        while second.wall() < Duration::from_secs(1) {
            let backends = server.backends().len();
            (least, greatest) = (least.min(backends), greatest.max(backends));
            thread::sleep(Duration::from_millis(20));
        }
        most = most.max(if second.excess().is_zero() { greatest } else { least });
    }
    most
}

fn server() -> Postgres {
    let server = Postgres::start(&[]);
    server.ask(&PostgresStorage::new(&server.url()).unwrap().definition());
    server.ask("INSERT INTO tower_ratelimit VALUES ('other', 'text', now())");
    server
}

/// A pool with the default number of connections, all with TLS.
fn pool_with_tls(server: &Postgres) -> Pool {
    let files = Certificates::authority();
    let [certificate, key, authority] = ["server.pem", "server-key.pem", "authority.pem"].map(|name| files.read(name));
    server.enable_tls(&certificate, &key, None);
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(&authority).unwrap()).unwrap();
    let tls = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let tls = tls.with_safe_default_protocol_versions().unwrap().with_root_certificates(roots).with_no_client_auth();
    let url = format!("postgres://postgres@localhost:{}/postgres?sslmode=require", server.port());
    let manager = Manager::new(url.parse().unwrap(), MakeRustlsConnect::new(tls));
    Pool::builder(manager).max_size(MOST - 1).build().unwrap()
}

/// Locks the table before or after the storage has connected, and counts the backends.
fn check_table_lock(is_connected: bool, lock: impl FnOnce(&Postgres) -> Vec<Session>) {
    let server = server();
    let early = is_connected.then(|| Traffic::start(&server));
    if let Some(traffic) = &early {
        traffic.recovers();
    }
    let sessions = lock(&server);
    let traffic = early.unwrap_or_else(|| Traffic::start(&server));
    let most = most_backends(&server, OBSERVED);
    // A hit on a key of the traffic could be refused, because it waits behind others.
    let answer = RUNTIME.block_on(traffic.limiter.hit(&Key::from("locked")));
    assert!(answer.is_err(), "the table is not locked: {answer:?}");
    drop(sessions);
    traffic.recovers();
    let after = most_backends(&server, Duration::from_millis(500));
    assert!(most <= MOST && after <= MOST, "{most} backends, then {after}");
    traffic.end();
}

fn lock_table(server: &Postgres, mode: &str) -> Vec<Session> {
    let mut session = server.session();
    session.execute(&format!("BEGIN; LOCK TABLE tower_ratelimit IN {mode} MODE"));
    vec![session]
}

#[test]
fn exclusively_locked_table_costs_no_further_connections() {
    check_table_lock(true, |server| lock_table(server, "ACCESS EXCLUSIVE"));
}

#[test]
fn exclusively_locked_table_costs_no_further_connections_at_the_start() {
    check_table_lock(false, |server| lock_table(server, "ACCESS EXCLUSIVE"));
}

/// Guards against this defect: the storage cannot cancel the statements of a pool that requires TLS, and the
/// pool replaces each connection that is given up.
#[test]
fn exclusively_locked_table_costs_a_pool_with_tls_one_further_connection() {
    let server = server();
    let traffic = Traffic::on(PostgresStorage::from_pool(pool_with_tls(&server), "").unwrap());
    traffic.recovers();
    let sessions = lock_table(&server, "ACCESS EXCLUSIVE");
    let most = most_backends_of_pool(&server, OBSERVED);
    drop(sessions);
    traffic.recovers();
    let after = most_backends_of_pool(&server, Duration::from_secs(1));
    assert!(most <= MOST && after <= MOST, "{most} backends, then {after}");
    traffic.end();
}

#[test]
fn index_that_is_being_created_costs_no_further_connections() {
    check_table_lock(false, |server| {
        let mut session = server.session();
        session.execute("BEGIN; CREATE INDEX ON tower_ratelimit (expires_at)");
        vec![session]
    });
}

#[test]
fn altered_table_behind_a_long_read_costs_no_further_connections() {
    check_table_lock(true, |server| {
        let (mut reads, mut alters) = (server.session(), server.session());
        reads.execute("BEGIN; SELECT count(*) FROM tower_ratelimit");
        alters.begin("ALTER TABLE tower_ratelimit ADD COLUMN more int; ALTER TABLE tower_ratelimit DROP COLUMN more;");
        wait_until("the statement waits for the lock", || {
            server.ask("SELECT count(*) FROM pg_locks WHERE NOT granted AND mode = 'AccessExclusiveLock'") == "1"
        });
        vec![reads, alters]
    });
}

#[test]
fn locked_rows_cost_no_further_connections() {
    let server = server();
    let traffic = Traffic::start(&server);
    traffic.recovers();
    let mut session = server.session();
    session.execute("BEGIN; SELECT * FROM tower_ratelimit FOR UPDATE");
    let most = most_backends(&server, OBSERVED);
    drop(session);
    traffic.recovers();
    assert!(most <= MOST, "{most} backends");
    traffic.end();
}

#[test]
fn suspended_server_costs_no_further_connections() {
    let server = server();
    let traffic = Traffic::start(&server);
    traffic.recovers();
    server.stop();
    thread::sleep(OBSERVED);
    thread::scope(|scope| {
        let most = scope.spawn(|| most_backends(&server, Duration::from_secs(3)));
        server.resume();
        let most = most.join().unwrap();
        assert!(most <= MOST, "{most} backends");
    });
    traffic.recovers();
    traffic.end();
}

#[test]
fn suspended_backends_cost_one_further_connection() {
    let server = server();
    let traffic = Traffic::start(&server);
    traffic.recovers();
    server.stop_backends();
    let most = most_backends(&server, OBSERVED);
    traffic.recovers();
    server.resume();
    traffic.recovers();
    let after = most_backends(&server, Duration::from_millis(500));
    assert!(most <= MOST && after <= MOST, "{most} backends, then {after}");
    traffic.end();
}

#[test]
fn migration_that_is_given_up_ends_on_the_server() {
    let server = Postgres::start(&[]);
    let storage = storage(&server);
    let mut session = server.session();
    session.execute(LOCK_MIGRATIONS);
    for _ in 0..10 {
        wait_until("a connection is free", || server.backends().len() < MOST);
        let migration = RUNTIME.spawn({
            let storage = storage.clone();
            async move { migrate(&storage).await }
        });
        wait_until("the migration waits", || server.ask(WAITING_MIGRATIONS) != "0");
        assert!(server.backends().len() <= MOST);
        migration.abort();
    }
    wait_until("all migrations have ended", || server.backends().is_empty());
    drop(session);
    RUNTIME.block_on(migrate(&storage));
}

/// Guards against this defect: a pooler does not cancel the statement of a client that has left.
#[test]
fn migration_that_is_given_up_behind_a_pooler_ends_on_the_server() {
    let server = Postgres::start(&[]);
    let pooler = PgBouncer::start(&server, 2);
    let storage = PostgresStorage::new(&with_timeout(&pooler.url(), LONG)).unwrap();
    let mut session = server.session();
    session.execute(LOCK_MIGRATIONS);
    for _ in 0..4 {
        let migration = RUNTIME.spawn({
            let storage = storage.clone();
            async move { migrate(&storage).await }
        });
        wait_until("the migration waits", || server.ask(WAITING_MIGRATIONS) == "1");
        migration.abort();
        wait_until("the migration has ended", || server.ask(WAITING_MIGRATIONS) == "0");
    }
    drop(session);
    RUNTIME.block_on(migrate(&storage));
}

/// The storage creates the table when it connects.
#[test]
fn creation_of_the_table_that_is_locked_costs_no_further_connections() {
    let server = Postgres::start(&[]);
    let mut session = server.session();
    session.execute(LOCK_MIGRATIONS);
    let traffic = Traffic::start(&server);
    let most = most_backends(&server, OBSERVED);
    drop(session);
    traffic.recovers();
    assert!(most <= MOST, "{most} backends");
    traffic.end();
}

/// Makes hits one after another, and then at the same time. All of them succeed.
fn check_hits(limiter: &RateLimiter) {
    RUNTIME.block_on(async {
        for client in 0_u64..100 {
            let _ = limiter.hit(&Key::from(client)).await.unwrap();
            if client % 10 == 0 {
                // The storage tries to open the other connections again.
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
        let hits: JoinSet<_> = (0_u64..100)
            .map(|client| {
                let limiter = limiter.clone();
                async move { limiter.hit(&Key::from(client)).await.unwrap() }
            })
            .collect();
        hits.join_all().await;
    });
}

#[test]
fn hits_use_the_only_connection_that_the_server_allows() {
    let server = server();
    server.ask("CREATE USER app CONNECTION LIMIT 1; GRANT ALL ON tower_ratelimit TO app");
    let url = format!("postgres://app@127.0.0.1:{}/postgres", server.port());
    let app = || PostgresStorage::new(&with_timeout(&url, LONG)).unwrap();
    let first = app();
    RUNTIME.block_on(first.ready(LONG)).unwrap();
    let limiter = RateLimiter::with_storage(policy("1000/day"), first);
    check_hits(&limiter);
    let error = RUNTIME.block_on(failed_check(&app()));
    assert!(error.kind() == StorageErrorKind::Unreachable && !error.may_have_counted(), "{error:?}");
    assert!(format!("{error:#}").contains("too many connections for role"), "{error:?}");
}

#[test]
fn hits_that_begin_together_use_the_only_free_connection() {
    let server = server();
    server.ask("CREATE USER app CONNECTION LIMIT 1; GRANT ALL ON tower_ratelimit TO app");
    let url = format!("postgres://app@127.0.0.1:{}/postgres", server.port());
    let limiter =
        RateLimiter::with_storage(policy("1000/day"), PostgresStorage::new(&with_timeout(&url, LONG)).unwrap());
    RUNTIME.block_on(async {
        let hits: JoinSet<_> = (0_u64..100)
            .map(|client| {
                let limiter = limiter.clone();
                async move { hit(&limiter, &Key::from(client)).await }
            })
            .collect();
        hits.join_all().await;
    });
}

//! The first connection of a storage, and the notices of a server.

use std::sync::{Mutex, Once};
use std::time::Duration;

use common::servers::{Mode, Postgres, Proxy, with_timeout};
use common::time::{EVENTUALLY, Stopwatch};
use common::{message, policy};
use deadpool_postgres::tokio_postgres::{NoTls, connect};
use tokio::task::spawn_blocking;
use tokio::time::{sleep, timeout};
use tower_ratelimit::storage::{PostgresStorage, StorageErrorKind};
use tower_ratelimit::{Key, RateLimiter};

use super::{migrate, with_options};

const QUICK: Duration = Duration::from_millis(100);
const SECOND: Duration = Duration::from_secs(1);

fn limiter_through_proxy(server: &Postgres) -> (Proxy, RateLimiter) {
    let proxy = Proxy::start(server.port());
    let url = format!("postgres://postgres@127.0.0.1:{}/postgres", proxy.port());
    let storage = PostgresStorage::new(&with_timeout(&url, QUICK)).unwrap();
    (proxy, RateLimiter::with_storage(policy("999/day"), storage))
}

/// Guards against this defect: the first hits failed, because a login takes longer than the timeout
/// in a build without optimizations.
#[tokio::test]
async fn first_hits_wait_for_the_first_connection() {
    let server = spawn_blocking(|| Postgres::start(&[])).await.unwrap();
    let begun = Stopwatch::start();
    loop {
        let (proxy, limiter) = limiter_through_proxy(&server);
        // Delays the first reply to the login, and no other.
        proxy.set(Mode::Delay(4 * QUICK));
        let (watch, key) = (Stopwatch::start(), Key::global());
        let (hit, peek, ()) = tokio::join!(limiter.hit(&key), limiter.peek(&key), async {
            sleep(QUICK).await;
            proxy.set(Mode::Pass);
        });
        let is_delayed = watch.wall() >= 4 * QUICK;
        match (hit, peek) {
            (Ok(hit), Ok(_)) if is_delayed => return assert!(hit.is_admitted()),
            // On a busy machine, the reply may come after the delay ends, or a hit may time out later. With the
            // defect, no hit ever succeeds.
            (hit, peek) => assert!(begun.wall() < EVENTUALLY, "{hit:?}, {peek:?}"),
        }
    }
}

#[tokio::test]
async fn hits_wait_for_the_first_attempt_to_connect_and_for_no_later_one() {
    let server = spawn_blocking(|| Postgres::start(&[])).await.unwrap();
    let (proxy, limiter) = limiter_through_proxy(&server);
    proxy.set(Mode::SwallowReplies);
    let watch = Stopwatch::start();
    let error = limiter.hit(&Key::global()).await.unwrap_err();
    watch.assert_below(SECOND + 2 * QUICK, "the first hit fails");
    assert!(watch.wall() >= SECOND && !error.may_have_counted());
    // If the thread pauses after the attempt, the hit times out while it waits for the next one.
    assert!(error.kind() == StorageErrorKind::Unreachable || error.is_timeout() && !watch.excess().is_zero());
    let text = message(error);
    assert!(text.contains("connecting took longer than 1s"), "{text}");
    for _ in 0..5 {
        let watch = Stopwatch::start();
        limiter.hit(&Key::global()).await.unwrap_err();
        watch.assert_below(2 * QUICK, "a later hit fails");
        sleep(QUICK).await;
    }
}

#[tokio::test]
async fn hits_of_callers_that_leave_do_not_make_later_ones_wait() {
    let server = spawn_blocking(|| Postgres::start(&[])).await.unwrap();
    let (proxy, limiter) = limiter_through_proxy(&server);
    proxy.set(Mode::SwallowReplies);
    let begun = Stopwatch::start();
    timeout(SECOND / 2, limiter.hit(&Key::global())).await.unwrap_err();
    while begun.wall() < SECOND {
        sleep(QUICK).await;
    }
    let watch = Stopwatch::start();
    limiter.hit(&Key::global()).await.unwrap_err();
    watch.assert_below(2 * QUICK, "a hit after the first second fails");
}

/// Records the logs of the crate `tokio-postgres` from INFO on.
struct Log(Mutex<Vec<String>>);

static LOG: Log = Log(Mutex::new(Vec::new()));

impl log::Log for Log {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        metadata.level() <= log::Level::Info && metadata.target().starts_with("tokio_postgres")
    }

    fn log(&self, record: &log::Record<'_>) {
        if self.enabled(record.metadata()) {
            self.0.lock().unwrap().push(record.args().to_string());
        }
    }

    fn flush(&self) {}
}

#[test]
fn notices_of_the_server_are_not_logged() {
    static SET: Once = Once::new();
    SET.call_once(|| log::set_logger(&LOG).unwrap());
    log::set_max_level(log::LevelFilter::Info);
    let server = Postgres::start(&[]);
    let storage = with_options(&server, "table=noticed");
    let runtime = tokio::runtime::Runtime::new().unwrap();
    for _ in 0..2 {
        // The second call gets the notice that the table exists.
        runtime.block_on(migrate(&storage));
    }
    let foreign = async {
        let config = format!("host=127.0.0.1 port={} user=postgres", server.port());
        let (client, connection) = connect(&config, NoTls).await.unwrap();
        let driver = tokio::spawn(connection);
        client.batch_execute(&storage.definition()).await.unwrap();
        drop(client);
        driver.await.unwrap().unwrap();
    };
    let notices = || LOG.0.lock().unwrap().iter().filter(|text| text.contains("\"noticed\"")).count();
    assert_eq!(notices(), 0);
    runtime.block_on(foreign);
    assert_eq!(notices(), 1, "the test sees the notices of other programs");
}

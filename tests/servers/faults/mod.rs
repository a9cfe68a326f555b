//! One suite for all shared storages: their guarantees while servers and networks fail.
//!
//! Each function runs as a test on each backend. `cargo test --test servers -- faults` runs them
//! all, and another filter, for example `faults::outages::redis` or `hanging`, selects some.

/// Creates a test of each function on each backend.
///
/// The first brackets contain the attribute of the tests. The second contain `await` if the
/// functions are `async`.
macro_rules! on_backends {
    (@one [$attribute:meta] [] [$($test:ident),+ $(,)?] $module:ident: $backend:ident) => {
        mod $module {
            $(
                #[$attribute]
                fn $test() {
                    super::$test::<crate::faults::backend::$backend>();
                }
            )+
        }
    };
    (@one [$attribute:meta] [await] [$($test:ident),+ $(,)?] $module:ident: $backend:ident) => {
        mod $module {
            $(
                #[$attribute]
                async fn $test() {
                    super::$test::<crate::faults::backend::$backend>().await;
                }
            )+
        }
    };
    ($attribute:tt $wait:tt $tests:tt $($module:ident: $backend:ident),+) => {
        $(on_backends! { @one $attribute $wait $tests $module: $backend })+
    };
}

/// Runs tests on every backend.
macro_rules! on_every_backend {
    ($attribute:tt $wait:tt $tests:tt) => {
        on_backends! {
            $attribute $wait $tests
            redis: Redis, redis_swap: RedisSwap, memcached: MemcachedServer, etcd: EtcdMember,
            postgres: PostgresServer
        }
    };
}

mod backend;
mod cancellation;
mod connections;
mod contention;
mod counting;
mod outages;
mod resending;
mod runtimes;

use std::time::Duration;

use common::harness::{AGAIN, EntryPoints, SECOND, within};
use common::time::{EVENTUALLY, Stopwatch};
use tokio::time::sleep;
use tower_ratelimit::storage::{AnyStorage, StorageError};
use tower_ratelimit::{Decision, Global, Key, RateLimiter, Storage};

use self::backend::Backend;

/// A limit that no test reaches.
const PLENTY: u32 = 10_000;

/// A timeout that only a test that hangs reaches.
const LONG: Duration = Duration::from_secs(60);

/// A short timeout.
const QUICK: Duration = Duration::from_millis(100);

/// Returns two services and a limiter on the server behind a port.
fn entry_points<B: Backend>(port: u16) -> EntryPoints {
    EntryPoints::new(&B::policy(PLENTY), B::storage(port, common::harness::DEADLINE), Global::new)
}

/// Returns a limiter on the server behind a port.
fn limiter<B: Backend>(port: u16, timeout: Duration) -> RateLimiter {
    RateLimiter::with_storage(B::policy(PLENTY), B::storage(port, timeout))
}

/// Makes a hit with a limiter whose timeout is [`QUICK`], and asserts that it completes in time.
async fn quick_hit<B: Backend>(limiter: &RateLimiter, key: &Key) -> Result<Decision, StorageError> {
    within(QUICK + B::MARGIN, limiter.hit(key)).await
}

/// Waits until the storage decides. Returns the elapsed time.
async fn recovers(limiter: &RateLimiter) -> Duration {
    let watch = Stopwatch::start();
    while let Err(error) = limiter.peek(&Key::global()).await {
        assert!(watch.wall() < EVENTUALLY, "{error}");
        sleep(AGAIN).await;
    }
    watch.elapsed()
}

/// Makes a hit with a timeout of [`LONG`], and panics if it fails. Repeats it if the machine is so
/// busy that an attempt to connect takes longer than a second, which counts nothing.
pub(crate) async fn hit(limiter: &RateLimiter, key: &Key) -> Decision {
    let all = Stopwatch::start();
    loop {
        let watch = Stopwatch::start();
        match limiter.hit(key).await {
            Ok(decision) => return decision,
            Err(error) => {
                // The server may still have the connection of an attempt that was given up.
                let is_late = watch.excuses(SECOND) || all.excuses(SECOND);
                assert!(!error.may_have_counted() && is_late && all.wall() < EVENTUALLY, "{error:#}");
            }
        }
        // During the backoff, a hit fails at once with the same error.
        sleep(2 * QUICK + AGAIN).await;
    }
}

/// Returns the maximum number of connections of a storage that has connected within `time`. An
/// attempt to connect starts another one after 250 ms.
fn most_connections(time: Duration) -> usize {
    1 + usize::try_from(time.as_millis() / 250).unwrap()
}

/// Asserts that `ready` fails within [`QUICK`]. Returns the error.
async fn not_ready<B: Backend>(storage: &AnyStorage) -> StorageError {
    within(QUICK + B::MARGIN, storage.ready(QUICK)).await.unwrap_err()
}

/// Waits until the storage is ready. Returns the elapsed time.
async fn ready<B: Backend>(storage: &AnyStorage) -> Duration {
    let watch = Stopwatch::start();
    storage.ready(LONG).await.unwrap();
    watch.elapsed()
}

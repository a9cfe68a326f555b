//! One suite for all storages on servers: what they guarantee while servers and networks fail.
//!
//! Each function runs as a test on each backend: `cargo test --test servers -- faults` runs them
//! all, a further argument like `redis` or `hanging` selects some.

/// Makes a test of each function on each backend. `[tokio::test]` is the attribute of the tests, `[await]` follows
/// each call of an `async fn`.
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
            redis: Redis, redis_swap: RedisSwap, memcached: MemcachedServer, etcd: EtcdMember
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

use std::time::{Duration, Instant};

use common::harness::{AGAIN, EntryPoints, within};
use tokio::time::sleep;
use tower_ratelimit::{Decision, Global, Key, RateLimiter};

use self::backend::Backend;

/// A limit that no test reaches.
const PLENTY: u32 = 10_000;

/// A timeout that means that something hung.
const LONG: Duration = Duration::from_secs(20);

/// A short timeout.
const QUICK: Duration = Duration::from_millis(100);

/// How much later than a short timeout an answer may arrive on a busy machine.
const LITTLE: Duration = Duration::from_millis(60);

/// Two services and a limiter on the server behind a port.
fn entry_points<B: Backend>(port: u16) -> EntryPoints<B::Storage> {
    EntryPoints::new(&B::policy(PLENTY), B::storage(port, common::harness::DEADLINE), || Global)
}

/// A limiter on the server behind a port.
fn limiter<B: Backend>(port: u16, timeout: Duration) -> RateLimiter<B::Storage> {
    RateLimiter::with_storage(B::policy(PLENTY), B::storage(port, timeout))
}

/// Makes a hit with a limiter whose timeout is [`QUICK`], which has to be over in time.
async fn quick_hit<B: Backend>(limiter: &RateLimiter<B::Storage>, key: &Key) -> Result<Decision, B::Error> {
    within(QUICK + LITTLE, limiter.hit(key)).await
}

/// Waits until the storage answers, and returns how long that took.
async fn recovers<B: Backend>(limiter: &RateLimiter<B::Storage>) -> Duration {
    let started = Instant::now();
    while let Err(error) = limiter.peek(&Key::everybody()).await {
        assert!(started.elapsed() < LONG, "{error}");
        sleep(AGAIN).await;
    }
    started.elapsed()
}

/// Asserts that the storage is not ready, and that this is known within [`QUICK`]. Returns the reason.
async fn not_ready<B: Backend>(storage: &B::Storage) -> B::Error {
    within(QUICK + LITTLE, B::ready(storage, QUICK)).await.unwrap_err()
}

/// Waits until the storage is ready, and returns how long that took.
async fn ready<B: Backend>(storage: &B::Storage) -> Duration {
    let started = Instant::now();
    B::ready(storage, LONG).await.unwrap();
    started.elapsed()
}

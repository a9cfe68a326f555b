//! Redis: decisions, stored states, scripts, access, and the kinds of servers.

mod access;
mod calendar;
mod cluster;
mod combined;
mod decisions;
mod groups;
mod logs;
mod memory;
mod records;
mod rights;
mod scripts;
mod sentinels;
mod server;
mod several_keys;
mod several_keys_of_cluster;
mod shared;
mod slots;
mod states;
mod tls;
mod url;
mod versions;

use std::time::{Duration, Instant};

use common::harness::{DEADLINE, EntryPoints, SECOND, within};
use common::random::Numbers;
use common::servers::{Server, with_timeout};
use common::time::{EVENTUALLY, Stopwatch};
use common::vectors::IN_TIME;
use tower_ratelimit::storage::{ManualClock, RedisStorage, StorageError};
use tower_ratelimit::{Global, Policy, Storage};

/// A timeout that a test reaches only if it hangs.
const LONG: Duration = Duration::from_secs(60);

/// The tolerance for results after a short timeout on a busy machine.
const LITTLE: Duration = Duration::from_millis(60);

/// Limits that no test reaches.
const PLENTY: &str = "fixed-window 1000000/day; moving-window 1000000/day";

/// A storage with a long timeout.
fn storage(url: &str) -> RedisStorage {
    storage_within(url, LONG)
}

fn storage_within(url: &str, timeout: Duration) -> RedisStorage {
    RedisStorage::new(&with_timeout(url, timeout)).unwrap_or_else(|error| panic!("{error}"))
}

fn entry_points(url: &str, policy: &Policy) -> EntryPoints {
    EntryPoints::new(policy, storage_within(url, DEADLINE), Global::new)
}

/// Asserts that `ready` fails within a tenth of a second. Returns the error.
async fn not_ready(storage: &RedisStorage) -> StorageError {
    within(SECOND / 10 + LITTLE, storage.ready(SECOND / 10)).await.unwrap_err()
}

/// Waits until the servers are ready. Returns the elapsed time.
async fn ready(storage: &RedisStorage) -> Duration {
    let watch = Stopwatch::start();
    storage.ready(LONG).await.unwrap();
    watch.elapsed()
}

/// A connected storage with a manual clock, on an empty server. Its connection is a task of the test's
/// thread, so hits that are polled together wait together.
async fn connected(server: &Server, clock: ManualClock) -> RedisStorage {
    server.ask(&["FLUSHALL"]);
    let storage = storage(&server.url()).clock(clock);
    ready(&storage).await;
    storage
}

/// Compares decisions on a manual clock with those of a model. Panics with the difference that
/// `compare` returns. The server removes a key by its own clock, so a difference after [`IN_TIME`] is
/// no fault: then the comparison is repeated with the same numbers.
fn compare_in_time<T>(numbers: &mut Numbers, compare: impl Fn(&mut Numbers) -> Result<T, String>) -> T {
    let first = numbers.clone();
    let watch = Stopwatch::start();
    loop {
        let begun = Instant::now();
        match compare(numbers) {
            Ok(compared) => return compared,
            Err(difference) => {
                assert!(begun.elapsed() >= IN_TIME && watch.wall() < EVENTUALLY, "{first:?}: {difference}");
                *numbers = first.clone();
            }
        }
    }
}

//! Redis: decisions, stored states, scripts, access, and the kinds of servers.

mod access;
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
mod states;
mod tls;
mod url;
mod versions;

use std::time::{Duration, Instant};

use common::harness::{DEADLINE, EntryPoints, SECOND, within};
use tower_ratelimit::storage::{RedisStorage, StorageError};
use tower_ratelimit::{Global, Policy};

/// A timeout that a test reaches only if it hangs.
const LONG: Duration = Duration::from_secs(20);

/// The tolerance for results after a short timeout on a busy machine.
const LITTLE: Duration = Duration::from_millis(60);

/// Limits that no test reaches.
const PLENTY: &str = "fixed-window 1000000/day; moving-window 1000000/day";

fn storage(url: &str) -> RedisStorage {
    RedisStorage::new(url).unwrap_or_else(|error| panic!("{error}")).deadline(DEADLINE)
}

fn entry_points(url: &str, policy: &Policy) -> EntryPoints<RedisStorage> {
    EntryPoints::new(policy, storage(url), || Global)
}

/// Asserts that `ready` fails within a tenth of a second. Returns the error.
async fn not_ready(storage: &RedisStorage) -> StorageError {
    within(SECOND / 10 + LITTLE, storage.ready(SECOND / 10)).await.unwrap_err()
}

/// Waits until the servers are ready. Returns the elapsed time.
async fn ready(storage: &RedisStorage) -> Duration {
    let started = Instant::now();
    storage.ready(LONG).await.unwrap();
    started.elapsed()
}

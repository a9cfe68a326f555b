//! Redis: decisions, states and scripts on a server, and servers of several kinds.

mod access;
mod cluster;
mod decisions;
mod logs;
mod memory;
mod rights;
mod scripts;
mod sentinels;
mod server;
mod states;
mod tls;
mod url;

use std::time::{Duration, Instant};

use common::harness::{DEADLINE, EntryPoints, SECOND, within};
use tower_ratelimit::storage::{RedisStorage, RedisStorageError};
use tower_ratelimit::{Global, Policy};

/// A timeout that means that something hung.
const LONG: Duration = Duration::from_secs(20);

/// How much later than a short timeout an answer may arrive on a busy machine.
const LITTLE: Duration = Duration::from_millis(60);

/// Limits that no test reaches.
const PLENTY: &str = "fixed-window 1000000/day; moving-window 1000000/day";

fn storage(url: &str) -> RedisStorage {
    RedisStorage::new(url).unwrap_or_else(|error| panic!("{error}")).deadline(DEADLINE)
}

fn entry_points(url: &str, policy: &Policy) -> EntryPoints<RedisStorage> {
    EntryPoints::new(policy, storage(url), || Global)
}

/// Asserts that the storage is not ready, and that this is known within a tenth of a second.
/// Returns the reason.
async fn not_ready(storage: &RedisStorage) -> RedisStorageError {
    within(SECOND / 10 + LITTLE, storage.ready(SECOND / 10)).await.unwrap_err()
}

/// Waits until the servers answer, and returns how long that took.
async fn ready(storage: &RedisStorage) -> Duration {
    let started = Instant::now();
    storage.ready(LONG).await.unwrap();
    started.elapsed()
}

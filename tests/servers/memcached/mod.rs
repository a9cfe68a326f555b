//! memcached: decisions on one server and on several, and the stored items.

mod connection;
mod decisions;
mod items;
mod login;
mod ring;
mod tls;
mod url;

use std::time::Duration;

use common::harness::{SECOND, within};
use common::servers::{Memcached, with_timeout};
use tower_ratelimit::Storage;
use tower_ratelimit::storage::{MemcachedStorage, StorageError};

/// A timeout that only a hanging test reaches.
const LONG: Duration = Duration::from_secs(60);

/// The tolerance for results after a short timeout on a busy machine.
const LITTLE: Duration = Duration::from_millis(60);

fn storage(url: &str) -> MemcachedStorage {
    MemcachedStorage::new(&with_timeout(url, LONG)).unwrap_or_else(|error| panic!("{error}"))
}

/// A connected storage. On a busy machine, the first attempt may take longer than a hit waits for it.
async fn connected(url: &str) -> MemcachedStorage {
    let storage = storage(url);
    storage.ready(LONG).await.unwrap();
    storage
}

/// Returns the URL of these servers.
fn url_of(servers: &[Memcached]) -> String {
    let hosts: Vec<String> = servers.iter().map(|server| format!("127.0.0.1:{}", server.port())).collect();
    format!("memcached://{}", hosts.join(","))
}

/// Asserts that `ready` fails within a tenth of a second. Returns the error.
async fn not_ready(storage: &MemcachedStorage) -> StorageError {
    within(SECOND / 10 + LITTLE, storage.ready(SECOND / 10)).await.unwrap_err()
}

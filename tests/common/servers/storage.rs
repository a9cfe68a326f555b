//! Redis storages with a manual clock, and checks that fail.

use std::fmt;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use tokio::runtime::Runtime;
use tower_ratelimit::Storage;
use tower_ratelimit::storage::{ManualClock, RedisStorage, StorageError};

use super::{Server, with_option, with_timeout};
use crate::time::{EVENTUALLY, eventually};

/// Connections live as long as the runtime on which they were opened.
pub static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| Runtime::new().unwrap());

/// Checks the storage until the check fails for another reason than a busy machine. Returns the error.
pub async fn failed_check(storage: &impl Storage) -> StorageError {
    failure(async || storage.check().await).await
}

/// Repeats a call until it fails for another reason than a busy machine, on which a call, an attempt to
/// connect or a handshake takes too long. Returns the error.
pub async fn failure<T: fmt::Debug>(mut call: impl AsyncFnMut() -> Result<T, StorageError>) -> StorageError {
    let mut last = None;
    eventually("the call fails", async || {
        let error = call().await.unwrap_err();
        let text = format!("{error:#}");
        let is_late =
            error.is_timeout() || ["took longer", "no TLS handshake: timed out"].iter().any(|late| text.contains(late));
        last = Some(error);
        !is_late
    })
    .await;
    last.unwrap()
}

/// A connected storage with a new prefix and a manual clock.
pub fn on(server: &Server, clock: ManualClock) -> RedisStorage {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    on_prefix(server, &format!("t{}", NUMBER.fetch_add(1, Ordering::SeqCst)), clock)
}

/// A connected storage with a manual clock. On a busy machine, the first attempt to connect may take
/// longer than a call waits for it.
pub fn on_prefix(server: &Server, prefix: &str, clock: ManualClock) -> RedisStorage {
    let url = with_option(&with_timeout(&server.url(), EVENTUALLY), "prefix", prefix);
    let storage = RedisStorage::new(&url).unwrap().clock(clock);
    // The caller may be in a runtime, whose thread cannot enter another one.
    let connect = || RUNTIME.block_on(storage.ready(EVENTUALLY)).unwrap();
    thread::scope(|scope| scope.spawn(connect).join()).unwrap();
    storage
}

//! Storages on servers, whose time is a test's.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use tokio::runtime::Runtime;
use tower_ratelimit::storage::{ManualClock, RedisStorage};

use super::Server;

/// Connections live as long as the runtime they were made on.
pub static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| Runtime::new().unwrap());

/// A storage of its own on the server, with a clock that stands.
pub fn on(server: &Server, clock: ManualClock) -> RedisStorage {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let prefix = format!("t{}", NUMBER.fetch_add(1, Ordering::SeqCst));
    let _guard = RUNTIME.enter();
    RedisStorage::new(&server.url()).unwrap().prefix(&prefix).deadline(Duration::from_secs(5)).clock(clock)
}

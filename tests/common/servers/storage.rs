//! Redis storages with a manual clock.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, Ordering};

use tokio::runtime::Runtime;
use tower_ratelimit::storage::{ManualClock, RedisStorage};

use super::Server;
use crate::time::EVENTUALLY;

/// Connections live as long as the runtime on which they were opened.
pub static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| Runtime::new().unwrap());

/// A storage with a new prefix and a manual clock.
pub fn on(server: &Server, clock: ManualClock) -> RedisStorage {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let prefix = format!("t{}", NUMBER.fetch_add(1, Ordering::SeqCst));
    let _guard = RUNTIME.enter();
    RedisStorage::new(&server.url()).unwrap().prefix(&prefix).timeout(EVENTUALLY).clock(clock)
}

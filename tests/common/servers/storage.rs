//! Redis storages with a manual clock.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, Ordering};

use tokio::runtime::Runtime;
use tower_ratelimit::storage::{ManualClock, RedisStorage};

use super::{Server, with_option, with_timeout};
use crate::time::EVENTUALLY;

/// Connections live as long as the runtime on which they were opened.
pub static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| Runtime::new().unwrap());

/// A storage with a new prefix and a manual clock.
pub fn on(server: &Server, clock: ManualClock) -> RedisStorage {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    on_prefix(server, &format!("t{}", NUMBER.fetch_add(1, Ordering::SeqCst)), clock)
}

/// A storage with a manual clock.
pub fn on_prefix(server: &Server, prefix: &str, clock: ManualClock) -> RedisStorage {
    let url = with_option(&with_timeout(&server.url(), EVENTUALLY), "prefix", prefix);
    RedisStorage::new(&url).unwrap().clock(clock)
}

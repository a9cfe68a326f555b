//~ `Result<MemoryStorage, ConfigError>` is not a storage
//~ write `?` after a constructor that can fail

use tower_ratelimit::{MemoryStorage, OnError, PeerIp, Quota, RateLimitLayer};

fn main() {
    let storage = MemoryStorage::builder().max_keys(1_000).build();
    let _ = RateLimitLayer::new(Quota::per_second(10), PeerIp::new()).storage(storage, OnError::Admit);
}

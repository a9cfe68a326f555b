//~ the storage `Breaker<MemoryStorage>` can fail
//~ `RateLimitLayer::new(policy, key).storage(storage, OnError::Refuse)`

use tower_ratelimit::storage::Breaker;
use tower_ratelimit::{MemoryStorage, PeerIp, Quota, RateLimitLayer};

fn main() {
    let storage = Breaker::new(MemoryStorage::new());
    let _ = RateLimitLayer::with_storage(Quota::per_second(10), PeerIp::new(), storage);
}

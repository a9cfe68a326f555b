//~ `&str` is not a storage
//~ `"redis://cache/".parse::<AnyStorage>()?`

use tower_ratelimit::{OnError, PeerIp, Quota, RateLimitLayer};

fn main() {
    let _ = RateLimitLayer::new(Quota::per_second(10), PeerIp::new()).storage("redis://cache/", OnError::Admit);
}

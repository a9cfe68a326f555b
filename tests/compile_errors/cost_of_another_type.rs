//~ `usize` is not a cost
//~ the closure of `cost` returns a `u32`
//~ `u32::try_from(..).unwrap_or(u32::MAX)`

use tower_ratelimit::{PeerIp, Quota, RateLimitLayer};

fn main() {
    let _ = RateLimitLayer::new(Quota::per_second(10), PeerIp::new()).cost(|head| head.uri().path().len());
}

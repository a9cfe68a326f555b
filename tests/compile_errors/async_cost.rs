//~ is not a cost
//~ a cost is not awaited

use tower_ratelimit::{PeerIp, Quota, RateLimitLayer};

fn main() {
    let _ = RateLimitLayer::new(Quota::per_second(10), PeerIp::new()).cost(|_| async { 5 });
}

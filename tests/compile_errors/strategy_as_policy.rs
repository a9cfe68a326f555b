//~ `TokenBucket` is not a policy
//~ `Policy::new(TokenBucket::new(), Quota::per_second(10))`

use tower_ratelimit::{PeerIp, RateLimitLayer, TokenBucket};

fn main() {
    let _ = RateLimitLayer::new(TokenBucket::new(), PeerIp::new());
}

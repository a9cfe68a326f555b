//~ `&str` is not a policy
//~ expected a `Policy`, a `Quota`, a `Limit`, a `LivePolicy` or `policy_by(..)`
//~ parse a text: `"10/second".parse::<Policy>()?`

use tower_ratelimit::{PeerIp, RateLimitLayer, RateLimiter};

fn main() {
    let _ = RateLimitLayer::new("10/second", PeerIp::new());
    let _ = RateLimiter::new("10/second");
}

//~ `Result<Policy, ConfigError>` is not a policy
//~ with the `?`

use tower_ratelimit::{PeerIp, Policy, RateLimitLayer};

fn main() {
    let _ = RateLimitLayer::new("10/second".parse::<Policy>(), PeerIp::new());
}

//~ `Result<Policy, ConfigError>` is not a policy
//~ parse texts once, outside of the closure

use tower_ratelimit::{PeerIp, Policy, RateLimitLayer, policy_by};

fn main() {
    let _ = RateLimitLayer::new(policy_by(|_| "10/second".parse::<Policy>()), PeerIp::new());
}

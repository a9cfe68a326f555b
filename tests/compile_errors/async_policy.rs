//~ is not a policy
//~ a policy is not awaited: use `PolicyLookup` (feature `lookup`) instead of `policy_by`

use tower_ratelimit::{PeerIp, Quota, RateLimitLayer, policy_by};

fn main() {
    let _ = RateLimitLayer::new(policy_by(|_| async { Quota::per_second(10) }), PeerIp::new());
}

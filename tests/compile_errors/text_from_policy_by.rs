//~ `&str` is not a policy
//~ the closure of `policy_by` returns a `Policy`, a `Quota`, a `Limit`, a `LivePolicy`, or an `Option` of one

use tower_ratelimit::{PeerIp, RateLimitLayer, policy_by};

fn main() {
    let _ = RateLimitLayer::new(policy_by(|_| "10/second"), PeerIp::new());
}

//! The limits of this server's own endpoints, per client address.

use tower_ratelimit::{Headers, PeerIp, Quota, RateLimitLayer};

/// A simulation takes a few milliseconds of processor time. The page requests one for each change
/// of the setup.
pub(crate) fn of_simulations() -> RateLimitLayer {
    RateLimitLayer::new(Quota::per_second(15).burst(60), PeerIp::new())
}

pub(crate) fn of_pages() -> RateLimitLayer {
    RateLimitLayer::new(Quota::per_second(50).burst(200), PeerIp::new())
}

/// Writes no header fields, so that the responses show those of the policy that is tried.
pub(crate) fn of_trials() -> RateLimitLayer {
    RateLimitLayer::new(Quota::per_second(100).burst(200), PeerIp::new()).headers(Headers::none())
}

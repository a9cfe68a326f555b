//~ is not a key extractor
//~ `a.and(b)`

use tower_ratelimit::extract::Path;
use tower_ratelimit::{PeerIp, Quota, RateLimitLayer};

fn main() {
    let _ = RateLimitLayer::new(Quota::per_second(10), (PeerIp::new(), Path::new()));
}

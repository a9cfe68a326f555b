//~ is not a key
//~ `Key::from(..)` around an address or a text that a closure returns

use tower_ratelimit::extract::Head;
use tower_ratelimit::{Quota, RateLimitLayer};

fn main() {
    let _ = RateLimitLayer::new(Quota::per_second(10), |head: &Head<'_>| head.uri().path().to_owned());
}

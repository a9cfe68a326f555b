//~ is not a key
//~ a closure returns a `Key`: write `Key::from(..)` around an address, a number, a text or bytes

use tower_ratelimit::extract::Head;
use tower_ratelimit::{Quota, RateLimitLayer};

fn main() {
    let _ = RateLimitLayer::new(Quota::per_second(10), |head: &Head<'_>| head.uri().path().to_owned());
}

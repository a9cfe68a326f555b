//~ `String` is not a key
//~ write `Key::from(..)` around an address, a number, a text or bytes

use tower_ratelimit::extract::key_by;
use tower_ratelimit::{Quota, RateLimitLayer};

fn main() {
    let _ = RateLimitLayer::new(Quota::per_second(10), key_by(|head| head.uri().path().to_owned()));
}

//~ `u64` is not a key
//~ write `Key::from(..)`

use tower_ratelimit::extract::Extension;
use tower_ratelimit::{Quota, RateLimitLayer};

#[derive(Clone)]
struct User {
    id: u64,
}

fn main() {
    let _ = RateLimitLayer::new(Quota::per_second(10), Extension::new(|user: &User| user.id));
}

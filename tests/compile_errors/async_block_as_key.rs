//~ is not a key
//~ a key is not awaited: authenticate in an outer layer and read an `Extension`, or use `PolicyLookup`

use tower_ratelimit::extract::Head;
use tower_ratelimit::{Key, Quota, RateLimitLayer};

async fn user(_: String) -> Key {
    Key::global()
}

fn main() {
    let _ = RateLimitLayer::new(Quota::per_second(10), |head: &Head<'_>| user(head.uri().to_string()));
}

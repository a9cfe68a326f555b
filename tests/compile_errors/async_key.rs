//~ is not a key
//~ a key is not awaited: authenticate in an outer layer and read an `Extension`, or use `PolicyLookup`

use tower_ratelimit::extract::key_by;
use tower_ratelimit::{Key, Quota, RateLimitLayer};

fn main() {
    let _ = RateLimitLayer::new(Quota::per_second(10), key_by(async |_| Key::from("user")));
}

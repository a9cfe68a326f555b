//~ type annotations needed

use tower_ratelimit::extract::Extension;
use tower_ratelimit::{Key, KeyExtractor, Quota, RateLimitLayer};

#[derive(Clone)]
struct User(u64);

fn main() {
    let by_user = Extension::new(|user: &User| Key::from(user.0));
    let _ = RateLimitLayer::new(Quota::per_second(10), by_user.or(|head| Key::from(head.uri().path())));
}

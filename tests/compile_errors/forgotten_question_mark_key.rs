//~ `Result<ClientIp, ConfigError>` is not a key extractor
//~ write `?` after `ClientIp::behind(..)`

use tower_ratelimit::{ClientIp, Quota, RateLimitLayer};

fn main() {
    let _ = RateLimitLayer::new(Quota::per_second(10), ClientIp::behind(["10.0.0.0/8"]));
}

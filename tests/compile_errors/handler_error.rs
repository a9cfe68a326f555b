//~ Consider using `#[axum::debug_handler]`
//~! UsageHandler

use axum::Router;
use axum::routing::get;
use tower_ratelimit::{PeerIp, Quota, RateLimitLayer};

struct NoExtractor;

async fn handler(_: NoExtractor) -> &'static str {
    "hello"
}

fn main() {
    let limit = RateLimitLayer::new(Quota::per_second(10), PeerIp::new());
    let _: Router = Router::new().route("/", get(handler)).layer(limit);
}

//~ cannot build a response with the body
//~ `MapResponseBodyLayer::new(Body::new)`

use axum::Router;
use axum::routing::get;
use tower::ServiceBuilder;
use tower_http::trace::TraceLayer;
use tower_ratelimit::{PeerIp, Quota, RateLimitLayer};

fn main() {
    let limit = RateLimitLayer::new(Quota::per_second(10), PeerIp::new());
    let layers = ServiceBuilder::new().layer(limit).layer(TraceLayer::new_for_http());
    let _: Router = Router::new().route("/", get(|| async {})).layer(layers);
}

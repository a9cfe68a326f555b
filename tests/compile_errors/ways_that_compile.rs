use axum::Router;
use axum::body::Body;
use axum::routing::get;
use http::Response;
use tower::ServiceBuilder;
use tower_http::map_response_body::MapResponseBodyLayer;
use tower_http::trace::TraceLayer;
use tower_ratelimit::extract::key_by;
use tower_ratelimit::{Key, Policy, Quota, RateLimitLayer, policy_by};

fn main() {
    let limit =
        RateLimitLayer::new("10/second".parse::<Policy>().unwrap(), key_by(|head| Key::from(head.uri().path())));
    let limit =
        limit.rejection_by(|refused, _| Response::builder().status(refused.status()).body(Body::empty()).unwrap());
    let by_method = policy_by(|head| (head.method == "POST").then(|| Quota::per_second(5)));
    let outer = RateLimitLayer::new(by_method, key_by(|_| Key::global()));
    let layers = ServiceBuilder::new()
        .layer(outer)
        .layer(limit)
        .layer(MapResponseBodyLayer::new(Body::new))
        .layer(TraceLayer::new_for_http());
    let _: Router = Router::new().route("/", get(|| async {})).layer(layers);
}

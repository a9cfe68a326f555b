//~ of a rate limit is not `Clone`
//~ put a `tower::buffer::BufferLayer` between the two, or make the service with `boxed_clone`

use std::convert::Infallible;

use http::{Request, Response};
use tower::util::BoxService;
use tower::{Layer, Service};
use tower_ratelimit::{PeerIp, Quota, RateLimitLayer};

fn serve(_: impl Service<Request<()>>) {}

fn main() {
    let inner = tower::service_fn(|_: Request<()>| async { Ok::<_, Infallible>(Response::new(String::new())) });
    let layer = RateLimitLayer::new(Quota::per_second(10), PeerIp::new());
    serve(layer.layer(BoxService::new(inner)));
}

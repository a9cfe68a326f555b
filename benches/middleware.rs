//! The cost of a layer around a trivial service and around an axum router.
//!
//! `without` measures the service without a layer, or the router with an empty one. The difference
//! is the cost of the layer.

mod support;

use std::convert::Infallible;
use std::time::Duration;

use axum::body::Body;
use divan::{Bencher, Divan};
use http::{Request, Response, StatusCode};
use tower::Service;
use tower_ratelimit::{InFlightLayer, PeerIp, Policy, RateLimitLayer, TokenBucket};

use support::limiters::{bursting, stingy};
use support::services::{BURST, answer, request};

const OK: StatusCode = StatusCode::OK;
const REFUSED: StatusCode = StatusCode::TOO_MANY_REQUESTS;

fn main() {
    Divan::default().sample_count(1_000).max_time(Duration::from_secs(1)).config_with_args().main();
}

fn admitting() -> RateLimitLayer {
    layer(bursting(BURST))
}

fn refusing() -> RateLimitLayer {
    layer(stingy::<TokenBucket>())
}

fn layer(policy: Policy) -> RateLimitLayer {
    RateLimitLayer::new(policy, PeerIp::new())
}

fn in_flight() -> InFlightLayer {
    InFlightLayer::new(BURST, PeerIp::new())
}

/// Measures calls. Requests are created, and responses dropped, outside of the timed part.
fn measure<S, B>(bencher: Bencher<'_, '_>, mut service: S, expected: StatusCode)
where
    S: Service<Request<Body>, Response = Response<B>, Error = Infallible>,
{
    // The first request is admitted, even if all others are refused.
    answer(&mut service, request());
    assert_eq!(answer(&mut service, request()).status(), expected);
    bencher.with_inputs(request).bench_local_values(|request| answer(&mut service, request));
}

mod at_a_service {
    use divan::Bencher;
    use tower::Layer;
    use tower_ratelimit::{Header, Headers, RateLimitLayer};

    use super::support::limiters::{bursting, several};
    use super::support::services::{BURST, Hello};
    use super::{OK, REFUSED, admitting, in_flight, layer, measure, refusing};

    #[divan::bench]
    fn without(bencher: Bencher<'_, '_>) {
        measure(bencher, Hello, OK);
    }

    #[divan::bench]
    fn no_headers(bencher: Bencher<'_, '_>) {
        measure(bencher, admitting().headers(Headers::none()).layer(Hello), OK);
    }

    #[divan::bench]
    fn three_headers(bencher: Bencher<'_, '_>) {
        measure(bencher, admitting().layer(Hello), OK);
    }

    #[divan::bench]
    fn in_flight_no_headers(bencher: Bencher<'_, '_>) {
        measure(bencher, in_flight().headers(Headers::none()).layer(Hello), OK);
    }

    #[divan::bench]
    fn in_flight_two_headers(bencher: Bencher<'_, '_>) {
        measure(bencher, in_flight().layer(Hello), OK);
    }

    #[divan::bench]
    fn three_headers_by_api_key(bencher: Bencher<'_, '_>) {
        measure(bencher, RateLimitLayer::new(bursting(BURST), Header::new("x-api-key")).layer(Hello), OK);
    }

    #[divan::bench]
    fn three_layers(bencher: Bencher<'_, '_>) {
        measure(bencher, admitting().layer(admitting().layer(admitting().layer(Hello))), OK);
    }

    #[divan::bench]
    fn one_layer_of_three_limits(bencher: Bencher<'_, '_>) {
        measure(bencher, layer(several(3, BURST)).layer(Hello), OK);
    }

    #[divan::bench]
    fn refused(bencher: Bencher<'_, '_>) {
        measure(bencher, refusing().layer(Hello), REFUSED);
    }

    #[divan::bench]
    fn refused_without_headers(bencher: Bencher<'_, '_>) {
        measure(bencher, refusing().headers(Headers::none()).layer(Hello), REFUSED);
    }

    #[divan::bench]
    fn refused_by_the_innermost_of_three(bencher: Bencher<'_, '_>) {
        measure(bencher, admitting().layer(admitting().layer(refusing().layer(Hello))), REFUSED);
    }
}

mod at_a_router {
    use axum::Router;
    use axum::routing::get;
    use divan::Bencher;
    use tower::layer::util::Identity;
    use tower_ratelimit::Headers;

    use super::{OK, REFUSED, admitting, measure, refusing};

    fn router() -> Router {
        Router::new().route("/", get(async || ()))
    }

    #[divan::bench]
    fn without(bencher: Bencher<'_, '_>) {
        measure(bencher, router().layer(Identity::new()), OK);
    }

    #[divan::bench]
    fn no_headers(bencher: Bencher<'_, '_>) {
        measure(bencher, router().layer(admitting().headers(Headers::none())), OK);
    }

    #[divan::bench]
    fn three_headers(bencher: Bencher<'_, '_>) {
        measure(bencher, router().layer(admitting()), OK);
    }

    #[divan::bench]
    fn three_layers(bencher: Bencher<'_, '_>) {
        measure(bencher, router().layer(admitting()).layer(admitting()).layer(admitting()), OK);
    }

    #[divan::bench]
    fn refused(bencher: Bencher<'_, '_>) {
        measure(bencher, router().layer(refusing()), REFUSED);
    }

    #[divan::bench]
    fn refused_without_headers(bencher: Bencher<'_, '_>) {
        measure(bencher, router().layer(refusing().headers(Headers::none())), REFUSED);
    }
}

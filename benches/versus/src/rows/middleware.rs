//! The cost that a layer adds to one call of a trivial service.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::net::SocketAddr;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use axum::body::Body;
use axum::extract::ConnectInfo;
use axum::http::{Request, Response, StatusCode};
use governor::clock::QuantaInstant;
use governor::middleware::{NoOpMiddleware, RateLimitingMiddleware, StateInformationMiddleware};
use tower::Service;
use tower_governor::GovernorLayer;
use tower_governor::governor::{GovernorConfig, GovernorConfigBuilder};
use tower_governor::key_extractor::PeerIpKeyExtractor;
use tower_layer::Layer;
use tower_ratelimit::{Headers, PeerIp, Policy, RateLimitLayer, TokenBucket};

use crate::alloc::allocations_per_call;
use crate::measure::{Samples, interleave, time};
use crate::subject;
use crate::table::{Goal, Table, Unit};

const BARE: &str = "Middleware, no headers";
const HEADERS: &str = "Middleware, three headers";
const ALLOCATIONS: &str = "Middleware, three headers, allocations";
const REFUSAL: &str = "Middleware, refusal";
const PEERS_REFUSAL: &str = "Middleware, refusal, against tower_governor";
const STACKED: &str = "Middleware, three layers";
const ONE_OF_THREE: &str = "Middleware, one layer of three limits";

const OK: StatusCode = StatusCode::OK;
const REFUSED: StatusCode = StatusCode::TOO_MANY_REQUESTS;

pub fn measure(table: &mut Table) {
    if !table.wants_any([BARE, HEADERS, ALLOCATIONS, REFUSAL, PEERS_REFUSAL, STACKED, ONE_OF_THREE]) {
        return;
    }
    let mut hello = Hello;
    let mut bare = ours().headers(Headers::none()).layer(Hello);
    let mut peers_bare = peer().layer(Hello);
    let mut with_headers = ours().layer(Hello);
    let mut peers_with_headers = peer_with_headers().layer(Hello);
    let mut refusing = exhausted(layer(subject::stingy(TokenBucket::new())).layer(Hello));
    let mut peers_refusing = exhausted(peer_refusing().layer(Hello));
    let mut stacked = ours().layer(ours().layer(ours().layer(Hello)));
    let mut peers_stacked = peer_with_headers().layer(peer_with_headers().layer(peer_with_headers().layer(Hello)));
    let mut three_limits = layer(subject::three_thousands()).layer(Hello);

    let allocations = [
        allocations_per_call(|| call(&mut with_headers, OK)) - allocations_per_call(|| call(&mut hello, OK)),
        allocations_per_call(|| call(&mut peers_with_headers, OK)) - allocations_per_call(|| call(&mut hello, OK)),
    ]
    .map(Samples::one);

    let [hello, samples @ ..] = interleave([
        &mut || time(|| call(&mut hello, OK)),
        &mut || time(|| call(&mut bare, OK)),
        &mut || time(|| call(&mut peers_bare, OK)),
        &mut || time(|| call(&mut with_headers, OK)),
        &mut || time(|| call(&mut peers_with_headers, OK)),
        &mut || time(|| call(&mut refusing, REFUSED)),
        &mut || time(|| call(&mut peers_refusing, REFUSED)),
        &mut || time(|| call(&mut stacked, OK)),
        &mut || time(|| call(&mut peers_stacked, OK)),
        &mut || time(|| call(&mut three_limits, OK)),
    ]);
    let samples: [Samples; 9] = samples;
    let [
        bare,
        peers_bare,
        with_headers,
        peers_with_headers,
        refusal,
        peers_refusal,
        stacked,
        peers_stacked,
        three_limits,
    ] = samples.map(|sample| sample.minus(&hello));

    let mut row = |name: &str, ours: &Samples, other: &str, theirs: &Samples, goal: Goal| {
        table.row(name, Unit::Nanoseconds, ours, (other, theirs), goal);
    };
    row(BARE, &bare, "tower_governor", &peers_bare, Goal::CostAtMost(1.0));
    row(HEADERS, &with_headers, "tower_governor", &peers_with_headers, Goal::CostAtMost(0.65));
    row(REFUSAL, &refusal, "admission", &with_headers, Goal::CostAtMost(1.4));
    row(PEERS_REFUSAL, &refusal, "tower_governor", &peers_refusal, Goal::None);
    row(STACKED, &stacked, "3 tower_governors", &peers_stacked, Goal::CostAtMost(0.6));
    row(ONE_OF_THREE, &three_limits, "3 tower_governors", &peers_stacked, Goal::None);
    let [ours, theirs] = &allocations;
    table.row(ALLOCATIONS, Unit::Allocations, ours, ("tower_governor", theirs), Goal::AtMost(2.0));
}

pub fn ours() -> RateLimitLayer {
    layer(subject::thousand())
}

fn layer(policy: Policy) -> RateLimitLayer {
    RateLimitLayer::new(policy, PeerIp::new())
}

type Peer<M> = GovernorLayer<PeerIpKeyExtractor, M, Body>;

/// Uses a burst of 1,000, like ours.
pub fn peer() -> Peer<NoOpMiddleware> {
    peer_of(GovernorConfigBuilder::default().per_nanosecond(1).burst_size(1_000).finish())
}

pub fn peer_with_headers() -> Peer<StateInformationMiddleware> {
    peer_of(GovernorConfigBuilder::default().per_nanosecond(1).burst_size(1_000).use_headers().finish())
}

fn peer_refusing() -> Peer<StateInformationMiddleware> {
    peer_of(GovernorConfigBuilder::default().per_second(86_400).burst_size(1).use_headers().finish())
}

fn peer_of<M: RateLimitingMiddleware<QuantaInstant>>(config: Option<GovernorConfig<PeerIpKeyExtractor, M>>) -> Peer<M> {
    GovernorLayer::new(config.expect("neither the period nor the burst is zero"))
}

/// Exhausts the limit of a service, which admits one request.
fn exhausted<S>(mut service: S) -> S
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
{
    call(&mut service, OK);
    service
}

/// Calls the service with a new request. Its cost is included in the baseline that is subtracted.
pub fn call<S>(service: &mut S, expected: StatusCode)
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
{
    let mut request = Request::new(Body::empty());
    request.extensions_mut().insert(ConnectInfo(SocketAddr::from(([192, 0, 2, 1], 80))));
    let mut context = Context::from_waker(Waker::noop());
    assert!(service.poll_ready(&mut context).is_ready());
    match pin!(service.call(request)).poll(&mut context) {
        Poll::Ready(Ok(response)) => assert_eq!(response.status(), expected),
        Poll::Pending => panic!("the service never waits"),
    }
}

/// A trivial service.
#[derive(Clone)]
struct Hello;

impl Service<Request<Body>> for Hello {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Ready<Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<Body>) -> Self::Future {
        ready(Ok(Response::new(Body::empty())))
    }
}

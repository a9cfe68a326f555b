//! The limited service, and a request to it.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::net::SocketAddr;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use axum::body::Body;
use axum::extract::ConnectInfo;
use http::{Request, Response};
use tower::Service;

/// A burst with fewer digits than `u32::MAX`. `http` reserves memory for the longest number, and
/// allocates again for a shorter one. So the longest number would be cheaper than a usual one.
pub(crate) const BURST: u32 = 999_999;

/// A trivial service.
#[derive(Clone)]
pub(crate) struct Hello;

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

pub(crate) fn request() -> Request<Body> {
    let peer = ConnectInfo(SocketAddr::from(([192, 0, 2, 1], 80)));
    Request::builder()
        .header("x-api-key", "client-000042")
        .extension(peer)
        .body(Body::empty())
        .expect("the request is valid")
}

pub(crate) fn answer<S, B>(service: &mut S, request: Request<Body>) -> Response<B>
where
    S: Service<Request<Body>, Response = Response<B>, Error = Infallible>,
{
    let mut context = Context::from_waker(Waker::noop());
    assert!(service.poll_ready(&mut context).is_ready());
    match pin!(service.call(request)).poll(&mut context) {
        Poll::Ready(Ok(response)) => response,
        Poll::Pending => panic!("the service never waits"),
    }
}

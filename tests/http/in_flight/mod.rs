//! Requests in flight: their slots, from the call to the end of the body.

mod body;
mod claims;
mod closing;
#[cfg(feature = "grpc")]
mod grpc;
#[cfg(feature = "metrics")]
mod metrics;
mod permit;
mod recovery;
mod refusals;
#[cfg(feature = "grpc")]
mod resets;
mod runtimes;
mod shared;
mod sockets;
mod stacking;
mod tunnels;
mod wait;

use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::ready;
use std::pin::Pin;
use std::task::{Context, Poll};

use http::{HeaderMap, Request, Response};
use hyper::body::{Body, Bytes, Frame, SizeHint};
use tower::{Layer, ServiceExt, service_fn};
use tower_ratelimit::{Header, InFlight, InFlightBody, InFlightLayer, KeyExtractor};

/// A step of a [`Script`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Data(&'static str),
    Trailers,
    Fail,
    Panic,
    /// The body returns nothing from then on.
    Hang,
}

/// A body that returns these frames.
#[derive(Clone, Debug, Default)]
pub(crate) struct Script(pub(crate) VecDeque<Step>);

impl Script {
    pub(crate) fn new(steps: &[Step]) -> Self {
        Self(steps.iter().copied().collect())
    }
}

impl Body for Script {
    type Data = Bytes;
    type Error = String;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, String>>> {
        if self.0.front() == Some(&Step::Hang) {
            return Poll::Pending;
        }
        Poll::Ready(self.0.pop_front().map(|step| match step {
            Step::Data(text) => Ok(Frame::data(Bytes::from_static(text.as_bytes()))),
            Step::Trailers => Ok(Frame::trailers(HeaderMap::from_iter([(
                http::HeaderName::from_static("x-sum"),
                http::HeaderValue::from_static("7"),
            )]))),
            Step::Fail => Err("the body failed".to_owned()),
            Step::Panic | Step::Hang => panic!("the body panics"),
        }))
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.0.len() as u64)
    }
}

impl From<String> for Script {
    fn from(text: String) -> Self {
        Self::new(&[Step::Data(text.leak())])
    }
}

/// A layer with the header field `x-user` as the key.
pub(crate) fn layer(slots: u32) -> InFlightLayer {
    InFlightLayer::new(slots, user())
}

pub(crate) fn user() -> impl KeyExtractor {
    Header::new("x-user")
}

pub(crate) fn of(user: &str) -> Request<()> {
    common::with("x-user", user)
}

type Answer = Response<InFlightBody<Script>>;

/// Sends a request to an inner service that responds with `body`.
pub(crate) async fn send(layer: &InFlightLayer, request: Request<()>, body: Script) -> Answer {
    layer
        .layer(service_fn(move |_| ready(Ok::<_, Infallible>(Response::new(body.clone())))))
        .oneshot(request)
        .await
        .unwrap()
}

/// Returns a service with this layer whose inner service responds with an endless stream.
pub(crate) fn streams<R>(
    layer: &InFlightLayer<R>,
) -> InFlight<
    impl tower::Service<Request<()>, Response = Response<Script>, Error = Infallible, Future: Send> + Clone + Send + 'static,
    R,
> {
    let stream = Script::new(&[Step::Data("chunk"), Step::Hang]);
    layer.layer(service_fn(move |_: Request<()>| ready(Ok(Response::new(stream.clone())))))
}

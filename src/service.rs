//! The middleware service.

use std::fmt;
use std::mem;
use std::sync::Arc;
use std::task::{Context, Poll};

use http::{Request, Response};
use tower_service::Service;

use crate::future::ResponseFuture;
use crate::middleware::common::{Shared, inner_service};
use crate::middleware::exchange::HttpExchange;
use crate::middleware::state::{LayerState, SharedState};
use crate::middleware::step::Step;
use crate::rejection::{Rejection, TextRejection};

/// The middleware that limits the requests to an inner service. Created by
/// [`RateLimitLayer`](crate::RateLimitLayer).
///
/// A refused request never reaches the inner service. An admitted request gets the response or the
/// error of the inner service, and the middleware adds [header fields](crate::Headers) to the
/// response. A request that is not limited is forwarded unchanged.
///
/// The middleware calls the inner service that was polled ready, except for requests that wait
///
/// - for the delay of a [leaky bucket](crate::LeakyBucket),
/// - to be admitted instead of being refused ([`wait`](crate::RateLimitLayer::wait)),
/// - for the lookup of their policy (`PolicyLookup`).
///
/// Such a request keeps a clone of the inner service, which is polled ready after the wait. So it
/// occupies no permit of a `ConcurrencyLimit` and no slot of a `Buffer` while it waits.
pub struct RateLimit<S, R = TextRejection> {
    inner: S,
    shared: Arc<SharedState<R>>,
}

inner_service!(RateLimit, LayerState);

/// An inner service that can be cloned, as [`RateLimit`] requires. Implemented for all types that
/// are [`Clone`].
#[diagnostic::on_unimplemented(
    message = "the inner service `{Self}` of a rate limit is not `Clone`",
    label = "a request that waits for the storage moves the service into its future, and a clone replaces it",
    note = "put a `tower::buffer::BufferLayer` between the two, or make the service with `boxed_clone`"
)]
pub trait CloneService: Clone {}

#[diagnostic::do_not_recommend]
impl<S: Clone> CloneService for S {}

impl<S, R, B, ResBody> Service<Request<B>> for RateLimit<S, R>
where
    S: Service<Request<B>, Response = Response<ResBody>> + CloneService,
    R: Rejection<ResBody>,
{
    type Response = Response<ResBody>;
    type Error = S::Error;
    type Future = ResponseFuture<S, B, R>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<B>) -> Self::Future {
        let mut response = None;
        let rejection = &*self.shared.rejection;
        let mut exchange = HttpExchange { rejection, request: &mut request, response: &mut response };
        match self.shared.admit(&mut exchange) {
            Step::Forward(plan) => ResponseFuture::calling(self.inner.call(request), plan),
            Step::Respond => ResponseFuture::responded(response),
            Step::Wait(wait) => {
                // The future takes the service that was polled ready, and a clone replaces it.
                // Unless the storage decides first, the future replaces the ready service with
                // another clone.
                let next = self.inner.clone();
                let ready = mem::replace(&mut self.inner, next);
                ResponseFuture::waiting(ready, request, Arc::clone(&self.shared), wait)
            }
        }
    }
}

impl<S: fmt::Debug, R> fmt::Debug for RateLimit<S, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RateLimit")
            .field("inner", &self.inner)
            .field("storage", &self.shared.storage)
            .finish_non_exhaustive()
    }
}

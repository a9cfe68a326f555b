//! The service: asks, then forwards or answers.

use std::fmt;
use std::mem;
use std::sync::Arc;
use std::task::{Context, Poll};

use http::{Request, Response};
use tower_service::Service;

use crate::future::{ResponseFuture, Waiting};
use crate::middleware::admission::{Action, LayerState};
use crate::{MemoryStorage, Rejection, Storage, TextRejection};

/// A service whose requests are limited, made by [`RateLimitLayer`](crate::RateLimitLayer).
///
/// The service that was polled ready is the one that is called, with one exception: a request that
/// waits for the delay of a leaky bucket waits with a clone, which becomes ready after the delay. So it
/// holds no permit of a `ConcurrencyLimit` and no slot of a `Buffer` meanwhile. A refused request never
/// reaches the inner service. Responses, errors and bodies are the inner service's own.
pub struct RateLimit<S, St = MemoryStorage, R = TextRejection> {
    inner: S,
    shared: Handle<St, R>,
}

/// A handle on what all services of a layer share.
type Handle<St, R> = Arc<LayerState<St, R>>;

impl<S, St: Storage, R> RateLimit<S, St, R> {
    pub(crate) fn new(inner: S, shared: Handle<St, R>) -> Self {
        Self { inner, shared }
    }

    /// The service inside.
    pub fn get_ref(&self) -> &S {
        &self.inner
    }

    /// The service inside. Calls made to it directly are not limited.
    pub fn get_mut(&mut self) -> &mut S {
        &mut self.inner
    }

    /// The service inside, without its limits.
    pub fn into_inner(self) -> S {
        self.inner
    }
}

/// A service that can be cloned, as the one inside of a [`RateLimit`] has to be.
#[diagnostic::on_unimplemented(
    message = "the service `{Self}` inside of a rate limit is not `Clone`",
    label = "a request that waits for its storage takes the service along and leaves a clone behind",
    note = "put a `tower::buffer::BufferLayer` between the two, or make the service with `boxed_clone`"
)]
pub trait CloneService: Clone {}

#[diagnostic::do_not_recommend]
impl<S: Clone> CloneService for S {}

impl<S, St, R, B, ResBody> Service<Request<B>> for RateLimit<S, St, R>
where
    S: Service<Request<B>, Response = Response<ResBody>> + CloneService,
    St: Storage,
    R: Rejection<ResBody>,
{
    type Response = Response<ResBody>;
    type Error = S::Error;
    type Future = ResponseFuture<S, B, St, R>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<B>) -> Self::Future {
        match self.shared.consider(&mut request) {
            Action::Forward(told) => ResponseFuture::calling(self.inner.call(request), told),
            Action::Respond(response) => ResponseFuture::refused(response),
            Action::Wait(place, deciding) => {
                // The future takes the service that was polled ready and leaves a clone behind. If the
                // request has to wait for its turn, the future clones it once more and drops it.
                let next = self.inner.clone();
                let ready = mem::replace(&mut self.inner, next);
                let shared = Arc::clone(&self.shared);
                ResponseFuture::waiting(Waiting::new(ready, request, shared, deciding, place))
            }
        }
    }
}

impl<S: Clone, St, R> Clone for RateLimit<S, St, R> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), shared: Arc::clone(&self.shared) }
    }
}

impl<S: fmt::Debug, St: fmt::Debug, R> fmt::Debug for RateLimit<S, St, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RateLimit")
            .field("inner", &self.inner)
            .field("storage", &self.shared.storage)
            .finish_non_exhaustive()
    }
}

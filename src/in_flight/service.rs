//! The middleware service.

use std::fmt;
use std::mem;
use std::sync::Arc;
use std::task::{Context, Poll};

use http::{Method, Request, Response};
use http_body::Body;
use tower_service::Service;

use super::admission::SlotState;
use super::body::InFlightBody;
use super::future::{InFlightFuture, RequestForSlots};
use crate::middleware::common::{Shared, inner_service};
use crate::middleware::exchange::HttpExchange;
use crate::middleware::progress::Progress;
use crate::middleware::step::Step;
use crate::rejection::{Rejection, TextRejection};
use crate::service::CloneService;

/// The middleware that limits the requests in flight to an inner service. Created by
/// [`InFlightLayer`](crate::InFlightLayer).
///
/// A request is passed to the inner service that was polled ready. With a
/// [storage](crate::InFlightLayer::storage), it keeps this service while the storage decides.
///
/// A request that [waits](crate::InFlightLayer::wait) for a free slot drops the ready service and keeps a
/// clone. The clone is polled ready after the wait. So a waiting request holds no permit of a
/// `ConcurrencyLimit` and no place of a `Buffer`.
pub struct InFlight<S, R = TextRejection> {
    inner: S,
    shared: Arc<Shared<SlotState, R>>,
}

inner_service!(InFlight, SlotState);

impl<S, R, B, ResBody> Service<Request<B>> for InFlight<S, R>
where
    S: Service<Request<B>, Response = Response<ResBody>> + CloneService,
    R: Rejection<ResBody>,
    ResBody: Body,
{
    type Response = Response<InFlightBody<ResBody>>;
    type Error = S::Error;
    type Future = InFlightFuture<S, B, R>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<B>) -> Self::Future {
        let (mut response, mut permit, is_head) = (None, None, request.method() == Method::HEAD);
        let rejection = &*self.shared.rejection;
        let mut exchange = HttpExchange { rejection, request: &mut request, response: &mut response };
        let progress = match self.shared.admit(&mut exchange, &mut permit) {
            Step::Forward(plan) => Progress::Calling { inner: self.inner.call(request), plan },
            Step::Respond => Progress::Responded { response },
            Step::Wait(hit) => {
                let next = self.inner.clone();
                let ready = mem::replace(&mut self.inner, next);
                let waiting = RequestForSlots::new(ready, request, Arc::clone(&self.shared), hit);
                Progress::Waiting { waiting }
            }
        };
        InFlightFuture::new(progress, permit, is_head)
    }
}

impl<S: fmt::Debug, R> fmt::Debug for InFlight<S, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InFlight").field("inner", &self.inner).finish_non_exhaustive()
    }
}

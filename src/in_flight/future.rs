//! The response future.

use std::fmt;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use http::{Request, Response, StatusCode};
use http_body::Body;
use pin_project_lite::pin_project;
use tower_service::Service;

use super::admission::{SlotState, SlotWait};
use super::body::InFlightBody;
use super::permit::Permit;
use crate::decision::Decision;
use crate::middleware::common::Shared;
use crate::middleware::exchange::HttpExchange;
use crate::middleware::post_response::ResponsePlan;
use crate::middleware::progress::{Progress, unready};
use crate::middleware::step::Step;
use crate::rejection::Rejection;

pin_project! {
    /// The response future of [`InFlight`](crate::InFlight).
    ///
    /// It holds the slots of the request until the response is ready. Dropping the future gives
    /// them back, unless a [`Permit`](crate::Permit) still holds them. If the request
    /// [waits](crate::InFlightLayer::wait), the drop removes it from the queue.
    #[must_use = "futures do nothing unless they are polled"]
    #[project = InFlightFutureProj]
    pub struct InFlightFuture<S, B, R>
    where
        S: Service<Request<B>>,
    {
        #[pin]
        progress: SlotProgress<S, B, R>,
        permit: Option<Permit>,
        is_head: bool,
    }
}

type SlotProgress<S, B, R> =
    Progress<<S as Service<Request<B>>>::Future, Box<RequestForSlots<S, B, R>>, <S as Service<Request<B>>>::Response>;

impl<S, B, R> InFlightFuture<S, B, R>
where
    S: Service<Request<B>>,
{
    /// `is_head` is `true` for a `HEAD` request, whose response has no body.
    pub(super) fn new(progress: SlotProgress<S, B, R>, permit: Option<Permit>, is_head: bool) -> Self {
        Self { progress, permit, is_head }
    }
}

impl<S, B, R, ResBody> Future for InFlightFuture<S, B, R>
where
    S: Service<Request<B>, Response = Response<ResBody>> + Clone,
    R: Rejection<ResBody>,
    ResBody: Body,
{
    type Output = Result<Response<InFlightBody<ResBody>>, S::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let InFlightFutureProj { progress, permit, is_head } = self.project();
        let polled = ready!(progress.poll(cx, |waiting, cx| waiting.poll(cx, permit)));
        // Gives the slots back if the inner service has failed.
        let permit = permit.take();
        let response = polled?;
        let permit = permit.filter(|_| !*is_head && has_body(&response));
        Poll::Ready(Ok(response.map(|body| InFlightBody::new(body, permit))))
    }
}

/// A request that waits for its slots, and then for the inner service.
pub(super) struct RequestForSlots<S, B, R> {
    // While the storage decides first, the service is the one that was polled ready. During all other
    // waits it is a clone, which has to be polled ready before it is called.
    call: Option<(S, Request<B>)>,
    shared: Arc<Shared<SlotState, R>>,
    /// `None` when the request has its slots.
    hit: Option<SlotWait>,
    plan: ResponsePlan,
}

impl<S, B, R> RequestForSlots<S, B, R> {
    pub(super) fn new(ready: S, request: Request<B>, shared: Arc<Shared<SlotState, R>>, hit: SlotWait) -> Box<Self>
    where
        S: Clone,
    {
        let service = if hit.keeps_service_ready { ready } else { unready(&ready) };
        Box::new(Self { call: Some((service, request)), shared, hit: Some(hit), plan: ResponsePlan::NOTHING })
    }

    /// Polls the wait and then the service. Sets `permit` when the request has its slots. Returns the
    /// progress after the wait.
    fn poll<ResBody>(
        &mut self,
        cx: &mut Context<'_>,
        permit: &mut Option<Permit>,
    ) -> Poll<Result<SlotProgress<S, B, R>, S::Error>>
    where
        S: Service<Request<B>, Response = Response<ResBody>> + Clone,
        R: Rejection<ResBody>,
    {
        let (service, request) = self.call.as_mut().expect("polled after completion");
        while let Some(hit) = &mut self.hit {
            let take = ready!(hit.take.as_mut().poll(cx));
            let mut response = None;
            let mut exchange = HttpExchange { rejection: &*self.shared.rejection, request, response: &mut response };
            match self.shared.admit_after_wait(take, hit, &mut exchange, permit) {
                Step::Forward(plan) => (self.plan, self.hit) = (plan, None),
                Step::Respond => return Poll::Ready(Ok(Progress::Responded { response })),
                Step::Wait(wait) => {
                    if !wait.keeps_service_ready {
                        *service = unready(service);
                    }
                    self.hit = Some(wait);
                }
            }
        }
        if let Err(error) = ready!(service.poll_ready(cx)) {
            // The request has a clone of its permit.
            self.call = None;
            return Poll::Ready(Err(error));
        }
        let (mut service, request) = self.call.take().expect("checked above");
        let plan = mem::replace(&mut self.plan, ResponsePlan::NOTHING);
        Poll::Ready(Ok(Progress::Calling { inner: service.call(request), plan }))
    }
}

/// Returns `false` if the response ends with its head, so that a server may never poll its body. The
/// refusal of an inner layer has a body that is complete, so it counts as ended too.
fn has_body<B: Body>(response: &Response<B>) -> bool {
    let without_body = [StatusCode::NO_CONTENT, StatusCode::NOT_MODIFIED];
    let is_refusal = || response.extensions().get::<Decision>().is_some_and(Decision::is_refused);
    !without_body.contains(&response.status()) && !response.body().is_end_stream() && !is_refusal()
}

impl<S, B, R> fmt::Debug for InFlightFuture<S, B, R>
where
    S: Service<Request<B>>,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InFlightFuture").finish_non_exhaustive()
    }
}

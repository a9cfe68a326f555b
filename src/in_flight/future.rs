//! The response future.

use std::fmt;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use http::{Method, Request, Response, StatusCode};
use http_body::Body;
use pin_project_lite::pin_project;
use tower_service::Service;

use super::admission::{Shared, SlotWait};
use super::body::InFlightBody;
use super::permit::Permit;
use crate::decision::Decision;
use crate::future::poll_inner;
use crate::middleware::exchange::{HttpExchange, ResponsePlan, Step};
use crate::rejection::Rejection;

pin_project! {
    /// The response future of [`InFlight`](crate::InFlight).
    ///
    /// It holds the slots of the request until the response is ready. Dropping it gives them back, or
    /// leaves the queue if the request [waits](crate::InFlightLayer::wait).
    #[must_use = "futures do nothing unless they are polled"]
    pub struct InFlightFuture<S, B, R>
    where
        S: Service<Request<B>>,
    {
        #[pin]
        state: FutureState<S, B, R>,
    }
}

pin_project! {
    #[project = StateProj]
    enum FutureState<S, B, R>
    where
        S: Service<Request<B>>,
    {
        Calling {
            #[pin]
            inner: S::Future,
            plan: ResponsePlan,
            permit: Option<Permit>,
            is_head: bool,
        },
        Refused {
            response: Option<S::Response>,
        },
        Waiting {
            waiting: Box<WaitingRequest<S, B, R>>,
        },
    }
}

impl<S, B, R> InFlightFuture<S, B, R>
where
    S: Service<Request<B>>,
{
    pub(super) fn calling(inner: &mut S, request: Request<B>, plan: ResponsePlan, permit: Option<Permit>) -> Self {
        Self { state: FutureState::calling(inner, request, plan, permit) }
    }

    pub(super) fn refused(response: Option<S::Response>) -> Self {
        Self { state: FutureState::Refused { response } }
    }

    /// Waits for the slots. `service` is a clone that was not polled ready.
    pub(super) fn waiting(service: S, request: Request<B>, shared: Arc<Shared<R>>, hit: SlotWait) -> Self {
        let call = Some((service, request));
        let waiting = WaitingRequest { call, shared, hit: Some(hit), plan: ResponsePlan::NOTHING, permit: None };
        Self { state: FutureState::Waiting { waiting: Box::new(waiting) } }
    }
}

impl<S, B, R> FutureState<S, B, R>
where
    S: Service<Request<B>>,
{
    fn calling(inner: &mut S, request: Request<B>, plan: ResponsePlan, permit: Option<Permit>) -> Self {
        let is_head = request.method() == Method::HEAD;
        Self::Calling { inner: inner.call(request), plan, permit, is_head }
    }
}

impl<S, B, R, ResBody> Future for InFlightFuture<S, B, R>
where
    S: Service<Request<B>, Response = Response<ResBody>>,
    R: Rejection<ResBody>,
    ResBody: Body,
{
    type Output = Result<Response<InFlightBody<ResBody>>, S::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.project().state;
        loop {
            match state.as_mut().project() {
                StateProj::Calling { inner, plan, permit, is_head } => {
                    let polled = ready!(poll_inner(inner, plan, cx));
                    // Gives the slots back if the inner service has failed.
                    let permit = permit.take();
                    let response = polled?;
                    let permit = permit.filter(|_| !*is_head && has_body(&response));
                    return Poll::Ready(Ok(response.map(|body| InFlightBody::new(body, permit))));
                }
                StateProj::Refused { response } => {
                    let response = response.take().expect("polled after completion");
                    return Poll::Ready(Ok(response.map(|body| InFlightBody::new(body, None))));
                }
                StateProj::Waiting { waiting } => {
                    let next = ready!(waiting.poll(cx))?;
                    state.set(next);
                }
            }
        }
    }
}

/// A request that waits for its slots, and then for the inner service.
struct WaitingRequest<S, B, R> {
    // The service is a clone, which has to be polled ready before it is called.
    call: Option<(S, Request<B>)>,
    shared: Arc<Shared<R>>,
    /// `None` when the request has its slots.
    hit: Option<SlotWait>,
    plan: ResponsePlan,
    permit: Option<Permit>,
}

impl<S, B, R> WaitingRequest<S, B, R> {
    /// Polls the wait and then the service. Returns the next state.
    fn poll<ResBody>(&mut self, cx: &mut Context<'_>) -> Poll<Result<FutureState<S, B, R>, S::Error>>
    where
        S: Service<Request<B>, Response = Response<ResBody>>,
        R: Rejection<ResBody>,
    {
        let (service, request) = self.call.as_mut().expect("polled after completion");
        if let Some(hit) = &mut self.hit {
            let taken = ready!(hit.taken.as_mut().poll(cx));
            let mut response = None;
            let mut exchange = HttpExchange { rejection: &*self.shared.rejection, request, response: &mut response };
            match self.shared.admit_after_wait(taken, hit, &mut exchange, &mut self.permit) {
                Step::Forward(plan) => self.plan = plan,
                Step::Respond => return Poll::Ready(Ok(FutureState::Refused { response })),
                Step::Wait(never) => match never {},
            }
            self.hit = None;
        }
        if let Err(error) = ready!(service.poll_ready(cx)) {
            self.permit = None;
            return Poll::Ready(Err(error));
        }
        let (mut service, request) = self.call.take().expect("checked above");
        let plan = mem::replace(&mut self.plan, ResponsePlan::NOTHING);
        Poll::Ready(Ok(FutureState::calling(&mut service, request, plan, self.permit.take())))
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

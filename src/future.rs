//! The response future: a request that waits, and then the response of the inner service.

use std::fmt;
use std::mem;
use std::pin::Pin;
use std::slice;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use http::{Request, Response};
use pin_project_lite::pin_project;
use tokio::time::{Sleep, sleep};
use tower_service::Service;

use crate::middleware::exchange::HttpExchange;
use crate::middleware::post_response::ResponsePlan;
use crate::middleware::progress::{Progress, unready};
use crate::middleware::state::SharedState;
use crate::middleware::step::{Step, Wait};
use crate::rejection::Rejection;

pin_project! {
    /// The response future of [`RateLimit`](crate::RateLimit).
    ///
    /// The effect of dropping the future depends on the progress of the request:
    ///
    /// | progress | effect of a drop |
    /// |---|---|
    /// | the policy is looked up, or the inner service is not ready after that | nothing is spent |
    /// | the storage decides the first hit | the units may be spent, and are not refunded |
    /// | the request [waits](crate::RateLimitLayer::wait) to be admitted | nothing is spent. A hit in flight is refunded in a task of the tokio runtime |
    /// | a leaky bucket delays the request | the hit is refunded, unless a later hit is in the bucket's queue |
    /// | the request has waited, and the inner service is not ready | the hit is refunded, as during a delay |
    /// | the inner service was called | the units stay spent, unless a [`Reservation`](crate::Reservation) corrects them |
    #[must_use = "futures do nothing unless they are polled"]
    pub struct ResponseFuture<S, B, R>
    where
        S: Service<Request<B>>,
    {
        #[pin]
        progress: ResponseProgress<S, B, R>,
    }
}

type ResponseProgress<S, B, R> = Progress<
    <S as Service<Request<B>>>::Future,
    Pin<Box<WaitingRequest<S, B, R>>>,
    <S as Service<Request<B>>>::Response,
>;

impl<S, B, R> ResponseFuture<S, B, R>
where
    S: Service<Request<B>>,
{
    pub(crate) fn calling(inner: S::Future, plan: ResponsePlan) -> Self {
        Self { progress: Progress::Calling { inner, plan } }
    }

    /// Returns the response that the rejection has built.
    pub(crate) fn responded(response: Option<S::Response>) -> Self {
        Self { progress: Progress::Responded { response } }
    }

    /// Lets the request wait. `ready` is the inner service that was polled ready.
    pub(crate) fn waiting(ready: S, request: Request<B>, shared: Arc<SharedState<R>>, wait: Wait) -> Self
    where
        S: Clone,
    {
        let waiting = Box::pin(WaitingRequest::new(ready, request, shared, wait));
        Self { progress: Progress::Waiting { waiting } }
    }
}

impl<S, B, R, ResBody> Future for ResponseFuture<S, B, R>
where
    S: Service<Request<B>, Response = Response<ResBody>> + Clone,
    R: Rejection<ResBody>,
{
    type Output = Result<Response<ResBody>, S::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.project().progress.poll(cx, |waiting, cx| waiting.as_mut().poll(cx))
    }
}

impl<S, B, R> fmt::Debug for ResponseFuture<S, B, R>
where
    S: Service<Request<B>>,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").finish_non_exhaustive()
    }
}

pin_project! {
    /// A request that waits for the lookup of its policy, for the storage, for its turn to be
    /// admitted, for the delay of a leaky bucket, or for the inner service after these.
    struct WaitingRequest<S, B, R>
    {
        shared: Arc<SharedState<R>>,
        // While the storage decides first, the service is the one that was polled ready. During all
        // other waits it is a clone, which has to be polled ready before it is called.
        call: Option<(S, Request<B>)>,
        wait: Wait,
        #[pin]
        delay: Option<Sleep>,
    }
}

impl<S, B, R> WaitingRequest<S, B, R> {
    fn new(ready: S, request: Request<B>, shared: Arc<SharedState<R>>, wait: Wait) -> Self
    where
        S: Clone,
    {
        let service = if wait.keeps_service_ready() { ready } else { unready(&ready) };
        Self { shared, call: Some((service, request)), delay: wait.delay().map(sleep), wait }
    }

    /// Polls until the request is forwarded or has its response. Returns the next state.
    fn poll<ResBody>(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<AfterWait<S, B, R>>
    where
        S: Service<Request<B>, Response = Response<ResBody>> + Clone,
        R: Rejection<ResBody>,
    {
        let mut this = self.project();
        let plan = loop {
            let (service, request) = this.call.as_mut().expect("polled after completion");
            let mut response = None;
            let mut exchange = HttpExchange { rejection: &*this.shared.rejection, request, response: &mut response };
            // `true` if the service is ready.
            let (step, is_ready) = match this.wait {
                #[cfg(feature = "lookup")]
                Wait::Lookup(lookup) => {
                    *this.wait = Wait::LookedUp(ready!(lookup.as_mut().poll(cx)));
                    continue;
                }
                #[cfg(feature = "lookup")]
                Wait::LookedUp(found) => {
                    ready!(service.poll_ready(cx))?;
                    (this.shared.admit_found(found, &mut exchange), true)
                }
                Wait::Service(plan) => {
                    ready!(service.poll_ready(cx))?;
                    break mem::replace(plan, ResponsePlan::NOTHING);
                }
                Wait::Decision(hits, deciding) => {
                    let decided = ready!(Pin::new(deciding).poll(cx));
                    let decided = decided.as_ref().map(slice::from_ref);
                    (hits.with_requests(|requests| this.shared.apply(decided, requests, &mut exchange)), true)
                }
                Wait::Decisions(hits, deciding) => {
                    let decided = ready!(Pin::new(deciding).poll(cx));
                    let decided = decided.as_ref().map(Vec::as_slice);
                    (hits.with_requests(|requests| this.shared.apply(decided, requests, &mut exchange)), true)
                }
                Wait::Turn(hits, turn) => {
                    let result = ready!(turn.as_mut().poll(cx));
                    hits.set_policy(result.policy);
                    let decided = result.decided;
                    (hits.with_requests(|requests| this.shared.apply_turn(decided, requests, &mut exchange)), false)
                }
                Wait::Delay(delayed) => {
                    if let Some(delay) = this.delay.as_mut().as_pin_mut() {
                        ready!(delay.poll(cx));
                    }
                    this.delay.set(None);
                    ready!(service.poll_ready(cx))?;
                    break this.shared.admitted_after_wait(delayed, &mut exchange);
                }
            };
            match step {
                Step::Forward(plan) if is_ready => break plan,
                Step::Forward(plan) => *this.wait = Wait::Service(plan),
                Step::Respond => return Poll::Ready(Ok(Progress::Responded { response })),
                Step::Wait(wait) => {
                    if !wait.keeps_service_ready() {
                        *service = unready(service);
                    }
                    this.delay.set(wait.delay().map(sleep));
                    *this.wait = wait;
                }
            }
        };
        let (mut ready, request) = this.call.take().expect("checked above");
        Poll::Ready(Ok(Progress::Calling { inner: ready.call(request), plan }))
    }
}

type AfterWait<S, B, R> = Result<ResponseProgress<S, B, R>, <S as Service<Request<B>>>::Error>;

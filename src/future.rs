//! The response future.

#[cfg(feature = "lookup")]
mod finding;
#[cfg(not(feature = "lookup"))]
mod no_finding;

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use http::{Request, Response};
use pin_project_lite::pin_project;
use tokio::time::Sleep;
use tower_service::Service;

#[cfg(feature = "lookup")]
use self::finding::Finding;
#[cfg(not(feature = "lookup"))]
use self::no_finding::Finding;
use crate::headers;
use crate::middleware::exchange::{HttpExchange, ResponsePlan, Step};
use crate::middleware::post_response::HeldHit;
use crate::middleware::state::Shared;
use crate::rejection::Rejection;
use crate::waiting::{Attempted, Stage};

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
        state: ResponseState<S, B, R>,
    }
}

pin_project! {
    #[project = StateProj]
    enum ResponseState<S, B, R>
    where
        S: Service<Request<B>>,
    {
        Calling {
            #[pin]
            inner: S::Future,
            plan: ResponsePlan,
        },
        Refused {
            response: Option<S::Response>,
        },
        Waiting {
            waiting: Pin<Box<WaitingRequest<S, B, R>>>,
        },
        // Never constructed without the feature `lookup`.
        Finding {
            finding: Box<Finding<S, B, R>>,
        },
    }
}

impl<S, B, R> ResponseFuture<S, B, R>
where
    S: Service<Request<B>>,
{
    pub(crate) fn calling(inner: S::Future, plan: ResponsePlan) -> Self {
        Self { state: ResponseState::Calling { inner, plan } }
    }

    /// Returns the response that the rejection has built.
    pub(crate) fn refused(response: Option<S::Response>) -> Self {
        Self { state: ResponseState::Refused { response } }
    }

    #[cfg(feature = "lookup")]
    pub(crate) fn finding(
        ready: &S,
        request: Request<B>,
        shared: Arc<Shared<R>>,
        tenant: crate::lookup::Finding,
    ) -> Self
    where
        S: Clone,
    {
        Self { state: ResponseState::Finding { finding: Box::new(Finding::new(ready, request, shared, tenant)) } }
    }

    pub(crate) fn waiting(waiting: WaitingRequest<S, B, R>) -> Self {
        Self { state: ResponseState::Waiting { waiting: Box::pin(waiting) } }
    }
}

impl<S, B, R, ResBody> Future for ResponseFuture<S, B, R>
where
    S: Service<Request<B>, Response = Response<ResBody>> + Clone,
    R: Rejection<ResBody>,
{
    type Output = Result<Response<ResBody>, S::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.project().state;
        loop {
            match state.as_mut().project() {
                StateProj::Calling { inner, plan } => {
                    return poll_inner(inner, plan, cx);
                }
                StateProj::Refused { response } => {
                    return Poll::Ready(Ok(response.take().expect("polled after completion")));
                }
                StateProj::Finding { finding } => {
                    let next = ready!(finding.poll(cx))?;
                    state.set(next);
                }
                StateProj::Waiting { waiting } => {
                    let next = ready!(waiting.as_mut().poll(cx))?;
                    state.set(next);
                }
            }
        }
    }
}

/// Polls the inner future. When it is ready, settles the request and writes the header fields into
/// the response in place. Until then, also polls the shadow checks.
///
/// Responses are large. The function is not inlined, so that the compiler does not move them.
#[inline(never)]
fn poll_inner<F, ResBody, E>(inner: Pin<&mut F>, plan: &mut ResponsePlan, cx: &mut Context<'_>) -> Poll<F::Output>
where
    F: Future<Output = Result<Response<ResBody>, E>>,
{
    if plan.is_nothing() {
        return inner.poll(cx);
    }
    let mut polled = inner.poll(cx);
    if let Poll::Ready(Ok(response)) = &mut polled {
        match plan.after.take() {
            None => headers::write_admitted(response, plan.numbers, None),
            Some(after) => after.settle(response, plan.numbers),
        }
    } else if let Some(after) = &mut plan.after {
        after.poll(cx);
    }
    polled
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
    /// A request that waits for the storage, then for its turn to be admitted, and then for the
    /// delay of a leaky bucket.
    pub(crate) struct WaitingRequest<S, B, R>
    {
        shared: Arc<Shared<R>>,
        // While the storage decides first, the service is the one that was polled ready. While the
        // request waits for its turn or its delay, and after that, it is a clone, which has to be
        // polled ready before it is called.
        call: Option<(S, Request<B>)>,
        hit: HeldHit,
        progress: Progress,
        #[pin]
        delay: Option<Sleep>,
    }
}

enum Progress {
    Waiting(Stage),
    /// The request has waited, and the service is polled ready. `None` if the hit is admitted and
    /// has its decision. A plan if the storage has failed, and the request is forwarded.
    Over(Option<ResponsePlan>),
}

impl<S, B, R> WaitingRequest<S, B, R> {
    pub(crate) fn new(ready: S, request: Request<B>, shared: Arc<Shared<R>>, hit: HeldHit, stage: Stage) -> Self
    where
        S: Clone,
    {
        let service = if matches!(stage, Stage::Decision(_)) { ready } else { unready(&ready) };
        let delay = hit.delayed.as_ref().map(|decision| tokio::time::sleep(decision.delay()));
        Self { shared, call: Some((service, request)), hit, progress: Progress::Waiting(stage), delay }
    }

    /// Polls the storage, then the turn, the delay and the service. Returns the next state.
    fn poll<ResBody>(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<AfterWaiting<S, B, R>>
    where
        S: Service<Request<B>, Response = Response<ResBody>> + Clone,
        R: Rejection<ResBody>,
    {
        let mut this = self.project();
        let plan = loop {
            let (service, request) = this.call.as_mut().expect("polled after completion");
            let mut response = None;
            let mut exchange = HttpExchange { rejection: &*this.shared.rejection, request, response: &mut response };
            let (step, is_first) = match this.progress {
                Progress::Waiting(Stage::Decision(deciding)) => {
                    let decided = ready!(Pin::new(deciding).poll(cx));
                    (this.shared.apply(decided.as_ref(), this.hit.storage_request(), &mut exchange), true)
                }
                Progress::Waiting(Stage::Turn(turn)) => {
                    let Attempted { policy, decided } = ready!(turn.as_mut().poll(cx));
                    this.hit.set_policy(policy);
                    (this.shared.apply_turn(decided, this.hit.storage_request(), &mut exchange), false)
                }
                Progress::Waiting(Stage::Delay) => {
                    if let Some(delay) = this.delay.as_mut().as_pin_mut() {
                        ready!(delay.poll(cx));
                    }
                    this.delay.set(None);
                    *this.progress = Progress::Over(None);
                    continue;
                }
                Progress::Over(plan) => {
                    ready!(service.poll_ready(cx))?;
                    break plan.take().unwrap_or_else(|| this.shared.admitted_after_wait(this.hit, &mut exchange));
                }
            };
            match step {
                Step::Forward(plan) if is_first => break plan,
                Step::Forward(plan) => *this.progress = Progress::Over(Some(plan)),
                Step::Respond => return Poll::Ready(Ok(ResponseState::Refused { response })),
                Step::Wait(pause) => {
                    let stage = this.hit.pause(pause);
                    *service = unready(service);
                    let delay = this.hit.delayed.as_ref().map(|decision| decision.delay());
                    this.delay.set(delay.filter(|delay| !delay.is_zero()).map(tokio::time::sleep));
                    *this.progress = Progress::Waiting(stage);
                }
            }
        };
        let (mut ready, request) = this.call.take().expect("checked above");
        Poll::Ready(Ok(ResponseState::Calling { inner: ready.call(request), plan }))
    }
}

type AfterWaiting<S, B, R> = Result<ResponseState<S, B, R>, <S as Service<Request<B>>>::Error>;

/// Returns a clone to keep during a wait. The caller drops the ready service, because it may hold a
/// permit or a slot that another request needs.
fn unready<S: Clone>(readied: &S) -> S {
    readied.clone()
}

//! The response, on its way.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use http::{Request, Response};
use pin_project_lite::pin_project;
use tokio::time::Sleep;
use tower_service::Service;

use crate::middleware::admission::{AdmissionResult, LayerState, ResponsePlan};
use crate::middleware::post_response::QueueSlot;
use crate::{Decision, Rejection, Storage, headers};

pin_project! {
    /// The future of [`RateLimit`](crate::RateLimit).
    ///
    /// Dropping it while it waits for the delay of a leaky bucket gives the place in the queue back
    /// if that place is the last one. A request that waits for its delay holds no readied service: it
    /// waits with a clone, which becomes ready after the delay and is then called.
    #[must_use = "futures do nothing unless they are polled"]
    pub struct ResponseFuture<S, B, St, R>
    where
        S: Service<Request<B>>,
        St: Storage,
    {
        #[pin]
        state: State<S, B, St, R>,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<S, B, St, R>
    where
        S: Service<Request<B>>,
        St: Storage,
    {
        Calling {
            #[pin]
            inner: S::Future,
            told: ResponsePlan<St>,
        },
        Refused {
            response: Option<S::Response>,
        },
        Waiting {
            waiting: Pin<Box<Waiting<S, B, St, R>>>,
        },
    }
}

impl<S, B, St, R> ResponseFuture<S, B, St, R>
where
    S: Service<Request<B>>,
    St: Storage,
{
    pub(crate) fn calling(inner: S::Future, told: ResponsePlan<St>) -> Self {
        Self { state: State::Calling { inner, told } }
    }

    pub(crate) fn refused(response: S::Response) -> Self {
        Self { state: State::Refused { response: Some(response) } }
    }

    pub(crate) fn waiting(waiting: Waiting<S, B, St, R>) -> Self {
        Self { state: State::Waiting { waiting: Box::pin(waiting) } }
    }
}

impl<S, B, St, R, ResBody> Future for ResponseFuture<S, B, St, R>
where
    S: Service<Request<B>, Response = Response<ResBody>> + Clone,
    St: Storage,
    R: Rejection<ResBody>,
{
    type Output = Result<Response<ResBody>, S::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.project().state;
        loop {
            match state.as_mut().project() {
                StateProj::Calling { inner, told } => {
                    return poll_and_tell(inner, told, cx);
                }
                StateProj::Refused { response } => {
                    return Poll::Ready(Ok(response.take().expect("polled after it was ready")));
                }
                StateProj::Waiting { waiting } => match ready!(waiting.as_mut().poll(cx))? {
                    Done::Call(inner, told) => state.set(State::Calling { inner, told }),
                    Done::Refused(response) => return Poll::Ready(Ok(response)),
                },
            }
        }
    }
}

/// Polls, and writes where it is what the response is told: responses are large, and so a function by itself, which hands
/// over what it was given.
#[inline(never)]
fn poll_and_tell<F, St, ResBody, E>(
    inner: Pin<&mut F>,
    told: &mut ResponsePlan<St>,
    cx: &mut Context<'_>,
) -> Poll<F::Output>
where
    F: Future<Output = Result<Response<ResBody>, E>>,
    St: Storage,
{
    let mut polled = inner.poll(cx);
    if let Poll::Ready(Ok(response)) = &mut polled {
        match told.after.take() {
            None => headers::write_admitted(response, told.numbers, None),
            Some(after) => after.settle(response, told.numbers),
        }
    } else if let Some(after) = &mut told.after {
        after.poll(cx);
    }
    polled
}

impl<S, B, St, R> fmt::Debug for ResponseFuture<S, B, St, R>
where
    S: Service<Request<B>>,
    St: Storage,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").finish_non_exhaustive()
    }
}

pin_project! {
    /// A request that waits for the storage, and then perhaps for its turn.
    pub(crate) struct Waiting<S, B, St, R>
    where
        St: Storage,
    {
        shared: Arc<LayerState<St, R>>,
        // While the storage decides, the service is the one that was polled ready. From then on it
        // is a clone, which has to be polled ready before it is called.
        call: Option<(S, Request<B>)>,
        deciding: St::DecideFuture,
        place: QueueSlot<St>,
        #[pin]
        delay: Option<Sleep>,
        // The decision of a request whose turn has come.
        turn: Option<Box<Decision>>,
    }
}

/// How waiting ends.
enum Done<F, St: Storage, Response> {
    Call(F, ResponsePlan<St>),
    Refused(Response),
}

impl<S, B, St: Storage, R> Waiting<S, B, St, R> {
    pub(crate) fn new(
        ready: S,
        request: Request<B>,
        shared: Arc<LayerState<St, R>>,
        deciding: St::DecideFuture,
        place: QueueSlot<St>,
    ) -> Self
    where
        S: Clone,
    {
        let delay = place.taken.as_ref().map(|decision| tokio::time::sleep(decision.delay()));
        let service = if delay.is_some() { unready(&ready) } else { ready };
        Self { shared, call: Some((service, request)), deciding, place, delay, turn: None }
    }

    fn poll<ResBody>(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Waited<S, B, St>>
    where
        S: Service<Request<B>, Response = Response<ResBody>> + Clone,
        R: Rejection<ResBody>,
    {
        let mut this = self.project();
        let told = loop {
            let (service, request) = this.call.as_mut().expect("polled after it was ready");
            if let Some(delay) = this.delay.as_mut().as_pin_mut() {
                ready!(delay.poll(cx));
                this.delay.set(None);
                *this.turn = this.place.taken.take();
            }
            if let Some(decision) = &*this.turn {
                ready!(service.poll_ready(cx))?;
                let now = this.place.look();
                let now = now.as_ref().unwrap_or(decision);
                break this.shared.admitted_after(decision, now, this.place.ask(), request);
            }
            let decided = ready!(Pin::new(&mut *this.deciding).poll(cx));
            match this.shared.judge(decided, this.place.ask(), request) {
                AdmissionResult::Admitted(told) => break told,
                AdmissionResult::Refused(response) => return Poll::Ready(Ok(Done::Refused(response))),
                AdmissionResult::Delayed(decision) => {
                    let delay = decision.delay();
                    this.place.taken = Some(decision);
                    this.shared.tell_delayed(this.place);
                    *service = unready(service);
                    this.delay.set(Some(tokio::time::sleep(delay)));
                }
            }
        };
        let (mut ready, request) = this.call.take().expect("just looked at");
        Poll::Ready(Ok(Done::Call(ready.call(request), told)))
    }
}

/// The result of waiting. Polling the inner service ready can fail.
type Waited<S, B, St> = Result<
    Done<<S as Service<Request<B>>>::Future, St, <S as Service<Request<B>>>::Response>,
    <S as Service<Request<B>>>::Error,
>;

/// Returns a clone to wait with. The readied service may hold a permit or a slot that another
/// client needs, so it is dropped.
fn unready<S: Clone>(readied: &S) -> S {
    readied.clone()
}

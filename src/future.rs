//! The response, on its way.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use http::{Request, Response};
use pin_project_lite::pin_project;
use tokio::time::Sleep;
use tower_service::Service;

use crate::admission::{Shared, Told, Verdict};
use crate::aftermath::Place;
use crate::{Rejection, Storage, headers};

pin_project! {
    /// The future of [`RateLimit`](crate::RateLimit).
    ///
    /// It has called the inner service, or has its refusal ready, or is waiting in a box of its own: for a storage that
    /// did not answer at once, or for a leaky bucket's delay. While it waits for a delay, dropping it gives the place in
    /// the queue back if it is the last one.
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
            told: Told<St>,
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
    pub(crate) fn calling(inner: S::Future, told: Told<St>) -> Self {
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
    S: Service<Request<B>, Response = Response<ResBody>>,
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
                StateProj::Waiting { waiting } => match ready!(waiting.as_mut().poll(cx)) {
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
fn poll_and_tell<F, St, ResBody, E>(inner: Pin<&mut F>, told: &mut Told<St>, cx: &mut Context<'_>) -> Poll<F::Output>
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
        shared: Arc<Shared<St, R>>,
        // The service that was polled ready, and what it is to be called with.
        call: Option<(S, Request<B>)>,
        deciding: St::Decided,
        place: Place<St>,
        #[pin]
        delay: Option<Sleep>,
    }
}

/// How waiting ends.
enum Done<F, St: Storage, Response> {
    Call(F, Told<St>),
    Refused(Response),
}

impl<S, B, St: Storage, R> Waiting<S, B, St, R> {
    pub(crate) fn new(
        ready: S,
        request: Request<B>,
        shared: Arc<Shared<St, R>>,
        deciding: St::Decided,
        place: Place<St>,
    ) -> Self {
        let delay = place.taken.as_ref().map(|decision| tokio::time::sleep(decision.delay()));
        Self { shared, call: Some((ready, request)), deciding, place, delay }
    }

    fn poll<ResBody>(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Done<S::Future, St, S::Response>>
    where
        S: Service<Request<B>, Response = Response<ResBody>>,
        R: Rejection<ResBody>,
    {
        let mut this = self.project();
        let told = loop {
            let (_, request) = this.call.as_mut().expect("polled after it was ready");
            if let Some(delay) = this.delay.as_mut().as_pin_mut() {
                ready!(delay.poll(cx));
                let decision = this.place.taken.take().expect("who waits for a turn has a place");
                let now = this.place.look();
                break this.shared.admitted_after(
                    &decision,
                    now.as_ref().unwrap_or(&decision),
                    this.place.ask(),
                    request,
                );
            }
            let decided = ready!(Pin::new(&mut *this.deciding).poll(cx));
            match this.shared.judge(decided, this.place.ask(), request) {
                Verdict::Admitted(told) => break told,
                Verdict::Refused(response) => return Poll::Ready(Done::Refused(response)),
                Verdict::Delayed(decision) => {
                    this.delay.set(Some(tokio::time::sleep(decision.delay())));
                    this.place.taken = Some(decision);
                }
            }
        };
        let (mut ready, request) = this.call.take().expect("just looked at");
        Poll::Ready(Done::Call(ready.call(request), told))
    }
}

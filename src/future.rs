//! The response, on its way.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use http::{Request, Response};
use pin_project_lite::pin_project;
use tokio::time::Sleep;
use tower_service::Service;

use crate::admission::{Shared, Verdict};
use crate::headers::Numbers;
use crate::{Decision, Key, Policy, Rejection, Storage, headers};

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
            told: Option<Numbers>,
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
    pub(crate) fn calling(inner: S::Future, told: Option<Numbers>) -> Self {
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
                    return poll_and_tell(inner, *told, cx);
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
fn poll_and_tell<F, ResBody, E>(inner: Pin<&mut F>, told: Option<Numbers>, cx: &mut Context<'_>) -> Poll<F::Output>
where
    F: Future<Output = Result<Response<ResBody>, E>>,
{
    let mut polled = inner.poll(cx);
    if let Poll::Ready(Ok(response)) = &mut polled
        && let Some(numbers) = told
    {
        headers::write_admitted(response, numbers);
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
enum Done<F, Response> {
    Call(F, Option<Numbers>),
    Refused(Response),
}

impl<S, B, St: Storage, R> Waiting<S, B, St, R> {
    /// `delayed` is the decision, if it is there.
    pub(crate) fn new(
        ready: S,
        request: Request<B>,
        shared: Arc<Shared<St, R>>,
        policy: Policy,
        key: Key,
        deciding: St::Decided,
        delayed: Option<Box<Decision>>,
    ) -> Self {
        let delay = delayed.as_ref().map(|decision| tokio::time::sleep(decision.delay()));
        let place = Place { storage: shared.storage.clone(), policy, key, taken: delayed };
        Self { shared, call: Some((ready, request)), deciding, place, delay }
    }

    fn poll<ResBody>(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Done<S::Future, S::Response>>
    where
        S: Service<Request<B>, Response = Response<ResBody>>,
        R: Rejection<ResBody>,
    {
        let mut this = self.project();
        loop {
            let told = if let Some(delay) = this.delay.as_mut().as_pin_mut() {
                ready!(delay.poll(cx));
                this.place.taken.take().and_then(|decision| this.shared.headers.numbers_of(&decision))
            } else {
                let decided = ready!(Pin::new(&mut *this.deciding).poll(cx));
                let (_, request) = this.call.as_mut().expect("polled after it was ready");
                match this.shared.judge(decided, request) {
                    Verdict::Admitted(told) => told,
                    Verdict::Refused(response) => return Poll::Ready(Done::Refused(response)),
                    Verdict::Delayed(decision) => {
                        this.delay.set(Some(tokio::time::sleep(decision.delay())));
                        this.place.taken = Some(decision);
                        continue;
                    }
                }
            };
            let (mut ready, request) = this.call.take().expect("polled after it was ready");
            return Poll::Ready(Done::Call(ready.call(request), told));
        }
    }
}

/// A place in a leaky bucket's queue, given back when it is dropped before its turn.
struct Place<St: Storage> {
    storage: St,
    policy: Policy,
    key: Key,
    taken: Option<Box<Decision>>,
}

impl<St: Storage> Drop for Place<St> {
    fn drop(&mut self) {
        let Some(decision) = self.taken.take() else { return };
        let mut done = self.storage.refund(&self.policy, &self.key, &decision);
        let at_once = Pin::new(&mut done).poll(&mut Context::from_waker(std::task::Waker::noop()));
        if at_once.is_pending()
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            runtime.spawn(async move { drop(done.await) });
        }
    }
}

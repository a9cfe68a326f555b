//! The service: asks, then forwards or answers.

use std::fmt;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use http::{Request, Response};
use tower_service::Service;

use crate::admission::{Shared, Verdict};
use crate::extract::Head;
use crate::future::{ResponseFuture, Waiting};
use crate::storage::{Ask, Shown};
use crate::{MemoryStorage, Op, Rejection, Storage, TextRejection};

/// A service whose requests are limited, made by [`RateLimitLayer`](crate::RateLimitLayer).
///
/// The service that was polled ready is the one that is called; a refused request never reaches it. Responses, errors and
/// bodies are the inner service's own.
pub struct RateLimit<S, St = MemoryStorage, R = TextRejection> {
    inner: S,
    shared: Handle<St, R>,
}

/// A handle on what all services of a layer share.
type Handle<St, R> = Arc<Shared<St, R>>;

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

impl<S, St, R, B, ResBody> Service<Request<B>> for RateLimit<S, St, R>
where
    S: Service<Request<B>, Response = Response<ResBody>> + Clone,
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
        let (head, shared) = (Head::of(&request), &*self.shared);
        let Some(policy) = shared.policies.of(&head) else {
            return ResponseFuture::calling(self.inner.call(request), None);
        };
        // Looked at where it is, and moved only when it has to wait: handing things on costs more than making them.
        let extracted = shared.key.extract(&head);
        let key = match &extracted {
            Ok(Some(key)) => key,
            Ok(None) => return ResponseFuture::calling(self.inner.call(request), None),
            Err(missing) => return ResponseFuture::refused(shared.reject_missing(missing, &head)),
        };
        let cost = match shared.cost.as_ref().map_or(Ok(1), |cost| cost(&head)) {
            Ok(cost) => cost,
            Err(missing) => return ResponseFuture::refused(shared.reject_missing(&missing, &head)),
        };
        // What is free shows how things stand.
        let op = if cost == 0 { Op::Peek } else { Op::Hit };
        let ask = || Ask::new(&policy, key, op, cost);
        // Nearly always the answer is there at once, and is yes.
        let mut shown = shared.headers.tell_admitted().then(Shown::default);
        if op == Op::Hit && shared.storage.hit_at_once(ask(), shown.as_mut()) {
            let told = shown.and_then(|shown| shared.headers.numbers(shown.at, &shown.limit));
            return ResponseFuture::calling(self.inner.call(request), told);
        }
        let mut deciding = shared.storage.decide(ask());
        // A storage that knows the answer is not made to wait for the first poll of a future.
        let delayed = match Pin::new(&mut deciding).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(decided) => match shared.judge(decided, &mut request) {
                Verdict::Admitted(told) => return ResponseFuture::calling(self.inner.call(request), told),
                Verdict::Refused(response) => return ResponseFuture::refused(response),
                Verdict::Delayed(decision) => Some(decision),
            },
            Poll::Pending => None,
        };
        let (policy, key, shared) = (policy.into_owned(), key.clone(), Arc::clone(&self.shared));
        // The service that was polled ready is taken along, and a clone is left behind.
        let next = self.inner.clone();
        let ready = mem::replace(&mut self.inner, next);
        ResponseFuture::waiting(Waiting::new(ready, request, shared, policy, key, deciding, delayed))
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

//! The service: asks, then forwards or answers.

use std::fmt;
use std::mem;
use std::sync::Arc;
use std::task::{Context, Poll};

use http::{Request, Response};
use tower_service::Service;

use crate::admission::{Shared, Told, Verdict};
use crate::aftermath::poll_once;
use crate::extract::Head;
use crate::future::{Place, ResponseFuture, Waiting};
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
        let (shared, rules) = (&*self.shared, &self.shared.rules);
        if shared.lints.are_looking() {
            shared.look_at(&mut request);
        }
        let head = Head::of(&request);
        if rules.skips(&head) {
            return ResponseFuture::calling(self.inner.call(request), Told::NOTHING);
        }
        let Some(policy) = rules.policies.of(&head) else {
            return ResponseFuture::calling(self.inner.call(request), Told::NOTHING);
        };
        // Looked at where it is, and moved only when it has to wait: handing things on costs more than making them.
        let extracted = rules.key.extract(&head);
        let asked = match &extracted {
            Ok(None) => return ResponseFuture::calling(self.inner.call(request), Told::NOTHING),
            Ok(Some(key)) => rules.cost.as_ref().map_or(Ok(1), |cost| cost(&head)).map(|cost| (key, cost)),
            Err(missing) => Err(missing.clone()),
        };
        let (key, cost) = match asked {
            Ok(asked) => asked,
            Err(missing) => {
                return match shared.missing(&missing, &policy, &head) {
                    Some(response) => ResponseFuture::refused(response),
                    None => ResponseFuture::calling(self.inner.call(request), Told::NOTHING),
                };
            }
        };
        // What is free shows how things stand.
        let op = if cost == 0 { Op::Peek } else { Op::Hit };
        let ask = Ask::new(&policy, key, op, cost);
        if rules.shadow {
            let told = shared.try_out(ask);
            return ResponseFuture::calling(self.inner.call(request), told);
        }
        // Nearly always the answer is there at once, is yes, and nobody wants to know more.
        if op == Op::Hit && !rules.want_decisions() && policy.shadowed().is_none() {
            let mut shown = rules.headers.tell_numbers().then(Shown::default);
            if shared.storage.hit_at_once(ask, shown.as_mut()) {
                let numbers = shown.and_then(|shown| rules.headers.numbers(shown.at, &shown.limit));
                return ResponseFuture::calling(self.inner.call(request), Told::only(numbers));
            }
        }
        let mut deciding = shared.storage.decide(ask);
        // A storage that knows the answer is not made to wait for the first poll of a future.
        let delayed = match poll_once(&mut deciding) {
            Poll::Ready(decided) => match shared.judge(decided, ask, &mut request) {
                Verdict::Admitted(told) => return ResponseFuture::calling(self.inner.call(request), told),
                Verdict::Refused(response) => return ResponseFuture::refused(response),
                Verdict::Delayed(decision) => Some(decision),
            },
            Poll::Pending => None,
        };
        let account = shared.account(&policy, key, false);
        // The service that was polled ready is taken along, and a clone is left behind.
        let next = self.inner.clone();
        let ready = mem::replace(&mut self.inner, next);
        let place = Place::new(account, cost, delayed);
        ResponseFuture::waiting(Waiting::new(ready, request, Arc::clone(&self.shared), deciding, place))
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

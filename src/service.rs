//! The service: asks, then forwards or answers.

use std::borrow::Cow;
use std::fmt;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use http::header::{HeaderValue, RETRY_AFTER};
use http::{Request, Response};
use tower_service::Service;

use crate::extract::{Head, Missing};
use crate::future::{ResponseFuture, Waiting};
use crate::layer::{OnError, Shared};
use crate::per_request::Choice;
use crate::storage::Ask;
use crate::{Decision, Headers, Key, MemoryStorage, Op, Policy, Refused, Rejection, Storage, TextRejection, headers};

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

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let head = Head::of(&request);
        let Question { policy, key, cost } = match self.shared.question(&head) {
            Ok(Some(question)) => question,
            Ok(None) => return ResponseFuture::calling(self.inner.call(request), None),
            Err(missing) => return ResponseFuture::refused(self.shared.reject_missing(&missing, &head)),
        };
        // What is free shows how things stand.
        let op = if cost == 0 { Op::Peek } else { Op::Hit };
        let mut deciding = self.shared.storage.decide(Ask::new(&policy, &key, op, cost));
        // A storage that knows the answer is not made to wait for the first poll of a future.
        let delayed = match Pin::new(&mut deciding).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(decided) => match self.shared.judge(decided, &head) {
                Verdict::Admitted(told) => return ResponseFuture::calling(self.inner.call(request), told),
                Verdict::Refused(response) => return ResponseFuture::refused(response),
                Verdict::Delayed(decision) => Some(decision),
            },
            Poll::Pending => None,
        };
        let (policy, shared) = (policy.into_owned(), Arc::clone(&self.shared));
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

/// What the storage is to be asked about a request.
struct Question<'a> {
    policy: Cow<'a, Policy>,
    key: Key,
    cost: u32,
}

/// What an admitted request's response is told.
pub(crate) type Told = Option<(Decision, Headers)>;

/// What becomes of a request.
pub(crate) enum Verdict<ResBody> {
    Admitted(Told),
    Delayed(Decision),
    Refused(Response<ResBody>),
}

impl<St: Storage, R> Shared<St, R> {
    /// What to ask about a request; `None` when it is not limited.
    fn question(&self, head: &Head<'_>) -> Result<Option<Question<'_>>, Missing> {
        let policy = match &self.policies.0 {
            Choice::Always(policy) => Cow::Borrowed(policy),
            Choice::By(choose) => match choose(head) {
                Some(policy) => Cow::Owned(policy),
                None => return Ok(None),
            },
        };
        let Some(key) = self.key.extract(head)? else { return Ok(None) };
        let cost = self.cost.as_ref().map_or(Ok(1), |cost| cost(head))?;
        Ok(Some(Question { policy, key, cost }))
    }

    /// What becomes of a request on which the storage has answered.
    pub(crate) fn judge<ResBody>(&self, decided: Result<Decision, St::Error>, head: &Head<'_>) -> Verdict<ResBody>
    where
        R: Rejection<ResBody>,
    {
        match decided {
            Ok(decision) if decision.is_refused() => Verdict::Refused(self.reject(decision, head)),
            Ok(decision) if decision.delay().is_zero() => Verdict::Admitted(Some((decision, self.headers))),
            Ok(decision) => Verdict::Delayed(decision),
            Err(error) => {
                storage_failed(&error.into());
                match self.on_error {
                    OnError::Admit => Verdict::Admitted(None),
                    OnError::Refuse => {
                        let mut response = self.rejection.reject(Refused::Storage, head);
                        response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
                        Verdict::Refused(response)
                    }
                }
            }
        }
    }

    fn reject<ResBody>(&self, decision: Decision, head: &Head<'_>) -> Response<ResBody>
    where
        R: Rejection<ResBody>,
    {
        let mut response = self.rejection.reject(Refused::Limit(&decision), head);
        headers::write_refused(&mut response, decision, self.headers);
        response
    }

    fn reject_missing<ResBody>(&self, missing: &Missing, head: &Head<'_>) -> Response<ResBody>
    where
        R: Rejection<ResBody>,
    {
        key_missing(missing);
        let mut response = self.rejection.reject(Refused::Missing(missing), head);
        response.extensions_mut().insert(missing.clone());
        response
    }
}

#[cfg(feature = "tracing")]
fn storage_failed(error: &crate::BoxError) {
    tracing::error!(error = &**error as &dyn std::error::Error, "the rate limit storage failed");
}

#[cfg(feature = "tracing")]
fn key_missing(missing: &Missing) {
    if missing.is_clients_fault() {
        tracing::debug!(reason = missing.reason(), "a request could not be limited");
    } else {
        tracing::error!(reason = missing.reason(), "requests cannot be limited");
    }
}

#[cfg(not(feature = "tracing"))]
fn storage_failed(_: &crate::BoxError) {}

#[cfg(not(feature = "tracing"))]
fn key_missing(_: &Missing) {}

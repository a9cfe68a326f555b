//! What to ask about a request, and what becomes of it.

use std::mem;
use std::sync::Arc;

use http::header::{HeaderValue, RETRY_AFTER};
use http::{Request, Response};

use crate::extract::{Head, KeyExtractor, Missing};
use crate::headers::Numbers;
use crate::per_request::{CostFn, Policies};
use crate::{BoxError, Decision, Headers, Refused, Rejection, Storage, headers};

/// What all services of a layer share.
pub(crate) struct Shared<St, R> {
    pub(crate) policies: Policies,
    pub(crate) key: Arc<dyn KeyExtractor>,
    pub(crate) cost: Option<Arc<CostFn>>,
    pub(crate) storage: St,
    pub(crate) on_error: OnError,
    pub(crate) rejection: Arc<R>,
    pub(crate) headers: Headers,
}

/// What to do with a request when the storage has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums)] // open or closed
pub enum OnError {
    /// Pass it on, without rate-limit header fields: the service stays up, unprotected.
    Admit,
    /// Answer 503 with `Retry-After: 1`: the service stays protected, and down.
    Refuse,
}

impl<St: Clone, R> Clone for Shared<St, R> {
    fn clone(&self) -> Self {
        Self {
            policies: self.policies.clone(),
            key: Arc::clone(&self.key),
            cost: self.cost.clone(),
            storage: self.storage.clone(),
            on_error: self.on_error,
            rejection: Arc::clone(&self.rejection),
            headers: self.headers,
        }
    }
}

/// What becomes of a request.
pub(crate) enum Verdict<ResBody> {
    /// Its response is told these numbers.
    Admitted(Option<Numbers>),
    Delayed(Box<Decision>),
    Refused(Response<ResBody>),
}

impl<St: Storage, R> Shared<St, R> {
    /// What becomes of a request on which the storage has answered. If it is refused, what was attached to it is taken.
    #[inline]
    pub(crate) fn judge<B, ResBody>(
        &self,
        decided: Result<Decision, St::Error>,
        request: &mut Request<B>,
    ) -> Verdict<ResBody>
    where
        R: Rejection<ResBody>,
    {
        match decided {
            Ok(ref decision) if decision.is_refused() => {
                let mut response = self.rejection.reject(Refused::Limit(decision), &Head::of(request));
                headers::write_refused(&mut response, decision, self.headers);
                headers::attach(&mut response, decision, mem::take(request.extensions_mut()));
                Verdict::Refused(response)
            }
            Ok(decision) if decision.is_at_once() => Verdict::Admitted(self.headers.numbers_of(&decision)),
            Ok(decision) => Verdict::Delayed(Box::new(decision)),
            Err(error) => self.without_storage(&error.into(), &Head::of(request)),
        }
    }

    #[cold]
    fn without_storage<ResBody>(&self, error: &BoxError, head: &Head<'_>) -> Verdict<ResBody>
    where
        R: Rejection<ResBody>,
    {
        storage_failed(error);
        match self.on_error {
            OnError::Admit => Verdict::Admitted(None),
            OnError::Refuse => {
                let mut response = self.rejection.reject(Refused::Storage, head);
                response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
                Verdict::Refused(response)
            }
        }
    }

    #[cold]
    pub(crate) fn reject_missing<ResBody>(&self, missing: &Missing, head: &Head<'_>) -> Response<ResBody>
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
fn storage_failed(error: &BoxError) {
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
fn storage_failed(_: &BoxError) {}

#[cfg(not(feature = "tracing"))]
fn key_missing(_: &Missing) {}

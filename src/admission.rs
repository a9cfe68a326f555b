//! What to ask about a request, and what becomes of it.

use std::borrow::Cow;
use std::sync::Arc;

use http::Response;
use http::header::{HeaderValue, RETRY_AFTER};

use crate::extract::{Head, KeyExtractor, Missing};
use crate::headers::Numbers;
use crate::per_request::{Choice, CostFn, Policies};
use crate::{Decision, Headers, Key, Policy, Refused, Rejection, Storage, headers};

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

/// What the storage is to be asked about a request.
pub(crate) struct Question<'a> {
    pub(crate) policy: Cow<'a, Policy>,
    pub(crate) key: Key,
    pub(crate) cost: u32,
}

/// What becomes of a request.
pub(crate) enum Verdict<ResBody> {
    /// Its response is told these numbers.
    Admitted(Option<Numbers>),
    Delayed(Box<Decision>),
    Refused(Response<ResBody>),
}

impl<St: Storage, R> Shared<St, R> {
    /// What to ask about a request; `None` when it is not limited.
    pub(crate) fn question(&self, head: &Head<'_>) -> Result<Option<Question<'_>>, Missing> {
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
            Ok(decision) if decision.delay().is_zero() => Verdict::Admitted(self.headers.numbers(&decision)),
            Ok(decision) => Verdict::Delayed(Box::new(decision)),
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

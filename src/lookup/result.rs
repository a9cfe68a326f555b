//! The result of a lookup: a tenant or an error.

use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use http::Extensions;

use crate::error::BoxError;
use crate::extract::KeyError;
use crate::key::Key;
use crate::policy::{IntoPolicy, SharedPolicy};

/// The result of a [`PolicyLookup`](crate::PolicyLookup) for one id: the policy of all requests with
/// this id, or the error with which they are rejected.
///
/// [`key`](Self::key) sets the key of these requests, and [`extension`](Self::extension) adds a value
/// for their handlers. `Tenant::from` and `into` convert these types into a tenant:
///
/// | type | effect on the requests |
/// |---|---|
/// | [`Policy`](crate::Policy), [`Quota`](crate::Quota) or [`Limit`](crate::Limit) | they are limited by this policy |
/// | [`LivePolicy`](crate::LivePolicy) | they are limited by its current policy, even while the tenant is cached |
/// | an `Option` of one of these | `None` means that they are not limited |
/// | [`KeyError`] | they are rejected with the status of the error |
#[derive(Clone, Debug)]
pub struct Tenant {
    pub(crate) policy: TenantPolicy,
    /// Inserted into the extensions of each request.
    pub(crate) extensions: Extensions,
}

#[derive(Clone, Debug)]
pub(crate) enum TenantPolicy {
    Limited(SharedPolicy, Option<Key>),
    Unlimited,
    Rejected(KeyError),
}

impl Tenant {
    fn new(policy: TenantPolicy) -> Self {
        Self { policy, extensions: Extensions::new() }
    }

    pub(super) fn unlimited() -> Self {
        Self::new(TenantPolicy::Unlimited)
    }

    /// Sets the key of the tenant's requests. The layer's extractor is then not called for them.
    /// Defaults to the key that the extractor returns.
    ///
    /// Does nothing for a tenant that is not limited or is a [`KeyError`].
    #[must_use]
    pub fn key(mut self, key: Key) -> Self {
        if let TenantPolicy::Limited(_, own_key) = &mut self.policy {
            *own_key = Some(key);
        }
        self
    }

    /// Inserts a clone of `value` into the extensions of each of the tenant's requests, for example
    /// the account. So the handler needs no query of its own. A value of the same type that is in
    /// the request already is replaced.
    ///
    /// The layer's extractor, its closure of [`cost`](crate::RateLimitLayer::cost) and its
    /// [`Rejection`](crate::Rejection) find the value too. The value is cached with the tenant.
    ///
    /// A request that was admitted although its lookup failed has no value, and neither has a
    /// skipped request.
    #[must_use]
    pub fn extension<T: Clone + Send + Sync + 'static>(mut self, value: T) -> Self {
        self.extensions.insert(value);
        self
    }
}

impl<P: IntoPolicy> From<P> for Tenant {
    fn from(policy: P) -> Self {
        Self::new(TenantPolicy::Limited(policy.into_shared(), None))
    }
}

impl<P: IntoPolicy> From<Option<P>> for Tenant {
    fn from(policy: Option<P>) -> Self {
        policy.map_or_else(Self::unlimited, Self::from)
    }
}

/// Rejects the tenant's requests with the status of the error. Use it for an unknown id, for
/// example.
impl From<KeyError> for Tenant {
    fn from(error: KeyError) -> Self {
        Self::new(TenantPolicy::Rejected(error))
    }
}

/// The error of a failed lookup of a policy.
///
/// | cause | [`source`](Error::source) |
/// |---|---|
/// | the lookup returned an error | this error |
/// | the lookup took longer than its [timeout](crate::PolicyLookup::timeout) | none |
/// | the lookup panicked, or its runtime has ended | none |
/// | there is no tokio runtime with time enabled | none |
/// | too many lookups [wait](crate::PolicyLookup::max_lookups) | none |
///
/// All requests that wait for the same lookup get clones of one error.
#[derive(Clone)]
pub struct LookupError(Arc<LookupErrorKind>);

enum LookupErrorKind {
    Failed(BoxError),
    TimedOut(Duration),
    Panicked,
    NoRuntime,
    /// The number of lookups in flight.
    TooMany(usize),
}

impl LookupError {
    pub(super) fn failed(error: BoxError) -> Self {
        Self(Arc::new(LookupErrorKind::Failed(error)))
    }

    pub(super) fn timed_out(timeout: Duration) -> Self {
        Self(Arc::new(LookupErrorKind::TimedOut(timeout)))
    }

    pub(super) fn panicked() -> Self {
        Self(Arc::new(LookupErrorKind::Panicked))
    }

    pub(super) fn no_runtime() -> Self {
        Self(Arc::new(LookupErrorKind::NoRuntime))
    }

    pub(super) fn too_many(in_flight: usize) -> Self {
        Self(Arc::new(LookupErrorKind::TooMany(in_flight)))
    }

    /// Returns `true` if the lookup took longer than its timeout.
    pub fn is_timeout(&self) -> bool {
        matches!(*self.0, LookupErrorKind::TimedOut(_))
    }
}

impl fmt::Display for LookupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("cannot look up the policy")?;
        match &*self.0 {
            LookupErrorKind::Failed(_) => Ok(()),
            LookupErrorKind::TimedOut(timeout) => write!(f, ": no result within {timeout:?}"),
            LookupErrorKind::Panicked => f.write_str(": the lookup panicked, or its runtime has ended"),
            LookupErrorKind::NoRuntime => f.write_str(": there is no tokio runtime with time enabled"),
            LookupErrorKind::TooMany(in_flight) => write!(f, ": {in_flight} lookups are in flight or wait already"),
        }
    }
}

impl fmt::Debug for LookupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LookupError({self}")?;
        if let LookupErrorKind::Failed(error) = &*self.0 {
            write!(f, ": {error:?}")?;
        }
        f.write_str(")")
    }
}

impl Error for LookupError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match &*self.0 {
            LookupErrorKind::Failed(error) => Some(&**error),
            LookupErrorKind::TimedOut(_)
            | LookupErrorKind::Panicked
            | LookupErrorKind::NoRuntime
            | LookupErrorKind::TooMany(_) => None,
        }
    }
}

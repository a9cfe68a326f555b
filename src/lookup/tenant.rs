//! The result of a lookup.

use http::Extensions;

use crate::extract::KeyError;
use crate::key::Key;
use crate::policy::{IntoPolicy, SharedPolicy};

/// The result of a [`PolicyLookup`](crate::PolicyLookup). It decides what happens to the requests
/// with one id.
///
/// Created with `Tenant::from` or `into` from one of these:
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

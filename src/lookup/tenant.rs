//! The result of a lookup.

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
pub struct Tenant(pub(crate) Outcome);

#[derive(Clone, Debug)]
pub(crate) enum Outcome {
    Limited(SharedPolicy, Option<Key>),
    Unlimited,
    Rejected(KeyError),
}

impl Tenant {
    /// Sets the key of the tenant's requests. The layer's extractor is then not called for them.
    /// Defaults to the key that the extractor returns.
    ///
    /// Does nothing for a tenant that is not limited or is a [`KeyError`].
    #[must_use]
    pub fn key(self, key: Key) -> Self {
        match self.0 {
            Outcome::Limited(policy, _) => Self(Outcome::Limited(policy, Some(key))),
            other => Self(other),
        }
    }
}

impl<P: IntoPolicy> From<P> for Tenant {
    fn from(policy: P) -> Self {
        Self(Outcome::Limited(policy.into_shared(), None))
    }
}

impl<P: IntoPolicy> From<Option<P>> for Tenant {
    fn from(policy: Option<P>) -> Self {
        policy.map_or(Self(Outcome::Unlimited), Self::from)
    }
}

/// Rejects the tenant's requests with the status of the error. Use it for an unknown id, for
/// example.
impl From<KeyError> for Tenant {
    fn from(error: KeyError) -> Self {
        Self(Outcome::Rejected(error))
    }
}

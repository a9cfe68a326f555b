use crate::extract::KeyError;
use crate::{IntoPolicy, Key, SharedPolicy};

/// The result of a [`PolicyLookup`](crate::PolicyLookup): a policy, no limit, or a key error.
///
/// A policy, a [`Quota`](crate::Quota), a [`Limit`](crate::Limit), a
/// [`LivePolicy`](crate::LivePolicy), a [`KeyError`] and an `Option` of a policy convert into a
/// tenant. `None` means that the tenant is not limited.
#[derive(Clone, Debug)]
pub struct Tenant(pub(crate) Outcome);

#[derive(Clone, Debug)]
pub(crate) enum Outcome {
    Limited(SharedPolicy, Option<Key>),
    Unlimited,
    Rejected(KeyError),
}

impl Tenant {
    /// Sets the key of the tenant's requests. Defaults to the key of the layer's extractor. Does
    /// nothing for a tenant without a policy.
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

/// Rejects the tenant's requests with the status of the error, for example if the id is unknown.
impl From<KeyError> for Tenant {
    fn from(error: KeyError) -> Self {
        Self(Outcome::Rejected(error))
    }
}

//! What may differ from request to request: whether it is limited at all, by which policy, what it costs, and whether that
//! is charged in the end.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use http::{Extensions, HeaderMap, Response, StatusCode, Version};

use crate::extract::{AllowList, Caveat, Head, Missing};
use crate::{ConfigError, Policy, Storage};

type PolicyFn = dyn Fn(&Head<'_>) -> Option<Policy> + Send + Sync;
pub(crate) type CostFn = dyn Fn(&Head<'_>) -> Result<u32, Missing> + Send + Sync;
pub(crate) type ChargeFn = dyn Fn(&ResponseHead<'_>) -> bool + Send + Sync;

/// Which policy binds a request: always the same, or one chosen by its head.
#[derive(Clone)]
pub struct Policies(pub(crate) Choice, Clients);

/// The number of clients that fill the storage, as far as it is known.
struct Clients(AtomicU64);

impl Clients {
    const UNKNOWN: u64 = u64::MAX;
}

impl Default for Clients {
    fn default() -> Self {
        Self(Self::UNKNOWN.into())
    }
}

impl Clone for Clients {
    fn clone(&self) -> Self {
        Self(self.0.load(Ordering::Relaxed).into())
    }
}

/// A layer warns of a storage that fewer clients fill.
const FEW_CLIENTS: u64 = 10_000;

#[derive(Clone)]
pub(crate) enum Choice {
    Always(Policy),
    By(Arc<PolicyFn>),
}

impl Policies {
    /// The policy that binds a request; `None` when it is not limited.
    #[inline]
    pub(crate) fn of(&self, head: &Head<'_>) -> Option<Cow<'_, Policy>> {
        match &self.0 {
            Choice::Always(policy) => Some(Cow::Borrowed(policy)),
            Choice::By(choose) => choose(head).map(Cow::Owned),
        }
    }

    /// Whether the storage can keep what is known beforehand, limits that are only tried out too.
    pub(crate) fn fit(&self, storage: &impl Storage) -> Result<(), ConfigError> {
        match &self.0 {
            Choice::Always(policy) => {
                storage.validate(policy)?;
                let clients = storage.clients_to_fill(policy).unwrap_or(Clients::UNKNOWN);
                self.1.0.store(clients, Ordering::Relaxed);
                policy.shadows().iter().try_for_each(|shadow| storage.validate(shadow))
            }
            Choice::By(_) => Ok(()),
        }
    }

    /// What may be wrong with the storage, by the last call of [`fit`](Self::fit).
    pub(crate) fn caveats(&self) -> Option<Caveat> {
        let clients = self.1.0.load(Ordering::Relaxed);
        (clients < FEW_CLIENTS).then_some(Caveat::SmallStorage { clients })
    }
}

impl<P: Into<Policy>> From<P> for Policies {
    fn from(policy: P) -> Self {
        Self(Choice::Always(policy.into()), Clients::default())
    }
}

impl fmt::Debug for Policies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Choice::Always(policy) => policy.fmt(f),
            Choice::By(_) => f.write_str("policy_by(..)"),
        }
    }
}

/// Chooses the policy of each request by its head: tiers, tenants, exceptions.
///
/// The closure answers a [`Policy`], or an `Option` of one: `None` is not limited. Make the policies once and clone them,
/// which is cheap, and name them: equal names share what is remembered, and two tiers should not.
///
/// ```
/// use tower_ratelimit::extract::Head;
/// use tower_ratelimit::{Header, Policy, Quota, RateLimitLayer, policy_by};
///
/// let free = Policy::from(Quota::per_minute(10)).with_name("free");
/// let paid = Policy::from(Quota::per_minute(1_000)).with_name("paid");
/// let tier = move |head: &Head<'_>| {
///     let key = head.headers.get("x-api-key");
///     if key.is_some_and(|key| key.as_bytes().starts_with(b"paid-")) { paid.clone() } else { free.clone() }
/// };
/// let layer = RateLimitLayer::new(policy_by(tier), Header::new("x-api-key"));
/// ```
pub fn policy_by<F, T>(choose: F) -> Policies
where
    F: Fn(&Head<'_>) -> T + Send + Sync + 'static,
    T: Into<Option<Policy>>,
{
    Policies(Choice::By(Arc::new(move |head: &Head<'_>| choose(head).into())), Clients::default())
}

/// What a closure given to [`RateLimitLayer::cost`](crate::RateLimitLayer::cost) may answer: units, or a `Result` of them with [`Missing`].
pub trait IntoCost {
    /// The units.
    ///
    /// # Errors
    ///
    /// The closure's own.
    fn into_cost(self) -> Result<u32, Missing>;
}

impl IntoCost for u32 {
    fn into_cost(self) -> Result<u32, Missing> {
        Ok(self)
    }
}

impl IntoCost for Result<u32, Missing> {
    fn into_cost(self) -> Result<u32, Missing> {
        self
    }
}

/// What says which requests are not limited: see [`RateLimitLayer::skip`](crate::RateLimitLayer::skip).
///
/// Closures over the [`Head`] that answer a `bool` do, and an [`AllowList`].
pub trait Skip: Send + Sync + 'static {
    /// Whether the request passes without having been counted.
    fn skips(&self, head: &Head<'_>) -> bool;

    /// What may be wrong with how it is set up, as [`KeyExtractor::caveats`](crate::KeyExtractor::caveats).
    fn caveats(&self) -> Vec<Caveat> {
        Vec::new()
    }
}

impl<T: Skip + ?Sized> Skip for Arc<T> {
    fn skips(&self, head: &Head<'_>) -> bool {
        (**self).skips(head)
    }

    fn caveats(&self) -> Vec<Caveat> {
        (**self).caveats()
    }
}

impl Skip for Box<dyn Skip> {
    fn skips(&self, head: &Head<'_>) -> bool {
        (**self).skips(head)
    }

    fn caveats(&self) -> Vec<Caveat> {
        (**self).caveats()
    }
}

impl<F> Skip for F
where
    F: Fn(&Head<'_>) -> bool + Send + Sync + 'static,
{
    fn skips(&self, head: &Head<'_>) -> bool {
        self(head)
    }
}

impl Skip for AllowList {
    fn skips(&self, head: &Head<'_>) -> bool {
        self.allows(head)
    }

    fn caveats(&self) -> Vec<Caveat> {
        Self::caveats(self)
    }
}

/// A response without its body, borrowed: what says whether a request is charged. See
/// [`RateLimitLayer::charge_when`](crate::RateLimitLayer::charge_when).
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct ResponseHead<'a> {
    /// The status.
    pub status: StatusCode,
    /// The version of HTTP.
    pub version: Version,
    /// The header fields.
    pub headers: &'a HeaderMap,
    /// What the service has attached.
    pub extensions: &'a Extensions,
}

impl<'a> ResponseHead<'a> {
    /// The head of a response.
    pub fn of<B>(response: &'a Response<B>) -> Self {
        Self {
            status: response.status(),
            version: response.version(),
            headers: response.headers(),
            extensions: response.extensions(),
        }
    }
}

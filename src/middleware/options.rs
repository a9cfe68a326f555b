//! Options that depend on the request: its policy, its cost, skipping it, and settling it by its
//! response.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use http::{Extensions, HeaderMap, Response, StatusCode, Version};

use crate::error::ConfigError;
use crate::extract::{Head, KeyError};
use crate::limiter::validate;
#[cfg(feature = "lookup")]
use crate::lookup::{FindTenant, PolicyLookup};
use crate::middleware::together::Together;
use crate::policy::{IntoPolicy, Policy, SharedPolicy};
use crate::reservation::Correction;
use crate::storage::AnyStorage;

type PolicyFn = dyn Fn(&Head<'_>) -> Option<Policy> + Send + Sync;
pub(crate) type CostFn = dyn Fn(&Head<'_>) -> Result<u32, KeyError> + Send + Sync;
type SettleFn = dyn Fn(&ResponseHead<'_>) -> Option<u32> + Send + Sync;
type ClearFn = dyn Fn(&ResponseHead<'_>) -> bool + Send + Sync;

/// The sources of a request's actual cost.
#[derive(Clone, Default)]
pub(crate) struct SettleOptions {
    /// A closure over the head of the response. Its result `None` keeps the estimated cost.
    pub(crate) by_response: Option<Arc<SettleFn>>,
    /// A closure over the head of the response. If it returns `true`, the key is cleared.
    pub(crate) clears: Option<Arc<ClearFn>>,
    /// `true` if a [`Reservation`](crate::Reservation) is in the request's extensions.
    pub(crate) is_later: bool,
}

impl SettleOptions {
    /// Returns `true` if the head of the response decides, unless a reservation does.
    pub(crate) fn is_by_response(&self) -> bool {
        self.by_response.is_some() || self.clears.is_some()
    }

    /// Returns the correction for the head of the response. `None` keeps the estimated cost.
    pub(crate) fn correction(&self, response: &ResponseHead<'_>) -> Option<Correction> {
        if self.clears.as_ref().is_some_and(|clears| clears(response)) {
            return Some(Correction::Clear);
        }
        self.by_response.as_ref().and_then(|actual| actual(response)).map(Correction::Cost)
    }
}

/// The source of the policy of each request: a fixed policy, a [`LivePolicy`](crate::LivePolicy),
/// the closure of [`policy_by`], or a `PolicyLookup` (feature `lookup`).
///
/// [`IntoPolicySource`] converts these types into a `PolicySource`.
#[derive(Clone)]
pub struct PolicySource(pub(crate) Choice);

#[derive(Clone)]
pub(crate) enum Choice {
    Always(SharedPolicy),
    By(Arc<PolicyFn>),
    #[cfg(feature = "lookup")]
    LookUp(Arc<dyn FindTenant>),
}

impl PolicySource {
    /// Returns the policy for the request, or `None` if the request is not limited. Also returns
    /// `None` for a [lookup](Self::lookup), which is asynchronous.
    #[inline]
    pub(crate) fn of(&self, head: &Head<'_>) -> Option<Cow<'_, Policy>> {
        match &self.0 {
            Choice::Always(policy) => Some(policy.read()),
            Choice::By(choose) => choose(head).map(Cow::Owned),
            #[cfg(feature = "lookup")]
            Choice::LookUp(_) => None,
        }
    }

    /// Returns the lookup that chooses the policy, if there is one.
    #[cfg(feature = "lookup")]
    pub(crate) fn lookup(&self) -> Option<&dyn FindTenant> {
        match &self.0 {
            Choice::LookUp(lookup) => Some(&**lookup),
            _ => None,
        }
    }

    /// Returns the fixed or live policy, or `None` if the policy depends on the request.
    pub(crate) fn shared(&self) -> Option<&SharedPolicy> {
        if let Choice::Always(policy) = &self.0 { Some(policy) } else { None }
    }

    /// Checks that the storage supports the policy and its shadow limits, and all later policies of
    /// a live one. A policy that depends on the request is not checked.
    /// If it is one of several, also checks that the storage decides on all of them `together`.
    pub(super) fn bind(self, storage: &AnyStorage, together: Option<Arc<Together>>) -> Result<Self, ConfigError> {
        let Choice::Always(policy) = self.0 else { return Ok(self) };
        let storage = storage.clone();
        let bound = policy.bind(move |policy, changes| {
            validate(policy, &storage)?;
            together.as_ref().map_or(Ok(()), |together| together.check(changes))
        });
        Ok(Self(Choice::Always(bound?)))
    }

    /// The same for the only policy of a layer.
    pub(crate) fn bind_alone(self, storage: &AnyStorage) -> Result<Self, ConfigError> {
        self.bind(storage, None)
    }
}

/// A type that a layer accepts as its policy, for example in
/// [`RateLimitLayer::new`](crate::RateLimitLayer::new).
///
/// Implemented for [`Policy`], [`Quota`](crate::Quota), [`Limit`](crate::Limit),
/// [`LivePolicy`](crate::LivePolicy), `PolicyLookup` (feature `lookup`), and for the
/// [`PolicySource`] that [`policy_by`] returns.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a policy",
    label = "expected a `Policy`, a `Quota`, a `Limit`, a `LivePolicy` or `policy_by(..)`",
    note = "parse a text: `\"10/second\".parse::<Policy>()?`, with the `?`",
    note = "give a strategy its quota: `Policy::new(TokenBucket::new(), Quota::per_second(10))`",
    note = "choose a policy for each request by `policy_by(|head| ..)`"
)]
pub trait IntoPolicySource {
    /// Converts `self` into a [`PolicySource`].
    fn into_policy_source(self) -> PolicySource;
}

impl IntoPolicySource for PolicySource {
    fn into_policy_source(self) -> PolicySource {
        self
    }
}

#[cfg(feature = "lookup")]
impl<I: Clone + Eq + std::hash::Hash + Send + Sync + 'static> IntoPolicySource for PolicyLookup<I> {
    fn into_policy_source(self) -> PolicySource {
        PolicySource(Choice::LookUp(self.into_lookup()))
    }
}

impl IntoPolicySource for SharedPolicy {
    fn into_policy_source(self) -> PolicySource {
        PolicySource(Choice::Always(self))
    }
}

#[diagnostic::do_not_recommend]
impl<P: IntoPolicy> IntoPolicySource for P {
    fn into_policy_source(self) -> PolicySource {
        PolicySource(Choice::Always(self.into_shared()))
    }
}

// This trait, `IntoCost` and `IntoKey` are not one trait, because the compiler's message about a wrong
// type belongs to the trait.
/// A type that the closure of [`policy_by`] can return.
///
/// Implemented for [`Policy`], [`Quota`](crate::Quota), [`Limit`](crate::Limit),
/// [`LivePolicy`](crate::LivePolicy), and for an `Option` of each.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a policy",
    label = "the closure of `policy_by` returns a `Policy`, a `Quota`, a `Limit`, a `LivePolicy`, or an `Option` of one",
    note = "parse texts once, outside of the closure: `\"10/second\".parse::<Policy>()?`",
    note = "a policy is not awaited: use `PolicyLookup` (feature `lookup`) instead of `policy_by`"
)]
pub trait ChosenPolicy {
    /// Returns the policy, or `None` if the request is not limited. For a
    /// [`LivePolicy`](crate::LivePolicy), returns its current policy.
    fn chosen(self) -> Option<Policy>;
}

#[diagnostic::do_not_recommend]
impl<P: IntoPolicy> ChosenPolicy for P {
    fn chosen(self) -> Option<Policy> {
        Some(self.into_policy())
    }
}

impl<P: IntoPolicy> ChosenPolicy for Option<P> {
    fn chosen(self) -> Option<Policy> {
        self.map(P::into_policy)
    }
}

impl fmt::Debug for PolicySource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Choice::Always(policy) => policy.fmt(f),
            Choice::By(_) => f.write_str("policy_by(..)"),
            #[cfg(feature = "lookup")]
            Choice::LookUp(_) => f.write_str("PolicyLookup(..)"),
        }
    }
}

/// Chooses the policy of each request by its head, for example for tiers or tenants.
///
/// The closure returns a [`Policy`], a [`Quota`](crate::Quota), a [`Limit`](crate::Limit), a
/// [`LivePolicy`](crate::LivePolicy), or an `Option` of one. `None` means that the request is not
/// limited. Create the policies once and clone them, which is cheap. Give each policy its own name,
/// because policies with the same name share their states.
///
/// The layer cannot check these policies when it is built. If its storage does not support a
/// policy, the requests of that policy are handled as if the storage had failed: see [`OnError`].
///
/// [`OnError`]: crate::OnError
///
/// ```
/// use tower_ratelimit::extract::{Extension, Head};
/// use tower_ratelimit::{Key, Policy, Quota, RateLimitLayer, policy_by};
///
/// /// Inserted into the extensions by the authentication layer.
/// #[derive(Clone)]
/// struct User {
///     id: u64,
///     has_paid: bool,
/// }
///
/// let free = Policy::from(Quota::per_minute(10)).with_name("free");
/// let paid = Policy::from(Quota::per_minute(1_000)).with_name("paid");
/// let tier = move |head: &Head<'_>| {
///     let has_paid = head.extensions.get::<User>().is_some_and(|user| user.has_paid);
///     if has_paid { paid.clone() } else { free.clone() }
/// };
/// let layer = RateLimitLayer::new(policy_by(tier), Extension::new(|user: &User| Key::from(user.id)));
/// ```
pub fn policy_by<F, T>(choose: F) -> PolicySource
where
    F: Fn(&Head<'_>) -> T + Send + Sync + 'static,
    T: ChosenPolicy,
{
    PolicySource(Choice::By(Arc::new(move |head: &Head<'_>| choose(head).chosen())))
}

/// A type that the closure of [`RateLimitLayer::cost`](crate::RateLimitLayer::cost) can return.
///
/// Implemented for `u32` and for `Result<u32, KeyError>`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a cost",
    label = "the closure of `cost` returns a `u32`, or a `Result<u32, KeyError>`",
    note = "convert another number: `u32::try_from(..).unwrap_or(u32::MAX)`",
    note = "a cost is not awaited: compute it in an outer layer and read it from the extensions, or use `settle_later`"
)]
pub trait IntoCost {
    /// Returns the cost in units.
    ///
    /// # Errors
    ///
    /// Returns the [`KeyError`] of the closure. The request is then rejected.
    fn into_cost(self) -> Result<u32, KeyError>;
}

#[diagnostic::do_not_recommend]
impl IntoCost for u32 {
    fn into_cost(self) -> Result<u32, KeyError> {
        Ok(self)
    }
}

#[diagnostic::do_not_recommend]
impl IntoCost for Result<u32, KeyError> {
    fn into_cost(self) -> Result<u32, KeyError> {
        self
    }
}

/// Returns `true` for a request that is not limited.
pub(crate) type SkipFn = dyn Fn(&Head<'_>) -> bool + Send + Sync;

/// A borrowed response without its body: the argument of the closures of
/// [`RateLimitLayer::charge_when`](crate::RateLimitLayer::charge_when),
/// [`RateLimitLayer::settle`](crate::RateLimitLayer::settle) and
/// [`RateLimitLayer::clear_when`](crate::RateLimitLayer::clear_when).
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct ResponseHead<'a> {
    /// The status code.
    pub status: StatusCode,
    /// The HTTP version.
    pub version: Version,
    /// The header fields.
    pub headers: &'a HeaderMap,
    /// The extensions of the response.
    pub extensions: &'a Extensions,
}

impl<'a> ResponseHead<'a> {
    /// Borrows the head of `response`.
    pub fn from_response<B>(response: &'a Response<B>) -> Self {
        Self {
            status: response.status(),
            version: response.version(),
            headers: response.headers(),
            extensions: response.extensions(),
        }
    }
}

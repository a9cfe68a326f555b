//! Policies that are looked up, for example in a database.
//!
//! - A lookup runs in a task, so that a client that disconnects does not end it for others. A
//!   second task in it turns a panic into an error.
//! - The task's runtime may be blocked or not driven. So each request has a timer of its own
//!   runtime, and a lookup that is past its timeout is replaced.
//! - At most 16 lookups wait for each one that may run. Their clients may have left, so each of
//!   them would only be a task that waits for its timeout.
//! - After a failure the last good result is used, and one lookup per second runs in the
//!   background. So a database that hangs delays one round of requests by the timeout. Failures are
//!   not cached: made-up ids would evict the last good results.

mod cache;
mod error;

use std::fmt;
use std::hash::Hash;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use self::cache::LookupCache;
pub use self::error::LookupError;
use crate::error::BoxError;
use crate::extract::{Head, KeyError};
use crate::key::Key;
use crate::policy::{IntoPolicy, SharedPolicy};

/// Chooses the policy of each request by an asynchronous lookup of its [`Tenant`], for example in
/// a database. It is the asynchronous counterpart of [`policy_by`](crate::policy_by).
///
/// A lookup has two closures. The first returns the id of the request's tenant, or `None` if the
/// request is not limited. The second looks up the tenant with this id. Results are cached by id.
///
/// ```
/// use http::HeaderValue;
/// use tower_ratelimit::extract::{Head, KeyError};
/// use tower_ratelimit::{Header, Key, Policy, PolicyLookup, Quota, RateLimitLayer, Tenant};
/// # async fn query(_: &HeaderValue) -> Result<Option<(u64, bool)>, std::io::Error> { Ok(Some((7, true))) }
///
/// let free = Policy::from(Quota::per_minute(10)).with_name("free");
/// let paid = Policy::from(Quota::per_minute(1_000)).with_name("paid");
///
/// let tenants = PolicyLookup::new(
///     |head: &Head<'_>| match head.headers.get("x-api-key") {
///         Some(api_key) => Ok(Some(api_key.clone())),
///         None => Err(KeyError::unauthorized("send an API key in x-api-key")),
///     },
///     move |api_key: HeaderValue| {
///         let (free, paid) = (free.clone(), paid.clone());
///         async move {
///             Ok::<_, std::io::Error>(match query(&api_key).await? {
///                 // All API keys of an account share its quota.
///                 Some((account, true)) => Tenant::from(paid).key(Key::from(account)),
///                 Some((account, false)) => Tenant::from(free).key(Key::from(account)),
///                 None => Tenant::from(KeyError::unauthorized("unknown API key")),
///             })
///         }
///     },
/// );
/// let layer = RateLimitLayer::new(tenants, Header::new("x-api-key"));
/// ```
///
/// # The cache
///
/// - Each layer has its own cache, which its clones share.
/// - Every [`Tenant`] is cached, also one that is not limited, and one that is a [`KeyError`].
///   Errors of the lookup itself are not cached.
/// - Each id has at most one lookup in flight. Requests with the same id wait for it.
/// - A result is used for one minute ([`ttl`](Self::ttl)). The next request after that waits for a
///   new lookup.
/// - The cache holds up to 10,000 ids ([`max_tenants`](Self::max_tenants)). It prefers to keep the
///   ids that are used often.
/// - At most 64 lookups run at the same time, and 16 times as many wait
///   ([`max_lookups`](Self::max_lookups)). Further lookups fail immediately.
/// - A lookup fails after one second, including the time that it waits for others
///   ([`timeout`](Self::timeout)).
///
/// A client that sends many invalid ids causes a lookup for each. Authenticate clients first where
/// you can, and put a layer that limits by address around this one.
///
/// # Failures
///
/// - If a lookup fails and the cache has an earlier result, this result is used until a lookup
///   succeeds. Meanwhile, requests do not wait, and start at most one lookup per second and id in
///   the background. These failures are not reported.
/// - If a lookup fails and there is no earlier result, [`OnError`](crate::OnError) applies. The
///   observer and the log get a [`LookupError`].
///
/// # Runtime
///
/// A lookup runs in a task of the tokio runtime, which must have time enabled. Without such a
/// runtime, the lookup fails. If the client of a request disconnects, the lookup continues, and
/// its result is cached.
///
/// A request waits for its lookup without a ready inner service, so it occupies no permit of a
/// `ConcurrencyLimit` and no slot of a `Buffer`. After the lookup, the layer waits until a
/// clone of the inner service is ready, and then decides the request like a new one.
///
/// Requests in different runtimes share a lookup, for example in a server with a runtime for each
/// thread. Each request has a timer of its own runtime. If the runtime of a lookup ends, or does
/// not run until the [timeout](Self::timeout), another runtime starts a new lookup.
#[must_use = "a lookup does nothing until a layer uses it"]
pub struct PolicyLookup<I> {
    id: Arc<IdFn<I>>,
    look_up: Arc<LookUpFn<I>>,
    settings: Settings,
}

type IdFn<I> = dyn Fn(&Head<'_>) -> Result<Option<I>, KeyError> + Send + Sync;
type LookUpFn<I> = dyn Fn(I) -> Pin<Box<dyn Future<Output = Result<Tenant, BoxError>> + Send>> + Send + Sync;

#[derive(Clone, Copy, Debug)]
struct Settings {
    ttl: Duration,
    max_tenants: usize,
    max_lookups: usize,
    timeout: Duration,
}

impl<I: Clone + Eq + Hash + Send + Sync + 'static> PolicyLookup<I> {
    /// Creates a lookup from two closures.
    ///
    /// | closure | argument | returns |
    /// |---|---|---|
    /// | `id` | the [`Head`] of a request | the id of its tenant: an `Option<I>`, where `None` means that the request is not limited, or a `Result<Option<I>, KeyError>` |
    /// | `look_up` | an id | a future of `Result<T, E>`, where `T` is a [`Tenant`] or converts into one, such as a policy or an `Option` of a policy |
    ///
    /// If the future returns an error or panics, the lookup has failed.
    pub fn new<S, O, F, Fut, T, E>(id: S, look_up: F) -> Self
    where
        S: Fn(&Head<'_>) -> O + Send + Sync + 'static,
        O: IntoId<I>,
        F: Fn(I) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<T, E>> + Send + 'static,
        T: Into<Tenant>,
        E: Into<BoxError>,
    {
        Self {
            id: Arc::new(move |head: &Head<'_>| id(head).into_id()),
            look_up: Arc::new(move |id| {
                let found = look_up(id);
                Box::pin(async move { found.await.map(Into::into).map_err(Into::into) })
            }),
            settings: Settings {
                ttl: Duration::from_secs(60),
                max_tenants: 10_000,
                max_lookups: 64,
                timeout: Duration::from_secs(1),
            },
        }
    }

    /// Sets the time to live of a result. Defaults to 1 minute.
    ///
    /// With zero, each request waits for a lookup. Requests with the same id still share a lookup
    /// that is in flight.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.settings.ttl = ttl;
        self
    }

    /// Sets the maximum number of ids in the cache. 0 counts as 1. Defaults to 10,000.
    pub fn max_tenants(mut self, max_tenants: usize) -> Self {
        self.settings.max_tenants = max_tenants;
        self
    }

    /// Sets the maximum number of lookups that run at the same time. Up to 16 times as many wait
    /// until one of them has ended, 1,024 by default. Further lookups fail immediately. 0 counts as
    /// 1. Defaults to 64.
    pub fn max_lookups(mut self, max_lookups: usize) -> Self {
        self.settings.max_lookups = max_lookups;
        self
    }

    /// Sets the timeout of a lookup. A lookup that takes longer is aborted and counts as failed.
    /// The timeout includes the wait for [other lookups](Self::max_lookups). Defaults to 1 second.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.settings.timeout = timeout;
        self
    }

    /// Returns the lookup with an empty cache.
    pub(crate) fn into_lookup(self) -> Arc<dyn Lookup> {
        Arc::new(LookupCache::new(self))
    }
}

/// A value that the first closure of [`PolicyLookup::new`] can return. Implemented for `Option<I>`
/// and `Result<Option<I>, KeyError>`, where `I` is the type of the id.
pub trait IntoId<I> {
    /// Returns the id, or `None` if the request is not limited.
    ///
    /// # Errors
    ///
    /// Returns the error of the closure.
    fn into_id(self) -> Result<Option<I>, KeyError>;
}

impl<I> IntoId<I> for Option<I> {
    fn into_id(self) -> Result<Option<I>, KeyError> {
        Ok(self)
    }
}

impl<I> IntoId<I> for Result<Option<I>, KeyError> {
    fn into_id(self) -> Result<Option<I>, KeyError> {
        self
    }
}

/// A [`PolicyLookup`] with its cache, whose id type is erased.
pub(crate) trait Lookup: Send + Sync {
    /// Returns the tenant of a request, or starts to look it up.
    fn find(&self, head: &Head<'_>) -> Found;
}

/// The result of [`Lookup::find`].
pub(crate) enum Found {
    Tenant(Arc<Tenant>),
    /// The request has no id, and is not limited.
    Unlimited,
    /// The request has no id, but needs one.
    Missing(KeyError),
    /// The lookup is in flight.
    Pending(Finding),
    /// The lookup cannot start.
    Failed(LookupError),
}

pub(crate) type LookupResult = Result<Arc<Tenant>, LookupError>;

/// The future of a lookup in flight.
pub(crate) type Finding = Pin<Box<dyn Future<Output = LookupResult> + Send>>;

impl<I> Clone for PolicyLookup<I> {
    fn clone(&self) -> Self {
        Self { id: Arc::clone(&self.id), look_up: Arc::clone(&self.look_up), settings: self.settings }
    }
}

impl<I> fmt::Debug for PolicyLookup<I> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PolicyLookup").field("settings", &self.settings).finish_non_exhaustive()
    }
}

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

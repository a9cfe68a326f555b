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
mod result;

use std::fmt;
use std::hash::Hash;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use self::cache::LookupCache;
pub(crate) use self::result::TenantPolicy;
pub use self::result::{LookupError, Tenant};
use crate::error::BoxError;
use crate::extract::{Head, KeyError};

/// Chooses the policy of each request by an asynchronous lookup of its [`Tenant`], for example in
/// a database. It is the asynchronous counterpart of [`policy_by`](crate::policy_by).
///
/// A lookup has two closures. The first returns the id of the request's tenant, or `None` if the
/// request is [anonymous](Self::anonymous). The second looks up the tenant with this id. Results
/// are cached by id.
///
/// ```
/// use tower_ratelimit::extract::{Head, KeyError};
/// use tower_ratelimit::{Key, PeerIp, Policy, PolicyLookup, Quota, RateLimitLayer, Tenant};
///
/// /// The handler finds it in the extensions of the request.
/// #[derive(Clone)]
/// struct Account {
///     id: u64,
///     has_paid: bool,
/// }
/// # async fn query(_: &str) -> std::io::Result<Option<Account>> { Ok(None) }
///
/// /// Copies the API key. A clone of the value could keep the whole request head in memory.
/// fn api_key_of(head: &Head<'_>) -> Result<Option<String>, KeyError> {
///     let Some(value) = head.headers.get("x-api-key") else { return Ok(None) };
///     match value.to_str() {
///         Ok(api_key) if api_key.len() <= 128 => Ok(Some(api_key.to_owned())),
///         _ => Err(KeyError::unauthorized("invalid API key")),
///     }
/// }
///
/// let free = Policy::from(Quota::per_minute(10)).with_name("free");
/// let paid = Policy::from(Quota::per_minute(1_000)).with_name("paid");
/// let guests = free.clone();
///
/// let tenants = PolicyLookup::new(api_key_of, move |api_key: String| {
///     let (free, paid) = (free.clone(), paid.clone());
///     async move {
///         std::io::Result::Ok(match query(&api_key).await? {
///             // All API keys of an account share its quota.
///             Some(account) => Tenant::from(if account.has_paid { paid } else { free })
///                 .key(Key::from(account.id))
///                 .extension(account),
///             None => Tenant::from(KeyError::unauthorized("unknown API key")),
///         })
///     }
/// })
/// .anonymous(guests);
/// // Guests are limited by their addresses.
/// let layer = RateLimitLayer::new(tenants.clone(), PeerIp::new());
///
/// // Later, when the account of this API key has changed:
/// tenants.forget(&"key-of-alice".to_owned());
/// ```
///
/// # The cache
///
/// - Clones of a lookup share one cache, and so do the layers that use them. A clone that changes
///   a setting gets a cache of its own.
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
/// - [`forget`](Self::forget) removes an id, for example after its plan has changed.
///   [`clear`](Self::clear) removes all.
///
/// A client that sends many invalid ids causes a lookup for each. Authenticate clients first where
/// you can, and put a layer that limits by address around this one. For an invalid id, return a
/// [`KeyError`] as the tenant, which is cached. An `Err` is a failed lookup, which is not cached.
///
/// If a client causes more lookups than [`max_lookups`](Self::max_lookups) allows, they fail. With
/// [`OnError::Admit`](crate::OnError::Admit), its requests are then admitted without a limit. Use
/// [`OnError::Refuse`](crate::OnError::Refuse), or the layer that limits by address.
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
/// not run until the [timeout](Self::timeout), another runtime starts a new lookup. A lookup of a runtime
/// that does not run counts towards [`max_lookups`](Self::max_lookups) until the runtime ends.
#[must_use = "a lookup does nothing until a layer uses it"]
pub struct PolicyLookup<I> {
    config: LookupConfig<I>,
    /// Filled when the first layer uses the lookup or a clone.
    cache: Arc<OnceLock<LookupCache<I>>>,
}

/// The closures and the settings of a lookup.
struct LookupConfig<I> {
    id: Arc<IdFn<I>>,
    look_up: Arc<LookUpFn<I>>,
    /// The tenant of requests without an id.
    anonymous: Arc<Tenant>,
    settings: LookupSettings,
}

type IdFn<I> = dyn Fn(&Head<'_>) -> Result<Option<I>, KeyError> + Send + Sync;
type LookUpFn<I> = dyn Fn(I) -> Pin<Box<dyn Future<Output = Result<Tenant, BoxError>> + Send>> + Send + Sync;

#[derive(Clone, Copy, Debug)]
struct LookupSettings {
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
    /// | `id` | the [`Head`] of a request | the id of its tenant: an `Option<I>`, where `None` means that the request is [anonymous](Self::anonymous), or a `Result<Option<I>, KeyError>` |
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
        let config = LookupConfig {
            id: Arc::new(move |head: &Head<'_>| id(head).into_id()),
            look_up: Arc::new(move |id| {
                let found = look_up(id);
                Box::pin(async move { found.await.map(Into::into).map_err(Into::into) })
            }),
            anonymous: Arc::new(Tenant::unlimited()),
            settings: LookupSettings {
                ttl: Duration::from_secs(60),
                max_tenants: 10_000,
                max_lookups: 64,
                timeout: Duration::from_secs(1),
            },
        };
        Self { config, cache: Arc::default() }
    }

    /// Sets the policy of requests without an id, for example of guests. They need no lookup, and
    /// the layer's extractor returns their keys. Defaults to none, so they are not limited.
    ///
    /// With a [`KeyError`], they are rejected.
    pub fn anonymous(self, tenant: impl Into<Tenant>) -> Self {
        self.with(|config| config.anonymous = Arc::new(tenant.into()))
    }

    /// Sets the time to live of a result. Defaults to 1 minute.
    ///
    /// With zero, each request waits for a lookup. Requests with the same id still share a lookup
    /// that is in flight.
    pub fn ttl(self, ttl: Duration) -> Self {
        self.with(|config| config.settings.ttl = ttl)
    }

    /// Sets the maximum number of ids in the cache. 0 counts as 1. Defaults to 10,000.
    ///
    /// The cache keeps each id whole, so an id should be short and own its bytes. A clone of a
    /// [`HeaderValue`](http::HeaderValue) can keep the whole head of its request in memory. So copy
    /// the bytes, and return a [`KeyError`] if there are too many, as in the
    /// [example](PolicyLookup).
    pub fn max_tenants(self, max_tenants: usize) -> Self {
        self.with(|config| config.settings.max_tenants = max_tenants)
    }

    /// Sets the maximum number of lookups that run at the same time. 0 counts as 1. Defaults to 64.
    ///
    /// Up to 16 times as many lookups wait until another one has ended, 1,024 by default. Further
    /// lookups fail immediately. Then [`OnError`](crate::OnError) applies.
    pub fn max_lookups(self, max_lookups: usize) -> Self {
        self.with(|config| config.settings.max_lookups = max_lookups)
    }

    /// Sets the timeout of a lookup. A lookup that takes longer is aborted and counts as failed.
    /// The timeout includes the wait for [other lookups](Self::max_lookups). Defaults to 1 second.
    pub fn timeout(self, timeout: Duration) -> Self {
        self.with(|config| config.settings.timeout = timeout)
    }

    /// Changes a setting. The lookup no longer shares the cache of its clones.
    fn with(mut self, change: impl FnOnce(&mut LookupConfig<I>)) -> Self {
        change(&mut self.config);
        Self { config: self.config, cache: Arc::default() }
    }

    /// Removes the result of this id from the cache. The next request with the id waits for a new
    /// lookup. Call it when the tenant has changed in the database.
    ///
    /// A lookup of the id that is in flight is not stopped, but
    /// [`max_lookups`](Self::max_lookups) no longer counts it among those that wait. The requests
    /// that wait for it already use its result, which is not cached.
    ///
    /// The last good result is removed too. If the new lookup fails, [`OnError`](crate::OnError)
    /// applies.
    ///
    /// Each process has its own cache. In the others, a result is used until its
    /// [time to live](Self::ttl) ends.
    pub fn forget(&self, id: &I) {
        if let Some(cache) = self.cache.get() {
            cache.forget(id);
        }
    }

    /// Removes the results of all ids from the cache, like [`forget`](Self::forget) for each.
    pub fn clear(&self) {
        if let Some(cache) = self.cache.get() {
            cache.clear();
        }
    }

    /// Returns the lookup with the cache that its clones share.
    pub(crate) fn into_lookup(self) -> Arc<dyn FindTenant> {
        Arc::new(self.cache.get_or_init(|| LookupCache::new(self.config)).clone())
    }
}

/// A value that the first closure of [`PolicyLookup::new`] can return. Implemented for `Option<I>`
/// and `Result<Option<I>, KeyError>`, where `I` is the type of the id.
pub trait IntoId<I> {
    /// Returns the id, or `None` if the request is anonymous.
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
pub(crate) trait FindTenant: Send + Sync {
    /// Returns the tenant of a request, or starts to look it up.
    fn find(&self, head: &Head<'_>) -> TenantLookup;
}

/// The result of [`FindTenant::find`].
pub(crate) enum TenantLookup {
    Ready(LookupResult),
    /// The lookup is in flight.
    Pending(LookupFuture),
}

pub(crate) type LookupResult = Result<Arc<Tenant>, LookupError>;

/// The future of a lookup in flight.
pub(crate) type LookupFuture = Pin<Box<dyn Future<Output = LookupResult> + Send>>;

/// The future of all lookups of a request.
pub(crate) type AllLookups = Pin<Box<dyn Future<Output = Vec<LookupResult>> + Send>>;

impl<I> Clone for PolicyLookup<I> {
    fn clone(&self) -> Self {
        let LookupConfig { id, look_up, anonymous, settings } = &self.config;
        let (id, look_up, anonymous) = (Arc::clone(id), Arc::clone(look_up), Arc::clone(anonymous));
        Self { config: LookupConfig { id, look_up, anonymous, settings: *settings }, cache: Arc::clone(&self.cache) }
    }
}

impl<I> fmt::Debug for PolicyLookup<I> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PolicyLookup").field("settings", &self.config.settings).finish_non_exhaustive()
    }
}

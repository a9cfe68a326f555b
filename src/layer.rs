//! The layer: what to limit, by which key, where it is kept.

use std::convert::Infallible;
use std::fmt;
use std::sync::Arc;

use tower_layer::Layer;

use crate::admission::{OnError, Shared};
use crate::extract::{Head, KeyExtractor};
use crate::per_request::{Choice, CostFn, IntoCost, Policies};
use crate::{Headers, MemoryStorage, RateLimit, RateLimiter, Storage, TextRejection};

/// Limits the requests to a service.
///
/// 1. The [`KeyExtractor`] says who is asking. If it says nobody, the request passes and gets no header fields; if the
///    key is missing, the answer is 400 or 500.
/// 2. All limits of the policy have to admit. The request is charged at that moment, whatever comes of it.
/// 3. Admitted: the inner service is called, after the delay of a leaky bucket if there is one. Its response gets
///    `X-RateLimit-Limit`, `X-RateLimit-Remaining` and `X-RateLimit-Reset`.
/// 4. Refused: the inner service never sees the request. The answer is 429 with the same fields and `Retry-After` (none
///    when the cost can never fit). A refusal is a response, never an error: `Error` is the inner service's own.
///
/// What is remembered lives in the layer, so all services made by one layer, and its clones, share it. Each layer built
/// without a storage has a [`MemoryStorage`] of its own.
///
/// Layers stack: the outer one is asked first, and what it has charged stays charged when an inner one refuses. The
/// response shows the numbers of the one with fewer units remaining; a refusal keeps its own.
///
/// ```
/// use axum::Router;
/// use axum::routing::{get, post};
/// use tower_ratelimit::{Global, PeerIp, Policy, Quota, RateLimitLayer};
///
/// # fn app() -> Result<Router, tower_ratelimit::ConfigError> {
/// let login: Policy = "fixed-window 5/minute".parse()?;
/// let app = Router::new()
///     .route("/login", post(|| async { "welcome" }).layer(RateLimitLayer::new(login, PeerIp::new())))
///     .route("/", get(|| async { "hello" }))
///     .layer(RateLimitLayer::new(Quota::per_second(1_000), Global));
/// # Ok(app)
/// # }
/// ```
///
/// # Caveats
///
/// A leaky bucket's delay is waited for by tokio's timer: outside a tokio runtime that has time enabled, a request that
/// has to wait panics. Nothing else needs a runtime.
///
/// A response of an inner layer that is no refusal by a limit (400, 500, 503) is to the layers outside like any other
/// response, and gets their numbers.
///
/// A CORS layer belongs outside, so that preflights are answered before they are counted and refusals carry the CORS
/// fields that let a browser read them.
#[must_use = "a layer limits nothing until it is put around a service"]
pub struct RateLimitLayer<St = MemoryStorage, R = TextRejection> {
    pub(crate) shared: Arc<Shared<St, R>>,
}

impl RateLimitLayer {
    /// Keeps `policy` for each key, in memory.
    ///
    /// `policy` is a [`Policy`](crate::Policy), a [`Quota`](crate::Quota), or chosen for each request by
    /// [`policy_by`](crate::policy_by).
    pub fn new(policy: impl Into<Policies>, key: impl KeyExtractor) -> Self {
        Self::with(policy.into(), key, MemoryStorage::new())
    }
}

impl<St: Storage<Error = Infallible>> RateLimitLayer<St> {
    /// Keeps `policy` for each key on a storage that cannot fail: a memory storage with other bounds, or shared by several
    /// layers.
    ///
    /// ```
    /// use tower_ratelimit::{MemoryStorage, PeerIp, Quota, RateLimitLayer};
    ///
    /// let storage = MemoryStorage::builder().max_keys(50_000).build()?;
    /// let layer = RateLimitLayer::with_storage(Quota::per_minute(60), PeerIp::new(), storage);
    /// # Ok::<(), tower_ratelimit::ConfigError>(())
    /// ```
    pub fn with_storage(policy: impl Into<Policies>, key: impl KeyExtractor, storage: St) -> Self {
        Self::with(policy.into(), key, storage)
    }

    /// Keeps the limiter's policy on the limiter's storage: what is spent there is spent here.
    ///
    /// For a storage that can fail, say what becomes of a request then: [`new`](RateLimitLayer::new) with the limiter's policy, and
    /// [`storage`](RateLimitLayer::storage) with its storage.
    pub fn from_limiter(limiter: &RateLimiter<St>, key: impl KeyExtractor) -> Self {
        Self::with(limiter.policy().clone().into(), key, limiter.storage().clone())
    }
}

impl<St: Storage> RateLimitLayer<St> {
    fn with(policies: Policies, key: impl KeyExtractor, storage: St) -> Self {
        let shared = Shared {
            policies,
            key: Arc::new(key),
            cost: None,
            storage,
            on_error: OnError::Refuse,
            rejection: Arc::new(TextRejection),
            headers: Headers::default(),
        };
        Self { shared: Arc::new(shared) }
    }
}

impl<St: Storage, R> RateLimitLayer<St, R> {
    /// Keeps states on `storage`. When it fails, `on_error` says what becomes of the request.
    pub fn storage<T: Storage>(self, storage: T, on_error: OnError) -> RateLimitLayer<T, R> {
        let Shared { policies, key, cost, rejection, headers, .. } = Arc::unwrap_or_clone(self.shared);
        RateLimitLayer { shared: Arc::new(Shared { policies, key, cost, storage, on_error, rejection, headers }) }
    }

    /// Answers refused requests with what `rejection` makes: see [`Rejection`](crate::Rejection).
    pub fn rejection<T>(self, rejection: T) -> RateLimitLayer<St, T> {
        let Shared { policies, key, cost, storage, on_error, headers, .. } = Arc::unwrap_or_clone(self.shared);
        let rejection = Arc::new(rejection);
        RateLimitLayer { shared: Arc::new(Shared { policies, key, cost, storage, on_error, rejection, headers }) }
    }

    /// Tells clients about their limits in these header fields.
    pub fn headers(self, headers: Headers) -> Self {
        let shared = Arc::unwrap_or_clone(self.shared);
        Self { shared: Arc::new(Shared { headers, ..shared }) }
    }

    /// Charges each request what `cost` says, in units, instead of 1.
    ///
    /// The closure answers a `u32`, or a `Result` of one with
    /// [`Missing`](crate::extract::Missing). A request that costs 0 is free: it passes,
    /// spends nothing, and its header fields show how things stand. Never let a client say what its own request costs.
    ///
    /// ```
    /// use tower_ratelimit::extract::Head;
    /// use tower_ratelimit::{PeerIp, Quota, RateLimitLayer};
    ///
    /// let layer = RateLimitLayer::new(Quota::per_minute(100), PeerIp::new())
    ///     .cost(|head: &Head<'_>| if head.uri.path().starts_with("/search") { 10 } else { 1 });
    /// ```
    pub fn cost<F, T>(self, cost: F) -> Self
    where
        F: Fn(&Head<'_>) -> T + Send + Sync + 'static,
        T: IntoCost,
    {
        let shared = Arc::unwrap_or_clone(self.shared);
        let cost: Arc<CostFn> = Arc::new(move |head: &Head<'_>| cost(head).into_cost());
        Self { shared: Arc::new(Shared { cost: Some(cost), ..shared }) }
    }

    /// The limiter inside, to peek at a key, to clear it, to charge it elsewhere; `None` when [`policy_by`](crate::policy_by) chooses
    /// the policy for each request: make one for a policy and the [storage](Self::storage_handle) then.
    pub fn limiter(&self) -> Option<RateLimiter<St>> {
        match &self.shared.policies.0 {
            Choice::Always(policy) => Some(RateLimiter::with_storage(policy.clone(), self.storage_handle())),
            Choice::By(_) => None,
        }
    }

    /// Another handle on the storage.
    pub fn storage_handle(&self) -> St {
        self.shared.storage.clone()
    }
}

impl<S, St: Storage, R> Layer<S> for RateLimitLayer<St, R> {
    type Service = RateLimit<S, St, R>;

    fn layer(&self, inner: S) -> Self::Service {
        RateLimit::new(inner, Arc::clone(&self.shared))
    }
}

impl<St, R> Clone for RateLimitLayer<St, R> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared) }
    }
}

impl<St: fmt::Debug, R> fmt::Debug for RateLimitLayer<St, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RateLimitLayer")
            .field("policies", &self.shared.policies)
            .field("storage", &self.shared.storage)
            .finish_non_exhaustive()
    }
}

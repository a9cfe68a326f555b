//! The layer.

use std::fmt;
use std::sync::Arc;

use tower_layer::Layer;

use crate::error::or_panic;
use crate::extract::{Head, KeyExtractor};
use crate::middleware::admission::LayerState;
use crate::middleware::config::{LayerConfig, OnError};
use crate::middleware::options::{Choice, CostFn, IntoCost, IntoPolicySource, PolicySource, ResponseHead, Skip};
use crate::observe::Observer;
use crate::storage::InfallibleStorage;
use crate::{ConfigError, Headers, MemoryStorage, RateLimit, RateLimiter, Storage, TextRejection};

/// Limits the requests to a service.
///
/// ```
/// use axum::{Router, routing::get};
/// use tower_ratelimit::{PeerIp, Quota, RateLimitLayer};
///
/// let limit = RateLimitLayer::new(Quota::per_minute(60), PeerIp::new());
/// let app: Router = Router::new().route("/", get(|| async { "hello" })).layer(limit);
/// ```
///
/// An admitted request goes to the inner service, and its response gets `X-RateLimit-Limit`,
/// `X-RateLimit-Remaining` and `X-RateLimit-Reset`. A refused request gets a 429 with these fields and
/// `Retry-PostResponse`, and the inner service never sees it.
///
/// Defaults to a [`MemoryStorage`] of its own, a cost of 1, [`Headers::x_rate_limit`] and
/// [`TextRejection`]. All services of one layer, and of its clones, share their counts.
///
/// The guides explain [the order of all steps](crate::guide#the-path-of-a-request),
/// [stacked layers](crate::guide#stacked-layers), [keys](crate::guide::keys_and_proxies),
/// [costs](crate::guide::costs), [responses](crate::guide::headers_and_refusals) and
/// [shared storages](crate::guide::several_processes).
///
/// # Errors
///
/// A refusal is a response. The error type is the inner service's own. If the storage fails,
/// [`OnError`] admits the request or refuses it with a 503. If the key is missing, the response is 400,
/// 401 or 500.
///
/// # Panics
///
/// The delay of a leaky bucket needs a tokio runtime with time enabled. A request that has to wait
/// panics outside of one. Nothing else needs a runtime.
#[must_use = "a layer limits nothing until it is put around a service"]
pub struct RateLimitLayer<St = MemoryStorage, R = TextRejection> {
    pub(crate) shared: Arc<LayerState<St, R>>,
}

impl RateLimitLayer {
    /// Creates a layer that keeps its counts in memory.
    ///
    /// `policy` is a [`Policy`](crate::Policy), a [`Quota`](crate::Quota), or the result of
    /// [`policy_by`](crate::policy_by), which chooses a policy for each request.
    pub fn new(policy: impl IntoPolicySource, key: impl KeyExtractor) -> Self {
        Self::with(policy.into_policy_source(), key, MemoryStorage::new())
    }
}

impl<St: InfallibleStorage> RateLimitLayer<St> {
    /// Creates a layer on a storage that cannot fail: a memory storage with other bounds, or one that several
    /// layers share.
    ///
    /// ```
    /// use tower_ratelimit::{MemoryStorage, PeerIp, Quota, RateLimitLayer};
    ///
    /// let storage = MemoryStorage::builder().max_keys(50_000).build()?;
    /// let layer = RateLimitLayer::with_storage(Quota::per_minute(60), PeerIp::new(), storage);
    /// # Ok::<(), tower_ratelimit::ConfigError>(())
    /// ```
    ///
    /// # Panics
    ///
    /// Panics if the storage cannot keep the policy.
    #[track_caller]
    pub fn with_storage(policy: impl IntoPolicySource, key: impl KeyExtractor, storage: St) -> Self {
        let policies = policy.into_policy_source();
        or_panic(policies.fit(&storage));
        Self::with(policies, key, storage)
    }

    /// Creates a layer with the limiter's policy on the limiter's storage, so that both share their counts.
    ///
    /// For a storage that can fail, use [`new`](RateLimitLayer::new) with the limiter's policy, and
    /// [`storage`](RateLimitLayer::storage) with its storage and an [`OnError`].
    pub fn from_limiter(limiter: &RateLimiter<St>, key: impl KeyExtractor) -> Self {
        Self::with(limiter.policy().clone().into_policy_source(), key, limiter.storage().clone())
    }
}

impl<St: Storage> RateLimitLayer<St> {
    fn with(policies: PolicySource, key: impl KeyExtractor, storage: St) -> Self {
        Self { shared: LayerState::new(LayerConfig::new(policies, Arc::new(key)), storage, Arc::new(TextRejection)) }
    }
}

/// The storage and the responses.
impl<St: Storage, R> RateLimitLayer<St, R> {
    /// Sets the storage, and whether requests pass while it fails.
    ///
    /// # Panics
    ///
    /// Panics if the storage cannot keep the policy: a long log on a storage of bounded values, or a policy
    /// that is not a fixed window with [leases](crate::storage::Leases). [`try_storage`](Self::try_storage)
    /// returns an error instead. A policy that is chosen [for each request](crate::policy_by) is validated
    /// then, and counts as a failure of the storage.
    #[track_caller]
    pub fn storage<T: Storage>(self, storage: T, on_error: OnError) -> RateLimitLayer<T, R> {
        or_panic(self.try_storage(storage, on_error))
    }

    /// As [`storage`](Self::storage), without panics.
    ///
    /// # Errors
    ///
    /// Returns an error if the storage cannot keep the policy.
    pub fn try_storage<T: Storage>(self, storage: T, on_error: OnError) -> Result<RateLimitLayer<T, R>, ConfigError> {
        let (rules, _, rejection) = self.into_parts();
        rules.policies.fit(&storage)?;
        let rules = rules.with(|rules| rules.on_error = on_error);
        Ok(RateLimitLayer { shared: LayerState::new(rules, storage, rejection) })
    }

    /// Sets the response to refused requests. Defaults to [`TextRejection`]. See
    /// [`Rejection`](crate::Rejection).
    pub fn rejection<T>(self, rejection: T) -> RateLimitLayer<St, T> {
        let (rules, storage, _) = self.into_parts();
        RateLimitLayer { shared: LayerState::new(rules, storage, Arc::new(rejection)) }
    }

    /// Sets the header fields. Defaults to [`Headers::x_rate_limit`].
    pub fn headers(self, headers: Headers) -> Self {
        self.ruled(|rules| rules.headers = headers)
    }

    fn into_parts(self) -> (LayerConfig, St, Arc<R>) {
        let LayerState { rules, storage, rejection, .. } = &*self.shared;
        (rules.clone(), storage.clone(), Arc::clone(rejection))
    }

    fn ruled(self, change: impl FnOnce(&mut LayerConfig)) -> Self {
        let (rules, storage, rejection) = self.into_parts();
        Self { shared: LayerState::new(rules.with(change), storage, rejection) }
    }
}

/// Options that depend on the request.
impl<St: Storage, R> RateLimitLayer<St, R> {
    /// Does not limit the requests that `skip` selects. They are not counted, get no header fields, and no
    /// other part of the layer sees them.
    ///
    /// `skip` is a closure over the [`Head`], or an [`AllowList`](crate::extract::AllowList) of networks. Each
    /// call adds one. A request is skipped if any of them selects it.
    ///
    /// ```
    /// use http::Method;
    /// use tower_ratelimit::extract::{AllowList, Head};
    /// use tower_ratelimit::{PeerIp, Quota, RateLimitLayer};
    ///
    /// let layer = RateLimitLayer::new(Quota::per_minute(60), PeerIp::new())
    ///     .skip(|head: &Head<'_>| head.uri().path() == "/health" || head.method == Method::OPTIONS)
    ///     .skip(AllowList::by(PeerIp::new()).limit("10.9.0.0/16").allow("10.0.0.0/8"));
    /// ```
    pub fn skip(self, skip: impl Skip) -> Self {
        self.ruled(|rules| rules.skip.push(Arc::new(skip)))
    }

    /// Sets the cost of each request in units. Defaults to 1.
    ///
    /// The closure returns a `u32`, or a `Result` of one with [`KeyError`](crate::extract::KeyError). A request
    /// that costs 0 passes and spends nothing, and its header fields report the state of the limits. Never let
    /// a client choose the cost of its own request.
    ///
    /// ```
    /// use tower_ratelimit::extract::Head;
    /// use tower_ratelimit::{PeerIp, Quota, RateLimitLayer};
    ///
    /// let layer = RateLimitLayer::new(Quota::per_minute(100), PeerIp::new())
    ///     .cost(|head: &Head<'_>| if head.uri().path().starts_with("/search") { 10 } else { 1 });
    /// ```
    pub fn cost<F, T>(self, cost: F) -> Self
    where
        F: Fn(&Head<'_>) -> T + Send + Sync + 'static,
        T: IntoCost,
    {
        let cost: Arc<CostFn> = Arc::new(move |head: &Head<'_>| cost(head).into_cost());
        self.ruled(|rules| rules.cost = Some(cost))
    }

    /// Charges only requests whose responses `charge` selects: only failed logins, only successes.
    ///
    /// ```
    /// use http::StatusCode;
    /// use tower_ratelimit::{PeerIp, Policy, RateLimitLayer, ResponseHead};
    ///
    /// let policy: Policy = "moving-window 5/minute".parse()?;
    /// let failed_logins = RateLimitLayer::new(policy, PeerIp::new())
    ///     .charge_when(|response: &ResponseHead<'_>| response.status == StatusCode::UNAUTHORIZED);
    /// # Ok::<(), tower_ratelimit::ConfigError>(())
    /// ```
    ///
    /// Every request is charged before the inner service is called. If `charge` returns `false`, the hit is
    /// [refunded](RateLimiter::refund) when the head of the response is ready. A request stays charged if the
    /// inner service fails or the client hangs up. A request that cost nothing is not refunded.
    ///
    /// Do not use an [`ElasticWindow`](crate::ElasticWindow), which locks out well-behaved clients:
    /// [`Lint::ElasticWindowRefunded`](crate::Lint::ElasticWindowRefunded) reports it. The guide on
    /// [costs](crate::guide::costs#charge-by-the-response) has the details.
    pub fn charge_when<F>(self, charge: F) -> Self
    where
        F: Fn(&ResponseHead<'_>) -> bool + Send + Sync + 'static,
    {
        self.ruled(|rules| rules.charge = Some(Arc::new(charge)))
    }
}

/// Observation.
impl<St: Storage, R> RateLimitLayer<St, R> {
    /// Tries the layer out. It decides, counts, and reports to its [observer](Self::observer) and the log.
    /// Every request goes on at once, even without a key or if the storage fails. It gets no header fields and
    /// does not wait for the storage.
    ///
    /// It tries all enforced limits of the policy, and not its shadow limits. Requests that cost nothing are
    /// not counted. Use a memory storage of its own, which is the default: in a shared one its keys take room
    /// from others.
    ///
    /// To try one limit of several, see [`Policy::shadow`](crate::Policy::shadow).
    pub fn shadow(self) -> Self {
        self.ruled(|rules| rules.shadow = true)
    }

    /// Inserts the [`Decision`](crate::Decision) into the extensions of each admitted request, for handlers.
    /// With the feature `axum` it is an extractor.
    ///
    /// A request has no decision if it is not limited, if the storage failed, or if it would have had to wait
    /// in a [shadow](Self::shadow) layer. So handlers should take an `Option<Decision>`. In stacked layers,
    /// the innermost layer's decision is there.
    pub fn share_decision(self) -> Self {
        self.ruled(|rules| rules.shares_decision = true)
    }

    /// Reports every decision to `observer`: a closure over the [`Event`](crate::Event), or an
    /// [`Observer`](crate::Observer). `MetricsObserver` (feature `metrics`) counts them.
    pub fn observer(self, observer: impl Observer) -> Self {
        self.ruled(|rules| rules.reporter.observer = Some(Arc::new(observer)))
    }

    /// Adds the key to the events in the log (feature `tracing`). By default the log has no keys,
    /// because they are addresses and secrets. Bytes that are not printable ASCII are escaped, and
    /// only the first 256 bytes of a key are written.
    pub fn log_keys(self) -> Self {
        self.ruled(|rules| rules.reporter.logs_keys = true)
    }

    /// Returns the limiter inside, to peek at a key, clear it, or charge it elsewhere. Returns
    /// `None` if [`policy_by`](crate::policy_by) chooses the policy of each request. Then create
    /// one from a policy and the [storage](Self::storage_handle).
    pub fn limiter(&self) -> Option<RateLimiter<St>> {
        match &self.shared.rules.policies.0 {
            Choice::Always(policy) => Some(RateLimiter::with_storage(policy.clone(), self.storage_handle())),
            Choice::By(_) => None,
        }
    }

    /// Returns another handle on the storage.
    pub fn storage_handle(&self) -> St {
        self.shared.storage.clone()
    }
}

impl<S, St: Storage, R> Layer<S> for RateLimitLayer<St, R> {
    type Service = RateLimit<S, St, R>;

    fn layer(&self, inner: S) -> Self::Service {
        self.shared.start();
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
            .field("policies", &self.shared.rules.policies)
            .field("storage", &self.shared.storage)
            .finish_non_exhaustive()
    }
}

//! The layer and its options.

mod handles;
mod wait;

use std::fmt;
use std::sync::Arc;

use tower_layer::Layer;

use crate::error::or_panic;
use crate::extract::{Head, KeyExtractor};
use crate::middleware::config::{LayerConfig, OnError};
use crate::middleware::options::{CostFn, IntoCost, IntoPolicySource, PolicySource, ResponseHead, Settling, Skip};
use crate::middleware::state::LayerState;
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
/// `X-RateLimit-Remaining` and `X-RateLimit-Reset`. A refused request gets a 429 with these fields
/// and `Retry-After`, and never reaches the inner service.
///
/// Defaults to a new [`MemoryStorage`], a cost of 1, [`Headers::x_rate_limit`] and
/// [`TextRejection`]. All services of one layer, and of its clones, share their counts.
///
/// The guides explain [the order of all steps](crate::guide#the-path-of-a-request),
/// [stacked layers](crate::guide#stacked-layers), [keys](crate::guide::keys_and_proxies),
/// [costs](crate::guide::costs), [responses](crate::guide::headers_and_refusals) and
/// [shared storages](crate::guide::several_processes).
///
/// # Errors
///
/// The error type is that of the inner service. The layer itself never returns an error. It
/// responds with a 429 to a refused request, and with 400, 401 or 500 to a request without a key.
/// If the storage fails, [`OnError`] selects between forwarding the request and a 503.
///
/// # Panics
///
/// The future of a request panics if a leaky bucket delays the request, or the request
/// [waits](Self::wait), outside of a tokio runtime with time enabled. With a memory storage,
/// nothing else needs a runtime except a `PolicyLookup`, which fails without one.
#[must_use = "a layer limits nothing until it is put around a service"]
pub struct RateLimitLayer<St = MemoryStorage, R = TextRejection> {
    pub(crate) shared: Arc<LayerState<St, R>>,
}

impl RateLimitLayer {
    /// Creates a layer that keeps its counts in memory.
    ///
    /// `policy` is a [`Policy`](crate::Policy), a [`Quota`](crate::Quota), a
    /// [`LivePolicy`](crate::LivePolicy), which can change later, or the result of
    /// [`policy_by`](crate::policy_by), which chooses a policy for each request.
    /// [`IntoPolicySource`] lists all types. `key` extracts the client's key from a request.
    pub fn new(policy: impl IntoPolicySource, key: impl KeyExtractor) -> Self {
        Self::with_storage(policy, key, MemoryStorage::new())
    }
}

impl<St: InfallibleStorage> RateLimitLayer<St> {
    /// Creates a layer with an infallible storage, such as a memory storage with bounds other than
    /// the defaults, or one that several layers share.
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
        Self::with(or_panic(policy.into_policy_source().bind(&storage)), key, storage)
    }

    /// Creates a layer that shares the policy, the storage and the counts of `limiter`.
    ///
    /// For a storage that can fail, use [`new`](RateLimitLayer::new) with the limiter's policy,
    /// then [`storage`](RateLimitLayer::storage) with its storage and an [`OnError`].
    pub fn from_limiter(limiter: &RateLimiter<St>, key: impl KeyExtractor) -> Self {
        Self::with(limiter.shared_policy().into_policy_source(), key, limiter.storage().clone())
    }
}

impl<St: Storage> RateLimitLayer<St> {
    fn with(policies: PolicySource, key: impl KeyExtractor, storage: St) -> Self {
        Self { shared: LayerState::new(LayerConfig::new(policies, Arc::new(key)), storage, Arc::new(TextRejection)) }
    }
}

/// Storage, responses and header fields.
impl<St: Storage, R> RateLimitLayer<St, R> {
    /// Sets the storage, and the behavior if it fails. Defaults to a new [`MemoryStorage`], which
    /// never fails.
    ///
    /// A policy that [`policy_by`](crate::policy_by) chooses is validated for each request. If the
    /// storage cannot keep it, the request is handled as if the storage had failed.
    ///
    /// # Panics
    ///
    /// Panics if the storage cannot keep the policy, for example a long log on a storage with a
    /// maximum value size, or a policy other than a fixed window on
    /// [leases](crate::storage::Leases). [`try_storage`](Self::try_storage) returns an error
    /// instead.
    #[track_caller]
    pub fn storage<T: Storage>(self, storage: T, on_error: OnError) -> RateLimitLayer<T, R> {
        or_panic(self.try_storage(storage, on_error))
    }

    /// Like [`storage`](Self::storage), but returns an error instead of panicking.
    ///
    /// # Errors
    ///
    /// Returns an error if the storage cannot keep the policy.
    pub fn try_storage<T: Storage>(self, storage: T, on_error: OnError) -> Result<RateLimitLayer<T, R>, ConfigError> {
        let (mut config, _, rejection) = self.into_parts();
        config.policies = config.policies.bind(&storage)?;
        let config = config.with(|config| config.on_error = on_error);
        Ok(RateLimitLayer { shared: LayerState::new(config, storage, rejection) })
    }

    /// Sets the [`Rejection`](crate::Rejection), which builds the response to a refused request.
    /// Defaults to [`TextRejection`].
    pub fn rejection<T>(self, rejection: T) -> RateLimitLayer<St, T> {
        let (config, storage, _) = self.into_parts();
        RateLimitLayer { shared: LayerState::new(config, storage, Arc::new(rejection)) }
    }

    /// Sets the header fields that report the limits. Defaults to [`Headers::x_rate_limit`].
    pub fn headers(self, headers: Headers) -> Self {
        self.with_config(|config| config.headers = headers)
    }

    fn into_parts(self) -> (LayerConfig, St, Arc<R>) {
        let LayerState { config, storage, rejection, .. } = &*self.shared;
        (config.clone(), storage.clone(), Arc::clone(rejection))
    }

    fn with_config(self, change: impl FnOnce(&mut LayerConfig)) -> Self {
        let (config, storage, rejection) = self.into_parts();
        Self { shared: LayerState::new(config.with(change), storage, rejection) }
    }
}

/// Options that depend on the request.
impl<St: Storage, R> RateLimitLayer<St, R> {
    /// Skips the requests that `skip` selects. A skipped request is not counted, is not observed,
    /// and its response gets no header fields.
    ///
    /// `skip` is a closure that takes the [`Head`], or an
    /// [`AllowList`](crate::extract::AllowList) of networks. Each call adds a condition. A request
    /// is skipped if any of them selects it.
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
        self.with_config(|config| config.skip.push(Arc::new(skip)))
    }

    /// Sets the cost of each request in units. Defaults to 1.
    ///
    /// The closure returns a `u32`, or a `Result` of one with
    /// [`KeyError`](crate::extract::KeyError). A request that costs 0 passes and spends nothing,
    /// and its header fields report the state of the limits. Never let a client choose the cost of
    /// its own request.
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
        self.with_config(|config| config.cost = Some(cost))
    }

    /// Charges only the requests whose responses `charge` selects, for example failed logins.
    /// Defaults to charging all requests.
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
    /// This is [`settle`](Self::settle) with the estimated cost or 0. A hit is spent before the
    /// inner service is called. If `charge` returns `false` for the head of the response, the hit
    /// is refunded.
    ///
    /// Do not use an [`ElasticWindow`](crate::ElasticWindow) with this option, because the window
    /// then locks out well-behaved clients.
    /// [`Lint::ElasticWindowRefunded`](crate::Lint::ElasticWindowRefunded)
    /// reports the combination. See the guide on
    /// [costs](crate::guide::costs#charge-by-the-response).
    pub fn charge_when<F>(self, charge: F) -> Self
    where
        F: Fn(&ResponseHead<'_>) -> bool + Send + Sync + 'static,
    {
        self.settle(move |response: &ResponseHead<'_>| if charge(response) { None } else { Some(0) })
    }

    /// Corrects the cost of each request to the units that `actual` returns for the head of its
    /// response. `None` keeps the [estimated cost](Self::cost).
    ///
    /// ```
    /// use tower_ratelimit::{PeerIp, Quota, RateLimitLayer, ResponseHead};
    ///
    /// let layer = RateLimitLayer::new(Quota::per_minute(1_000), PeerIp::new())
    ///     .settle(|response: &ResponseHead<'_>| response.headers.get("x-query-cost")?.to_str().ok()?.parse().ok());
    /// ```
    ///
    /// The estimated cost is spent before the inner service is called. When the head of the
    /// response is ready, the difference is refunded or charged, as [`RateLimiter::settle`] does. A
    /// charge can leave the client in debt. A request keeps its estimated cost if the inner service
    /// fails or the client disconnects. A request that costs nothing is not settled. Shadow limits
    /// are settled too.
    ///
    /// The response does not wait for a storage that is not immediately ready. The header fields
    /// then report the estimated cost.
    ///
    /// A layer has one source of the actual cost: the last call of `settle`,
    /// [`charge_when`](Self::charge_when) or [`settle_later`](Self::settle_later).
    pub fn settle<F>(self, actual: F) -> Self
    where
        F: Fn(&ResponseHead<'_>) -> Option<u32> + Send + Sync + 'static,
    {
        self.with_config(|config| config.settling = Some(Settling::ByResponse(Arc::new(actual))))
    }

    /// Inserts a [`Charge`](crate::Charge) into the extensions of each admitted request. The
    /// handler settles it when the actual cost is known, for example at the end of a streamed body.
    /// A request whose charge is never settled keeps its [estimated cost](Self::cost).
    ///
    /// A request has no charge if it is not limited, or if the storage failed. If either can
    /// happen, handlers should take an `Option<Charge>`. With stacked layers, the handler gets the
    /// charge of the innermost one, and [`Charge::of_policy`](crate::Charge::of_policy) returns the
    /// others.
    ///
    /// Replaces an earlier [`settle`](Self::settle) or [`charge_when`](Self::charge_when). See the
    /// guide on [costs](crate::guide::costs#settle-after-a-streamed-response).
    pub fn settle_later(self) -> Self {
        self.with_config(|config| config.settling = Some(Settling::Later))
    }
}

/// Observation and shadow mode.
impl<St: Storage, R> RateLimitLayer<St, R> {
    /// Runs the layer in shadow mode: it decides, counts, and reports to its
    /// [observer](Self::observer) and the log, but never refuses or delays a request. Requests pass
    /// even without a key or if the storage fails. Responses get no header fields.
    ///
    /// The layer checks the enforced limits of the policy, not its shadow limits. Requests that
    /// cost nothing are not counted. Use a separate memory storage, which is the default. If layers
    /// share a storage, the keys of the shadow layer take memory from those of the others.
    ///
    /// To run only one of several limits in shadow mode, use
    /// [`Policy::shadow`](crate::Policy::shadow).
    pub fn shadow(self) -> Self {
        self.with_config(|config| config.shadow = true)
    }

    /// Inserts the [`Decision`](crate::Decision) into the extensions of each admitted request, for
    /// handlers. With the feature `axum`, `Decision` is an extractor.
    ///
    /// A request has no decision if it is not limited, or if the storage failed. In a
    /// [shadow](Self::shadow) layer, it also has none if it would have been refused, if it costs
    /// nothing, or if the storage did not decide immediately. So handlers should take an
    /// `Option<Decision>`. With stacked layers, the handler sees the decision of the innermost one.
    pub fn share_decision(self) -> Self {
        self.with_config(|config| config.shares_decision = true)
    }

    /// Sets the observer, which receives every [`Event`](crate::Event) of this layer: decisions,
    /// failures of the storage, missing keys and settlements. `observer` is a closure that takes
    /// the event, or an [`Observer`](crate::Observer) such as `MetricsObserver` (feature
    /// `metrics`). Defaults to none.
    pub fn observer(self, observer: impl Observer) -> Self {
        self.with_config(|config| config.reporter.observer = Some(Arc::new(observer)))
    }

    /// Adds the key to log events (feature `tracing`). Defaults to off, because keys can be
    /// addresses or secrets. Bytes that are not printable ASCII are escaped, and a key is cut off
    /// after 256 bytes.
    pub fn log_keys(self) -> Self {
        self.with_config(|config| config.reporter.logs_keys = true)
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
            .field("policies", &self.shared.config.policies)
            .field("storage", &self.shared.storage)
            .finish_non_exhaustive()
    }
}

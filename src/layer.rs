//! The layer: what to limit, by which key, where it is kept.

use std::fmt;
use std::sync::Arc;

use tower_layer::Layer;

use crate::admission::Shared;
use crate::error::or_panic;
use crate::extract::{Head, KeyExtractor};
use crate::observe::Observer;
use crate::per_request::{Choice, CostFn, IntoCost, IntoPolicies, Policies, ResponseHead, Skip};
use crate::rules::{OnError, Rules};
use crate::storage::InfallibleStorage;
use crate::{ConfigError, Headers, MemoryStorage, RateLimit, RateLimiter, Storage, TextRejection};

/// Limits the requests to a service.
///
/// 1. The [`KeyExtractor`] says who is asking. If it says nobody, the request passes and gets no header fields; if the
///    key is missing, the answer is 400 or 500.
/// 2. All limits of the policy have to admit. The request is charged at that moment, whatever comes of it, unless its
///    response is to say whether it [is charged](Self::charge_when).
/// 3. Admitted: the inner service is called, after the delay of a leaky bucket if there is one. Its response gets
///    `X-RateLimit-Limit`, `X-RateLimit-Remaining` and `X-RateLimit-Reset`.
/// 4. Refused: the inner service never sees the request. The answer is 429 with the same fields and `Retry-After` (none
///    when the cost can never fit). A refusal is a response, never an error: `Error` is the inner service's own.
///
/// What is remembered lives in the layer, so all services made by one layer, and its clones, share it. Each layer built
/// without a storage has a [`MemoryStorage`] of its own.
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
/// # Stacking
///
/// Layers stack. The outer layer decides first, and an inner layer decides only on what the outer one
/// admits.
///
/// - The response shows the numbers of the layer with fewer units remaining. A refusal keeps the numbers
///   of the layer that refuses.
/// - The `Retry-After` of an inner layer's refusal is the longer wait of both layers, if the request spent
///   the outer layer's last units and the outer layer writes header fields. So a client that obeys
///   it is not refused by the outer layer instead.
/// - What the outer layer has charged stays charged when an inner layer refuses. To give it back, let the
///   outer layer charge only requests that no inner layer refuses:
///
/// ```
/// use tower_ratelimit::{Decision, Global, Quota, RateLimitLayer, ResponseHead};
///
/// let outer = RateLimitLayer::new(Quota::per_hour(1_000), Global)
///     .charge_when(|response: &ResponseHead<'_>| response.extensions.get().is_none_or(Decision::is_admitted));
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
/// fields that let a browser read them. In which order a layer does things is told in the [crate's documentation](crate).
#[must_use = "a layer limits nothing until it is put around a service"]
pub struct RateLimitLayer<St = MemoryStorage, R = TextRejection> {
    pub(crate) shared: Arc<Shared<St, R>>,
}

impl RateLimitLayer {
    /// Keeps `policy` for each key, in memory.
    ///
    /// `policy` is a [`Policy`](crate::Policy), a [`Quota`](crate::Quota), or chosen for each request by
    /// [`policy_by`](crate::policy_by).
    pub fn new(policy: impl IntoPolicies, key: impl KeyExtractor) -> Self {
        Self::with(policy.into_policies(), key, MemoryStorage::new())
    }
}

impl<St: InfallibleStorage> RateLimitLayer<St> {
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
    ///
    /// # Panics
    ///
    /// When the storage cannot keep the policy, as it may remember more than there is room for.
    #[track_caller]
    pub fn with_storage(policy: impl IntoPolicies, key: impl KeyExtractor, storage: St) -> Self {
        let policies = policy.into_policies();
        or_panic(policies.fit(&storage));
        Self::with(policies, key, storage)
    }

    /// Keeps the limiter's policy on the limiter's storage: what is spent there is spent here.
    ///
    /// For a storage that can fail, say what becomes of a request then: [`new`](RateLimitLayer::new) with the limiter's policy, and
    /// [`storage`](RateLimitLayer::storage) with its storage.
    pub fn from_limiter(limiter: &RateLimiter<St>, key: impl KeyExtractor) -> Self {
        Self::with(limiter.policy().clone().into_policies(), key, limiter.storage().clone())
    }
}

impl<St: Storage> RateLimitLayer<St> {
    fn with(policies: Policies, key: impl KeyExtractor, storage: St) -> Self {
        Self { shared: Shared::new(Rules::new(policies, Arc::new(key)), storage, Arc::new(TextRejection)) }
    }
}

/// Where it keeps states, and what it answers.
impl<St: Storage, R> RateLimitLayer<St, R> {
    /// Keeps states on `storage`. When it fails, `on_error` says what becomes of the request.
    ///
    /// # Panics
    ///
    /// When the storage cannot keep the policy, as it may remember more than there is room for, a long log on a store whose values
    /// are bounded, or as it is no fixed window and the storage has [leases](crate::storage::Leases). [`try_storage`](Self::try_storage) returns an error instead. A policy that is chosen
    /// [for each request](crate::policy_by) meets the storage then: that it cannot be kept is a failure of the storage.
    #[track_caller]
    pub fn storage<T: Storage>(self, storage: T, on_error: OnError) -> RateLimitLayer<T, R> {
        or_panic(self.try_storage(storage, on_error))
    }

    /// As [`storage`](Self::storage).
    ///
    /// # Errors
    ///
    /// When the storage cannot keep the policy.
    pub fn try_storage<T: Storage>(self, storage: T, on_error: OnError) -> Result<RateLimitLayer<T, R>, ConfigError> {
        let (rules, _, rejection) = self.into_parts();
        rules.policies.fit(&storage)?;
        let rules = rules.with(|rules| rules.on_error = on_error);
        Ok(RateLimitLayer { shared: Shared::new(rules, storage, rejection) })
    }

    /// Answers refused requests with what `rejection` makes: see [`Rejection`](crate::Rejection).
    pub fn rejection<T>(self, rejection: T) -> RateLimitLayer<St, T> {
        let (rules, storage, _) = self.into_parts();
        RateLimitLayer { shared: Shared::new(rules, storage, Arc::new(rejection)) }
    }

    /// Tells clients about their limits in these header fields.
    pub fn headers(self, headers: Headers) -> Self {
        self.ruled(|rules| rules.headers = headers)
    }

    fn into_parts(self) -> (Rules, St, Arc<R>) {
        let Shared { rules, storage, rejection, .. } = &*self.shared;
        (rules.clone(), storage.clone(), Arc::clone(rejection))
    }

    fn ruled(self, change: impl FnOnce(&mut Rules)) -> Self {
        let (rules, storage, rejection) = self.into_parts();
        Self { shared: Shared::new(rules.with(change), storage, rejection) }
    }
}

/// What differs from request to request.
impl<St: Storage, R> RateLimitLayer<St, R> {
    /// Lets requests pass that `skip` names: they are not counted, get no header fields, and nothing else of the layer looks
    /// at them.
    ///
    /// `skip` is a closure over the [`Head`], or an [`AllowList`](crate::extract::AllowList) of networks. Each call adds
    /// one; a request passes that any of them names.
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

    /// Charges only requests whose response `charge` says yes to: only failed logins, only successes.
    ///
    /// 1. Each request is charged before it is passed on, so however many are under way at once, no more of them than the
    ///    limit can turn out to count.
    /// 2. When the response's head is there and `charge` says no, what was taken is given back, as
    ///    [`RateLimiter::refund`] does: each limit only into the window it was taken from, and a leaky bucket only its last
    ///    place. A storage that does so at once (memory) has the header fields tell of it already; on others the response
    ///    does not wait for it, and its fields show the charge.
    /// 3. Without a response there is nothing to ask about: a request that fails with an error of the inner service, or is
    ///    dropped half way (the client has gone), stays charged. Else hanging up early would be a way not to be counted.
    ///
    /// Count failed logins by a [`MovingWindow`](crate::MovingWindow), as below. An
    /// [`ElasticWindow`](crate::ElasticWindow) locks out clients that behave: a success that is not charged still moves the
    /// window's end, so old failures never expire ([`Lint::ElasticWindowRefunded`](crate::Lint::ElasticWindowRefunded)).
    ///
    /// What a request that costs nothing took is not given back. A body that breaks off later changes nothing. Of stacked layers each asks for itself; the refusal of an inner one is
    /// a response like others.
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
    pub fn charge_when<F>(self, charge: F) -> Self
    where
        F: Fn(&ResponseHead<'_>) -> bool + Send + Sync + 'static,
    {
        self.ruled(|rules| rules.charge = Some(Arc::new(charge)))
    }
}

/// What can be seen of it.
impl<St: Storage, R> RateLimitLayer<St, R> {
    /// Only tries the layer out: it decides, counts and tells its [observer](Self::observer) and the log, and every request
    /// goes on at once, whatever was decided: also one without a key, or when the storage fails. No header field shows it, and
    /// nobody waits for its storage.
    ///
    /// All enforced limits of the policy are tried out, together; its shadow limits are not asked. Requests that cost nothing are
    /// not looked at. Give it a memory storage of its own, as it has unless told otherwise: what it keeps takes room, and where
    /// others keep theirs too it can crowd them out.
    ///
    /// One limit of several can be tried out too: see [`Policy::shadow`](crate::Policy::shadow).
    pub fn shadow(self) -> Self {
        self.ruled(|rules| rules.shadow = true)
    }

    /// Attaches the [`Decision`](crate::Decision) to each admitted request, for handlers: it is in the request's extensions.
    /// With the feature `axum` it is an extractor.
    ///
    /// A request has none that is not limited, or whose storage failed, or made one wait where the layer is only
    /// [tried out](Self::shadow): let handlers take an `Option<Decision>`. Of stacked layers that do so the innermost one's is there.
    pub fn share_decision(self) -> Self {
        self.ruled(|rules| rules.shares_decision = true)
    }

    /// Tells `observer` whatever this layer decides: a closure over the [`Event`](crate::Event), or an
    /// [`Observer`](crate::Observer) of one's own. `MetricsObserver` (feature `metrics`) counts.
    pub fn observer(self, observer: impl Observer) -> Self {
        self.ruled(|rules| rules.reporter.observer = Some(Arc::new(observer)))
    }

    /// Adds the key to the events in the log (feature `tracing`). By default the log has no keys, because
    /// they are addresses and secrets. Bytes that are not printable ASCII are escaped, and only the first
    /// 256 bytes of a key are written.
    pub fn log_keys(self) -> Self {
        self.ruled(|rules| rules.reporter.logs_keys = true)
    }

    /// The limiter inside, to peek at a key, to clear it, to charge it elsewhere; `None` when [`policy_by`](crate::policy_by) chooses
    /// the policy for each request: make one for a policy and the [storage](Self::storage_handle) then.
    pub fn limiter(&self) -> Option<RateLimiter<St>> {
        match &self.shared.rules.policies.0 {
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

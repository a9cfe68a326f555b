//! The layer and its options.

mod costs;
mod handles;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use http::Response;
use tower_layer::Layer;

use crate::error::{ConfigError, or_panic};
use crate::extract::{AllowList, Head, KeyExtractor};
use crate::headers::Headers;
use crate::limiter::LocalLimiter;
use crate::lint::Lint;
use crate::middleware::common::{Shared, common_options};
use crate::middleware::config::{LayerConfig, LayerMember, OnError};
use crate::middleware::options::{IntoPolicySource, PolicySource};
use crate::middleware::state::{LayerState, SharedState};
use crate::observe::{Event, NearLimit};
use crate::rejection::{RejectReason, TextRejection};
use crate::service::RateLimit;
use crate::storage::{AnyStorage, MAX_MEMBERS, MemoryStorage, Storage};
use crate::waiting::WaitBounds;

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
/// By default, the layer handles a request in one of these ways:
///
/// - An admitted request goes to the inner service. Its response gets the header fields
///   `X-RateLimit-Limit`, `X-RateLimit-Remaining` and `X-RateLimit-Reset`.
/// - A refused request never reaches the inner service. Its response is a 429 with the same fields,
///   and with `Retry-After` unless the request can never be admitted, because of its cost.
/// - A request is not limited if it is [skipped](Self::skip), if an [allow list](Self::allow_list)
///   selects it, or if its policy or its key is `None`. It goes to the inner service, and its response
///   is unchanged.
///
/// The defaults are a new [`MemoryStorage`], a cost of 1, [`Headers::x_rate_limit`] and
/// [`TextRejection`]. All services of a layer and of its clones share their counts. A method such
/// as [`headers`](Self::headers) returns a layer that still uses the same storage, and so the same
/// counts.
///
/// The guides explain [the order of all steps](crate::guide#the-path-of-a-request),
/// [stacked layers](crate::guide#stacked-layers), [keys](crate::guide::keys_and_proxies),
/// [costs](crate::guide::costs), [responses](crate::guide::headers_and_refusals) and
/// [shared storages](crate::guide::several_processes).
///
/// # Errors
///
/// The error type is that of the inner service. The layer itself never returns an error, but
/// responds with a status. With the default [rejection](Self::rejection), the statuses are:
///
/// | cause | response |
/// |---|---|
/// | the request is refused | 429 |
/// | the request has no key or no cost | [`KeyError::status`](crate::KeyError::status): 400, 401 or 500 |
/// | the storage or the lookup of the policy fails | 503, or the response of the inner service, as [`OnError`] selects |
///
/// # Panics
///
/// A request panics if it is delayed by a leaky bucket, or if it [waits](Self::wait), outside of a
/// tokio runtime with time enabled. The panic occurs in `Service::call` or in the response future.
///
/// With a memory storage, nothing else needs a runtime, except for a `PolicyLookup`. Without a
/// runtime, the lookup fails and does not panic.
#[doc(alias("middleware", "throttle"))]
#[must_use = "a layer limits nothing until it is put around a service"]
pub struct RateLimitLayer<R = TextRejection> {
    pub(crate) shared: Arc<SharedState<R>>,
}

impl RateLimitLayer {
    /// Creates a layer that keeps its counts in memory, in a [`MemoryStorage`] of its own.
    /// [`storage`](Self::storage) sets another one.
    ///
    /// `key` extracts the key of the client from a request. `policy` is one of these:
    ///
    /// | type | policy of a request |
    /// |---|---|
    /// | [`Policy`](crate::Policy), [`Limit`](crate::Limit) or [`Quota`](crate::Quota) | the same for all requests |
    /// | [`LivePolicy`](crate::LivePolicy) | the same for all requests, but it can change later |
    /// | the result of [`policy_by`](crate::policy_by) | chosen by a closure for each request |
    /// | `PolicyLookup` (feature `lookup`) | looked up for each request, for example in a database |
    ///
    /// # Panics
    ///
    /// Panics if no limit of the policy can refuse, because it is a lockout [by
    /// refusals](crate::Lockout::by_refusals) alone.
    #[track_caller]
    pub fn new(policy: impl IntoPolicySource, key: impl KeyExtractor) -> Self {
        let storage = MemoryStorage::new().into();
        // A memory storage supports every policy.
        Self::with(or_panic(policy.into_policy_source().bind_alone(&storage)), key, storage)
    }

    /// Creates a layer that shares the policy, the storage and the counts of `limiter`. It follows
    /// the changes of a [`LivePolicy`](crate::LivePolicy).
    ///
    /// For a [`RateLimiter`](crate::RateLimiter), use [`new`](Self::new) with its
    /// [policy](crate::RateLimiter::policy), then [`storage`](Self::storage) with its
    /// [storage](crate::RateLimiter::storage) and an [`OnError`]. This policy is a copy of the current
    /// one. To follow changes, call `new` with the [`LivePolicy`](crate::LivePolicy) itself.
    pub fn from_limiter(limiter: &LocalLimiter, key: impl KeyExtractor) -> Self {
        Self::with(limiter.shared_policy().into_policy_source(), key, limiter.storage().clone().into())
    }

    fn with(policies: PolicySource, key: impl KeyExtractor, storage: AnyStorage) -> Self {
        let first = LayerMember { policies, key: Arc::new(key), cost: None };
        Self { shared: Shared::new(LayerState::new(LayerConfig::new(first), storage), Arc::new(TextRejection::new())) }
    }
}

/// Several keys.
impl<R> RateLimitLayer<R> {
    /// Adds a policy with a key of its own, for example for the tenant of a user, or for all clients. A
    /// request is admitted if all policies admit it, and spends its cost from each. A refused request
    /// spends nothing from any of them.
    ///
    /// ```
    /// use tower_ratelimit::extract::Extension;
    /// use tower_ratelimit::{Global, Key, Policy, RateLimitLayer};
    ///
    /// /// Inserted into the extensions by the authentication layer.
    /// #[derive(Clone)]
    /// struct User {
    ///     id: u64,
    ///     tenant: u64,
    /// }
    ///
    /// let per_user = "100/minute".parse::<Policy>()?.with_name("user");
    /// let per_tenant = "1000/minute".parse::<Policy>()?.with_name("tenant");
    /// let for_all = "10000/minute".parse::<Policy>()?.with_name("all");
    /// let layer = RateLimitLayer::new(per_user, Extension::new(|user: &User| Key::from(user.id)))
    ///     .and(per_tenant, Extension::new(|user: &User| Key::from(user.tenant)))
    ///     .and(for_all, Global::new());
    /// # Ok::<(), tower_ratelimit::ConfigError>(())
    /// ```
    ///
    /// | part | with several policies |
    /// |---|---|
    /// | key | an extractor that returns an error rejects the request; one that returns `None` leaves its policy out |
    /// | refusal | [`LimitExceeded`](crate::LimitExceeded) and the header fields are about the refusing policy with the longest `Retry-After` |
    /// | header fields of an admitted request | those of the policy with the fewest remaining units; the IETF fields list the limits of all |
    /// | observer | a decision for each policy of an admitted request, and for each refusing policy otherwise |
    /// | [`cost`](Self::cost) | the same for all policies, unless you call `cost` after each `and` |
    /// | [`settle`](Self::settle), a [`Reservation`](crate::Reservation), [`clear_when`](Self::clear_when) | correct or clear all keys, with the same actual cost |
    /// | [shadow limits](crate::Policy#shadow-limits) | are checked if all policies admit the request |
    /// | [`limiter`](Self::limiter) | has the first policy |
    ///
    /// A [`MemoryStorage`] and [some others](crate::guide::plans_and_tenants#storages) decide on
    /// all keys together. A Redis Cluster does if the keys are [within](Self::within) one key. Wrap
    /// any other storage in [`InOrder`](crate::storage::InOrder), which decides on one key after the
    /// other, and refunds the earlier hits if a later one is refused. The guide on [plans and
    /// tenants](crate::guide::plans_and_tenants) has more examples.
    ///
    /// # Panics
    ///
    /// Panics in these cases. [`try_and`](Self::try_and) returns an error for the first three.
    ///
    /// - All limits of the policy are lockouts [by refusals](crate::Lockout::by_refusals), which have no
    ///   refusals to count.
    /// - The storage does not support the policy, or does not decide on several keys together. A
    ///   Redis Cluster decides only on keys [within](Self::within) one key.
    /// - Two policies have the same [identity](crate::Policy#identity). Give each its own name.
    /// - The layer has eight policies already, or one of the options [`wait`](Self::wait) and
    ///   [`shadow`](Self::shadow), which do not support several keys.
    #[track_caller]
    pub fn and(self, policy: impl IntoPolicySource, key: impl KeyExtractor) -> Self {
        or_panic(self.try_and(policy, key))
    }

    /// Like [`and`](Self::and), but returns an error instead of panicking.
    ///
    /// # Errors
    ///
    /// Returns an error if all limits of the policy are lockouts by refusals, if the storage does not
    /// support the policy or does not decide on several keys together, or if two policies have the same
    /// identity.
    ///
    /// # Panics
    ///
    /// Panics if the layer has eight policies already, or one of the options that do not support
    /// several keys.
    #[track_caller]
    pub fn try_and(self, policy: impl IntoPolicySource, key: impl KeyExtractor) -> Result<Self, ConfigError> {
        let (mut config, storage, rejection) = self.into_parts();
        let others = config.others.len() + 1;
        assert!(others < MAX_MEMBERS, "a layer has at most {MAX_MEMBERS} policies with keys of their own");
        let cost = config.others.last().unwrap_or(&config.first).cost.clone();
        config.others.push(LayerMember { policies: policy.into_policy_source(), key: Arc::new(key), cost });
        let config = config.bind(&storage)?.with(LayerConfig::assert_combines);
        Ok(Self { shared: Shared::new(LayerState::new(config, storage), rejection) })
    }

    /// Puts the key of each policy [within](crate::Key::within) an outer key, for example that of
    /// the tenant. Defaults to no outer key.
    ///
    /// Call this method before [`and`](Self::and) and [`storage`](Self::storage). A Redis Cluster
    /// needs an outer key: it decides on several keys together only if they are within the same
    /// outer key, because it then keeps them on one server.
    ///
    /// ```
    /// use tower_ratelimit::extract::Header;
    /// use tower_ratelimit::{Policy, Quota, RateLimitLayer};
    ///
    /// let per_user = Policy::from(Quota::per_minute(100)).with_name("user");
    /// let per_tenant = Policy::from(Quota::per_minute(1_000)).with_name("tenant");
    /// // Counts the users of each tenant separately.
    /// let layer = RateLimitLayer::new(per_user, Header::new("x-user"))
    ///     .within(Header::new("x-tenant"))
    ///     .and(per_tenant, Header::new("x-tenant"));
    /// ```
    ///
    /// - The counts of a user within a tenant are separate from those within another tenant, and
    ///   from those without this option. This holds for all storages, and their keys have the same
    ///   names on one Redis and on a cluster.
    /// - The key of [`Global`](crate::Global) is not within another one. A cluster rejects its
    ///   policy when the layer is built, unless it is [leased](crate::storage::Leases::only), or the
    ///   storage is an [`InOrder`](crate::storage::InOrder).
    /// - If the extractor returns an error, the request is rejected. If it returns `None`, the keys
    ///   are within the key of all clients.
    /// - A [`RateLimiter`](crate::RateLimiter) gets the key from
    ///   [`Key::within`](crate::Key::within).
    ///
    /// # Panics
    ///
    /// Panics if the layer has the option [`wait`](Self::wait) or [`shadow`](Self::shadow).
    #[track_caller]
    pub fn within(self, outer_key: impl KeyExtractor) -> Self {
        self.with_config(|config| {
            config.outer_key = Some(Arc::new(outer_key));
            config.assert_combines();
        })
    }
}

/// Storage, responses and header fields.
impl<R> RateLimitLayer<R> {
    /// Sets the storage, and the action of the layer if the storage, or the lookup of a policy,
    /// fails. Defaults to a new [`MemoryStorage`], which never fails, and to [`OnError::Refuse`].
    ///
    /// Several layers can share a storage: pass clones of it. The layers share the counts of equal
    /// keys under policies with the same [identity](crate::Policy#identity).
    ///
    /// ```
    /// use tower_ratelimit::{MemoryStorage, OnError, PeerIp, Quota, RateLimitLayer};
    ///
    /// let storage = MemoryStorage::builder().max_keys(50_000).build()?;
    /// let layer = RateLimitLayer::new(Quota::per_minute(60), PeerIp::new()).storage(storage, OnError::Refuse);
    /// # Ok::<(), tower_ratelimit::ConfigError>(())
    /// ```
    ///
    /// A policy that [`policy_by`](crate::policy_by) or a `PolicyLookup` chooses is not validated
    /// here. If the storage does not support such a policy, its requests are handled as if the
    /// storage had failed.
    ///
    /// # Panics
    ///
    /// Panics if the storage does not support the policy or one of its shadow limits, for example a
    /// long log on a storage with a maximum value size. Also panics if the layer has [several
    /// keys](Self::and), and the storage does not decide on them together.
    /// [`try_storage`](Self::try_storage) returns an error instead.
    #[track_caller]
    pub fn storage(self, storage: impl Storage, on_error: OnError) -> Self {
        or_panic(self.try_storage(storage, on_error))
    }

    /// Like [`storage`](Self::storage), but returns an error instead of panicking.
    ///
    /// # Errors
    ///
    /// Returns an error if the storage does not support the policy or one of its shadow limits, or
    /// if it does not decide on [several keys](Self::and) of the layer together.
    pub fn try_storage(self, storage: impl Storage, on_error: OnError) -> Result<Self, ConfigError> {
        let (storage, (config, _, rejection)) = (AnyStorage::new(storage), self.into_parts());
        let config = config.bind(&storage)?.with(|config| config.on_error = on_error);
        Ok(RateLimitLayer { shared: Shared::new(LayerState::new(config, storage), rejection) })
    }

    /// Sets the [`Rejection`](crate::Rejection), which builds the response to each request that the
    /// layer does not forward. [`RejectReason`] lists the causes: a refusal, a missing key or cost, or a
    /// failure of the storage or of the policy's lookup. Defaults to [`TextRejection`].
    ///
    /// [`rejection_by`](Self::rejection_by) takes a closure.
    pub fn rejection<T>(self, rejection: T) -> RateLimitLayer<T> {
        let (config, storage, _) = self.into_parts();
        RateLimitLayer { shared: Shared::new(LayerState::new(config, storage), Arc::new(rejection)) }
    }

    fn into_parts(self) -> (LayerConfig, AnyStorage, Arc<R>) {
        let shared = &*self.shared;
        (shared.config.clone(), shared.storage.clone(), Arc::clone(&shared.rejection))
    }

    fn with_config(self, change: impl FnOnce(&mut LayerConfig)) -> Self {
        let (config, storage, rejection) = self.into_parts();
        Self { shared: Shared::new(LayerState::new(config.with(change), storage), rejection) }
    }
}

/// Waiting instead of refusing.
impl<R> RateLimitLayer<R> {
    /// Lets requests wait for up to `max_wait` instead of refusing them. At most `max_waiting`
    /// requests of this layer wait at the same time. Defaults to refusing immediately.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_ratelimit::{PeerIp, Quota, RateLimitLayer};
    ///
    /// let layer = RateLimitLayer::new(Quota::per_second(10), PeerIp::new()).wait(Duration::from_secs(2), 1_000);
    /// ```
    ///
    /// Choose `max_wait` shorter than the timeouts of clients and proxies. Waiting requests keep
    /// their memory and their connections, so choose `max_waiting` as the number of them that the
    /// server can hold.
    ///
    /// The layer has `max_waiting` places. A request gets a place only while its key has fewer
    /// waiting requests than there are free places. So one key can take half of the places, and two
    /// keys a third each. The key of [`Global`](crate::Global) can take all of them.
    ///
    /// # Which requests wait
    ///
    /// A request whose hit was refused waits, unless one of these conditions holds. Then it is
    /// refused immediately, as without this option:
    ///
    /// - The time until it can be admitted is longer than `max_wait`.
    /// - It can never be admitted, because its cost exceeds the capacity.
    /// - All places are taken, or its key has at least as many waiting requests as there are free
    ///   places.
    ///
    /// In a [shadow](Self::shadow) layer, no request waits.
    ///
    /// # Order
    ///
    /// Waiting requests of the same policy and key are admitted in the order of their arrival, by the
    /// rules of [`RateLimiter::acquire`](crate::RateLimiter::acquire). A new request joins the end of
    /// the queue without a hit. In these cases it makes a hit instead, which can overtake them:
    ///
    /// - It gets no place, because all places are taken or its key has too many waiting requests.
    /// - The last refusal of a waiting request shows that the new one cannot be admitted within
    ///   `max_wait`.
    ///
    /// A request that [nothing polls](crate::RateLimiter::acquire) does not block the others.
    ///
    /// Requests in other processes can overtake too. So a request with a high [cost](Self::cost)
    /// may not be admitted within `max_wait`.
    ///
    /// # The end of the wait
    ///
    /// - For an admitted request, the layer waits until a clone of the inner service is ready, and
    ///   then calls the clone. A waiting request holds no permit of the inner service. The delay of
    ///   a [`LeakyBucket`](crate::LeakyBucket) follows after the wait, and is not part of
    ///   `max_wait`.
    /// - A request is refused as soon as its own hit shows that it cannot be admitted in time. The
    ///   hit of a request ahead of it with the same cost can show this too. A request that is still
    ///   behind others after `max_wait` is refused then. The header fields show the latest refusal
    ///   of the same key and cost, with times counted from now. If there is none, they show the
    ///   result of a peek.
    /// - If the client disconnects before the inner service is called, a hit that was already
    ///   admitted is refunded. If it disconnects during its first hit, before it waits, the units
    ///   can stay spent.
    /// - If the storage fails, [`OnError`](crate::OnError) applies.
    ///
    /// The observer and the log get one decision for each request, when its wait is over.
    ///
    /// # Panics
    ///
    /// Panics if the layer has [several keys](Self::and) or an [outer key](Self::within).
    ///
    /// The response future panics if the request has to wait outside of a tokio runtime with time
    /// enabled.
    #[track_caller]
    pub fn wait(self, max_wait: Duration, max_waiting: usize) -> Self {
        self.with_config(|config| {
            config.wait = Some(WaitBounds { max_wait, max_waiting });
            config.assert_combines();
        })
    }
}

/// Shadow mode, and decisions and meters for handlers.
impl<R> RateLimitLayer<R> {
    /// Runs the layer in shadow mode: it decides, counts, and reports to its
    /// [observer](Self::observer) and the log, but forwards every request without a delay. Defaults
    /// to off.
    ///
    /// - A request without a key or a cost passes, and so does each request while the storage
    ///   fails.
    /// - Responses get no header fields from this layer.
    /// - The layer checks the enforced limits of the policy, not its
    ///   [shadow limits](crate::Policy#shadow-limits).
    /// - A request whose cost is 0 is not checked.
    ///
    /// Use a separate memory storage, which is the default. If the shadow layer shares a storage with
    /// other layers:
    ///
    /// - Give its policy a name of its own. Otherwise it spends the units of each layer whose policy has
    ///   the same [identity](crate::Policy#identity), and that layer refuses requests earlier.
    /// - In a memory storage, its keys take memory from theirs.
    ///
    /// To run only one of several limits in shadow mode, use
    /// [`Policy::shadow`](crate::Policy::shadow).
    ///
    /// # Panics
    ///
    /// Panics if the layer has [several keys](Self::and) or an [outer key](Self::within).
    #[track_caller]
    #[doc(alias = "dry run")]
    pub fn shadow(self) -> Self {
        self.with_config(|config| {
            config.shadow = true;
            config.assert_combines();
        })
    }

    /// Inserts the [`Decision`](crate::Decision) into the extensions of each admitted request, for
    /// handlers. With [several keys](Self::and), this is the decision with the fewest remaining
    /// units. With the feature `axum`, `Decision` is an extractor. Defaults to off.
    ///
    /// The layer inserts no decision in these cases, so handlers should take an `Option<Decision>`:
    ///
    /// - The request is not limited.
    /// - The storage or the lookup of the policy failed, and the request was forwarded without a
    ///   limit.
    /// - The layer is a [shadow](Self::shadow) layer, and the request would have been refused, its
    ///   cost is 0, or the storage did not decide immediately.
    ///
    /// With stacked layers that have this option, the handler gets the decision of the innermost
    /// layer that inserted one.
    pub fn share_decision(self) -> Self {
        self.with_config(|config| config.shares_decision = true)
    }

    /// Inserts a [`Meter`](crate::Meter) into the extensions of each limited request. With it, the
    /// handler makes further hits on the key of the request: for messages, chunks or fields, also after
    /// the response. Defaults to off.
    ///
    /// These hits are separate from the hit of the request, and are settled one by one. So the options
    /// that settle the request, such as [`settle_later`](Self::settle_later), do not change them.
    ///
    /// With the feature `axum`, `Meter` is an extractor. The layer inserts no meter in these cases, so
    /// if they can happen, handlers should take an `Option<Meter>`:
    ///
    /// - The request is not limited.
    /// - The lookup of the policy failed, and the request was forwarded without a limit.
    /// - The layer is a [shadow](Self::shadow) layer, and the request has no key or no cost.
    ///
    /// With stacked layers, the handler gets the meter of the innermost layer with this option.
    ///
    /// See the guide on [costs](crate::guide::costs#meter-messages-and-chunks).
    pub fn meter(self) -> Self {
        self.with_config(|config| config.meters = true)
    }
}

/// Events.
impl<R> RateLimitLayer<R> {
    /// Reports [`EventKind::NearLimit`](crate::EventKind::NearLimit) when a client has spent this
    /// share of the capacity of a limit, for example 0.8. Use it to warn clients before they are
    /// refused. Defaults to off.
    ///
    /// The hit that crosses the share is reported once, for each limit that it crosses. So a client
    /// is reported once per window, even if several processes share the storage. It is reported again
    /// after units have become free, if its hits cross the share again:
    ///
    /// - Windows free all units at once, at their end.
    /// - A token bucket, a leaky bucket, a moving window and a sliding window counter free units all the
    ///   time. A client whose usage stays near the share may cross it with every hit, so send at most one
    ///   warning per period.
    /// - A settlement can return the units of a hit that was reported.
    ///
    /// A settlement that adds units is not reported if it crosses the share, and the hits after it do
    /// not cross it any more. So estimate a [`cost`](Self::cost) rather high. With
    /// [`Leases`](crate::storage::Leases), a process does not know the units of other processes at
    /// each hit, so it may miss the one that crosses the share.
    ///
    /// Hits of a [`Meter`](crate::Meter) and on shadow limits are reported, too. Like an
    /// [`observer`](Self::observer), this option needs the full decision on each request.
    ///
    /// ```
    /// use tower_ratelimit::{EventKind, PeerIp, Quota, RateLimitLayer};
    ///
    /// let layer = RateLimitLayer::new(Quota::per_hour(1_000), PeerIp::new()).near_limit(0.8).observer(|event| {
    ///     if let (EventKind::NearLimit { status, .. }, Some(key)) = (event.kind, event.key) {
    ///         println!("{key:?} has {} requests left for {:?}", status.remaining(), status.reset_after());
    ///     }
    /// });
    /// ```
    ///
    /// # Panics
    ///
    /// Panics unless `share` is greater than 0 and at most 1.
    #[track_caller]
    pub fn near_limit(self, share: f64) -> Self {
        let near_limit = NearLimit::new(share);
        self.with_config(|config| config.reporter.near_limit = Some(near_limit))
    }
}

common_options!(
    RateLimitLayer,
    "PeerIp, Quota, RateLimitLayer",
    "RateLimitLayer::new(Quota::per_minute(60), PeerIp::new())"
);

impl<S, R> Layer<S> for RateLimitLayer<R> {
    type Service = RateLimit<S, R>;

    fn layer(&self, inner: S) -> Self::Service {
        self.shared.start();
        RateLimit::new(inner, Arc::clone(&self.shared))
    }
}

impl<R> fmt::Debug for RateLimitLayer<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RateLimitLayer")
            .field("policies", &self.shared.config.members().map(|member| &member.policies).collect::<Vec<_>>())
            .field("storage", &self.shared.storage)
            .finish_non_exhaustive()
    }
}

use std::iter::once;
use std::sync::Arc;

use super::RateLimitLayer;
use crate::extract::Head;
use crate::middleware::options::{CostFn, IntoCost, ResponseHead, SettleOptions};

/// The cost of a request, before and after its response.
impl<R> RateLimitLayer<R> {
    /// Sets the cost of each request in units. Defaults to 1.
    ///
    /// The closure returns a `u32`, or a `Result<u32, KeyError>`. Never let a client choose the
    /// cost of its own request.
    ///
    /// | result | effect |
    /// |---|---|
    /// | 0 | the request passes and spends nothing, and the header fields of the response report the state of the limits |
    /// | at most the [capacity](crate::Limit::capacity) of each limit | the request spends all of these units, or is refused |
    /// | more than the capacity of a limit | the request is always refused, without `Retry-After` |
    /// | a [`KeyError`](crate::extract::KeyError) | the layer responds with the status of the error |
    ///
    /// ```
    /// use tower_ratelimit::{PeerIp, Quota, RateLimitLayer};
    ///
    /// let layer = RateLimitLayer::new(Quota::per_minute(100), PeerIp::new())
    ///     .cost(|head| if head.uri().path().starts_with("/search") { 10 } else { 1 });
    /// ```
    ///
    /// With [several keys](Self::and), the closure applies to the policy that was added last, to all
    /// before it that have no closure yet, and to those that are added later. So one call sets the same
    /// cost for all. For costs that differ, call `cost` after each `and`.
    #[doc(alias = "weight")]
    pub fn cost<F, T>(self, cost: F) -> Self
    where
        F: Fn(&Head<'_>) -> T + Send + Sync + 'static,
        T: IntoCost,
    {
        let cost: Arc<CostFn> = Arc::new(move |head: &Head<'_>| cost(head).into_cost());
        self.with_config(|config| {
            let before = config.others.len();
            for (position, member) in once(&mut config.first).chain(&mut config.others).enumerate() {
                if position == before || member.cost.is_none() {
                    member.cost = Some(Arc::clone(&cost));
                }
            }
        })
    }

    /// Charges only the requests for whose response `charge` returns `true`, for example failed
    /// logins. Defaults to charging all requests.
    ///
    /// ```
    /// use http::StatusCode;
    /// use tower_ratelimit::{PeerIp, Policy, RateLimitLayer};
    ///
    /// let policy: Policy = "moving-window 5/minute".parse()?;
    /// let failed_logins = RateLimitLayer::new(policy, PeerIp::new())
    ///     .charge_when(|response| response.status == StatusCode::UNAUTHORIZED);
    /// # Ok::<(), tower_ratelimit::ConfigError>(())
    /// ```
    ///
    /// The [cost](Self::cost) is spent before the inner service is called. If `charge` then returns
    /// `false` for the head of the response, the hit is refunded. This is [`settle`](Self::settle)
    /// with an actual cost of 0, or with the estimated cost, and replaces an earlier call of
    /// `settle`.
    ///
    /// Do not combine this option with an [`ElasticWindow`](crate::ElasticWindow), which would lock
    /// out well-behaved clients. The layer reports the combination as
    /// [`Lint::ElasticWindowRefunded`](crate::Lint::ElasticWindowRefunded). See the guide on
    /// [costs](crate::guide::costs#charge-by-the-response).
    pub fn charge_when<F>(self, charge: F) -> Self
    where
        F: Fn(&ResponseHead<'_>) -> bool + Send + Sync + 'static,
    {
        self.settle(move |response| if charge(response) { None } else { Some(0) })
    }

    /// Corrects the cost of each request to the units that `actual` returns for the head of its
    /// response. `None` keeps the estimated cost, which is that of [`cost`](Self::cost). Defaults
    /// to the estimated cost for all requests.
    ///
    /// ```
    /// use tower_ratelimit::{PeerIp, Quota, RateLimitLayer};
    ///
    /// let layer = RateLimitLayer::new(Quota::per_minute(1_000), PeerIp::new())
    ///     .settle(|response| response.headers.get("x-query-cost")?.to_str().ok()?.parse().ok());
    /// ```
    ///
    /// The estimated cost is spent before the inner service is called. When the head of the
    /// response is ready, the difference is refunded or charged, as
    /// [`Reservation::settle`](crate::Reservation::settle) does.
    ///
    /// - A charge can leave the client in debt.
    /// - A request keeps its estimated cost if the inner service returns an error, or if the client
    ///   disconnects before the head of the response is ready.
    /// - A request whose estimated cost is 0 is not settled.
    /// - [Shadow limits](crate::Policy#shadow-limits) are settled too.
    /// - If the storage fails, the hit keeps its estimated cost, unless the storage has settled the
    ///   hit before the failure. The observer and the log get the error.
    ///
    /// The response does not wait for a storage that is not immediately ready. The header fields
    /// then report the units that remained before the settlement.
    ///
    /// With [`settle_later`](Self::settle_later), a request whose handler has taken the reservation
    /// is settled by the reservation instead.
    ///
    /// Replaces an earlier call of [`charge_when`](Self::charge_when).
    pub fn settle<F>(self, actual: F) -> Self
    where
        F: Fn(&ResponseHead<'_>) -> Option<u32> + Send + Sync + 'static,
    {
        self.with_settling(|settling| settling.by_response = Some(Arc::new(actual)))
    }

    /// Clears the key of each request for whose response `clears` returns `true`, for example after
    /// a successful login. All hits of the key under this layer's policy are forgotten, and the
    /// locks of a [`Lockout`](crate::Lockout) with their level. Also clears those [shadow
    /// limits](crate::Policy#shadow-limits) that have admitted the request, because the others
    /// would have refused it. Defaults to clearing no key.
    ///
    /// ```
    /// use http::StatusCode;
    /// use tower_ratelimit::extract::{Extension, KeyExtractor};
    /// use tower_ratelimit::{Key, PeerIp, Policy, RateLimitLayer};
    ///
    /// /// The account of a login, which an outer layer has inserted.
    /// #[derive(Clone)]
    /// struct Account(String);
    ///
    /// let policy: Policy = "lockout 5/10m for 15m x2 up to 1d".parse()?;
    /// let account = Extension::new(|Account(name): &Account| Key::from(name));
    /// let logins = RateLimitLayer::new(policy, account.and(PeerIp::new()))
    ///     .charge_when(|response| response.status == StatusCode::UNAUTHORIZED)
    ///     .clear_when(|response| response.status.is_success());
    /// # Ok::<(), tower_ratelimit::ConfigError>(())
    /// ```
    ///
    /// If `clears` returns `true`, the closure of [`charge_when`](Self::charge_when) or
    /// [`settle`](Self::settle) is not called. With [`settle_later`](Self::settle_later), a request
    /// whose handler has taken the reservation is settled by the reservation instead, which can
    /// [clear](crate::Reservation::clear) the key. A request that costs 0 clears nothing.
    ///
    /// A client that can get such a response can reset the limit. So the key must not be shared
    /// with other clients, and an address alone does not suffice: an attacker with an account of
    /// their own would clear the strikes of their address between two guesses. See the guide on
    /// [logins](crate::guide::protecting_a_login).
    pub fn clear_when<F>(self, clears: F) -> Self
    where
        F: Fn(&ResponseHead<'_>) -> bool + Send + Sync + 'static,
    {
        self.with_settling(|settling| settling.clears = Some(Arc::new(clears)))
    }

    /// Passes a [`Reservation`](crate::Reservation) to the handler of each admitted request. The
    /// handler settles it when the actual cost is known, for example at the end of a streamed body.
    /// Without this option, requests have no reservation, and handlers that take one respond with 500.
    /// A request whose reservation is dropped keeps its estimated cost, which is that of
    /// [`cost`](Self::cost), and the layer reports
    /// [`EventKind::Unsettled`](crate::EventKind::Unsettled).
    ///
    /// A request may fail before its handler takes the reservation: its body is invalid, or no
    /// route matches. To settle such requests, also call [`charge_when`](Self::charge_when),
    /// [`settle`](Self::settle) or [`clear_when`](Self::clear_when). Their closures are called if
    /// the reservation was dropped before the head of the response is ready.
    ///
    /// With the feature `axum`, `Reservation` is an extractor. Other handlers take it out of the
    /// [`Reservations`](crate::Reservations) in the request's extensions.
    ///
    /// - A request that is not limited has no reservation. If that can happen, handlers should take
    ///   an `Option<Reservation>`.
    /// - If the storage failed and the request was admitted all the same, its reservation does
    ///   nothing. The decision is then the verdict on a client that has spent nothing.
    /// - With stacked layers, the handler gets the reservation of the innermost one.
    ///   [`Reservations::take_policy`](crate::Reservations::take_policy) returns those of the
    ///   others.
    /// - In a [shadow](Self::shadow) layer, each limited request has a reservation, even if it
    ///   would have been refused. If the storage did not decide immediately, the decision is the
    ///   verdict on a client that has spent nothing, too.
    /// - The reservation does not settle the hits of a [`Meter`](crate::Meter), which have
    ///   reservations of their own.
    ///
    /// ```
    /// use axum::Router;
    /// use axum::routing::post;
    /// use tower_ratelimit::{Global, Policy, RateLimitLayer, Reservation};
    ///
    /// let tokens: Policy = "token-bucket 10000/minute burst 20000".parse()?;
    /// let limit = RateLimitLayer::new(tokens, Global::new())
    ///     .cost(|_| 500)
    ///     .settle_later()
    ///     // Requests that fail before their handler cost nothing.
    ///     .charge_when(|response| !response.status.is_client_error());
    /// let complete = |reservation: Reservation, prompt: String| async move {
    ///     let used = prompt.len().try_into().unwrap_or(u32::MAX);
    ///     reservation.settle(used);
    /// };
    /// let app: Router = Router::new().route("/", post(complete)).layer(limit);
    /// # Ok::<(), tower_ratelimit::ConfigError>(())
    /// ```
    ///
    /// See the guide on [costs](crate::guide::costs#settle-after-a-streamed-response).
    pub fn settle_later(self) -> Self {
        self.with_settling(|settling| settling.is_later = true)
    }

    fn with_settling(self, change: impl FnOnce(&mut SettleOptions)) -> Self {
        self.with_config(|config| change(Arc::make_mut(config.settling.get_or_insert_default())))
    }
}

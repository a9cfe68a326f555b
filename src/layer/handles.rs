//! The methods of a layer that return limiters, the usage of a client, and the storage.

use std::sync::Arc;

use http::Request;

use super::RateLimitLayer;
use crate::error::ConfigError;
use crate::extract::Head;
use crate::limiter::RateLimiter;
use crate::policy::IntoPolicy;
use crate::storage::AnyStorage;
#[cfg(feature = "axum")]
use crate::usage::UsageHandler;
use crate::usage::{Usage, UsageError, usage};

/// Limiters, usage and storage of the layer.
impl<R> RateLimitLayer<R> {
    /// Returns a limiter that shares the policy and the storage of this layer. Use it to
    /// [peek](RateLimiter::peek) at a key, [clear](RateLimiter::clear) it or
    /// [charge](RateLimiter::charge) it outside of a request.
    ///
    /// The limiter follows the changes of a [`LivePolicy`](crate::LivePolicy). Calls of its
    /// [`acquire`](RateLimiter::acquire) wait in the same queues as the [waiting](Self::wait)
    /// requests of this layer.
    ///
    /// With [several keys](Self::and), this is the limiter of the first policy.
    /// [`limiter_for`](Self::limiter_for) returns those of the others.
    ///
    /// Returns `None` if [`policy_by`](crate::policy_by) or a `PolicyLookup` chooses the policy.
    /// Then use [`limiter_for`](Self::limiter_for).
    pub fn limiter(&self) -> Option<RateLimiter> {
        let policy = self.shared.config.first.policies.shared()?;
        let limiter = RateLimiter::of(policy.clone(), self.storage_handle());
        Some(limiter.waiting_in(Arc::clone(&self.shared.queues)))
    }

    /// Returns a limiter for `policy` that shares the storage of this layer. Use it for a policy that
    /// [`policy_by`](crate::policy_by) or a `PolicyLookup` chooses, or that [`and`](Self::and) adds.
    ///
    /// The limiter shares the counts of the layer's policy with the same
    /// [identity](crate::Policy#identity). Another policy has counts of its own. Calls of
    /// [`acquire`](RateLimiter::acquire) wait in the same queues as the [waiting](Self::wait) requests
    /// of this layer.
    ///
    /// # Errors
    ///
    /// Returns an error if the policy is a lockout [by refusals](crate::Lockout::by_refusals) alone, or
    /// if the storage does not support the policy or one of its shadow limits.
    pub fn limiter_for(&self, policy: impl IntoPolicy) -> Result<RateLimiter, ConfigError> {
        let limiter = RateLimiter::try_with_storage(policy, self.storage_handle())?;
        Ok(limiter.waiting_in(Arc::clone(&self.shared.queues)))
    }

    /// Returns the policies and the remaining units of the client that sent `request`. Returns `None` if
    /// the request is not limited, for example because it is [skipped](Self::skip). Spends nothing.
    ///
    /// With the feature `axum`, `usage_handler` returns a handler that responds with the usage as
    /// JSON.
    ///
    /// ```
    /// use http::Request;
    /// use tower_ratelimit::{Global, Quota, RateLimitLayer};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let layer = RateLimitLayer::new(Quota::per_minute(60), Global::new());
    /// let usage = layer.usage(&Request::new(())).await?.expect("every request is limited");
    /// assert_eq!(usage.decision().remaining(), 60);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// - [`UsageError::Key`] if the request has no key, or if the lookup of the policy returns a
    ///   [`KeyError`](crate::KeyError).
    /// - [`UsageError::Storage`] if the storage or the lookup of the policy fails.
    pub fn usage<B>(
        &self,
        request: &Request<B>,
    ) -> impl Future<Output = Result<Option<Usage>, UsageError>> + Send + use<R, B> {
        usage(&self.shared, &Head::from_request(request))
    }

    /// Returns an axum handler that responds with the usage of the request's own client as JSON. It
    /// spends nothing.
    ///
    /// ```
    /// use axum::{Router, routing::get};
    /// use tower_ratelimit::{PeerIp, Quota, RateLimitLayer};
    ///
    /// let limit = RateLimitLayer::new(Quota::per_minute(60), PeerIp::new());
    /// let app: Router = Router::new()
    ///     .route("/", get(|| async { "hello" }))
    ///     .layer(limit.clone())
    ///     // After the layer, so that looking at the usage is not limited.
    ///     .route("/usage", get(limit.usage_handler()));
    /// ```
    ///
    /// | case | response |
    /// |---|---|
    /// | the client is limited | 200 with the [usage](crate::Usage::to_json) |
    /// | the client is not limited | 200 with `{"limited":false}` |
    /// | the request has no key | 400, 401 or 500 |
    /// | the storage or the lookup of the policy fails | 503 with `Retry-After: 1` |
    ///
    /// The key and the policy of a request must not depend on its path. Otherwise the handler
    /// responds with the usage of another key or policy, because its own path differs from that of
    /// the limited requests.
    #[cfg(feature = "axum")]
    pub fn usage_handler(&self) -> UsageHandler<R> {
        UsageHandler::new(Arc::clone(&self.shared))
    }

    /// Returns a clone of the layer's storage. It shares the counts of the layer.
    pub fn storage_handle(&self) -> AnyStorage {
        self.shared.storage.clone()
    }
}

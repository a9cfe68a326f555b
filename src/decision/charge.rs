use std::fmt;
use std::sync::Arc;

use super::SettleError;

/// A handle that corrects the cost of a request later, even after the head of its response was
/// sent.
///
/// A layer with [`settle_later`](crate::RateLimitLayer::settle_later) inserts it into the
/// extensions of each admitted request, even if its cost is 0. A request has no charge if it is not
/// limited, or if it was forwarded because the storage failed. With the feature `axum`, `Charge` is
/// an extractor. Clones are handles to the same charge.
///
/// Call [`settle`](Self::settle) once, from any thread. It does not block. If the storage is not
/// immediately ready, a background task of the tokio runtime continues. The layer reports the
/// result as an [`Event`](crate::Event).
///
/// If all handles are dropped before the charge is settled, the request keeps its estimated cost.
/// The layer reports this as an event and logs it at DEBUG.
///
/// ```
/// use axum::Router;
/// use axum::routing::post;
/// use tower_ratelimit::{Charge, Global, Policy, RateLimitLayer};
///
/// let tokens: Policy = "token-bucket 10000/minute burst 20000".parse()?;
/// let limit = RateLimitLayer::new(tokens, Global).cost(|_| 500).settle_later();
/// let complete = |charge: Charge, prompt: String| async move {
///     let used = prompt.len().try_into().unwrap_or(u32::MAX);
///     // Fails only if another handle has settled the charge, or if the request cost nothing.
///     let _ = charge.settle(used);
/// };
/// let app: Router = Router::new().route("/", post(complete)).layer(limit);
/// # Ok::<(), tower_ratelimit::ConfigError>(())
/// ```
#[derive(Clone)]
#[must_use = "a charge that is not settled keeps its estimated cost"]
pub struct Charge {
    open: Arc<dyn OpenCharge>,
    /// The charge of the next outer layer.
    outer: Option<Arc<Self>>,
}

/// A charge on a storage whose type is erased.
pub(crate) trait OpenCharge: Send + Sync {
    fn settle(&self, actual: u32) -> Result<(), SettleError>;

    fn cost(&self) -> u32;

    fn policy(&self) -> &str;
}

impl Charge {
    pub(crate) fn new(open: Arc<dyn OpenCharge>, outer: Option<Self>) -> Self {
        Self { open, outer: outer.map(Arc::new) }
    }

    /// Corrects the cost of the request to `actual` units, like
    /// [`RateLimiter::settle`](crate::RateLimiter::settle). The difference to the estimated cost is
    /// refunded if `actual` is less, and charged if it is more.
    ///
    /// The header fields of the response report the settled state if the charge is settled before
    /// the head of the response is ready, and the storage is immediately ready.
    ///
    /// # Errors
    ///
    /// Returns an error, and changes nothing,
    ///
    /// - if the estimated cost of the request is 0 ([`SettleError::NothingSpent`]),
    /// - if the charge is already settled ([`SettleError::AlreadySettled`]).
    ///
    /// A failure of the storage is not returned. The layer reports it to the observer and logs it.
    pub fn settle(&self, actual: u32) -> Result<(), SettleError> {
        self.open.settle(actual)
    }

    /// Returns the estimated cost of the request in units.
    pub fn cost(&self) -> u32 {
        self.open.cost()
    }

    /// Returns the [identity](crate::Policy::identity) of the policy that decided on the request:
    /// its name, or its text if it has no name.
    pub fn policy(&self) -> &str {
        self.open.policy()
    }

    /// Returns the charge whose [`policy`](Self::policy) is `name`: this charge, or the charge of
    /// an outer layer. Returns `None` if there is none.
    ///
    /// With stacked layers, the request's extensions contain the charge of the innermost layer.
    /// This method finds the others.
    ///
    /// ```
    /// use tower_ratelimit::Charge;
    ///
    /// fn settle(charge: &Charge, tokens: u32, images: u32) {
    ///     for (policy, units) in [("tokens", tokens), ("images", images)] {
    ///         if let Some(charge) = charge.of_policy(policy) {
    ///             let _ = charge.settle(units);
    ///         }
    ///     }
    /// }
    /// ```
    pub fn of_policy(&self, name: &str) -> Option<&Self> {
        let mut charge = Some(self);
        while let Some(this) = charge.filter(|charge| charge.policy() != name) {
            charge = this.outer.as_deref();
        }
        charge
    }
}

impl fmt::Debug for Charge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Charge").field("policy", &self.policy()).field("cost", &self.cost()).finish_non_exhaustive()
    }
}

//! Policies that change while the program runs.

use std::fmt;
use std::sync::Arc;

use super::cell::PolicyCell;
use super::shared::SharedPolicy;
use super::{IntoPolicy, Policy};
use crate::error::ConfigError;

/// A policy that can be replaced while the program runs.
///
/// Layers and limiters take a live policy in place of a [`Policy`], and follow its changes. Clones
/// are handles to the same live policy.
///
/// ```
/// use tower_ratelimit::{Key, LivePolicy, Policy, Quota, RateLimiter};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let live = LivePolicy::new(Policy::from(Quota::per_minute(10)).with_name("api"));
/// let limiter = RateLimiter::new(live.clone());
/// let alice = Key::from("alice");
/// assert_eq!(limiter.hit(&alice).await?.remaining(), 9);
///
/// live.set(Policy::from(Quota::per_minute(100)).with_name("api"))?;
/// assert_eq!(limiter.hit(&alice).await?.remaining(), 98);
/// # Ok(())
/// # }
/// ```
///
/// # When a change takes effect
///
/// - A layer uses the new policy from the next request. A request reads the policy once. Its hit,
///   its refund and its header fields use that policy.
/// - A limiter uses the new policy from the next call. To settle a hit after a change, see
///   [`RateLimiter::current`](crate::RateLimiter::current).
/// - A request that [waits](crate::RateLimitLayer::wait) to be admitted, and a call of
///   [`acquire`](crate::RateLimiter::acquire), read the policy again at each attempt.
///
/// # Units already spent
///
/// Units stay spent if the new policy has the same [identity](Policy#identity). So give the policy
/// a name, and keep the name when you change an amount or a burst. A policy with another name, or
/// an unnamed policy with another text, starts with its full quota. So does a limit with another
/// period, strategy or position.
///
/// # Memory and locks
///
/// The first 64 distinct policies are read without a lock. They stay in memory until all handles,
/// layers and limiters of this live policy are dropped. Setting one of them again takes no further
/// memory. Each later policy replaces the one before it, and is read under a read lock.
///
/// Policies with custom strategies are distinct, unless one is a clone of the other.
#[derive(Clone)]
pub struct LivePolicy(Arc<PolicyCell>);

impl LivePolicy {
    /// Creates a live policy whose current policy is `policy`.
    pub fn new(policy: impl IntoPolicy) -> Self {
        Self(Arc::new(PolicyCell::new(&policy.into_policy())))
    }

    /// Returns the current policy.
    pub fn get(&self) -> Policy {
        self.0.read().into_owned()
    }

    /// Replaces the policy. A request that the old policy has admitted or refused keeps the old
    /// policy until its response. A request that waits to be admitted uses the new policy from its
    /// next attempt.
    ///
    /// # Errors
    ///
    /// Returns an error, and keeps the old policy, if the storage of a layer or a limiter that uses
    /// this live policy does not support the new policy or one of its shadow limits.
    pub fn set(&self, policy: impl IntoPolicy) -> Result<(), ConfigError> {
        self.0.set(&policy.into_policy())
    }
}

impl fmt::Debug for LivePolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LivePolicy({})", self.0.read())
    }
}

/// A layer or a limiter follows later changes. [`into_policy`](IntoPolicy::into_policy) returns the
/// current policy, which does not change later.
impl IntoPolicy for LivePolicy {
    fn into_policy(self) -> Policy {
        self.get()
    }

    fn into_shared(self) -> SharedPolicy {
        SharedPolicy::live(self.0)
    }
}

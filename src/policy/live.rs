//! Policies that change while the program runs.

use std::fmt;
use std::sync::Arc;

use super::cell::PolicyCell;
use super::shared::SharedPolicy;
use super::{IntoPolicy, Policy};
use crate::ConfigError;

/// A policy that can be replaced while the program runs.
///
/// Layers and limiters take it in place of a [`Policy`]. Clones are handles to the same policy.
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
/// A change takes effect with the next request. A request reads the policy once: its hit, its
/// refund and its header fields all use that policy. A request that
/// [waits](crate::RateLimitLayer::wait) to be admitted reads the policy again at each attempt. So
/// does [`acquire`](crate::RateLimiter::acquire).
///
/// # Units already spent
///
/// Units stay spent if the new policy has the same [identity](Policy#identity). So give the policy
/// a name, and keep the name when you change an amount or a burst. A policy with another name, or
/// an unnamed policy with another text, starts with its full quota. So does a limit with another
/// period, strategy or position.
///
/// # Cost
///
/// Reading the policy takes no lock for the first 64 distinct policies. They stay in memory until
/// the last handle and all layers and limiters that use it are dropped. Setting one of them again
/// takes no further memory. Each later policy replaces the one before it, and is read under a read
/// lock.
#[derive(Clone)]
pub struct LivePolicy(Arc<PolicyCell>);

impl LivePolicy {
    /// Creates a live policy with this first value.
    pub fn new(policy: impl IntoPolicy) -> Self {
        Self(Arc::new(PolicyCell::new(&policy.into_policy())))
    }

    /// Returns the current policy.
    pub fn get(&self) -> Policy {
        self.0.read().into_owned()
    }

    /// Replaces the policy. Requests that were admitted or refused by the old policy finish with
    /// it. Requests that wait to be admitted use the new one from their next attempt.
    ///
    /// # Errors
    ///
    /// Returns an error if the storage of a layer or a limiter that uses this live policy does not
    /// support the new policy. The old policy stays.
    pub fn set(&self, policy: impl IntoPolicy) -> Result<(), ConfigError> {
        self.0.set(&policy.into_policy())
    }
}

impl fmt::Debug for LivePolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LivePolicy({})", self.0.read())
    }
}

/// Converts into the current policy. Layers and limiters follow later changes.
impl IntoPolicy for LivePolicy {
    fn into_policy(self) -> Policy {
        self.get()
    }

    fn into_shared(self) -> SharedPolicy {
        SharedPolicy::live(self.0)
    }
}

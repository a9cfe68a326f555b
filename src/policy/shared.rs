//! The policy of a layer or a limiter.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::Policy;
use super::cell::{PolicyCell, PolicyUser};
use crate::error::ConfigError;

/// The policy of a layer or a limiter: fixed or live.
#[derive(Clone)]
pub struct SharedPolicy(Shared);

#[derive(Clone)]
enum Shared {
    Fixed(Policy),
    Live {
        live: Arc<PolicyCell>,
        /// The registration with the live policy, or `None` before [`bind`](SharedPolicy::bind).
        user: Option<Arc<PolicyUser>>,
    },
}

impl SharedPolicy {
    pub(super) fn fixed(policy: Policy) -> Self {
        Self(Shared::Fixed(policy))
    }

    pub(super) fn live(live: Arc<PolicyCell>) -> Self {
        Self(Shared::Live { live, user: None })
    }

    /// Returns the current policy. Call it once for each request.
    #[inline]
    pub(crate) fn read(&self) -> Cow<'_, Policy> {
        match &self.0 {
            Shared::Fixed(policy) => Cow::Borrowed(policy),
            Shared::Live { live, .. } => live.read(),
        }
    }

    /// Calls `f` with the current policy. Faster than [`read`](Self::read).
    #[inline(always)]
    pub(crate) fn with<T>(&self, f: impl FnOnce(&Policy) -> T) -> T {
        let owned;
        let policy = match &self.0 {
            Shared::Fixed(policy) => policy,
            Shared::Live { live, .. } => {
                if let Some(policy) = live.in_slot() {
                    policy
                } else {
                    owned = live.in_overflow();
                    &owned
                }
            }
        };
        f(policy)
    }

    /// Returns `true` if [`plain`](Self::plain) can return a policy.
    pub(crate) fn can_be_plain(&self) -> bool {
        match &self.0 {
            Shared::Fixed(policy) => policy.shadows().is_empty(),
            Shared::Live { .. } => true,
        }
    }

    /// Returns the policy if requests can take the fast path.
    ///
    /// A live policy is returned if it can be read without a lock, has no shadow limits, and has
    /// not changed since it was last checked for lints. A fixed policy is always returned, because
    /// the caller has checked it with [`can_be_plain`](Self::can_be_plain).
    #[inline]
    pub(crate) fn plain(&self) -> Option<&Policy> {
        match &self.0 {
            Shared::Fixed(policy) => Some(policy),
            Shared::Live { live, user } => {
                let has_changed = user.as_ref().is_some_and(|user| user.has_changed.load(Ordering::Relaxed));
                live.in_slot().filter(|policy| !has_changed && policy.shadows().is_empty())
            }
        }
    }

    /// Returns `true` if this is a live policy that has changed since the last call.
    pub(crate) fn take_changed(&self) -> bool {
        match &self.0 {
            Shared::Live { user: Some(user), .. } => {
                user.has_changed.load(Ordering::Relaxed) && user.has_changed.swap(false, Ordering::Relaxed)
            }
            _ => false,
        }
    }

    /// Validates the policy. If it is live, later policies are validated when they are set.
    pub(crate) fn bind(
        self,
        validate: impl Fn(&Policy) -> Result<(), ConfigError> + Send + Sync + 'static,
    ) -> Result<Self, ConfigError> {
        match self.0 {
            Shared::Fixed(policy) => {
                validate(&policy)?;
                Ok(Self(Shared::Fixed(policy)))
            }
            Shared::Live { live, .. } => {
                let user = Some(live.join(Box::new(validate))?);
                Ok(Self(Shared::Live { live, user }))
            }
        }
    }
}

impl fmt::Debug for SharedPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Shared::Fixed(policy) => policy.fmt(f),
            Shared::Live { live, .. } => write!(f, "LivePolicy({})", live.read()),
        }
    }
}

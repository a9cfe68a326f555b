//! Policies that change while the program runs, and the policy that a layer or a limiter reads.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use super::cell::{PolicyCell, PolicyChanges, PolicyUser};
use super::{Limit, Policy};
use crate::error::ConfigError;
use crate::quota::Quota;

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
/// - A limiter uses the new policy from the next call. A [`Reservation`](crate::Reservation) is
///   settled under the policy of its hit.
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
/// Policies with custom strategies or time zones are distinct, unless one is a clone of the other.
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
    /// Returns an error, and keeps the old policy, if a layer or a limiter that uses this live
    /// policy does not support the new policy:
    ///
    /// - The storage does not support the new policy or one of its shadow limits.
    /// - All limits of the new policy are lockouts [by refusals](crate::Lockout::by_refusals).
    ///
    /// The name of a policy can matter to a layer with [several keys](crate::RateLimitLayer::and).
    /// So it is an error, too, if such a layer could not be built with the new policy:
    ///
    /// - Another policy of the layer has the same name.
    /// - [`Leases::only`](crate::storage::Leases::only) no longer leases the policy of all clients,
    ///   and the storage is a Redis Cluster.
    pub fn set(&self, policy: impl IntoPolicy) -> Result<(), ConfigError> {
        PolicyCell::set_all(&[(&self.0, policy.into_policy())]).map_err(|(_, error)| error)
    }

    /// Replaces the policies of several live policies, or none of them, for example after a
    /// configuration file has changed.
    ///
    /// ```
    /// use tower_ratelimit::{LivePolicy, Policy};
    ///
    /// let read = |text: &str| text.parse::<Policy>();
    /// let api = LivePolicy::new(read("\"api\": 10/minute")?);
    /// let login = LivePolicy::new(read("\"login\": 5/minute")?);
    ///
    /// let changes = [(&api, read("\"api\": 20/minute")?), (&login, read("\"login\": 3/minute")?)];
    /// LivePolicy::set_all(changes)?;
    /// # Ok::<(), tower_ratelimit::ConfigError>(())
    /// ```
    ///
    /// All new policies are validated before the first one is published. Then they are published
    /// one after the other, and this cannot fail. A request that reads two of the live policies at
    /// that moment, for example in two layers, may get one new and one old policy. Two concurrent
    /// calls do not mix: afterwards, the live policies in both lists have the policies of one call.
    ///
    /// # Errors
    ///
    /// Returns an error, and keeps all old policies, if one of the new policies is not supported,
    /// as in [`set`](Self::set), or if a live policy is in the list twice.
    pub fn set_all<'a, P: IntoPolicy>(
        policies: impl IntoIterator<Item = (&'a LivePolicy, P)>,
    ) -> Result<(), ConfigError> {
        let mut changes: Vec<_> = policies.into_iter().map(|(live, policy)| (&live.0, policy.into_policy())).collect();
        // Concurrent calls lock the policies in the same order, so they do not wait for each other.
        changes.sort_by_key(|(cell, _)| Arc::as_ptr(cell));
        if let Some(twice) = changes.windows(2).find(|pair| Arc::ptr_eq(pair[0].0, pair[1].0)) {
            let policy = twice[0].0.read();
            let name = policy.identity();
            let message = format!("the live policy {name:?} is in the list twice: keep one of its new policies");
            return Err(ConfigError::new(message));
        }
        PolicyCell::set_all(&changes).map_err(|(policy, error)| {
            ConfigError::new(format!("cannot change the policy {:?}: {error}", policy.identity()))
        })
    }
}

impl fmt::Debug for LivePolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LivePolicy({})", self.0.read())
    }
}

/// A value that converts into a [`Policy`]: a `Policy`, a [`Quota`], a [`Limit`], or a
/// [`LivePolicy`].
///
/// To convert a type of your own, implement `From` for `Policy`, and this trait without methods:
///
/// ```
/// use tower_ratelimit::{IntoPolicy, Policy, Quota, RateLimiter};
///
/// struct Plan {
///     requests_per_minute: u32,
/// }
///
/// impl From<Plan> for Policy {
///     fn from(plan: Plan) -> Self {
///         Quota::per_minute(plan.requests_per_minute).into()
///     }
/// }
///
/// impl IntoPolicy for Plan {}
///
/// let limiter = RateLimiter::new(Plan { requests_per_minute: 60 });
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a policy",
    label = "expected a `Policy`, a `Quota`, a `Limit` or a `LivePolicy`",
    note = "parse a text: `\"10/second\".parse::<Policy>()?`"
)]
pub trait IntoPolicy: IntoShared + Sized {
    /// Converts into a policy. A [`LivePolicy`] converts into its current policy.
    fn into_policy(self) -> Policy {
        self.into_shared().read().into_owned()
    }
}

impl IntoPolicy for Policy {}

impl IntoPolicy for Quota {}

impl IntoPolicy for Limit {}

/// A layer or a limiter follows later changes. [`into_policy`](IntoPolicy::into_policy) returns the
/// current policy, which does not change later.
impl IntoPolicy for LivePolicy {}

/// Converts into a policy that may change later. This is a trait of its own, which other crates
/// cannot name, because [`SharedPolicy`] is not part of the API.
pub trait IntoShared {
    fn into_shared(self) -> SharedPolicy;
}

impl<P: Into<Policy>> IntoShared for P {
    fn into_shared(self) -> SharedPolicy {
        SharedPolicy::from(self.into())
    }
}

impl IntoShared for LivePolicy {
    fn into_shared(self) -> SharedPolicy {
        SharedPolicy(PolicyKind::Live { live: self.0, user: None })
    }
}

/// The policy of a layer or a limiter: fixed or live.
#[derive(Clone)]
pub struct SharedPolicy(PolicyKind);

#[derive(Clone)]
enum PolicyKind {
    Fixed(Policy),
    Live {
        live: Arc<PolicyCell>,
        /// The registration with the live policy, or `None` before [`bind`](SharedPolicy::bind).
        user: Option<Arc<PolicyUser>>,
    },
}

impl SharedPolicy {
    /// Returns the current policy. Call it once for each request.
    #[inline]
    pub(crate) fn read(&self) -> Cow<'_, Policy> {
        match &self.0 {
            PolicyKind::Fixed(policy) => Cow::Borrowed(policy),
            PolicyKind::Live { live, .. } => live.read(),
        }
    }

    /// Returns the policy after `changes`.
    pub(crate) fn after(&self, changes: &PolicyChanges<'_>) -> Policy {
        let changed = match &self.0 {
            PolicyKind::Live { live, .. } => changes.of(live),
            PolicyKind::Fixed(_) => None,
        };
        changed.map_or_else(|| self.read().into_owned(), Policy::clone)
    }

    /// Returns the policy without its registration, so that later policies are not validated for it.
    pub(crate) fn unregistered(&self) -> Self {
        Self(match &self.0 {
            PolicyKind::Fixed(policy) => PolicyKind::Fixed(policy.clone()),
            PolicyKind::Live { live, .. } => PolicyKind::Live { live: Arc::clone(live), user: None },
        })
    }

    /// Calls `f` with the current policy. Faster than [`read`](Self::read).
    #[inline(always)]
    pub(crate) fn with<T>(&self, f: impl FnOnce(&Policy) -> T) -> T {
        let owned;
        let policy = match &self.0 {
            PolicyKind::Fixed(policy) => policy,
            PolicyKind::Live { live, .. } => {
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
            PolicyKind::Fixed(policy) => !policy.wants_decisions(),
            PolicyKind::Live { .. } => true,
        }
    }

    /// Returns the policy if requests can take the fast path.
    ///
    /// A live policy is returned if it can be read without a lock, needs no full decisions, and has
    /// not changed since it was last checked for lints. A fixed policy is always returned, because
    /// the caller has checked it with [`can_be_plain`](Self::can_be_plain).
    #[inline]
    pub(crate) fn plain(&self) -> Option<&Policy> {
        match &self.0 {
            PolicyKind::Fixed(policy) => Some(policy),
            PolicyKind::Live { live, user } => {
                let has_changed = user.as_ref().is_some_and(|user| user.has_changed());
                live.in_slot().filter(|policy| !has_changed && !policy.wants_decisions())
            }
        }
    }

    /// Returns `true` if this is a live policy that has changed since the last call.
    pub(crate) fn take_changed(&self) -> bool {
        match &self.0 {
            PolicyKind::Live { user: Some(user), .. } => user.take_changed(),
            _ => false,
        }
    }

    /// Validates the policy. If it is live, later policies are validated when they are set.
    pub(crate) fn bind(
        self,
        validate: impl Fn(&Policy, &PolicyChanges<'_>) -> Result<(), ConfigError> + Send + Sync + 'static,
    ) -> Result<Self, ConfigError> {
        match self.0 {
            PolicyKind::Fixed(policy) => {
                validate(&policy, &PolicyChanges::default())?;
                Ok(Self(PolicyKind::Fixed(policy)))
            }
            PolicyKind::Live { live, .. } => {
                let user = Some(live.join(Box::new(validate))?);
                Ok(Self(PolicyKind::Live { live, user }))
            }
        }
    }
}

impl From<Policy> for SharedPolicy {
    fn from(policy: Policy) -> Self {
        Self(PolicyKind::Fixed(policy))
    }
}

impl fmt::Debug for SharedPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            PolicyKind::Fixed(policy) => policy.fmt(f),
            PolicyKind::Live { live, .. } => write!(f, "LivePolicy({})", live.read()),
        }
    }
}

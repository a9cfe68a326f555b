//! Policies that change while the program runs.

use std::borrow::Cow;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, Weak};

use super::{IntoPolicy, Policy};
use crate::ConfigError;

/// The number of distinct policies that a request reads without a lock.
const SLOTS: usize = 64;

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
/// refund and its header fields all use that policy.
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
/// the last handle is dropped. Setting one of them again takes no further memory. Each later
/// policy replaces the one before it, and is read under a read lock.
#[derive(Clone)]
pub struct LivePolicy(Arc<Live>);

struct Live {
    /// The position of the current policy in `slots`, or `SLOTS` if it is in `overflow`.
    current: AtomicUsize,
    /// The distinct policies so far. A slot never changes after it is filled, so a reader can
    /// borrow its policy.
    slots: [OnceLock<Policy>; SLOTS],
    overflow: RwLock<Option<Policy>>,
    users: Mutex<Vec<Weak<PolicyUser>>>,
}

/// A layer or a limiter that uses a live policy.
struct PolicyUser {
    validate: Box<Validate>,
    /// `true` if the policy has changed since the last call of [`SharedPolicy::take_changed`].
    has_changed: AtomicBool,
}

type Validate = dyn Fn(&Policy) -> Result<(), ConfigError> + Send + Sync;

impl LivePolicy {
    /// Creates a live policy with this first value.
    pub fn new(policy: impl IntoPolicy) -> Self {
        let live = Self(Arc::new(Live {
            current: AtomicUsize::new(0),
            slots: [const { OnceLock::new() }; SLOTS],
            overflow: RwLock::new(None),
            users: Mutex::default(),
        }));
        live.publish(&policy.into_policy());
        live
    }

    /// Returns the current policy.
    pub fn get(&self) -> Policy {
        self.read().into_owned()
    }

    /// Replaces the policy. Requests that have already read the old policy finish with it.
    ///
    /// # Errors
    ///
    /// Returns an error if the storage of a layer or a limiter that uses this live policy does not
    /// support the new policy. The old policy stays.
    pub fn set(&self, policy: impl IntoPolicy) -> Result<(), ConfigError> {
        let policy = policy.into_policy();
        // The lock is held until the policy is published, so a user that joins meanwhile validates
        // the new policy.
        let mut users = self.users();
        users.retain(|user| user.strong_count() > 0);
        let present: Vec<_> = users.iter().filter_map(Weak::upgrade).collect();
        present.iter().try_for_each(|user| (user.validate)(&policy))?;
        self.publish(&policy);
        for user in &present {
            user.has_changed.store(true, Ordering::Relaxed);
        }
        drop(users);
        Ok(())
    }

    /// Returns the current policy, borrowed if no lock is needed to read it.
    fn read(&self) -> Cow<'_, Policy> {
        self.in_slot().map_or_else(|| Cow::Owned(self.in_overflow()), Cow::Borrowed)
    }

    /// Returns the current policy if it is in a slot.
    #[inline]
    fn in_slot(&self) -> Option<&Policy> {
        self.0.slots.get(self.0.current.load(Ordering::Acquire))?.get()
    }

    #[cold]
    fn in_overflow(&self) -> Policy {
        let overflow = self.0.overflow.read().unwrap_or_else(PoisonError::into_inner);
        overflow.clone().expect("filled before `current` points to it")
    }

    /// Adds a user, which has to support the current policy and all later ones. The user leaves
    /// when it is dropped.
    fn join(&self, validate: Box<Validate>) -> Result<Arc<PolicyUser>, ConfigError> {
        let mut users = self.users();
        validate(&self.read())?;
        let user = Arc::new(PolicyUser { validate, has_changed: AtomicBool::new(false) });
        users.push(Arc::downgrade(&user));
        Ok(user)
    }

    fn publish(&self, policy: &Policy) {
        let Live { current, slots, overflow, .. } = &*self.0;
        let slot = slots.iter().position(|slot| match slot.get() {
            Some(earlier) => earlier.is_interchangeable_with(policy),
            None => slot.set(policy.clone()).is_ok(),
        });
        if slot.is_none() {
            *overflow.write().unwrap_or_else(PoisonError::into_inner) = Some(policy.clone());
        }
        current.store(slot.unwrap_or(SLOTS), Ordering::Release);
    }

    fn users(&self) -> MutexGuard<'_, Vec<Weak<PolicyUser>>> {
        self.0.users.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Policy {
    /// Returns `true` if either policy can take the place of the other. Texts do not contain the
    /// settings of custom strategies, so policies with such strategies have to be clones.
    fn is_interchangeable_with(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0) || self == other && self.to_string().parse().as_ref() == Ok(self)
    }
}

impl fmt::Debug for LivePolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LivePolicy({})", self.read())
    }
}

/// Converts into the current policy. Layers and limiters follow later changes.
impl IntoPolicy for LivePolicy {
    fn into_policy(self) -> Policy {
        self.get()
    }

    fn into_shared(self) -> SharedPolicy {
        SharedPolicy(Shared::Live { live: self, user: None })
    }
}

/// The policy of a layer or a limiter: fixed or live.
#[derive(Clone)]
pub struct SharedPolicy(Shared);

#[derive(Clone)]
enum Shared {
    Fixed(Policy),
    Live {
        live: LivePolicy,
        /// The registration with the live policy.
        user: Option<Arc<PolicyUser>>,
    },
}

impl SharedPolicy {
    pub(super) fn fixed(policy: Policy) -> Self {
        Self(Shared::Fixed(policy))
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

    /// Returns the policy if requests can take the fast path. A live policy must be readable
    /// without a lock, have no shadow limits, and be unchanged since its last lints. A fixed policy
    /// is not checked here, but by [`can_be_plain`](Self::can_be_plain).
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

    /// Returns `true` if a live policy has changed since the last call.
    pub(crate) fn take_changed(&self) -> bool {
        match &self.0 {
            Shared::Live { user: Some(user), .. } => {
                user.has_changed.load(Ordering::Relaxed) && user.has_changed.swap(false, Ordering::Relaxed)
            }
            _ => false,
        }
    }

    /// Validates the policy. Later policies of a live one are validated as well.
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
            Shared::Live { live, .. } => live.fmt(f),
        }
    }
}

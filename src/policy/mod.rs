//! Policies: the limits that apply to one key.

mod cell;
mod decide;
mod into;
mod limit;
mod live;
mod name;
mod shared;
mod text;

use std::borrow::Cow;
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::num::NonZeroU32;
use std::sync::Arc;

pub use self::decide::Op;
pub use self::into::IntoPolicy;
pub use self::limit::Limit;
pub(crate) use self::limit::SHADOW;
pub use self::live::LivePolicy;
pub use self::shared::SharedPolicy;
use crate::error::or_panic;
use crate::strategy::Strategy;
use crate::{ConfigError, Quota};

/// The limits that apply to one key. A hit is admitted by all of them or by none.
///
/// A [`Quota`] or a [`Limit`] converts into a policy, and the text form supports all options.
/// Cloning is cheap.
///
/// ```
/// use tower_ratelimit::{FixedWindow, MovingWindow, Policy, Quota};
///
/// let free = Policy::named("free")
///     .limit(FixedWindow::new(), Quota::per_second(10))
///     .limit(MovingWindow::new(), Quota::per_day(10_000));
/// let same: Policy = "fixed-window 10/second; moving-window 10000/day".parse()?;
/// assert_eq!(free, same.with_name("free"));
/// assert_eq!(free.to_string().parse(), Ok(free));
/// # Ok::<(), tower_ratelimit::ConfigError>(())
/// ```
///
/// # Identity
///
/// The name of a policy is its identity in a storage. Policies with the same name on one storage
/// share their states, others never do. The identity of an unnamed policy is its text, so processes
/// with the same configuration share states. A limit is identified by its position, its strategy
/// and its period.
///
/// A *named* policy keeps its identity when its configuration changes. The effect on its stored
/// states:
///
/// | change | effect on the units already spent |
/// |---|---|
/// | amount of a window or log | kept: with 8 of 10 spent, 0 remain after lowering to 5, and 12 after raising to 20 |
/// | amount of a bucket, with its burst | scaled: with 4 of 10 remaining, 8 remain after raising to 20 |
/// | amount of a bucket, without its burst | the time until the bucket is full is kept, up to that of an empty bucket |
/// | burst of a bucket, or length of a queue | kept if possible: with 5 of 20 remaining, 0 remain after lowering to 15 |
/// | period, strategy, or position of a limit | reset: the limit starts with its full quota |
///
/// An unnamed policy with another text is another policy, and starts with its full quota.
///
/// `retry_after` is exact after any of these changes. A client of a bucket never waits longer than
/// if its last admitted hit had emptied a bucket of the new quota (plus up to 0.2 % of the time in
/// which that bucket fills).
///
/// # Shadow limits
///
/// [`shadow`](Self::shadow) adds a limit that is observed but not enforced. It never refuses a
/// request, and no header field reports it. The text form is `10/second; shadow moving-window
/// 5/second`.
///
/// The middleware checks shadow limits for the requests that the enforced limits admit. It counts
/// each of them as a separate policy ([`shadows`](Self::shadows)) and reports the decisions to its
/// observer. The memory storage keeps shadow states next to the enforced states of the same key.
/// They take no memory from other keys and are evicted first.
#[derive(Clone)]
pub struct Policy(Arc<Inner>);

struct Inner {
    name: Option<Box<str>>,
    limits: Vec<Limit>,
    identity: String,
    digest: u128,
    limit_digests: Vec<u32>,
    /// The default name of a limit, or its prefix, on the wire.
    called: String,
    shadows: Vec<Policy>,
}

impl Policy {
    /// Creates an unnamed policy of one limit.
    ///
    /// # Panics
    ///
    /// Panics if the strategy does not support the quota. [`try_new`](Self::try_new) returns an
    /// error instead.
    #[track_caller]
    pub fn new(strategy: impl Strategy, quota: Quota) -> Self {
        Limit::new(strategy, quota).into()
    }

    /// Like [`new`](Self::new), but returns an error instead of panicking.
    ///
    /// # Errors
    ///
    /// Returns an error if the strategy does not support the quota.
    pub fn try_new(strategy: impl Strategy, quota: Quota) -> Result<Self, ConfigError> {
        Ok(Limit::try_new(strategy, quota)?.into())
    }

    /// Starts a policy with a name. [`PolicyBuilder::limit`] adds the first limit.
    ///
    /// # Panics
    ///
    /// Panics if the name is empty or not printable ASCII. [`try_with_name`](Self::try_with_name)
    /// returns an error instead.
    #[track_caller]
    pub fn named(name: impl Into<String>) -> PolicyBuilder {
        PolicyBuilder { name: or_panic(name::checked(name.into())) }
    }

    /// Adds a limit.
    ///
    /// # Panics
    ///
    /// Panics if the strategy does not support the quota, or if another limit has the same
    /// [name](Self::limit_name). [`Limit::try_new`] and [`try_with`](Self::try_with) return an
    /// error instead.
    #[must_use]
    #[track_caller]
    pub fn limit(self, strategy: impl Strategy, quota: Quota) -> Self {
        self.with(Limit::new(strategy, quota))
    }

    /// Adds a limit that was built separately.
    ///
    /// # Panics
    ///
    /// Panics if another limit has the same [name](Self::limit_name). [`try_with`](Self::try_with)
    /// returns an error instead.
    #[must_use]
    #[track_caller]
    pub fn with(self, limit: Limit) -> Self {
        or_panic(self.try_with(limit))
    }

    /// Like [`with`](Self::with), but returns an error instead of panicking.
    ///
    /// # Errors
    ///
    /// Returns an error if another limit has the same [name](Self::limit_name), because clients
    /// distinguish limits by name. For example, the second limit of `Policy::named("free")` cannot
    /// be named `free-1`, because that is the name of the first one if it has no name of its own.
    pub fn try_with(self, limit: Limit) -> Result<Self, ConfigError> {
        let mut limits = self.0.limits.clone();
        limits.push(limit);
        name::distinct(Self::of(self.0.name.clone(), limits, self.shadow_limits()))
    }

    /// Adds a [shadow limit](Self#shadow-limits), which is observed but not enforced.
    ///
    /// ```
    /// use tower_ratelimit::{Limit, Policy, Quota, TokenBucket};
    ///
    /// let policy = Policy::from(Quota::per_minute(60)).shadow(Limit::new(TokenBucket::new(), Quota::per_second(1).burst(10)));
    /// assert_eq!(policy.limits().len(), 1);
    /// assert_eq!(policy.shadows().len(), 1);
    /// ```
    #[must_use]
    pub fn shadow(self, limit: Limit) -> Self {
        let mut shadow = self.shadow_limits();
        shadow.push(limit);
        Self::of(self.0.name.clone(), self.0.limits.clone(), shadow)
    }

    /// Returns the shadow limits, each as a separate policy, for example to peek at their states.
    #[inline]
    pub fn shadows(&self) -> &[Self] {
        &self.0.shadows
    }

    /// Returns `true` if this is the policy of a shadow limit.
    #[inline]
    /// Returns `true` if an admitted hit can be delayed.
    pub(crate) fn delays(&self) -> bool {
        self.limits().iter().any(|limit| limit.strategy().delays())
    }

    pub(crate) fn is_shadow(&self) -> bool {
        self.limit_digests().first().is_some_and(|digest| digest & SHADOW != 0)
    }

    fn shadow_limits(&self) -> Vec<Limit> {
        self.shadows().iter().flat_map(Self::limits).cloned().collect()
    }

    /// Sets the name.
    ///
    /// # Panics
    ///
    /// Panics if the name is empty or not printable ASCII, or if it gives two limits the same
    /// [name](Self::limit_name). [`try_with_name`](Self::try_with_name) returns an error instead.
    #[must_use]
    #[track_caller]
    pub fn with_name(self, name: impl Into<String>) -> Self {
        or_panic(self.try_with_name(name))
    }

    /// Like [`with_name`](Self::with_name), but returns an error instead of panicking.
    ///
    /// # Errors
    ///
    /// Returns an error if the name is empty or not printable ASCII, or if it gives two limits the
    /// same [name](Self::limit_name).
    pub fn try_with_name(self, name: impl Into<String>) -> Result<Self, ConfigError> {
        name::distinct(Self::of(Some(name::checked(name.into())?), self.0.limits.clone(), self.shadow_limits()))
    }

    fn of(name: Option<Box<str>>, limits: Vec<Limit>, shadow: Vec<Limit>) -> Self {
        let identity = name.as_deref().map_or_else(|| text::of_limits(&limits), str::to_owned);
        let digest = digest(&identity);
        let limit_digests = limit::digests(&limits, false);
        // Shadow limits are not part of the identity, so adding or removing one does not reset the
        // other limits.
        let shadow_digests = limit::digests(&shadow, true);
        let shadows = shadow.into_iter().zip(shadow_digests).enumerate().map(|(position, (limit, limit_digest))| {
            let called = format!("{identity} shadow-{}", position + 1);
            // All other identities are ASCII, so this one cannot collide with them.
            let identity = format!("{identity}\u{b7}shadow-{}", position + 1);
            let limit_digests = vec![limit_digest];
            let (limits, shadows) = (vec![limit], Vec::new());
            Self(Arc::new(Inner { name: None, limits, identity, digest, limit_digests, called, shadows }))
        });
        let (called, shadows) = (identity.clone(), shadows.collect());
        Self(Arc::new(Inner { name, limits, identity, digest, limit_digests, called, shadows }))
    }

    /// Divides this policy among `replicas` and returns the part of one of them. Divides the
    /// amount, the burst and the queue length of each limit, rounded down. Each is at least 1,
    /// except for a queue of length 0, which is unchanged.
    ///
    /// The name and the [identity](Self::identity) stay, so a storage treats the result as the same
    /// policy. Add all limits before dividing: adding a limit to an unnamed divided policy gives it
    /// a new identity.
    ///
    /// ```
    /// use std::num::NonZeroU32;
    /// use tower_ratelimit::Policy;
    ///
    /// let all: Policy = "token-bucket 10/second burst 50; 2/day".parse()?;
    /// let share = all.divide(NonZeroU32::new(4).unwrap())?;
    /// assert_eq!(share.to_string(), "token-bucket 2/second burst 12; sliding-window-counter 1/day");
    /// assert_eq!(share.identity(), all.identity());
    /// # Ok::<(), tower_ratelimit::ConfigError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Returns an error if a custom strategy does not support its divided quota. The built-in
    /// strategies never fail.
    pub fn divide(&self, replicas: NonZeroU32) -> Result<Self, ConfigError> {
        if replicas == NonZeroU32::MIN {
            return Ok(self.clone());
        }
        let Inner { name, identity, digest, limit_digests, called, .. } = &*self.0;
        Ok(Self(Arc::new(Inner {
            name: name.clone(),
            limits: self.limits().iter().map(|limit| limit.divide(replicas)).collect::<Result<_, _>>()?,
            identity: identity.clone(),
            digest: *digest,
            limit_digests: limit_digests.clone(),
            called: called.clone(),
            shadows: self.shadows().iter().map(|shadow| shadow.divide(replicas)).collect::<Result<_, _>>()?,
        })))
    }

    /// Returns the name, or `None` for an unnamed policy.
    pub fn name(&self) -> Option<&str> {
        self.0.name.as_deref()
    }

    /// Returns the enforced limits, at least one.
    #[inline]
    pub fn limits(&self) -> &[Limit] {
        &self.0.limits
    }

    /// Returns the name by which header fields and responses report the limit at `position`.
    ///
    /// This is the limit's own name if it has one. Otherwise it is the name of the policy, and in a
    /// policy of several limits the limit's number follows, counted from 1, as in `free-1`.
    ///
    /// # Panics
    ///
    /// Panics if there is no limit at this position.
    #[track_caller]
    pub fn limit_name(&self, position: usize) -> Cow<'_, str> {
        match self.limits()[position].name() {
            Some(name) => name.into(),
            None if self.limits().len() == 1 => self.0.called.as_str().into(),
            None => format!("{}-{}", self.0.called, position + 1).into(),
        }
    }

    /// Returns the name of the limit in double quotes.
    pub(crate) fn quoted_name(&self, position: usize) -> String {
        name::Quoted(&self.limit_name(position)).to_string()
    }

    /// Returns the string that identifies the policy in a storage: its name, or its
    /// [text](Self#impl-Display-for-Policy) if it has no name.
    pub fn identity(&self) -> &str {
        &self.0.identity
    }

    /// Returns a 128-bit hash of the [identity](Self::identity), for storages that keep hashes
    /// instead of names. The hash may change between builds of a program.
    ///
    /// The policies in [`shadows`](Self::shadows) have the digest of this policy. Their
    /// [limit digests](Self::limit_digests) differ.
    #[inline]
    pub fn digest(&self) -> u128 {
        self.0.digest
    }

    /// Returns a 32-bit digest of the position, strategy and period of each limit. It distinguishes
    /// the states of the limits, and changes with the strategy or period of a limit.
    #[inline]
    pub fn limit_digests(&self) -> &[u32] {
        &self.0.limit_digests
    }
}

/// A named policy without limits. Created by [`Policy::named`].
#[derive(Clone, Debug)]
#[must_use = "a policy needs a limit"]
pub struct PolicyBuilder {
    name: Box<str>,
}

impl PolicyBuilder {
    /// Adds the first limit.
    ///
    /// # Panics
    ///
    /// Panics if the strategy does not support the quota. [`with`](Self::with) and
    /// [`Limit::try_new`] return an error instead.
    #[track_caller]
    pub fn limit(self, strategy: impl Strategy, quota: Quota) -> Policy {
        self.with(Limit::new(strategy, quota))
    }

    /// Adds the first limit, which was built separately.
    pub fn with(self, limit: Limit) -> Policy {
        Policy::of(Some(self.name), vec![limit], Vec::new())
    }
}

impl From<Limit> for Policy {
    fn from(limit: Limit) -> Self {
        Self::of(None, vec![limit], Vec::new())
    }
}

/// Uses [`TokenBucket`](crate::TokenBucket) if the quota has a burst, otherwise
/// [`SlidingWindowCounter`](crate::SlidingWindowCounter).
impl From<Quota> for Policy {
    fn from(quota: Quota) -> Self {
        Limit::from(quota).into()
    }
}

/// Compares the names and the texts of the limits, including shadow limits.
impl PartialEq for Policy {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0) || self.identity() == other.identity() && self.to_string() == other.to_string()
    }
}

impl Eq for Policy {}

impl fmt::Debug for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Policy({self})")
    }
}

/// Hashes an identity to 128 bits. Policies with the same hash would share their states, so the
/// hash is wide enough to make collisions improbable.
#[inline]
fn digest(identity: &str) -> u128 {
    let half = |half: u8| {
        let mut hasher = DefaultHasher::new();
        (half, identity).hash(&mut hasher);
        u128::from(hasher.finish())
    };
    half(0) << 64 | half(1)
}

//! Building policies: their limits, names and identities.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::num::NonZeroU32;
use std::sync::Arc;

use super::{Inner, Limit, Policy, limit, name, text};
use crate::error::{ConfigError, or_panic};
use crate::quota::Quota;
use crate::strategy::Strategy;

/// Creating and extending policies.
impl Policy {
    /// Creates an unnamed policy of one limit.
    ///
    /// # Panics
    ///
    /// Panics if the strategy does not support the quota. For example, window strategies do not
    /// support a burst. Also panics if the text that a custom strategy writes in
    /// [`describe`](crate::strategy::Strategy::describe) is empty or not printable ASCII.
    /// [`try_new`](Self::try_new) returns an error instead.
    #[track_caller]
    pub fn new(strategy: impl Strategy, quota: Quota) -> Self {
        Limit::new(strategy, quota).into()
    }

    /// Like [`new`](Self::new), but returns an error instead of panicking.
    ///
    /// # Errors
    ///
    /// Returns an error if the strategy does not support the quota, or if a custom strategy writes
    /// the limit as a text that is empty or not printable ASCII.
    pub fn try_new(strategy: impl Strategy, quota: Quota) -> Result<Self, ConfigError> {
        Ok(Limit::try_new(strategy, quota)?.into())
    }

    /// Starts a policy with a name. [`PolicyBuilder::limit`] and [`PolicyBuilder::with`] add the
    /// first limit and return the policy.
    ///
    /// # Panics
    ///
    /// Panics if the name is empty or not printable ASCII. To get an error instead, create an
    /// unnamed policy and call [`try_with_name`](Self::try_with_name).
    #[track_caller]
    pub fn named(name: impl Into<String>) -> PolicyBuilder {
        PolicyBuilder { name: or_panic(name::checked(name.into())) }
    }

    /// Adds a limit after the others.
    ///
    /// # Panics
    ///
    /// Panics in these cases. To get an error instead, create the limit with [`Limit::try_new`] and
    /// add it with [`try_with`](Self::try_with).
    ///
    /// - The strategy does not support the quota. For example, window strategies do not support a
    ///   burst.
    /// - Another limit of the policy has the same [name](Self::limit_name).
    /// - A custom strategy writes the limit as a text that is empty or not printable ASCII.
    #[must_use]
    #[track_caller]
    pub fn limit(self, strategy: impl Strategy, quota: Quota) -> Self {
        self.with(Limit::new(strategy, quota))
    }

    /// Adds a [`Limit`] after the others. Use it for a limit with a name of its own.
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
    /// Returns an error if another limit of the policy has the same [name](Self::limit_name),
    /// because clients distinguish limits by name. For example, the second limit of
    /// `Policy::named("free")` cannot be named `free-1`, because that is the default name of the
    /// first limit.
    pub fn try_with(self, limit: Limit) -> Result<Self, ConfigError> {
        let mut limits = self.0.limits.clone();
        limits.push(limit);
        name::distinct(Self::of(self.0.name.clone(), limits, self.shadow_limits()))
    }

    /// Adds a [shadow limit](Self#shadow-limits), which is observed but not enforced. It does not
    /// change the [identity](Self::identity) of the policy.
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

    /// Sets the name, which becomes the [identity](Self::identity) of the policy. Defaults to no
    /// name.
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

    /// Creates a policy from its enforced limits and its shadow limits.
    pub(super) fn of(name: Option<Box<str>>, limits: Vec<Limit>, shadow: Vec<Limit>) -> Self {
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

    /// Divides this policy among `replicas` and returns the part of one replica.
    ///
    /// The amount, the burst and the queue length of each limit are divided and rounded down. The
    /// result is at least 1, except that a queue of length 0 stays 0. So if an amount is less than
    /// `replicas`, the replicas together admit more than the policy. A burst or a queue that would
    /// then take more than 142 years to refill is shortened further. A custom strategy can divide
    /// its limit in another way, see [`Strategy::divide`].
    ///
    /// The name and the [identity](Self::identity) stay the same, so a storage treats the result as
    /// the same policy. Add all limits before you divide, because adding a limit to an unnamed
    /// divided policy gives it a new identity.
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

    fn shadow_limits(&self) -> Vec<Limit> {
        self.shadows().iter().flat_map(Self::limits).cloned().collect()
    }
}

/// A name for a policy that has no limit yet. Created by [`Policy::named`].
#[derive(Clone, Debug)]
#[must_use = "a policy needs a limit"]
pub struct PolicyBuilder {
    name: Box<str>,
}

impl PolicyBuilder {
    /// Adds the first limit and returns the policy.
    ///
    /// # Panics
    ///
    /// Panics if the strategy does not support the quota. For example, window strategies do not
    /// support a burst. Also panics if the text that a custom strategy writes in
    /// [`describe`](crate::strategy::Strategy::describe) is empty or not printable ASCII.
    /// To get an error instead, create the limit with [`Limit::try_new`] and add it with
    /// [`with`](Self::with).
    #[track_caller]
    pub fn limit(self, strategy: impl Strategy, quota: Quota) -> Policy {
        self.with(Limit::new(strategy, quota))
    }

    /// Adds a [`Limit`] as the first limit, and returns the policy.
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

//! Policies: the limits that apply to one key.

mod cell;
mod decide;
mod limit;
mod live;
mod members;
mod text;

use std::borrow::Cow;
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::num::NonZeroU32;
use std::sync::Arc;

pub(crate) use self::cell::PolicyChanges;
pub use self::decide::Op;
pub use self::limit::Limit;
pub(crate) use self::limit::SHADOW;
pub(crate) use self::live::SharedPolicy;
pub use self::live::{IntoPolicy, LivePolicy};
pub use self::members::Member;
use crate::error::{ConfigError, or_panic};
use crate::quota::Quota;
use crate::strategy::{CalendarWindow, Strategy};

/// The limits that apply to each key, with an optional name. A hit is admitted if all limits admit
/// it, and spends its cost from each of them. A refused hit spends nothing.
///
/// A [`Quota`](crate::Quota) or a [`Limit`] converts into a policy. The
/// [text form](Self#impl-FromStr-for-Policy) supports all options except for custom strategies.
/// Cloning a policy is cheap.
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
/// The [identity](Self::identity) of a policy is its name. The identity of an unnamed policy is the
/// text of its enforced limits, so processes with the same configuration share their states. On one
/// storage, policies with the same identity share their states, and others never do. Within a
/// policy, the state of a limit is identified by the position, the strategy and the period of the
/// limit.
///
/// A *named* policy keeps its identity when its limits change:
///
/// | change | effect on the units already spent |
/// |---|---|
/// | amount of a window or log | they stay spent: with 8 of 10 spent, 0 remain after lowering to 5, and 12 after raising to 20 |
/// | amount and burst (or queue) of a bucket, by the same factor | they are scaled: with 4 of 10 remaining, 8 remain after raising to 20 |
/// | amount of a bucket whose burst (or queue) stays the same | they are scaled so that the time until the bucket is full stays the same, up to that of an empty bucket |
/// | time zone or first day of a calendar window | the current window keeps its units and its end |
/// | burst of a bucket, or length of a queue | they stay spent, up to an empty bucket: with 15 of 20 spent, 15 remain after raising to 30, and 0 after lowering to 10 |
/// | period, strategy, or position of a limit | they are forgotten, and so are locks: the limit starts with its full quota |
/// | times of a [`Lockout`](crate::Lockout) | see below |
///
/// The burst of a token bucket, and the queue of a leaky bucket, default to the amount. A change of
/// the amount then changes both. An unnamed policy with another text is another policy, and starts
/// with its full quota.
///
/// `retry_after` is exact after any of these changes. A client of a bucket never waits longer than
/// if its last admitted hit had emptied a bucket of the new quota, plus up to 0.2 % of the time in
/// which that bucket fills. A debt that a [charge](crate::RateLimiter::charge) has left counts as
/// at most an empty bucket of the new quota, and can count as less. There are two exceptions, in
/// which the debt stays:
///
/// - Only the burst (or queue) changes, to a smaller one, or by less than a sixteenth. If the units
///   that are owed fit into the new bucket, the client still waits no longer than stated above.
/// - The amount changes, and the old and the new amount have the same short form, which is all that a
///   state contains of the amount. The probability is about 1 in 4,000 for an amount of a million, and
///   proportional to the amount.
///
/// A lock that has begun keeps its end. If more than the new duration is left, the lock ends one
/// new duration after the next refusal. There is one exception: a change of the time for which
/// levels are remembered, because a state stores only the sum of the lock and this time.
/// [`forgetting_after`](crate::Lockout::forgetting_after) sets this time. It defaults to the
/// longest lock, and is 0 without escalation. If this time becomes longer, running locks end
/// earlier by the difference, and their levels stay. If it becomes shorter, they end later by the
/// difference.
///
/// # Shadow limits
///
/// [`shadow`](Self::shadow) adds a limit that is observed but not enforced. It never refuses a
/// request, and no header field reports it. The text form is
/// `10/second; shadow moving-window 5/second`.
///
/// The middleware checks the shadow limits for each request that the enforced limits admit and that
/// has a cost above 0. It treats each shadow limit as a separate policy
/// ([`shadows`](Self::shadows)), and reports its decisions to the observer. A
/// [`RateLimiter`](crate::RateLimiter) ignores shadow limits.
///
/// The memory storage keeps shadow states next to the enforced states of the same key. Shadow
/// states take no memory from other keys and are evicted first.
#[derive(Clone)]
pub struct Policy(Arc<PolicyInner>);

struct PolicyInner {
    name: Option<Box<str>>,
    limits: Vec<Limit>,
    identity: String,
    digest: u128,
    limit_digests: Vec<u32>,
    /// The name that header fields and responses report for a limit without its own name. If the
    /// policy has several limits, it is the prefix, as `free` in `free-1`.
    called: String,
    shadows: Vec<Policy>,
    /// `true` if a layer needs full decisions: for shadow limits, and to report new locks.
    wants_decisions: bool,
}

impl Policy {
    /// Creates an unnamed policy of one limit.
    ///
    /// # Panics
    ///
    /// Panics if the strategy does not support the quota. For example, window strategies do not
    /// support a burst. Also panics if the text that a custom strategy writes in
    /// [`describe`](crate::strategy::Strategy::describe) is empty or not printable ASCII, and for a
    /// lockout [by refusals](crate::Lockout::by_refusals). [`try_new`](Self::try_new) returns an
    /// error instead.
    #[track_caller]
    pub fn new(strategy: impl Strategy, quota: Quota) -> Self {
        or_panic(Self::try_new(strategy, quota))
    }

    /// Like [`new`](Self::new), but returns an error instead of panicking.
    ///
    /// # Errors
    ///
    /// Returns an error if the strategy does not support the quota, if a custom strategy writes the
    /// limit as a text that is empty or not printable ASCII, or if it is a lockout
    /// [by refusals](crate::Lockout::by_refusals), which needs another limit before it.
    pub fn try_new(strategy: impl Strategy, quota: Quota) -> Result<Self, ConfigError> {
        let policy = Self::from(Limit::try_new(strategy, quota)?);
        policy.validate()?;
        Ok(policy)
    }

    /// Returns an error if all limits are lockouts by refusals, which then have no refusals to count.
    pub(crate) fn validate(&self) -> Result<(), ConfigError> {
        if !self.limits().iter().all(Limit::counts_refusals_of_others) {
            return Ok(());
        }
        let limits = text_of(self.limits());
        Err(ConfigError::new(format!(
            "\"{limits}\" counts the refusals of other limits: put another limit before it, for example \
             \"10/second; {limits}\""
        )))
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
        PolicyBuilder { name: or_panic(limit::checked_name(name.into())) }
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

    /// Adds a [`Limit`] after the others. Use it for a limit with a [name](Limit::named) of its own
    /// or with [kept units](Limit::keep).
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
        Self::of(self.0.name.clone(), limits, self.shadow_limits()).with_distinct_names()
    }

    /// Adds a [shadow limit](Self#shadow-limits), which is observed but not enforced. It does not
    /// change the [identity](Self::identity) of the policy.
    ///
    /// ```
    /// use tower_ratelimit::{Limit, Policy, Quota, TokenBucket};
    ///
    /// let limit = Limit::new(TokenBucket::new(), Quota::per_second(1).burst(10));
    /// let policy = Policy::from(Quota::per_minute(60)).shadow(limit);
    /// assert_eq!(policy.limits().len(), 1);
    /// assert_eq!(policy.shadows().len(), 1);
    /// ```
    ///
    /// # Panics
    ///
    /// Panics if the limit is a lockout [by refusals](crate::Lockout::by_refusals), because a
    /// shadow limit is decided alone.
    #[must_use]
    #[track_caller]
    pub fn shadow(self, limit: Limit) -> Self {
        assert!(
            !limit.counts_refusals_of_others(),
            "a shadow limit is decided alone, so \"{limit}\" would count no refusals: enforce it, or use RateLimitLayer::shadow"
        );
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
        let name = limit::checked_name(name.into())?;
        Self::of(Some(name), self.0.limits.clone(), self.shadow_limits()).with_distinct_names()
    }

    /// Creates a policy from its enforced limits and its shadow limits.
    pub(super) fn of(name: Option<Box<str>>, limits: Vec<Limit>, shadow: Vec<Limit>) -> Self {
        // Kept units are not part of the identity, so hits with and without them spend the same units.
        let text = || text_of(&limits.iter().map(Limit::without_kept).collect::<Vec<_>>());
        let identity = name.as_deref().map_or_else(text, str::to_owned);
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
            let wants_decisions = false;
            Self(Arc::new(PolicyInner {
                name: None,
                limits,
                identity,
                digest,
                limit_digests,
                called,
                shadows,
                wants_decisions,
            }))
        });
        let (called, shadows) = (identity.clone(), shadows.collect::<Vec<_>>());
        let wants_decisions = !shadows.is_empty() || limits.iter().any(Limit::locks);
        Self(Arc::new(PolicyInner { name, limits, identity, digest, limit_digests, called, shadows, wants_decisions }))
    }

    /// Divides this policy among `replicas` and returns the part of one replica.
    ///
    /// The amount, the burst and the queue length of each limit are divided and rounded down. The
    /// result is at least 1, except that a queue of length 0 stays 0. So if an amount is less than
    /// `replicas`, the replicas together admit more than the policy. A burst or a queue that would
    /// then take more than 142 years to refill is shortened further. A custom strategy can divide
    /// its limit in another way, see [`Strategy::divide`].
    ///
    /// The [kept units](Limit::keep) are divided and rounded up, but at least one unit of the
    /// result is not kept.
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
        let PolicyInner { name, identity, digest, limit_digests, called, wants_decisions, .. } = &*self.0;
        Ok(Self(Arc::new(PolicyInner {
            name: name.clone(),
            limits: self.limits().iter().map(|limit| limit.divide(replicas)).collect::<Result<_, _>>()?,
            identity: identity.clone(),
            digest: *digest,
            limit_digests: limit_digests.clone(),
            called: called.clone(),
            wants_decisions: *wants_decisions,
            shadows: self.shadows().iter().map(|shadow| shadow.divide(replicas)).collect::<Result<_, _>>()?,
        })))
    }

    /// Returns a hash that identifies the queue of waiting hits. Hits that keep units wait apart from
    /// those that can spend these units.
    pub(crate) fn queue_digest(&self) -> u128 {
        let add = |digest: u128, limit: &Limit| digest.rotate_left(29).wrapping_add(limit.kept().into());
        self.limits().iter().fold(self.digest(), add)
    }

    fn shadow_limits(&self) -> Vec<Limit> {
        self.shadows().iter().flat_map(Self::limits).cloned().collect()
    }

    /// Returns the [shadow limits](Self#shadow-limits), each as a separate policy with one limit.
    /// A [`RateLimiter`](crate::RateLimiter) for such a policy can peek at its states.
    #[inline]
    pub fn shadows(&self) -> &[Self] {
        &self.0.shadows
    }

    /// Returns `true` if the only limit counts the requests in flight.
    pub(crate) fn counts_in_flight(&self) -> bool {
        self.limits().first().is_some_and(Limit::counts_in_flight)
    }

    /// Returns `true` if a layer needs the full decision of each hit.
    #[inline]
    pub(crate) fn wants_decisions(&self) -> bool {
        self.0.wants_decisions
    }

    /// Returns `true` if the limit with the fewest remaining units is the one that would refuse another
    /// hit of this cost, so that a summary suffices.
    #[inline]
    pub(crate) fn suits_summary(&self, cost: u32) -> bool {
        let limits = self.limits();
        limits.len() == 1 || limits.iter().all(|limit| limit.needed(cost) == 1)
    }

    /// Returns `true` if one of the limits can delay an admitted hit.
    pub(crate) fn delays(&self) -> bool {
        self.limits().iter().any(|limit| limit.strategy().delays())
    }

    /// Returns `true` if this is the policy of a shadow limit.
    #[inline]
    pub(crate) fn is_shadow(&self) -> bool {
        self.limit_digests().first().is_some_and(|digest| digest & SHADOW != 0)
    }

    /// Returns the name of the policy, or `None` for an unnamed policy and for those in
    /// [`shadows`](Self::shadows).
    pub fn name(&self) -> Option<&str> {
        self.0.name.as_deref()
    }

    /// Returns the enforced limits, of which there is at least one. [`shadows`](Self::shadows)
    /// returns the shadow limits.
    #[inline]
    pub fn limits(&self) -> &[Limit] {
        &self.0.limits
    }

    /// Returns the name by which header fields and responses report the limit at `position`.
    ///
    /// The first row that applies determines the name:
    ///
    /// | limit | name |
    /// |---|---|
    /// | a limit with a [name of its own](Limit::named) | this name |
    /// | the limit of a policy in [`shadows`](Self::shadows) | the identity of the enclosing policy and a number, as in `free shadow-1` |
    /// | the only limit of the policy | the [identity](Self::identity) of the policy: its name, or its text |
    /// | one of several limits | the identity and the number of the limit, counted from 1, as in `free-1` |
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

    /// Returns the [name of the limit](Self::limit_name) in double quotes, with the escapes of a
    /// Structured Field string.
    pub(crate) fn quoted_name(&self, position: usize) -> String {
        limit::Quoted(&self.limit_name(position)).to_string()
    }

    /// Returns the string that identifies the policy in a storage.
    ///
    /// | policy | identity |
    /// |---|---|
    /// | a policy with a name | the name |
    /// | a policy without a name | the [text](Self#impl-Display-for-Policy) of its enforced limits, without [kept units](Limit::keep) |
    /// | the result of [`divide`](Self::divide) | the identity of the original policy |
    /// | one of the [`shadows`](Self::shadows) | the identity of the enclosing policy and a number, as in `free·shadow-1` |
    pub fn identity(&self) -> &str {
        &self.0.identity
    }

    /// Returns a 128-bit hash of the [identity](Self::identity), for storages that keep hashes
    /// instead of names. For one of the [`shadows`](Self::shadows), returns the digest of the
    /// enclosing policy. Their [limit digests](Self::limit_digests) differ.
    ///
    /// The hash may differ between builds of a program, so a storage must not write it to a file or
    /// send it to another process.
    #[inline]
    pub fn digest(&self) -> u128 {
        self.0.digest
    }

    /// Returns a 32-bit hash for each limit, in the order of [`limits`](Self::limits).
    ///
    /// A hash depends on the position, the strategy and the period of its limit. No two limits of a
    /// policy have the same hash. Storages that keep hashes identify the state of each limit by it.
    /// Like [`digest`](Self::digest), it may differ between builds of a program.
    #[inline]
    pub fn limit_digests(&self) -> &[u32] {
        &self.0.limit_digests
    }

    /// Returns the policy if its limits have different [names](Self::limit_name).
    fn with_distinct_names(self) -> Result<Self, ConfigError> {
        let limits = self.limits().len();
        let name_of = |position: usize| self.limit_name(position);
        let twice = (1..limits).find(|&second| (0..second).any(|first| name_of(first) == name_of(second)));
        match twice {
            None => Ok(self),
            Some(second) => Err(ConfigError::new(format!(
                "two limits of the policy \"{self}\" have the name {:?}: \
                 give one of them another name, for example \"daily\"",
                name_of(second)
            ))),
        }
    }

    /// Returns `true` if the two policies always make the same decisions.
    ///
    /// Equality compares texts, which contain neither the settings of custom strategies nor the data
    /// of time zones. So two policies with one of these are interchangeable only if one is a clone of
    /// the other.
    pub(super) fn is_interchangeable_with(&self, other: &Self) -> bool {
        let has_zone =
            |limit: &Limit| limit.strategy().name() == CalendarWindow::NAME && limit.to_string().contains(" in ");
        Arc::ptr_eq(&self.0, &other.0)
            || self == other
                && self.to_string().parse().as_ref() == Ok(self)
                && !self.limits().iter().chain(self.shadows().iter().flat_map(Self::limits)).any(has_zone)
    }
}

/// Compares the [identities](Self::identity) and the [texts](Self#impl-Display-for-Policy), which
/// include shadow limits. Two custom strategies with different settings can have the same text.
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

/// Returns the text of enforced limits.
fn text_of(limits: &[Limit]) -> String {
    limits.iter().map(Limit::to_string).collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_that_keep_units_of_different_limits_have_different_queues() {
        let digest = |text: &str| text.parse::<Policy>().unwrap().queue_digest();
        let [neither, first, second] = ["10/s; 100/min", "10/s keep 5; 100/min", "10/s; 100/min keep 5"].map(digest);
        assert!(neither != first && first != second && second != neither);
    }

    /// Guards against this defect: a live policy keeps the old data of a time zone after `set`.
    #[cfg(feature = "calendar")]
    #[test]
    fn policies_with_a_time_zone_are_interchangeable_only_with_clones() {
        let parsed = |text: &str| text.parse::<Policy>().unwrap();
        for (text, expected) in [
            ("fixed-window 5/minute", true),
            ("calendar 5/day", true),
            ("calendar 5/day in Europe/Berlin", false),
            ("9/second; shadow calendar 5/day in Europe/Berlin", false),
        ] {
            let policy = parsed(text);
            assert!(policy.is_interchangeable_with(&policy.clone()));
            assert_eq!(policy.is_interchangeable_with(&parsed(text)), expected, "{text}");
        }
    }
}

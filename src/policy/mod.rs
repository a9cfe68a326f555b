//! The limits that bind one key.

mod into;
mod limit;
mod name;
mod text;

use std::borrow::Cow;
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::num::NonZeroU32;
use std::sync::Arc;

pub use self::into::IntoPolicy;
pub use self::limit::Limit;
pub(crate) use self::limit::SHADOW;
use crate::decision::{Decision, Statuses};
use crate::error::or_panic;
use crate::strategy::{State, Strategy};
use crate::{ConfigError, Quota, Timestamp};

/// The limits that bind one key, admitted all together or not at all.
///
/// A [`Quota`] becomes one by itself; strings name everything there is. Cloning is cheap.
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
/// A policy's name is its identity in a storage: equal names on one storage share what they remember, others never do. An
/// unnamed policy is called by its text, so processes with equal configuration share. A limit is identified by its
/// position, its strategy and its period.
///
/// So when the configuration of a *named* policy changes under what is remembered:
///
/// | changed | what was spent |
/// |---|---|
/// | the amount of a window or log | stays: of 10 with 8 spent, lowered to 5, nothing remains; raised to 20, 12 remain |
/// | the amount of a bucket, and its burst with it | keeps its proportion: a bucket of 10 with 4 left, raised to 20, has 8 |
/// | the amount of a bucket, its burst staying | keeps the time until it is full again, up to that of an empty bucket |
/// | a bucket's burst or a queue's places alone | stays, as far as it fits: of a burst of 20 with 5 left, lowered to 15, nothing remains |
/// | the period, the strategy, or the place among the limits | is forgotten: the limit starts afresh |
///
/// An unnamed policy whose text changes is another policy, and starts afresh.
///
/// `retry_after` is exact after any of these changes. A client of a bucket waits for no longer than if it had emptied a
/// bucket of the new quota with its last admitted hit (plus up to 0.2 % of the time in which that bucket fills).
///
/// # Shadow limits
///
/// A limit can be tried out before it is enforced: [`shadow`](Self::shadow) adds one that the middleware decides and counts
/// as a policy of its own ([`shadows`](Self::shadows)), only for requests that the enforced limits admit, and reports to
/// its observer; it never refuses and no header field shows it. In strings: `10/second; shadow moving-window 5/second`.
/// The memory storage keeps its states beside the enforced ones of the same key, where they take no room from others, and
/// forgets them first.
#[derive(Clone)]
pub struct Policy(Arc<Inner>);

struct Inner {
    name: Option<Box<str>>,
    limits: Vec<Limit>,
    identity: String,
    digest: u128,
    limit_digests: Vec<u32>,
    /// What its limits are called after on the wire.
    called: String,
    shadows: Vec<Policy>,
}

/// Whether a decision spends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "an operation either spends or does not")]
pub enum Op {
    /// Spends when admitted.
    Hit,
    /// Looks, and changes nothing.
    Peek,
}

impl Policy {
    /// An unnamed policy of one limit.
    ///
    /// # Panics
    ///
    /// When the strategy cannot keep the quota; [`try_new`](Self::try_new) returns an error instead.
    #[track_caller]
    pub fn new(strategy: impl Strategy, quota: Quota) -> Self {
        Limit::new(strategy, quota).into()
    }

    /// As [`new`](Self::new).
    ///
    /// # Errors
    ///
    /// When the strategy cannot keep the quota.
    pub fn try_new(strategy: impl Strategy, quota: Quota) -> Result<Self, ConfigError> {
        Ok(Limit::try_new(strategy, quota)?.into())
    }

    /// The beginning of a policy with a name; it needs a limit to be one.
    ///
    /// # Panics
    ///
    /// When the name is empty or not printable ASCII; [`try_named`](Self::try_named) returns an error instead.
    #[track_caller]
    pub fn named(name: impl Into<String>) -> PolicyBuilder {
        or_panic(Self::try_named(name))
    }

    /// As [`named`](Self::named).
    ///
    /// # Errors
    ///
    /// When the name is empty or not printable ASCII.
    pub fn try_named(name: impl Into<String>) -> Result<PolicyBuilder, ConfigError> {
        Ok(PolicyBuilder { name: name::checked(name.into())? })
    }

    /// The same policy with one limit more.
    ///
    /// # Panics
    ///
    /// When the strategy cannot keep the quota, or another limit has the new one's
    /// [name](Self::limit_name). [`Limit::try_new`] and [`try_with`](Self::try_with) return an error
    /// instead.
    #[must_use]
    #[track_caller]
    pub fn limit(self, strategy: impl Strategy, quota: Quota) -> Self {
        self.with(Limit::new(strategy, quota))
    }

    /// The same policy with one limit more.
    ///
    /// # Panics
    ///
    /// When another limit has the new one's [name](Self::limit_name).
    /// [`try_with`](Self::try_with) returns an error instead.
    #[must_use]
    #[track_caller]
    pub fn with(self, limit: Limit) -> Self {
        or_panic(self.try_with(limit))
    }

    /// As [`with`](Self::with).
    ///
    /// # Errors
    ///
    /// When another limit has the new one's [name](Self::limit_name): clients could not tell them apart.
    /// The second limit of `Policy::named("free")` cannot be named `free-1`.
    pub fn try_with(self, limit: Limit) -> Result<Self, ConfigError> {
        let mut limits = self.0.limits.clone();
        limits.push(limit);
        name::distinct(Self::of(self.0.name.clone(), limits, self.shadow_limits()))
    }

    /// The same policy with one limit more that is only tried out: see [above](Self#shadow-limits).
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

    /// The limits that are only tried out, each as a policy of its own: to peek at what they have counted.
    #[inline]
    pub fn shadows(&self) -> &[Self] {
        &self.0.shadows
    }

    /// Whether it is a limit that is only tried out.
    #[inline]
    pub(crate) fn is_shadow(&self) -> bool {
        self.limit_digests().first().is_some_and(|digest| digest & SHADOW != 0)
    }

    fn shadow_limits(&self) -> Vec<Limit> {
        self.shadows().iter().flat_map(Self::limits).cloned().collect()
    }

    /// The same limits under this name.
    ///
    /// # Panics
    ///
    /// When the name is empty or not printable ASCII, or gives two limits the same
    /// [name](Self::limit_name). [`try_with_name`](Self::try_with_name) returns an error instead.
    #[must_use]
    #[track_caller]
    pub fn with_name(self, name: impl Into<String>) -> Self {
        or_panic(self.try_with_name(name))
    }

    /// As [`with_name`](Self::with_name).
    ///
    /// # Errors
    ///
    /// When the name is empty or not printable ASCII, or gives two limits the same
    /// [name](Self::limit_name).
    pub fn try_with_name(self, name: impl Into<String>) -> Result<Self, ConfigError> {
        name::distinct(Self::of(Some(name::checked(name.into())?), self.0.limits.clone(), self.shadow_limits()))
    }

    fn of(name: Option<Box<str>>, limits: Vec<Limit>, shadow: Vec<Limit>) -> Self {
        let identity = name.as_deref().map_or_else(|| text::of_limits(&limits), str::to_owned);
        let digest = digest(&identity);
        let limit_digests = limit::digests(&limits, false);
        // What is only tried out is no part of the identity: it comes and goes, and what was spent stays.
        let shadow_digests = limit::digests(&shadow, true);
        let shadows = shadow.into_iter().zip(shadow_digests).enumerate().map(|(position, (limit, limit_digest))| {
            let called = format!("{identity} shadow-{}", position + 1);
            // All names are ASCII, so none can be the same.
            let identity = format!("{identity}\u{b7}shadow-{}", position + 1);
            let limit_digests = vec![limit_digest];
            let (limits, shadows) = (vec![limit], Vec::new());
            Self(Arc::new(Inner { name: None, limits, identity, digest, limit_digests, called, shadows }))
        });
        let (called, shadows) = (identity.clone(), shadows.collect());
        Self(Arc::new(Inner { name, limits, identity, digest, limit_digests, called, shadows }))
    }

    /// What one of so many has of it that divide it between them: of each limit the amount, the burst and the places in a queue,
    /// rounded down and at least 1. It is the same policy to a storage: its name and its [identity](Self::identity) stay. Divide a
    /// policy when it is complete: an unnamed share to which a limit is added, a shadow limit too, is called by its own text.
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
    /// When a strategy of one's own cannot keep its share. All others can.
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

    /// Its name, if it was given one.
    pub fn name(&self) -> Option<&str> {
        self.0.name.as_deref()
    }

    /// Its limits, at least one.
    #[inline]
    pub fn limits(&self) -> &[Limit] {
        &self.0.limits
    }

    /// What limit number `position` is called on the wire: its own name, else the policy's if it is alone, else the
    /// policy's and its number, counted from 1.
    ///
    /// # Panics
    ///
    /// When there is no such limit.
    #[track_caller]
    pub fn limit_name(&self, position: usize) -> Cow<'_, str> {
        match self.limits()[position].name() {
            Some(name) => name.into(),
            None if self.limits().len() == 1 => self.0.called.as_str().into(),
            None => format!("{}-{}", self.0.called, position + 1).into(),
        }
    }

    /// The same, in double quotes.
    pub(crate) fn quoted_name(&self, position: usize) -> String {
        name::Quoted(&self.limit_name(position)).to_string()
    }

    /// What it is called in a storage: its name, or its text.
    pub fn identity(&self) -> &str {
        &self.0.identity
    }

    /// The [identity](Self::identity) in 128 bits, for a storage that keeps hashes instead of names; a shadow limit has that of
    /// its policy. It may differ from one build of a program to the next.
    #[inline]
    pub fn digest(&self) -> u128 {
        self.0.digest
    }

    /// For each limit, its position, strategy and period in 32 bits: what tells its states from those of the policy's other
    /// limits, and of another strategy or period at its place.
    #[inline]
    pub fn limit_digests(&self) -> &[u32] {
        &self.0.limit_digests
    }

    /// Decides on a hit or a peek: checks every limit, then spends all of them or none. `states` are those of the
    /// limits, in their order, and are left as they are to be stored. Only a hit changes them. Cost 0 is admitted and
    /// spends nothing.
    ///
    /// This is the whole of what a storage computes; the rest is reading the clock and keeping the states.
    ///
    /// # Panics
    ///
    /// When there are not as many states as limits.
    #[track_caller]
    pub fn decide(&self, states: &mut [State], now: Timestamp, op: Op, cost: u32) -> Decision {
        let limits = self.limits();
        assert_eq!(states.len(), limits.len(), "one state for each limit");
        let spends = op == Op::Hit && cost > 0;
        let admits = || limits.iter().zip(&*states).all(|(limit, state)| limit.check(state, now, cost).is_admitted());
        let all_admit = spends && limits.len() > 1 && admits();
        let mut decision = Decision::blank();
        for ((limit, state), status) in limits.iter().zip(states).zip(decision.open(limits.len(), cost)) {
            let part = match (spends, all_admit) {
                (false, _) => None,
                (true, true) => Some(limit.spend(state, now, cost)),
                (true, false) if limits.len() == 1 => Some(limit.hit(state, now, cost)),
                (true, false) => Some(limit.refuse(state, now)),
            };
            limit.tell(state, now, cost, part, status);
        }
        decision.conclude(now);
        decision
    }

    /// The refusal of a storage that could not decide: every limit refuses, and shows nothing remaining, for
    /// `retry_after` microseconds. Mark it [storage full](Decision::storage_full) or [contended](Decision::contended).
    pub fn refuse(&self, now: Timestamp, cost: u32, retry_after: u64) -> Decision {
        let limits = self.limits();
        Decision::new(now, cost, Statuses::from_fn(limits.len(), |i| limits[i].refusal(retry_after)))
    }

    /// Gives back an admitted hit, as far as each limit has not forgotten it. A refusal, a peek and a hit already
    /// forgotten give back nothing.
    ///
    /// # Panics
    ///
    /// When there are not as many states as limits.
    #[track_caller]
    pub fn refund(&self, states: &mut [State], now: Timestamp, decision: &Decision) {
        assert_eq!(states.len(), self.limits().len(), "one state for each limit");
        if decision.is_refused() {
            return;
        }
        for ((limit, state), status) in self.limits().iter().zip(states).zip(decision.limits()) {
            let hit = status.hit(decision.at(), decision.cost());
            if now < hit.until {
                limit.strategy().refund(limit.quota(), state, now, &hit);
            }
        }
    }
}

/// A policy that has a name and needs its first limit: see [`Policy::named`].
#[derive(Clone, Debug)]
#[must_use = "a policy needs a limit"]
pub struct PolicyBuilder {
    name: Box<str>,
}

impl PolicyBuilder {
    /// The policy with its first limit.
    ///
    /// # Panics
    ///
    /// When the strategy cannot keep the quota. [`with`](Self::with) and [`Limit::try_new`] return an
    /// error instead.
    #[track_caller]
    pub fn limit(self, strategy: impl Strategy, quota: Quota) -> Policy {
        self.with(Limit::new(strategy, quota))
    }

    /// The policy with its first limit.
    pub fn with(self, limit: Limit) -> Policy {
        Policy::of(Some(self.name), vec![limit], Vec::new())
    }
}

impl From<Limit> for Policy {
    fn from(limit: Limit) -> Self {
        Self::of(None, vec![limit], Vec::new())
    }
}

/// One limit: with [`TokenBucket`](crate::TokenBucket) when the quota has a burst, else with
/// [`SlidingWindowCounter`](crate::SlidingWindowCounter).
impl From<Quota> for Policy {
    fn from(quota: Quota) -> Self {
        Limit::from(quota).into()
    }
}

/// Equal when they have the same name and the same limits, shadow limits too, as text.
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

/// 128 bits of an identity. Names can come from configuration that others write, so it is a hash that resists collisions.
#[inline]
fn digest(identity: &str) -> u128 {
    let half = |half: u8| {
        let mut hasher = DefaultHasher::new();
        (half, identity).hash(&mut hasher);
        u128::from(hasher.finish())
    };
    half(0) << 64 | half(1)
}

use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::num::NonZeroU32;
use std::sync::Arc;

use super::name;
use crate::error::or_panic;
use crate::strategy::{Outcome, Part, State, Status, Strategy, StrategyDyn};
use crate::{ConfigError, Quota, SlidingWindowCounter, Timestamp, TokenBucket};

/// The bit of a limit's digest that says that the limit is only tried out.
pub(crate) const SHADOW: u32 = 2;

/// The bits of a limit's digest that storages use for other things.
const LOW_BITS: u32 = 3;

/// A different number for each limit of a policy. Two hashes that collide by chance would make two
/// limits share their states, so the later limit gets another hash.
pub(super) fn digests<'a>(limits: impl IntoIterator<Item = &'a Limit>, shadow: bool) -> Vec<u32> {
    let mut digests = Vec::new();
    for (position, limit) in limits.into_iter().enumerate() {
        let flag = if shadow { SHADOW } else { 0 };
        let mut attempts = (0..).map(|attempt| limit.digest(position, attempt) | flag);
        digests.extend(attempts.find(|digest| !digests.contains(digest)));
    }
    digests
}

/// A quota with its strategy, and perhaps a name of its own.
///
/// Most policies are built without naming this type; it is for a limit that is to be called something else than
/// `policy-1`, `policy-2`.
///
/// ```
/// use tower_ratelimit::{FixedWindow, Limit, MovingWindow, Policy, Quota};
///
/// let policy = Policy::named("free")
///     .limit(FixedWindow::new(), Quota::per_second(10))
///     .with(Limit::new(MovingWindow::new(), Quota::per_day(10_000)).named("daily"));
/// assert_eq!(policy.limit_name(0), "free-1");
/// assert_eq!(policy.limit_name(1), "daily");
/// ```
#[derive(Clone)]
pub struct Limit {
    strategy: Arc<dyn StrategyDyn>,
    quota: Quota,
    name: Option<Box<str>>,
}

impl Limit {
    /// A limit that spends `quota` by `strategy`.
    ///
    /// # Panics
    ///
    /// When the strategy cannot keep the quota (a burst where there are none); [`try_new`](Self::try_new) returns an
    /// error instead.
    #[track_caller]
    pub fn new(strategy: impl Strategy, quota: Quota) -> Self {
        or_panic(Self::try_new(strategy, quota))
    }

    /// As [`new`](Self::new).
    ///
    /// # Errors
    ///
    /// When the strategy cannot keep the quota, or describes itself in something else than printable ASCII.
    pub fn try_new(strategy: impl Strategy, quota: Quota) -> Result<Self, ConfigError> {
        Self::of(Arc::new(strategy), quota)
    }

    pub(super) fn of(strategy: Arc<dyn StrategyDyn>, quota: Quota) -> Result<Self, ConfigError> {
        strategy.validate(&quota)?;
        let limit = Self { strategy, quota, name: None };
        // What an unnamed policy is called on the wire.
        name::checked(limit.to_string())?;
        Ok(limit)
    }

    /// The same limit with a name of its own. The limits of one policy have to have different names,
    /// because clients tell them apart by them.
    ///
    /// # Panics
    ///
    /// When the name is empty or not printable ASCII; [`try_named`](Self::try_named) returns an error instead.
    #[must_use]
    #[track_caller]
    pub fn named(self, name: impl Into<String>) -> Self {
        or_panic(self.try_named(name))
    }

    /// As [`named`](Self::named).
    ///
    /// # Errors
    ///
    /// When the name is empty or not printable ASCII.
    pub fn try_named(self, name: impl Into<String>) -> Result<Self, ConfigError> {
        Ok(Self { name: Some(name::checked(name.into())?), ..self })
    }

    /// What one of so many has of it that divide it between them, under the same name.
    pub(super) fn divide(&self, replicas: NonZeroU32) -> Result<Self, ConfigError> {
        let (strategy, quota) = match self.strategy.divide(&self.quota, replicas) {
            Some(share) => (share.strategy, share.quota),
            None => (Arc::clone(&self.strategy), self.quota.divide(replicas)),
        };
        Ok(Self { name: self.name.clone(), ..Self::of(strategy, quota)? })
    }

    /// Its strategy.
    pub fn strategy(&self) -> &dyn Strategy {
        &*self.strategy
    }

    /// Its quota.
    pub fn quota(&self) -> &Quota {
        &self.quota
    }

    /// Its own name, if it was given one.
    pub fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// The most units that can be spent at one instant.
    pub fn capacity(&self) -> u32 {
        self.strategy.capacity(&self.quota)
    }

    /// In how many seconds, rounded up, all of the [capacity](Self::capacity) comes back.
    pub(crate) fn window_secs(&self) -> u64 {
        let quota = self.quota();
        let micros = u128::from(self.capacity()) * u128::from(quota.period_micros());
        let seconds = micros.div_ceil(u128::from(quota.amount()) * 1_000_000);
        u64::try_from(seconds).unwrap_or(u64::MAX)
    }

    /// A number for this strategy and period at this place of a policy. It tells the states of this
    /// limit from those of others. One bit of it says whether the limit is enforced.
    fn digest(&self, position: usize, attempt: u32) -> u32 {
        let mut hasher = DefaultHasher::new();
        (position, self.strategy.name(), self.quota.period_micros()).hash(&mut hasher);
        if attempt > 0 {
            attempt.hash(&mut hasher);
        }
        #[allow(clippy::cast_possible_truncation)]
        let digest = hasher.finish() as u32;
        digest & !LOW_BITS
    }

    /// What this limit answers to a hit of `cost` units that a storage decided elsewhere: `state` is what was left, and
    /// `outcome` what the hit did to it, nothing in a peek.
    pub fn answer(&self, state: &State, now: Timestamp, cost: u32, outcome: Option<Outcome>) -> Status {
        let mut status = Status::BLANK;
        self.tell(state, now, cost, outcome, &mut status);
        status
    }

    #[inline]
    pub(crate) fn check(&self, state: &State, now: Timestamp, cost: u32) -> Status {
        self.strategy.check(&self.quota, state, now, cost)
    }

    /// All of a hit of at least 1 unit, where no other limit refuses.
    #[inline]
    pub(crate) fn hit(&self, state: &mut State, now: Timestamp, cost: u32) -> Outcome {
        self.strategy.hit(&self.quota, state, now, cost)
    }

    #[inline]
    pub(super) fn spend(&self, state: &mut State, now: Timestamp, cost: u32) -> Outcome {
        Outcome::Spent { delay: self.strategy.spend(&self.quota, state, now, cost) }
    }

    #[inline]
    pub(crate) fn refuse(&self, state: &mut State, now: Timestamp) -> Outcome {
        self.strategy.refuse(&self.quota, state, now);
        Outcome::Refused
    }

    pub(crate) fn counts_refusals(&self) -> bool {
        self.strategy.counts_refusals()
    }

    /// What it says after that.
    #[inline]
    pub(crate) fn tell(&self, state: &State, now: Timestamp, cost: u32, part: Part, status: &mut Status) {
        self.strategy.tell(&self.quota, state, now, cost, part, status);
    }

    /// A refusal without a decision: nothing remains for `retry_after` microseconds.
    pub(crate) fn refusal(&self, retry_after: u64) -> Status {
        Status::refused(self.capacity(), 0, retry_after, Some(retry_after))
    }
}

/// With [`TokenBucket`] when the quota has a burst, else with [`SlidingWindowCounter`].
impl From<Quota> for Limit {
    fn from(quota: Quota) -> Self {
        if quota.burst_size().is_some() {
            Self::new(TokenBucket::new(), quota)
        } else {
            Self::new(SlidingWindowCounter::new(), quota)
        }
    }
}

/// As in a policy's text: `"daily" moving-window 10000/day`.
impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(name) = &self.name {
            write!(f, "{} ", name::Quoted(name))?;
        }
        self.strategy.describe(&self.quota, f)
    }
}

impl fmt::Debug for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Limit({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_whose_hashes_collide_get_different_digests() {
        let limit = |text: &str| crate::Policy::limits(&text.parse().unwrap())[0].clone();
        let limits = [limit("fixed-window 10/minute"), limit("fixed-window 100/2786174215 ms")];
        assert_eq!(limits[0].digest(0, 0), limits[1].digest(1, 0), "this pair collides");
        for shadow in [false, true] {
            let digests = digests(&limits, shadow);
            assert_ne!(digests[0], digests[1]);
        }
    }
}

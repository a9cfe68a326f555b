//! The answer to a hit or a peek.

mod verdict;

use std::array;
use std::cmp::Reverse;
use std::fmt;
use std::time::Duration;

pub use self::verdict::DecisionSource;
use self::verdict::Verdict;
use crate::Timestamp;
use crate::strategy::Status;

/// The answer to a hit or a peek: admitted, perhaps after a delay, or refused, with each limit's numbers.
///
/// Plain data, made once by the storage and carried to whoever wants to know. All numbers are as of the instant
/// [`at`](Self::at), after the hit; a peek shows what is there and says what the hit would be told.
///
/// ```
/// use tower_ratelimit::{Key, Quota, RateLimiter};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let limiter = RateLimiter::new(Quota::per_minute(5));
/// let decision = limiter.hit(&Key::from("alice")).await?;
/// assert!(decision.is_admitted());
/// assert_eq!((decision.capacity(), decision.remaining()), (5, 4));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "a decision says whether to go on"]
pub struct Decision {
    at: Timestamp,
    /// How many seconds `at` is ahead of the wall clock.
    ahead: u32,
    cost: u32,
    verdict: Verdict,
    statuses: Statuses,
}

impl Decision {
    /// The decision on a hit of `cost` units at `at`, admitted if every limit admits.
    pub(crate) fn new(at: Timestamp, cost: u32, statuses: Statuses) -> Self {
        let mut decision = Self { at, ahead: 0, cost, verdict: Verdict::REFUSED, statuses };
        decision.conclude(at);
        decision
    }

    /// The decision on a hit of `cost` units at `at` by a policy whose one limit answered `status`.
    pub fn of(at: Timestamp, cost: u32, status: Status) -> Self {
        Self::new(at, cost, Statuses::One([status]))
    }

    /// The decision on a hit of `cost` units at `at` by a policy whose limits answered `statuses`, in their order: for a storage
    /// that decides elsewhere and is told the answers. [`Limit::answer`](crate::Limit::answer) makes them.
    pub fn of_limits(at: Timestamp, cost: u32, statuses: impl ExactSizeIterator<Item = Status>) -> Self {
        let mut statuses = statuses;
        let limits = statuses.len();
        Self::new(at, cost, Statuses::from_fn(limits, |_| statuses.next().unwrap_or(Status::BLANK)))
    }

    /// A decision to be filled in: it is large, so whoever makes many fills it in where it is wanted.
    #[inline]
    pub(crate) const fn blank() -> Self {
        let statuses = Statuses::More(Vec::new());
        Self { at: Timestamp::EPOCH, ahead: 0, cost: 0, verdict: Verdict::REFUSED, statuses }
    }

    /// The answers of so many limits, to be filled in.
    #[inline(always)]
    pub(crate) fn open(&mut self, limits: usize, cost: u32) -> &mut [Status] {
        self.cost = cost;
        self.statuses = Statuses::from_fn(limits, |_| Status::BLANK);
        self.statuses.as_mut_slice()
    }

    /// Fills in the verdict, now that the limits have answered.
    #[inline]
    pub(crate) fn conclude(&mut self, at: Timestamp) {
        self.at = at;
        let admitted = self.limits().iter().all(Status::is_admitted);
        self.verdict = if admitted { Verdict::ADMITTED } else { Verdict::REFUSED };
    }

    /// The same refusal, marked [storage full](Self::is_storage_full).
    pub fn storage_full(self) -> Self {
        Self { verdict: self.verdict.instead(Verdict::STORAGE_FULL), ..self }
    }

    /// The same refusal, marked [contended](Self::is_contended).
    pub fn contended(self) -> Self {
        Self { verdict: self.verdict.instead(Verdict::CONTENDED), ..self }
    }

    /// Whether the hit may go on, after its [`delay`](Self::delay).
    #[inline]
    pub fn is_admitted(&self) -> bool {
        self.verdict.is(Verdict::ADMITTED)
    }

    /// Whether the hit is turned away. It has taken nothing.
    #[inline]
    pub fn is_refused(&self) -> bool {
        !self.is_admitted()
    }

    /// Returns `true` if the hit was refused because the storage was full: a newcomer that found only
    /// keys that are being refused, or a client whose own log could not grow. See
    /// [`MemoryStorage`](crate::MemoryStorage).
    pub fn is_storage_full(&self) -> bool {
        self.verdict.is(Verdict::STORAGE_FULL)
    }

    /// Returns `true` if a compare-and-swap storage refused the hit because other processes changed the key
    /// before every swap. The hit has spent nothing. Retrying can succeed.
    pub fn is_contended(&self) -> bool {
        self.verdict.is(Verdict::CONTENDED)
    }

    /// Whether a storage that stood in for another one has decided: see [`Breaker`](crate::storage::Breaker).
    pub fn is_from_fallback(&self) -> bool {
        self.verdict.is_from_fallback()
    }

    /// The same decision, as it is told by a storage that chooses between two and has asked this one of them. So a refund finds
    /// its way [back](Self::back).
    pub fn via(self, way: DecisionSource) -> Self {
        Self { verdict: self.verdict.via(way), ..self }
    }

    /// Which of the two a storage has asked that chooses between two, and the decision as that one told it. One that has gone
    /// [via](Self::via) neither is the primary's.
    pub fn back(self) -> (DecisionSource, Self) {
        let (way, verdict) = self.verdict.back();
        (way, Self { verdict, ..self })
    }

    /// The same answer, which has come the ways that another one has.
    pub(crate) fn the_way_of(self, other: &Self) -> Self {
        Self { verdict: other.verdict.instead(self.verdict), ..self }
    }

    /// When the storage decided, by its own clock.
    pub fn at(&self) -> Timestamp {
        self.at
    }

    /// When the storage decided, by the wall clock.
    #[inline]
    pub(crate) fn wall_at(&self) -> Timestamp {
        self.at.minus(u64::from(self.ahead) * 1_000_000)
    }

    /// Sets how many seconds the storage's clock is ahead of the wall clock.
    #[inline]
    pub(crate) fn set_ahead(&mut self, seconds: u32) {
        self.ahead = seconds;
    }

    /// How many units the hit asked for.
    pub fn cost(&self) -> u32 {
        self.cost
    }

    /// Whether the hit may go on without waiting.
    #[inline]
    pub(crate) fn is_at_once(&self) -> bool {
        self.is_admitted() && self.limits().iter().all(|status| status.delay_micros() == 0)
    }

    /// How long an admitted hit has to wait for its turn: the longest delay of its limits, zero without a leaky bucket.
    pub fn delay(&self) -> Duration {
        let longest = self.limits().iter().map(Status::delay_micros).max();
        Duration::from_micros(longest.filter(|_| self.is_admitted()).unwrap_or(0))
    }

    /// Units that can still be spent now: the least of the limits'.
    pub fn remaining(&self) -> u32 {
        self.limits().iter().map(Status::remaining).min().unwrap_or(0)
    }

    /// The most units that can ever be spent at one instant: the least of the limits'.
    pub fn capacity(&self) -> u32 {
        self.limits().iter().map(Status::capacity).min().unwrap_or(0)
    }

    /// How long until more units [remain](Self::remaining); zero when all of the [capacity](Self::capacity) does.
    pub fn reset_after(&self) -> Duration {
        let remaining = self.remaining();
        if remaining == self.capacity() {
            return Duration::ZERO;
        }
        let least = self.limits().iter().filter(|status| status.remaining() == remaining);
        least.map(Status::reset_after).max().unwrap_or_default()
    }

    /// How long until the refused hit would be admitted if nothing else happened: `None` when it was admitted, or
    /// when its cost can never fit.
    pub fn retry_after(&self) -> Option<Duration> {
        self.limits().iter().max_by_key(|status| status.retry_micros()).and_then(Status::retry_after)
    }

    /// The numbers of each limit, in the policy's order.
    #[inline]
    pub fn limits(&self) -> &[Status] {
        self.statuses.as_slice()
    }

    /// The one limit to tell a client about: of those that refuse the one with the latest
    /// [`retry_after`](Status::retry_after) (never is latest), else the one with the least remaining, and of equals the
    /// one with the latest [`reset_after`](Status::reset_after).
    ///
    /// A decision without limits, which only [`of_limits`](Self::of_limits) makes, shows zeros.
    pub fn shown(&self) -> &Status {
        shown(self.limits())
    }
}

/// Of a policy's limits the one to tell a client about: see [`Decision::shown`].
pub(crate) fn shown(limits: &[Status]) -> &Status {
    let wait = |status: &Status| (status.is_admitted(), Reverse(status.retry_micros()));
    let room = |status: &Status| (status.remaining(), Reverse(status.reset_after_micros()));
    match limits {
        [only] => only,
        several => several.iter().min_by_key(|status| (wait(status), room(status))).unwrap_or(&Status::BLANK),
    }
}

/// The statuses of one to four limits in place, of more on the heap: an admitted hit allocates nothing.
#[derive(Clone)]
pub(crate) enum Statuses {
    One([Status; 1]),
    Two([Status; 2]),
    Three([Status; 3]),
    Four([Status; 4]),
    More(Vec<Status>),
}

impl Statuses {
    #[inline(always)]
    pub(crate) fn from_fn(len: usize, status: impl FnMut(usize) -> Status) -> Self {
        match len {
            1 => Self::One(array::from_fn(status)),
            2 => Self::Two(array::from_fn(status)),
            3 => Self::Three(array::from_fn(status)),
            4 => Self::Four(array::from_fn(status)),
            more => Self::More((0..more).map(status).collect()),
        }
    }

    #[inline(always)]
    pub(crate) fn as_mut_slice(&mut self) -> &mut [Status] {
        match self {
            Self::One(statuses) => statuses,
            Self::Two(statuses) => statuses,
            Self::Three(statuses) => statuses,
            Self::Four(statuses) => statuses,
            Self::More(statuses) => statuses,
        }
    }

    #[inline]
    pub(crate) fn as_slice(&self) -> &[Status] {
        match self {
            Self::One(statuses) => statuses,
            Self::Two(statuses) => statuses,
            Self::Three(statuses) => statuses,
            Self::Four(statuses) => statuses,
            Self::More(statuses) => statuses,
        }
    }
}

impl PartialEq for Statuses {
    fn eq(&self, other: &Self) -> bool {
        self.as_slice() == other.as_slice()
    }
}

impl Eq for Statuses {}

impl fmt::Debug for Statuses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.as_slice()).finish()
    }
}

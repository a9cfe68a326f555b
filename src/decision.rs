//! Decisions: the results of hits and peeks.

use std::array;
use std::cmp::Reverse;
use std::fmt;
use std::time::Duration;

use crate::strategy::{Lock, Status};
use crate::time::{Timestamp, micros};

/// The result of a hit, a peek or a charge: admitted, admitted after a [delay](Self::delay), or
/// refused.
///
/// | operation | verdict | [status of each limit](Self::statuses) |
/// |---|---|---|
/// | [hit](crate::RateLimiter::hit) | admitted if all limits admit it | after the hit |
/// | [peek](crate::RateLimiter::peek) | the verdict that a hit would get | without the hit |
/// | [charge](crate::RateLimiter::charge) | admitted | after the charge |
///
/// A storage that is [full](Self::is_storage_full) or [contended](Self::is_contended) may refuse a
/// hit, a peek or a charge, even if the limits admit it.
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
#[must_use = "a decision contains the verdict on the hit"]
pub struct Decision {
    at: Timestamp,
    /// The number of seconds by which `at` is ahead of the wall clock.
    ahead: u32,
    cost: u32,
    verdict: Verdict,
    statuses: Statuses,
}

impl Decision {
    /// Creates the decision on a hit of `cost` units, which is admitted if every status admits.
    pub(crate) fn of_all(at: Timestamp, cost: u32, statuses: Statuses) -> Self {
        let mut decision = Self { at, ahead: 0, cost, verdict: Verdict::REFUSED, statuses };
        decision.conclude(at);
        decision
    }

    /// Creates the decision of a policy with one limit, on a hit of `cost` units at `at`. The hit
    /// is admitted if `status` admits it.
    pub fn new(at: Timestamp, cost: u32, status: Status) -> Self {
        Self::of_all(at, cost, Statuses::One([status]))
    }

    /// Creates the decision of a policy on a hit of `cost` units at `at`. `statuses` contains the
    /// status of each limit, in the order of the policy. The hit is admitted if every status admits
    /// it.
    ///
    /// Use it in a storage that does not call [`Policy::decide`](crate::Policy::decide), for
    /// example because a script on a server decides. [`Limit::status`](crate::Limit::status)
    /// returns such statuses.
    pub fn from_statuses(at: Timestamp, cost: u32, statuses: impl ExactSizeIterator<Item = Status>) -> Self {
        let mut statuses = statuses;
        let limits = statuses.len();
        Self::of_all(at, cost, Statuses::from_fn(limits, |_| statuses.next().unwrap_or(Status::BLANK)))
    }

    /// Returns an empty decision to be filled in place, because decisions are large.
    #[inline]
    pub(crate) const fn blank() -> Self {
        let statuses = Statuses::More(Vec::new());
        Self { at: Timestamp::EPOCH, ahead: 0, cost: 0, verdict: Verdict::REFUSED, statuses }
    }

    /// Sets the cost and returns blank statuses to be filled in.
    #[inline(always)]
    pub(crate) fn open(&mut self, limits: usize, cost: u32) -> &mut [Status] {
        self.cost = cost;
        self.statuses = Statuses::from_fn(limits, |_| Status::BLANK);
        self.statuses.as_mut_slice()
    }

    /// Sets the time to `at`, and computes the verdict from the statuses.
    #[inline]
    pub(crate) fn conclude(&mut self, at: Timestamp) {
        self.at = at;
        let admitted = self.statuses().iter().all(Status::is_admitted);
        self.verdict = if admitted { Verdict::ADMITTED } else { Verdict::REFUSED };
    }

    /// Replaces the time of the decision.
    pub(crate) fn with_at(self, at: Timestamp) -> Self {
        Self { at, ..self }
    }

    /// Turns this decision into a refusal by a [full storage](Self::is_storage_full). The statuses
    /// do not change. [`Policy::refusal`](crate::Policy::refusal) creates a decision with suitable
    /// statuses.
    pub fn storage_full(self) -> Self {
        Self { verdict: self.verdict.instead(Verdict::STORAGE_FULL), ..self }
    }

    /// Turns this decision into a [contended](Self::is_contended) refusal. The statuses do not
    /// change, as in [`storage_full`](Self::storage_full).
    pub fn contended(self) -> Self {
        Self { verdict: self.verdict.instead(Verdict::CONTENDED), ..self }
    }

    /// Returns `true` if the hit or charge is admitted, possibly after a [`delay`](Self::delay).
    /// For a peek, returns `true` if a hit would be admitted.
    #[inline]
    pub fn is_admitted(&self) -> bool {
        self.verdict.is(Verdict::ADMITTED)
    }

    /// Returns `true` if the hit or charge is refused. For a peek, returns `true` if a hit would be
    /// refused.
    ///
    /// A refusal spends nothing, with one exception: [`acquire`](crate::RateLimiter::acquire) and
    /// [`InOrder`](crate::storage::InOrder) may have to refund units before they refuse. If this
    /// refund fails, the units stay spent.
    #[inline]
    pub fn is_refused(&self) -> bool {
        !self.is_admitted()
    }

    /// Returns `true` if the hit or charge was refused because the storage was full. For a peek,
    /// returns `true` if a hit would be refused for this reason.
    ///
    /// - A new key is refused if the storage finds no key to evict. It looks at a few keys, and
    ///   never evicts a key without remaining units.
    /// - A stored key is refused if there is no room, in most cases because its log cannot grow.
    ///
    /// With [`OnFull::Admit`](crate::storage::OnFull::Admit), a new key that finds no room is
    /// admitted instead, and this method returns `false`. See
    /// [`MemoryStorage`](crate::MemoryStorage#eviction).
    pub fn is_storage_full(&self) -> bool {
        self.verdict.is(Verdict::STORAGE_FULL)
    }

    /// Returns `true` if a compare-and-swap storage refused the hit or charge because other
    /// processes changed the key before every swap. Retrying can succeed. See
    /// [`Cas`](crate::storage::Cas).
    pub fn is_contended(&self) -> bool {
        self.verdict.is(Verdict::CONTENDED)
    }

    /// Returns `true` if the fallback of a [`Breaker`](crate::storage::Breaker) decided.
    pub fn is_from_fallback(&self) -> bool {
        self.source() == DecisionSource::Fallback
    }

    /// Returns the storage that decided: the primary storage or its fallback. Defaults to
    /// [`DecisionSource::Primary`]. A [`Breaker`](crate::storage::Breaker) sets it with
    /// [`with_source`](Self::with_source).
    pub fn source(&self) -> DecisionSource {
        self.verdict.source()
    }

    /// Sets the [`source`](Self::source). A storage that chooses between two others calls it, so
    /// that it can later settle the hit in the storage that decided.
    pub fn with_source(self, source: DecisionSource) -> Self {
        Self { verdict: self.verdict.with_source(source), ..self }
    }

    /// Returns the time of the decision, according to the storage's clock.
    pub fn at(&self) -> Timestamp {
        self.at
    }

    /// Returns the time of the decision by the wall clock.
    #[inline]
    pub(crate) fn wall_at(&self) -> Timestamp {
        self.at.minus(u64::from(self.ahead) * 1_000_000)
    }

    /// Adds `micros` microseconds to the `retry_after` of each limit that refuses.
    #[cold]
    pub(crate) fn lengthen_waits(&mut self, micros: u64) {
        self.statuses.as_mut_slice().iter_mut().for_each(|status| status.lengthen_wait(micros));
    }

    /// Sets the number of seconds by which the storage's clock is ahead of the wall clock.
    #[inline]
    pub(crate) fn set_ahead(&mut self, seconds: u32) {
        self.ahead = seconds;
    }

    /// Returns the cost of the hit or peek in units, or the units of the charge.
    pub fn cost(&self) -> u32 {
        self.cost
    }

    /// Returns `true` if the hit is admitted without a delay.
    #[inline]
    pub(crate) fn is_at_once(&self) -> bool {
        self.is_admitted() && self.statuses().iter().all(|status| status.delay_micros() == 0)
    }

    /// Returns the delay of an admitted hit: the maximum over all limits. For a peek, returns the
    /// delay that a hit would get. Returns zero for a refused hit.
    ///
    /// The caller of [`RateLimiter::hit`](crate::RateLimiter::hit),
    /// [`RateLimiter::reserve`](crate::RateLimiter::reserve) or [`Meter::hit`](crate::Meter::hit)
    /// has to sleep for this time. Do not sleep for another decision of a layer, or for a decision
    /// from [`acquire`](crate::RateLimiter::acquire): a layer delays the request itself, and
    /// `acquire` sleeps before it returns.
    ///
    /// Of the built-in strategies, only the leaky bucket delays hits.
    pub fn delay(&self) -> Duration {
        let longest = self.statuses().iter().map(Status::delay_micros).max();
        Duration::from_micros(longest.filter(|_| self.is_admitted()).unwrap_or(0))
    }

    /// Returns the number of units that can be spent after this decision, at the instant
    /// [`at`](Self::at): the minimum over all limits.
    pub fn remaining(&self) -> u32 {
        self.statuses().iter().map(Status::counted_remaining).min().unwrap_or(0)
    }

    /// Returns the number of units that can be spent at one instant if nothing has been spent: the
    /// minimum over all limits.
    pub fn capacity(&self) -> u32 {
        self.statuses().iter().map(Status::counted_capacity).min().unwrap_or(0)
    }

    /// Returns the time until more units [remain](Self::remaining) if the key gets no other hits.
    /// Returns zero if the whole [capacity](Self::capacity) remains.
    pub fn reset_after(&self) -> Duration {
        let remaining = self.remaining();
        if remaining == self.capacity() {
            return Duration::ZERO;
        }
        let least = self.statuses().iter().filter(|status| status.counted_remaining() == remaining);
        least.map(Status::reset_after).max().unwrap_or_default()
    }

    /// Returns the time until a refused hit would be admitted if the key gets no other hits: the
    /// maximum over all limits. Returns `None` if the hit was admitted, or if it can never be
    /// admitted, because its cost exceeds the capacity of a limit, minus the units that the limit
    /// [keeps](crate::Limit::keep).
    pub fn retry_after(&self) -> Option<Duration> {
        let wait = self.retry_after_micros();
        (self.is_refused() && wait != u64::MAX).then(|| Duration::from_micros(wait))
    }

    /// Returns the time until a refused hit would be admitted, or `u64::MAX` for never. Returns zero if the
    /// hit was admitted.
    fn retry_after_micros(&self) -> u64 {
        let waits = self.statuses().iter().map(Status::retry_micros);
        if self.is_refused() { waits.max().unwrap_or(0) } else { 0 }
    }

    /// Returns the lock that this hit has started, or the lock that ends last if there are several.
    /// Returns `None` if the hit has started no lock, and for a peek or a charge.
    pub fn new_lock(&self) -> Option<Lock> {
        let locks = self.statuses().iter().filter_map(Status::lock);
        locks.filter(Lock::is_new).max_by_key(Lock::ends_after)
    }

    /// Returns the status of each limit, to change the waits.
    #[inline]
    pub(crate) fn statuses_mut(&mut self) -> &mut [Status] {
        self.statuses.as_mut_slice()
    }

    /// Returns the status of each limit, in the order of the policy.
    #[inline]
    pub fn statuses(&self) -> &[Status] {
        self.statuses.as_slice()
    }

    /// Returns the status of the limit that header fields report.
    ///
    /// - If the hit is refused, this is the refusing limit with the longest
    ///   [`retry_after`](Status::retry_after). A limit that can never admit the hit counts as the
    ///   longest. Of several with the same `retry_after`, it is the one with the fewest remaining
    ///   units.
    /// - If the hit is admitted, this is the limit with the fewest remaining units.
    ///
    /// If several limits are equal by these rules, it is the one with the longest
    /// [`reset_after`](Status::reset_after), and otherwise the first of them.
    ///
    /// For a decision without limits, which only [`from_statuses`](Self::from_statuses) creates,
    /// all numbers of the status are zero.
    pub fn shown(&self) -> &Status {
        shown(self.statuses())
    }
}

/// Returns the status of the limit that header fields report. See [`Decision::shown`].
pub(crate) fn shown(limits: &[Status]) -> &Status {
    match limits {
        [only] => only,
        several => several.iter().min_by_key(|status| order(status)).unwrap_or(&Status::BLANK),
    }
}

/// Returns the position of the decision that header fields report, of several that were made together:
/// of the refusals that with the longest [`Decision::retry_after`], which can be that of a lock that the
/// refusal has started. Otherwise they report the limit that [`Decision::shown`] would select from the
/// limits of all of them.
#[inline]
pub(crate) fn shown_position(decisions: &[Decision]) -> usize {
    match decisions {
        [_] => 0,
        several => {
            let rank = |at: &usize| {
                let decision = &several[*at];
                (decision.is_admitted(), Reverse(decision.retry_after_micros()), order(decision.shown()))
            };
            (0..several.len()).min_by_key(rank).unwrap_or(0)
        }
    }
}

/// Orders statuses: the one that header fields report comes first.
fn order(status: &Status) -> (bool, Reverse<u64>, u32, Reverse<u64>) {
    // An admitted hit can have the wait of a lock that the next refusal would begin.
    let wait = Reverse(if status.is_admitted() { 0 } else { status.retry_micros() });
    (status.is_admitted(), wait, status.counted_remaining(), Reverse(status.reset_after_micros()))
}

/// The statuses of a decision. Up to four are stored inline, so that most decisions need no
/// allocation.
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

impl Decision {
    /// Sets the cost.
    pub(crate) fn of_cost(self, cost: u32) -> Self {
        Self { cost, ..self }
    }

    /// Returns `true` if this is the decision on an admitted hit that has spent at least one unit.
    /// Otherwise there is nothing to settle. A later refund does not change the result.
    pub fn has_spent(&self) -> bool {
        self.is_admitted() && self.cost > 0 && self.statuses().iter().any(|status| status.until() > Timestamp::EPOCH)
    }
}

impl Decision {
    /// Returns this refusal with the time moved forward by `passed`, as if the key got no other
    /// hits meanwhile. Each `retry_after` becomes shorter, but stays at least one microsecond.
    pub(crate) fn after(mut self, passed: Duration) -> Self {
        let passed = micros(passed);
        self.at = self.at.plus(passed);
        self.statuses.as_mut_slice().iter_mut().for_each(|status| status.pass(passed));
        self
    }

    /// Returns the decision on the next hit, if this is a refusal that has started a lock: the lock
    /// refuses that hit.
    pub(crate) fn of_next_hit(mut self) -> Self {
        self.statuses.as_mut_slice().iter_mut().for_each(|status| *status = status.of_next_hit());
        self
    }

    /// Turns an admission into a refusal, because its delay is longer than `max_delay`. The
    /// `retry_after` is the time until the delay of a hit would be `max_delay`. The remaining units
    /// do not change, even if the hit was refunded, because the refund may have failed.
    pub(crate) fn refuse_delay(mut self, max_delay: Duration) -> Self {
        let max_delay = micros(max_delay);
        self.statuses.as_mut_slice().iter_mut().for_each(|status| status.refuse_delay(max_delay));
        self.verdict = self.verdict.instead(Verdict::REFUSED);
        self
    }

    /// Turns the admission of a peek into a refusal with a `retry_after` of one microsecond,
    /// because other hits wait for the same units. Does not change a refusal.
    pub(crate) fn refuse_turn(mut self) -> Self {
        if self.is_admitted() {
            self.statuses.as_mut_slice().iter_mut().for_each(Status::refuse_turn);
            self.verdict = self.verdict.instead(Verdict::REFUSED);
        }
        self
    }
}

/// The storage that decided: the primary storage, or the fallback of a
/// [`Breaker`](crate::storage::Breaker). See [`Decision::source`](crate::Decision::source).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "a storage has at most one fallback")]
pub enum DecisionSource {
    /// The primary storage, or the only one.
    Primary,
    /// The fallback.
    Fallback,
}

/// The answer (admitted, or the kind of refusal) and the source, in one 32-bit word to keep
/// decisions small.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Verdict(u32);

/// The bit that is set if the fallback decided. The bits below it are the answer.
const FALLBACK: u32 = 1 << 8;

impl Verdict {
    const ADMITTED: Self = Self(0);
    const REFUSED: Self = Self(1);
    // Refusals by the storage instead of a strategy.
    const STORAGE_FULL: Self = Self(2);
    const CONTENDED: Self = Self(3);

    /// Returns `true` if this is the answer. Ignores the source.
    #[inline]
    const fn is(self, answer: Self) -> bool {
        self.0 & !FALLBACK == answer.0
    }

    /// Replaces the answer and keeps the source.
    const fn instead(self, answer: Self) -> Self {
        Self(self.0 & FALLBACK | answer.0)
    }

    const fn source(self) -> DecisionSource {
        if self.0 & FALLBACK == 0 { DecisionSource::Primary } else { DecisionSource::Fallback }
    }

    const fn with_source(self, source: DecisionSource) -> Self {
        match source {
            DecisionSource::Primary => Self(self.0 & !FALLBACK),
            DecisionSource::Fallback => Self(self.0 | FALLBACK),
        }
    }
}

impl fmt::Debug for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let answer = match self.with_source(DecisionSource::Primary) {
            Self::ADMITTED => "Admitted",
            Self::STORAGE_FULL => "StorageFull",
            Self::CONTENDED => "Contended",
            _ => "Refused",
        };
        f.write_str(answer)?;
        if self.source() == DecisionSource::Fallback { f.write_str(" by a fallback") } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answer_and_source_are_independent() {
        for answer in [Verdict::ADMITTED, Verdict::REFUSED, Verdict::STORAGE_FULL, Verdict::CONTENDED] {
            assert_eq!(answer.source(), DecisionSource::Primary);
            for source in [DecisionSource::Primary, DecisionSource::Fallback] {
                let verdict = answer.with_source(source);
                assert!(verdict.is(answer));
                assert_eq!(verdict.source(), source);
                assert_eq!(verdict.instead(Verdict::REFUSED).instead(answer), verdict);
                assert_eq!(verdict.with_source(DecisionSource::Primary), answer);
            }
        }
    }

    #[test]
    fn debug_output_shows_the_answer_and_a_fallback() {
        assert_eq!(format!("{:?}", Verdict::ADMITTED), "Admitted");
        assert_eq!(
            format!("{:?}", Verdict::STORAGE_FULL.with_source(DecisionSource::Fallback)),
            "StorageFull by a fallback"
        );
    }
}

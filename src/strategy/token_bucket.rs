use super::contract::hit_in_steps;
use super::gcra::{Debt, script_arguments};
use super::mark::Mark;
use super::{Hit, Outcome, Script, State, Status, Strategy};
use crate::error::ConfigError;
use crate::quota::{Quota, Span};
use crate::time::Timestamp;

/// A bucket of B tokens, refilled continuously at N per P, the rate of the quota. A hit takes as
/// many tokens as it costs, and is refused if the bucket has fewer.
///
/// It suits clients that work in bursts. It admits B units at once after an idle period, N per P on
/// average, and at most B + N·d/P in any span d. B is the [`burst`](Quota::burst) of the quota, and
/// defaults to N.
///
/// It is implemented as the generic cell rate algorithm (GCRA, ITU-T I.371) in exact rational
/// arithmetic. The remaining units are rounded down, and waits are rounded up to a microsecond.
///
/// In strings: `token-bucket 10/second burst 20` (alias `gcra`).
///
#[doc = include_str!("../pictures/token_bucket.svg")]
///
/// ```
/// use std::time::Duration;
/// use tower_ratelimit::storage::ManualClock;
/// use tower_ratelimit::{Key, MemoryStorage, Policy, Quota, RateLimiter, TokenBucket};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let clock = ManualClock::default();
/// let storage = MemoryStorage::builder().clock(clock.clone()).build()?;
/// let policy = Policy::new(TokenBucket::new(), Quota::per_second(10).burst(20));
/// let limiter = RateLimiter::with_storage(policy, storage);
/// let alice = Key::from("alice");
///
/// assert!(limiter.hit_with_cost(&alice, 20).await?.is_admitted());
/// assert_eq!(limiter.hit(&alice).await?.retry_after(), Some(Duration::from_millis(100)));
/// clock.advance(Duration::from_secs(1));
/// assert_eq!(limiter.peek(&alice).await?.remaining(), 10);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "callers write its name as a value")]
pub struct TokenBucket;

impl TokenBucket {
    /// Creates the strategy. It has no options. The quota sets the burst.
    pub const fn new() -> Self {
        Self
    }

    #[inline(always)]
    fn debt(self, quota: &Quota, state: &State, now: Timestamp) -> Debt {
        Debt::of(quota, self.capacity(quota), quota.largest_mark(), state, now)
    }

    /// Decides a hit on a state that a larger bucket or a charge has written.
    #[cold]
    fn hit_under_larger_mark(self, quota: &Quota, state: &mut State, now: Timestamp, cost: u32) -> Outcome {
        hit_in_steps(&self, quota, state, now, cost)
    }
}

impl Strategy for TokenBucket {
    fn name(&self) -> &'static str {
        "token-bucket"
    }

    #[inline(always)]
    fn capacity(&self, quota: &Quota) -> u32 {
        quota.burst_size().unwrap_or(quota.amount())
    }

    fn validate(&self, quota: &Quota) -> Result<(), ConfigError> {
        quota.check_refill(self.capacity(quota))
    }

    #[inline(always)]
    fn check(&self, quota: &Quota, state: &State, now: Timestamp, cost: u32) -> Status {
        self.debt(quota, state, now).status(cost)
    }

    #[inline(always)]
    fn spend(&self, quota: &Quota, state: &mut State, now: Timestamp, cost: u32) -> u64 {
        *state = self.debt(quota, state, now).plus(cost).store(now);
        0
    }

    #[cold]
    fn refuse(&self, quota: &Quota, state: &mut State, now: Timestamp) {
        self.debt(quota, state, now).settle(state, now);
    }

    /// Computes with times instead of debts, because adding and comparing is faster than the
    /// multiplications and divisions of the other methods.
    #[inline]
    fn hit(&self, quota: &Quota, state: &mut State, now: Timestamp, cost: u32) -> Outcome {
        let (before, mark) = match *state {
            State::Counts { until, amounts: [early, mark] } if until > now => {
                if mark > quota.largest_mark() {
                    return self.hit_under_larger_mark(quota, state, now, cost);
                }
                let early = if early < quota.amount() { early } else { 0 };
                (Owed { micros: until.since(now), early }, Mark::from_amount(mark))
            }
            _ => (Owed::NONE, Mark::new(now)),
        };
        let full = quota.full_span();
        let after = before.plus(quota.span_of(cost), quota.amount());
        if !after.is_within(full, quota.amount()) {
            if before.micros > full.micros {
                self.refuse(quota, state, now);
            }
            return Outcome::Refused;
        }
        let mark = mark.with_size(after.micros, quota.largest_mark()).amount();
        state.replace(State::Counts { until: now.plus(after.micros), amounts: [after.early, mark] });
        Outcome::spent(0, after.plus(quota.span_of(1), quota.amount()).is_within(full, quota.amount()))
    }

    fn script(&self, quota: &Quota, _: Timestamp, cost: u32) -> Option<Script> {
        let sources = &[include_str!("bucket.lua"), include_str!("token_bucket.lua")];
        let arguments = script_arguments(quota, self.capacity(quota), cost);
        Some(Script { name: "token-bucket", sources, arguments, delays: false })
    }

    fn charge(&self, quota: &Quota, state: &mut State, now: Timestamp, units: u32) {
        *state = self.debt(quota, state, now).charged(units).store_any(now);
    }

    fn refund(&self, quota: &Quota, state: &mut State, now: Timestamp, hit: &Hit, units: u32) {
        let debt = self.debt(quota, state, now);
        if debt.has(hit) {
            *state = debt.refunded(state, now, hit, units);
        }
    }
}

/// The time until all debt is paid: `micros - early / N`, where N is the amount of the quota and
/// `early < N`.
#[derive(Clone, Copy)]
struct Owed {
    micros: u64,
    early: u32,
}

impl Owed {
    const NONE: Self = Self { micros: 0, early: 0 };

    #[inline(always)]
    fn plus(self, span: Span, amount: u32) -> Self {
        let micros = self.micros.saturating_add(span.micros);
        match self.early.checked_sub(span.part) {
            Some(early) => Self { micros, early },
            None => Self { micros: micros.saturating_add(1), early: self.early + (amount - span.part) },
        }
    }

    /// Returns `true` if this time is at most `span`.
    #[inline(always)]
    fn is_within(self, span: Span, amount: u32) -> bool {
        match self.micros.checked_sub(span.micros) {
            None | Some(0) => true,
            // One microsecond more, minus `early` and the fraction of the span.
            Some(1) => u64::from(self.early) + u64::from(span.part) >= amount.into(),
            Some(_) => false,
        }
    }
}

use super::debt::Debt;
use super::{Hit, Outcome, State, Status, Strategy};
use crate::{ConfigError, Quota, Timestamp};

/// A bucket of B tokens, refilled continuously at N per P; a hit takes as many as it costs.
///
/// For APIs whose clients work in bursts: B at once after a quiet spell, N per P in the long run, never more than
/// B + N·d/P in any span d. B is the quota's [`burst`](Quota::burst), or N. Implemented as the generic cell rate
/// algorithm (GCRA, ITU-T I.371) in exact rational arithmetic; `remaining` is rounded down, waits are rounded up to a
/// microsecond.
///
/// In strings: `token-bucket 10/second burst 20`; `gcra` is a second name.
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
pub struct TokenBucket;

impl TokenBucket {
    /// The strategy has no options: the burst is the quota's.
    pub const fn new() -> Self {
        Self
    }

    #[inline(always)]
    fn debt(self, quota: &Quota, state: &State, now: Timestamp) -> Debt {
        Debt::of(quota, self.capacity(quota), state, now)
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
        *state = self.debt(quota, state, now).plus(cost).store();
        0
    }

    fn hit(&self, quota: &Quota, state: &mut State, now: Timestamp, cost: u32) -> Outcome {
        let debt = self.debt(quota, state, now);
        if !debt.fits(cost) {
            return Outcome::Refused;
        }
        let debt = debt.plus(cost);
        *state = debt.store();
        Outcome::spent(0, debt.fits(1))
    }

    fn refund(&self, quota: &Quota, state: &mut State, now: Timestamp, hit: &Hit) {
        let debt = self.debt(quota, state, now);
        if debt.has(hit) {
            *state = debt.without(now, hit).store();
        }
    }
}

//! The sliding window counter.
//!
//! The state has no room for the instant at which it began. So a refund compares the instants of
//! the buckets, and does not notice a clear within one aligned bucket.

use super::arithmetic::{mul_div_ceil, mul_div_floor};
use super::{Hit, Outcome, Script, State, Status, Strategy};
use crate::quota::Quota;
use crate::time::Timestamp;

/// Admits about N units in a sliding window of length P, for a quota of N per P. Estimates the
/// units in the window from two counters. This is the default strategy of a [`Quota`] without a
/// burst.
///
/// Time is divided into spans of length P, here called buckets. The strategy counts the units of
/// the current bucket and of the previous one. The estimate is the count of the current bucket,
/// plus the part of the previous one that the window still covers, rounded down: `floor(previous *
/// (P - elapsed) / P) + current`. A hit is admitted only if the estimate stays at most N. Any span
/// of P contains at most 2N units, but only clients that time their hits get near that.
///
/// The state is three integers per key. Units become available gradually, not all at once as in a
/// fixed window.
///
/// The first bucket of a key starts with its first admitted hit. With [`aligned`](Self::aligned),
/// buckets start at multiples of P since the Unix epoch.
///
/// In strings: `sliding-window-counter 10/minute`, `sliding-window-counter-aligned 10/minute`.
///
#[doc = include_str!("../pictures/sliding_window_counter.svg")]
///
/// ```
/// use std::time::Duration;
/// use tower_ratelimit::storage::ManualClock;
/// use tower_ratelimit::{Key, MemoryStorage, Quota, RateLimiter};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let clock = ManualClock::default();
/// let storage = MemoryStorage::builder().clock(clock.clone()).build()?;
/// let limiter = RateLimiter::with_storage(Quota::per_minute(100), storage);
/// let alice = Key::from("alice");
///
/// limiter.hit_with_cost(&alice, 40).await?;
/// clock.advance(Duration::from_secs(90));
/// // The window still covers half of the bucket in which the 40 units were spent.
/// assert_eq!(limiter.peek(&alice).await?.remaining(), 80);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SlidingWindowCounter {
    aligned: bool,
}

/// The two buckets at an instant. `start` is the start of the current bucket.
#[derive(Clone, Copy)]
struct Buckets {
    start: Timestamp,
    period: u64,
    /// The microseconds until the current bucket starts, which is 0 unless the clock has gone back.
    ahead: u64,
    elapsed: u64,
    previous: u32,
    current: u32,
}

impl SlidingWindowCounter {
    /// Creates a counter whose buckets are not aligned. The first admitted hit of a key starts its
    /// first bucket. After the current and the previous bucket have expired, the next admitted hit
    /// starts a first bucket again.
    pub const fn new() -> Self {
        Self { aligned: false }
    }

    /// Creates a counter whose buckets start at multiples of the period since the Unix epoch, such
    /// as full hours or midnight UTC.
    pub const fn aligned() -> Self {
        Self { aligned: true }
    }

    /// Returns the empty buckets of a key whose first hit is at `now`.
    fn fresh(self, quota: &Quota, now: Timestamp) -> Buckets {
        let period = quota.period_micros();
        let start = if self.aligned { now.floor_to(period) } else { now };
        Buckets { start, period, ahead: 0, elapsed: now.since(start), previous: 0, current: 0 }
    }

    /// Returns the buckets at `now`, or `None` if both have expired.
    #[inline(always)]
    fn buckets(self, quota: &Quota, state: &State, now: Timestamp) -> Option<Buckets> {
        let State::Counts { until, amounts: [previous, current] } = *state else { return None };
        let period = quota.period_micros();
        let mut start = until.minus(2 * period);
        if self.aligned {
            // Has an effect only if the period of the quota has changed.
            start = start.floor_to(period);
        }
        let mut ahead = 0;
        if start > now {
            // The clock has gone back. The bucket counts as started now, or at the next multiple of
            // the period if aligned. A refusal stores this start, so that it does not move with
            // later decisions.
            let latest = if self.aligned { now.floor_to(period).plus(period) } else { now };
            start = start.min(latest);
            ahead = start.since(now);
        }
        let elapsed = now.since(start);
        let buckets = if elapsed < period {
            Buckets { start, period, ahead, elapsed, previous, current }
        } else if elapsed < 2 * period {
            let (start, elapsed) = (start.plus(period), elapsed - period);
            Buckets { start, period, ahead, elapsed, previous: current, current: 0 }
        } else {
            return None;
        };
        (buckets.previous > 0 || buckets.current > 0).then_some(buckets)
    }
}

impl SlidingWindowCounter {
    /// Stores the corrected start of buckets that are ahead of the clock.
    #[cold]
    fn settle(self, quota: &Quota, state: &mut State, now: Timestamp) {
        if let Some(buckets) = self.buckets(quota, state, now) {
            *state = buckets.store();
        }
    }
}

impl Buckets {
    fn store(self) -> State {
        State::Counts { until: self.forgotten(), amounts: [self.previous, self.current] }
    }

    /// Returns the instant from which the current bucket has no effect.
    fn forgotten(&self) -> Timestamp {
        self.start.plus(2 * self.period)
    }

    /// Returns the status of a hit of `cost` units.
    #[inline(always)]
    fn status(&self, capacity: u32, cost: u32) -> Status {
        let remaining = u32::try_from(self.estimate()).map_or(0, |estimate| capacity.saturating_sub(estimate));
        let until_free = |units: u32| self.falls_to(capacity - units);
        let reset = if remaining == capacity { 0 } else { until_free(remaining + 1) };
        if cost <= remaining {
            Status::admitted(capacity, remaining, reset)
        } else {
            Status::refused(capacity, remaining, reset, (cost <= capacity).then(|| until_free(cost)))
        }
    }

    fn estimate(&self) -> u64 {
        let weighted = mul_div_floor(self.previous.into(), self.period - self.elapsed, self.period);
        weighted + u64::from(self.current)
    }

    /// Returns the microseconds until the estimate falls to `units`, which must be less than the
    /// current estimate.
    fn falls_to(&self, units: u32) -> u64 {
        let falls = match units.checked_sub(self.current) {
            Some(units) => weighs_at_most(self.previous, units, self.period) - self.elapsed,
            // The current bucket has to become the previous one before its weight decreases.
            None => self.period - self.elapsed + weighs_at_most(self.current, units, self.period),
        };
        self.ahead + falls
    }
}

/// Returns the first microsecond of a bucket at which `floor(previous * (period - elapsed) /
/// period) <= units`, for `units < previous`.
fn weighs_at_most(previous: u32, units: u32, period: u64) -> u64 {
    period - mul_div_ceil(u64::from(units) + 1, period, previous.into()) + 1
}

impl Strategy for SlidingWindowCounter {
    fn name(&self) -> &'static str {
        if self.aligned { "sliding-window-counter-aligned" } else { "sliding-window-counter" }
    }

    #[inline(always)]
    fn check(&self, quota: &Quota, state: &State, now: Timestamp, cost: u32) -> Status {
        let buckets = self.buckets(quota, state, now).unwrap_or_else(|| self.fresh(quota, now));
        buckets.status(quota.amount(), cost)
    }

    #[inline(always)]
    fn spend(&self, quota: &Quota, state: &mut State, now: Timestamp, cost: u32) -> u64 {
        let mut buckets = self.buckets(quota, state, now).unwrap_or_else(|| self.fresh(quota, now));
        buckets.current = buckets.current.saturating_add(cost);
        state.replace(buckets.store());
        0
    }

    #[inline]
    fn refuse(&self, quota: &Quota, state: &mut State, now: Timestamp) {
        if state.until().minus(2 * quota.period_micros()) > now {
            self.settle(quota, state, now);
        }
    }

    fn hit(&self, quota: &Quota, state: &mut State, now: Timestamp, cost: u32) -> Outcome {
        let mut buckets = self.buckets(quota, state, now).unwrap_or_else(|| self.fresh(quota, now));
        let (capacity, after) = (u64::from(quota.amount()), buckets.estimate() + u64::from(cost));
        if after > capacity {
            self.refuse(quota, state, now);
            return Outcome::Refused;
        }
        buckets.current = buckets.current.saturating_add(cost);
        *state = buckets.store();
        Outcome::spent(0, after < capacity)
    }

    fn script(&self, quota: &Quota, _: Timestamp, _: u32) -> Option<Script> {
        let arguments = vec![quota.amount().into(), quota.period_micros(), self.aligned.into()];
        Some(Script {
            name: "sliding-window-counter",
            sources: &[include_str!("sliding_window_counter.lua")],
            arguments,
            delays: false,
        })
    }

    fn refund(&self, quota: &Quota, state: &mut State, now: Timestamp, hit: &Hit, units: u32) {
        let Some(mut buckets) = self.buckets(quota, state, now) else { return };
        let bucket = if hit.until == buckets.forgotten() {
            &mut buckets.current
        } else if hit.until == buckets.start.plus(buckets.period) {
            &mut buckets.previous
        } else {
            return;
        };
        *bucket = bucket.saturating_sub(units);
        let empty = buckets.previous == 0 && buckets.current == 0;
        *state = if empty { State::Fresh } else { buckets.store() };
    }
}

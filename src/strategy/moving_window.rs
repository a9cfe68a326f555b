use std::mem;

use super::{Hit, Outcome, Script, State, Status, Strategy};
use crate::quota::Quota;
use crate::time::Timestamp;

/// Admits at most N units in any span of length P, for a quota of N per P. Keeps a log of admitted
/// hits.
///
/// This is the strictest window, also known as sliding window log. The log has an entry for each
/// instant at which hits were admitted, so it has at most N entries, unless units are
/// [charged](crate::RateLimiter::charge). In a [`MemoryStorage`](crate::MemoryStorage), an entry
/// takes 16 bytes in a log of up to 128 entries, and about three to six bytes in a log of at least
/// 1,000. A decision is a binary search in the log.
///
/// In strings: `moving-window 10/minute`.
///
#[doc = include_str!("../pictures/moving_window.svg")]
///
/// ```
/// use std::time::Duration;
/// use tower_ratelimit::storage::ManualClock;
/// use tower_ratelimit::{Key, MemoryStorage, MovingWindow, Policy, Quota, RateLimiter};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let clock = ManualClock::default();
/// let storage = MemoryStorage::builder().clock(clock.clone()).build()?;
/// let limiter = RateLimiter::with_storage(Policy::new(MovingWindow::new(), Quota::per_minute(2)), storage);
/// let alice = Key::from("alice");
///
/// limiter.hit(&alice).await?;
/// clock.advance(Duration::from_secs(50));
/// limiter.hit(&alice).await?;
/// clock.advance(Duration::from_secs(10));
/// // The first hit has expired. The second one counts for 50 more seconds.
/// assert_eq!(limiter.hit(&alice).await?.remaining(), 0);
/// assert_eq!(limiter.hit(&alice).await?.retry_after(), Some(Duration::from_secs(50)));
/// # Ok(())
/// # }
/// ```
#[doc(alias = "sliding window log")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "callers write its name as a value")]
pub struct MovingWindow;

impl MovingWindow {
    /// Creates the strategy. It has no options.
    pub const fn new() -> Self {
        Self
    }
}

impl Strategy for MovingWindow {
    fn name(&self) -> &'static str {
        "moving-window"
    }

    fn check(&self, quota: &Quota, state: &State, now: Timestamp, cost: u32) -> Status {
        let (capacity, period) = (quota.amount(), quota.period_micros());
        let State::Log(log) = state else { return fresh(capacity, cost) };
        let active = u32::try_from(log.active(now, period)).unwrap_or(u32::MAX);
        let remaining = capacity.saturating_sub(active);
        // Returns the time until `units` are free: until the active units have fallen to the rest
        // of the capacity.
        let until_free =
            |units: u32| log.falls_to(u64::from(capacity - units), now, period).map_or(0, |instant| instant.since(now));
        let reset = if active == 0 { 0 } else { until_free(remaining.saturating_add(1).min(capacity)) };
        if cost <= remaining {
            Status::admitted(capacity, remaining, reset)
        } else {
            Status::refused(capacity, remaining, reset, (cost <= capacity).then(|| until_free(cost)))
        }
    }

    fn spend(&self, quota: &Quota, state: &mut State, now: Timestamp, cost: u32) -> u64 {
        let mut log = match mem::take(state) {
            State::Log(log) => log,
            _ => Box::default(),
        };
        log.add(now, quota.period_micros(), cost);
        *state = State::Log(log);
        0
    }

    #[inline]
    fn refuse(&self, quota: &Quota, state: &mut State, now: Timestamp) {
        if let State::Log(log) = state
            && log.is_ahead_of(now)
        {
            log.add(now, quota.period_micros(), 0);
        }
    }

    fn hit(&self, quota: &Quota, state: &mut State, now: Timestamp, cost: u32) -> Outcome {
        let (capacity, period) = (u64::from(quota.amount()), quota.period_micros());
        let active = if let State::Log(log) = state { log.active(now, period) } else { 0 };
        let after = active.saturating_add(cost.into());
        if after > capacity {
            self.refuse(quota, state, now);
            return Outcome::Refused;
        }
        self.spend(quota, state, now, cost);
        Outcome::spent(0, after < capacity)
    }

    fn log_entries(&self, quota: &Quota) -> u32 {
        quota.amount()
    }

    fn script(&self, quota: &Quota, _: Timestamp, _: u32) -> Option<Script> {
        // An instant is stored modulo the range of its bytes. No two entries are further apart than
        // two periods.
        let bytes = (4..7).find(|bytes| quota.period_micros() < 1 << (8 * bytes - 1)).unwrap_or(7);
        let arguments = vec![quota.amount().into(), quota.period_micros(), bytes];
        Some(Script { name: "moving-window", sources: &[include_str!("moving_window.lua")], arguments, delays: false })
    }

    /// Adds the units to the log, which counts up to `u32::MAX` units.
    fn charge(&self, quota: &Quota, state: &mut State, now: Timestamp, units: u32) {
        let period = quota.period_micros();
        let active = if let State::Log(log) = state { log.active(now, period) } else { 0 };
        let missing = u64::from(u32::MAX).saturating_sub(active);
        let units = u32::try_from(missing).map_or(units, |missing| missing.min(units));
        if units > 0 {
            self.spend(quota, state, now, units);
        }
    }

    /// Also drops expired entries if the log still contains the hit, as an admitted hit does.
    fn refund(&self, quota: &Quota, state: &mut State, now: Timestamp, hit: &Hit, units: u32) {
        let State::Log(log) = state else { return };
        let period = quota.period_micros();
        let before = log.active(now, period);
        let is_left = log.take_back(hit.at, period, units);
        if !is_left || log.active(now, period) != before && !log.expire(now, period) {
            *state = State::Fresh;
        }
    }
}

fn fresh(capacity: u32, cost: u32) -> Status {
    if cost <= capacity {
        Status::admitted(capacity, capacity, 0)
    } else {
        Status::refused(capacity, capacity, 0, None)
    }
}

use super::window::{Window, status};
use super::{Hit, Script, State, Status, Strategy};
use crate::quota::Quota;
use crate::time::Timestamp;

/// Admits at most N units in each window of length P, for a quota of N per P. This is the simplest
/// strategy.
///
/// The first admitted hit starts a window, which ends P later. The next admitted hit after that
/// starts another one. With [`aligned`](Self::aligned), windows start at multiples of P since the
/// Unix epoch, so the windows of all keys end at the same time.
///
/// Any span of P can contain up to 2N - 1 units, or 2N if aligned: at the end of one window and the
/// start of the next.
///
/// In strings: `fixed-window 10/minute`, `fixed-window-aligned 10/minute`. The alias
/// `interval-token-bucket` of `fixed-window` describes the strategy as a bucket that is refilled
/// completely after each period.
///
#[doc = include_str!("../pictures/fixed_window.svg")]
///
/// ```
/// use std::time::Duration;
/// use tower_ratelimit::storage::ManualClock;
/// use tower_ratelimit::{FixedWindow, Key, MemoryStorage, Policy, Quota, RateLimiter};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let clock = ManualClock::default();
/// let storage = MemoryStorage::builder().clock(clock.clone()).build()?;
/// let limiter = RateLimiter::with_storage(Policy::new(FixedWindow::new(), Quota::per_minute(2)), storage);
/// let alice = Key::from("alice");
///
/// assert!(limiter.hit(&alice).await?.is_admitted());
/// clock.advance(Duration::from_secs(59));
/// assert!(limiter.hit(&alice).await?.is_admitted());
/// assert_eq!(limiter.hit(&alice).await?.retry_after(), Some(Duration::from_secs(1)));
/// clock.advance(Duration::from_secs(1));
/// assert_eq!(limiter.hit(&alice).await?.remaining(), 1);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FixedWindow {
    aligned: bool,
}

impl FixedWindow {
    /// Creates a strategy whose windows start with the first hit that is admitted after the
    /// previous window has ended.
    pub const fn new() -> Self {
        Self { aligned: false }
    }

    /// Creates a strategy whose windows start at multiples of the period since the Unix epoch, such
    /// as full hours or midnight UTC. Weeks start on Thursdays. Months of 30 days and years of 365
    /// days do not follow the calendar.
    pub const fn aligned() -> Self {
        Self { aligned: true }
    }

    /// Returns the end of the window that an admitted hit would start now if there was none.
    fn end_from(self, quota: &Quota, now: Timestamp) -> Timestamp {
        let period = quota.period_micros();
        if self.aligned { now.floor_to(period).plus(period) } else { now.plus(period) }
    }

    /// Returns the live window. If the stored end is later than that of a window started now, the clock
    /// has gone back, and the window counts as started now. A refusal stores the earlier end, so that it
    /// does not move with later decisions.
    #[inline(always)]
    fn live(self, quota: &Quota, state: &State, now: Timestamp) -> Option<Window> {
        Window::live(state, now, |until| until.min(self.end_from(quota, now)))
    }
}

impl Strategy for FixedWindow {
    fn name(&self) -> &'static str {
        if self.aligned { "fixed-window-aligned" } else { "fixed-window" }
    }

    #[inline(always)]
    fn check(&self, quota: &Quota, state: &State, now: Timestamp, cost: u32) -> Status {
        let (left, count) = Window::left(self.live(quota, state, now), now);
        status(quota, left, count, cost, left)
    }

    #[inline(always)]
    fn spend(&self, quota: &Quota, state: &mut State, now: Timestamp, cost: u32) -> u64 {
        let window = self.live(quota, state, now).unwrap_or_else(|| Window::new(self.end_from(quota, now), now));
        window.spend(state, cost)
    }

    #[inline]
    fn refuse(&self, quota: &Quota, state: &mut State, now: Timestamp) {
        if let Some(live) = self.live(quota, state, now) {
            *state = live.store();
        }
    }

    fn script(&self, quota: &Quota, _: Timestamp, _: u32) -> Option<Script> {
        let arguments = vec![quota.amount().into(), quota.period_micros(), self.aligned.into()];
        let sources = &[include_str!("window.lua"), include_str!("fixed_window.lua")];
        Some(Script { name: "fixed-window", sources, arguments, delays: false })
    }

    fn refund(&self, quota: &Quota, state: &mut State, now: Timestamp, hit: &Hit, units: u32) {
        if let Some(live) = self.live(quota, state, now).filter(|live| live.end == hit.until) {
            live.refund(state, hit, units);
        }
    }
}

use super::window::{Window, status};
use super::{Hit, Script, State, Status, Strategy};
use crate::quota::Quota;
use crate::time::Timestamp;

/// Admits at most N units in a window that ends after a period P without hits, for a quota of N per
/// P. Each hit, admitted or refused, moves the end to one period from now.
///
/// A refused client must send no requests for a whole period to be admitted again. **A client that
/// keeps trying is never admitted again**. This includes a person who reloads a page, and a program
/// that retries at a fixed interval shorter than P. To limit password attempts without this effect,
/// use a [`MovingWindow`](crate::MovingWindow).
///
/// The `retry_after` of a refusal is always P, because the refused hit has moved the end. An
/// exception is a hit whose cost exceeds N, which has none. The end also moves if another limit of
/// the policy refuses the hit. A peek and a hit of cost 0 do not move the end.
///
/// A [refund](crate::Reservation::refund) does not move the end back. It ends the window only if it
/// returns the last units that were spent in it. So with
/// [`charge_when`](crate::RateLimitLayer::charge_when), the successful requests of a well-behaved
/// client prevent its old failures from expiring, until it is locked out. The lint
/// [`ElasticWindowRefunded`](crate::Lint::ElasticWindowRefunded) reports this combination.
///
/// In strings: `elastic-window 10/minute`.
///
#[doc = include_str!("../pictures/elastic_window.svg")]
///
/// ```
/// use std::time::Duration;
/// use tower_ratelimit::storage::ManualClock;
/// use tower_ratelimit::{ElasticWindow, Key, MemoryStorage, Policy, Quota, RateLimiter};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let clock = ManualClock::default();
/// let storage = MemoryStorage::builder().clock(clock.clone()).build()?;
/// let limiter = RateLimiter::with_storage(Policy::new(ElasticWindow::new(), Quota::per_minute(1)), storage);
/// let alice = Key::from("alice");
///
/// assert!(limiter.hit(&alice).await?.is_admitted());
/// clock.advance(Duration::from_secs(59));
/// assert!(limiter.hit(&alice).await?.is_refused());
/// clock.advance(Duration::from_secs(59));
/// assert!(limiter.hit(&alice).await?.is_refused());
/// clock.advance(Duration::from_secs(60));
/// assert!(limiter.hit(&alice).await?.is_admitted());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "callers write its name as a value")]
pub struct ElasticWindow;

impl ElasticWindow {
    /// Creates the strategy. It has no options.
    pub const fn new() -> Self {
        Self
    }

    /// Returns the live window. A stored end that is more than a period from now was written before the
    /// clock went back.
    fn live(quota: &Quota, state: &State, now: Timestamp) -> Option<Window> {
        Window::live(state, now, |until| until.min(now.plus(quota.period_micros())))
    }

    /// Returns the live window with the end to which a hit moves it.
    fn moved(quota: &Quota, state: &State, now: Timestamp) -> Option<Window> {
        Window::live(state, now, |_| now.plus(quota.period_micros()))
    }
}

impl Strategy for ElasticWindow {
    fn name(&self) -> &'static str {
        "elastic-window"
    }

    #[inline]
    fn check(&self, quota: &Quota, state: &State, now: Timestamp, cost: u32) -> Status {
        let (left, count) = Window::left(Self::live(quota, state, now), now);
        // A refused hit itself moves the end, so the wait is a whole period.
        status(quota, left, count, cost, quota.period_micros())
    }

    #[inline]
    fn spend(&self, quota: &Quota, state: &mut State, now: Timestamp, cost: u32) -> u64 {
        let begun = || Window::new(now.plus(quota.period_micros()), now);
        Self::moved(quota, state, now).unwrap_or_else(begun).spend(state, cost)
    }

    #[inline]
    fn refuse(&self, quota: &Quota, state: &mut State, now: Timestamp) {
        if let Some(moved) = Self::moved(quota, state, now) {
            *state = moved.store();
        }
    }

    fn counts_refusals(&self) -> bool {
        true
    }

    fn script(&self, quota: &Quota, _: Timestamp, _: u32) -> Option<Script> {
        let arguments = vec![quota.amount().into(), quota.period_micros()];
        let sources = &[include_str!("window.lua"), include_str!("elastic_window.lua")];
        Some(Script { name: "elastic-window", sources, arguments, delays: false })
    }

    fn refund(&self, quota: &Quota, state: &mut State, now: Timestamp, hit: &Hit, units: u32) {
        if let Some(live) = Self::live(quota, state, now) {
            live.refund(state, hit, units);
        }
    }
}

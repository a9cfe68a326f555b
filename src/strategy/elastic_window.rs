use super::arithmetic::low_bits;
use super::fixed_window::status;
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

/// A live window: its end, the units spent in it, and an anchor that distinguishes it from a later
/// window.
struct Window {
    end: Timestamp,
    count: u32,
    anchor: u32,
}

impl Window {
    #[inline]
    fn live(quota: &Quota, state: &State, now: Timestamp) -> Option<Self> {
        match *state {
            State::Counts { until, amounts: [count, anchor] } if count > 0 && until > now => {
                // A stored end that is more than a period from now was written before the clock
                // went back.
                Some(Self { end: until.min(now.plus(quota.period_micros())), count, anchor })
            }
            _ => None,
        }
    }

    fn store(self) -> State {
        State::Counts { until: self.end, amounts: [self.count, self.anchor] }
    }
}

impl ElasticWindow {
    /// Creates the strategy. It has no options.
    pub const fn new() -> Self {
        Self
    }
}

impl Strategy for ElasticWindow {
    fn name(&self) -> &'static str {
        "elastic-window"
    }

    #[inline]
    fn check(&self, quota: &Quota, state: &State, now: Timestamp, cost: u32) -> Status {
        let (left, count) = Window::live(quota, state, now).map_or((0, 0), |live| (live.end.since(now), live.count));
        // A refused hit itself moves the end, so the wait is a whole period.
        status(quota, left, count, cost, quota.period_micros())
    }

    #[inline]
    fn spend(&self, quota: &Quota, state: &mut State, now: Timestamp, cost: u32) -> u64 {
        let end = now.plus(quota.period_micros());
        let (count, anchor) = match Window::live(quota, state, now) {
            Some(live) => (live.count, live.anchor),
            None => (0, low_bits(now)),
        };
        let count = count.saturating_add(cost);
        state.replace(Window { end, count, anchor }.store());
        0
    }

    #[inline]
    fn refuse(&self, quota: &Quota, state: &mut State, now: Timestamp) {
        if let Some(live) = Window::live(quota, state, now) {
            *state = Window { end: now.plus(quota.period_micros()), ..live }.store();
        }
    }

    fn counts_refusals(&self) -> bool {
        true
    }

    fn script(&self, quota: &Quota, _: Timestamp, _: u32) -> Option<Script> {
        let arguments = vec![quota.amount().into(), quota.period_micros()];
        Some(Script {
            name: "elastic-window",
            sources: &[include_str!("elastic_window.lua")],
            arguments,
            delays: false,
        })
    }

    fn refund(&self, quota: &Quota, state: &mut State, now: Timestamp, hit: &Hit, units: u32) {
        if let Some(live) = Window::live(quota, state, now)
            && live.anchor == hit.anchor
        {
            let count = live.count.saturating_sub(units);
            *state = if count == 0 { State::Fresh } else { Window { count, ..live }.store() };
        }
    }
}

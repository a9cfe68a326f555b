use std::fmt;
use std::num::NonZeroU32;

use super::gcra::{Debt, script_arguments};
use super::{Divided, Hit, Script, State, Status, Strategy};
use crate::error::ConfigError;
use crate::quota::Quota;
use crate::time::Timestamp;

/// A bounded queue with a constant rate. Delays hits instead of refusing them, until the queue is
/// full.
///
/// The bucket consists of slots: as many as the [length of the queue](Self::queue), and one for the
/// hit that is admitted immediately. For a quota of N per P, one slot becomes free every P/N. A hit
/// takes one slot for each unit of its cost:
///
/// - If fewer slots are free, the hit is refused.
/// - If all slots are free, the hit is admitted immediately.
/// - Otherwise the hit is admitted with a [delay](crate::Decision::delay): the time until all slots
///   of earlier hits are free, rounded up to a microsecond.
///
/// A layer waits for the delay before it calls the inner service. A caller of
/// [`RateLimiter::hit`](crate::RateLimiter::hit) has to wait itself.
///
/// In strings: `leaky-bucket 10/second queue 20` (alias `leaky-bucket-queue`). The length of the
/// queue defaults to the amount of the quota.
///
/// A [refund](crate::Reservation::refund) frees the slots of a hit only if the hit is the last one
/// in the queue. Otherwise the refund changes nothing, because the later hits keep their slots. A
/// second refund of the same hit changes nothing either.
///
#[doc = include_str!("../pictures/leaky_bucket.svg")]
///
/// ```
/// use std::time::Duration;
/// use tower_ratelimit::{Key, LeakyBucket, Policy, Quota, RateLimiter};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let mail = Policy::new(LeakyBucket::new().queue(1), Quota::per_hour(1));
/// let limiter = RateLimiter::new(mail);
/// let smtp = Key::from("smtp");
///
/// assert_eq!(limiter.hit(&smtp).await?.delay(), Duration::ZERO);
/// assert!(limiter.hit(&smtp).await?.delay() > Duration::from_secs(3_590));
/// assert!(limiter.hit(&smtp).await?.is_refused());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LeakyBucket {
    queue: Option<u32>,
}

impl LeakyBucket {
    /// Creates a queue whose length is the amount of the quota. [`queue`](Self::queue) sets another
    /// length.
    pub const fn new() -> Self {
        Self { queue: None }
    }

    /// Sets the length of the queue in slots. A hit takes one slot per unit of its cost. With 0, a
    /// hit of one unit is either admitted immediately or refused, and a larger hit is refused.
    /// Defaults to the amount of the quota.
    ///
    /// A [`Limit`](crate::Limit) rejects a length of 2^32 - 1, and a length whose longest delay
    /// would exceed 142 years.
    #[must_use]
    pub const fn queue(self, slots: u32) -> Self {
        Self { queue: Some(slots) }
    }

    fn slots(self, quota: &Quota) -> u32 {
        self.queue.unwrap_or(quota.amount())
    }

    #[inline]
    fn debt(self, quota: &Quota, state: &State, now: Timestamp) -> Debt {
        let capacity = self.capacity(quota);
        Debt::of(quota, capacity, quota.span_of(capacity).largest_mark(), state, now)
    }
}

impl Strategy for LeakyBucket {
    fn name(&self) -> &'static str {
        "leaky-bucket"
    }

    /// Returns the length of the queue, plus one for the hit that is admitted immediately.
    #[inline]
    fn capacity(&self, quota: &Quota) -> u32 {
        self.slots(quota).saturating_add(1)
    }

    fn validate(&self, quota: &Quota) -> Result<(), ConfigError> {
        if let Some(burst) = quota.burst_size() {
            return Err(ConfigError::new(format!(
                "leaky-bucket does not support a burst, as in \"{quota}\": \
                 write \"queue {burst}\" instead of \"burst {burst}\" to set the length of its queue"
            )));
        }
        if self.slots(quota) == u32::MAX {
            return Err(ConfigError::new(
                "a leaky bucket's queue must be at most 4294967294, for example \"queue 20\"",
            ));
        }
        quota.check_refill(self.capacity(quota))
    }

    #[inline]
    fn check(&self, quota: &Quota, state: &State, now: Timestamp, cost: u32) -> Status {
        let debt = self.debt(quota, state, now);
        let status = debt.status(cost);
        // A hit that costs nothing takes no slot and is not delayed.
        if cost > 0 && status.is_admitted() { status.delayed(debt.until_paid()) } else { status }
    }

    #[inline]
    fn spend(&self, quota: &Quota, state: &mut State, now: Timestamp, cost: u32) -> u64 {
        let before = self.debt(quota, state, now);
        state.replace(before.plus(cost).store(now));
        before.until_paid()
    }

    fn refuse(&self, quota: &Quota, state: &mut State, now: Timestamp) {
        self.debt(quota, state, now).settle(state, now);
    }

    fn delays(&self) -> bool {
        true
    }

    /// Divides the quota and the queue. At least one slot stays if there was one, unless its delay
    /// would exceed 142 years.
    fn divide(&self, quota: &Quota, replicas: NonZeroU32) -> Option<Divided> {
        let (slots, share) = (self.slots(quota), quota.divide(replicas));
        let slots = (slots / replicas).max(slots.min(1)).min(share.most_in_time() - 1);
        Some(Divided::new(Self::new().queue(slots), share))
    }

    fn script(&self, quota: &Quota, _: Timestamp, cost: u32) -> Option<Script> {
        let sources = &[include_str!("bucket.lua"), include_str!("leaky_bucket.lua")];
        let arguments = script_arguments(quota, self.capacity(quota), cost);
        Some(Script { name: "leaky-bucket", sources, arguments, delays: true })
    }

    fn charge(&self, quota: &Quota, state: &mut State, now: Timestamp, units: u32) {
        *state = self.debt(quota, state, now).charged(units).store_any(now);
    }

    fn refund(&self, quota: &Quota, state: &mut State, now: Timestamp, hit: &Hit, units: u32) {
        let debt = self.debt(quota, state, now);
        if debt.has(hit) && state.until() == hit.until {
            *state = debt.refunded(state, now, hit, units);
        }
    }

    fn describe(&self, quota: &Quota, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {quota}", self.name())?;
        self.queue.map_or(Ok(()), |slots| write!(f, " queue {slots}"))
    }
}

use super::exact::div_ceil;
use super::{State, Status};
use crate::{Quota, Timestamp};

/// A bucket that is paid back continuously, counted exactly: what a token bucket and a leaky bucket have in common.
///
/// It is the generic cell rate algorithm (ITU-T I.371), whose one number is the instant at which all debt will be paid.
/// Debt is counted in 1/N microseconds, N being the quota's amount: one unit is P of them, and a microsecond pays N, so
/// nothing is ever rounded.
#[derive(Clone, Copy)]
pub(super) struct Debt {
    capacity: u32,
    /// 1/N microseconds that a microsecond pays back.
    rate: u64,
    /// 1/N microseconds that one unit costs.
    price: u64,
    owed: u128,
}

impl Debt {
    /// Nothing owed yet.
    #[inline]
    pub(super) fn none(quota: &Quota, capacity: u32) -> Self {
        Self { capacity, rate: quota.amount().into(), price: quota.period_micros(), owed: 0 }
    }

    /// The debt that [`store`](Self::store) stored, as it is at `now`. It can be no larger than the full bucket's, whatever a
    /// clock that has gone back makes of it.
    #[inline]
    pub(super) fn stored(self, until: Timestamp, early: u32, now: Timestamp) -> Self {
        let early = if u64::from(early) < self.rate { early } else { 0 };
        let owed = product(until.since(now), self.rate).saturating_sub(early.into());
        Self { owed: owed.min(self.worth(self.capacity)), ..self }
    }

    /// The answer to a hit of `cost` units on this debt.
    #[inline]
    pub(super) fn status(&self, cost: u32) -> Status {
        let (capacity, remaining) = (self.capacity, self.remaining());
        let reset = if remaining == capacity { 0 } else { self.until_fits(remaining + 1) };
        if self.fits(cost) {
            Status::admitted(capacity, remaining, reset)
        } else {
            Status::refused(capacity, remaining, reset, (cost <= capacity).then(|| self.until_fits(cost)))
        }
    }

    /// Microseconds, rounded up, until all is paid.
    #[inline]
    pub(super) fn until_paid(&self) -> u64 {
        div_ceil(self.owed, self.rate)
    }

    #[inline]
    pub(super) fn plus(self, units: u32) -> Self {
        Self { owed: self.owed + self.worth(units), ..self }
    }

    #[inline]
    pub(super) fn minus(self, units: u32) -> Self {
        Self { owed: self.owed.saturating_sub(self.worth(units)), ..self }
    }

    /// The debt as a state: the microsecond from which nothing is owed, and by how many 1/N of one that is too late.
    #[inline]
    pub(super) fn store(&self, now: Timestamp, anchor: u32) -> State {
        if self.owed == 0 {
            return State::Fresh;
        }
        let micros = self.until_paid();
        #[allow(clippy::cast_possible_truncation)] // less than the rate, which is a u32
        let early = (product(micros, self.rate) - self.owed) as u32;
        State::Counts { until: now.plus(micros), amounts: [early, anchor] }
    }

    /// Whether `units` more fit now: `units <= remaining()` without the division.
    fn fits(&self, units: u32) -> bool {
        self.capacity.checked_sub(units).is_some_and(|others| self.owed <= self.worth(others))
    }

    /// Units that fit now.
    fn remaining(&self) -> u32 {
        let taken = div_ceil(self.owed, self.price);
        u32::try_from(taken).map_or(0, |taken| self.capacity.saturating_sub(taken))
    }

    /// Microseconds, rounded up, until `units` fit; 0 when they do.
    fn until_fits(&self, units: u32) -> u64 {
        let may_owe = self.worth(self.capacity.saturating_sub(units));
        div_ceil(self.owed.saturating_sub(may_owe), self.rate)
    }

    fn worth(&self, units: u32) -> u128 {
        product(self.price, units.into())
    }
}

#[inline]
fn product(a: u64, b: u64) -> u128 {
    u128::from(a) * u128::from(b)
}

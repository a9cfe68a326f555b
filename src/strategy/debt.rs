use super::exact::{div_ceil, div_rem, product};
use super::{Hit, State, Status, low_bits};
use crate::{Quota, Timestamp};

/// A bucket that is paid back continuously, counted exactly: what a token bucket and a leaky bucket have in common.
///
/// It is the generic cell rate algorithm (ITU-T I.371), whose one number is the instant at which all debt will be paid.
/// Debt is counted in 1/N microseconds, N being the quota's amount: one unit is P of them, and a microsecond pays N, so
/// nothing is ever rounded. That takes more than 64 bits where the quota is large and its period long.
#[derive(Clone, Copy)]
pub(super) struct Debt {
    capacity: u32,
    /// 1/N microseconds that a microsecond pays back.
    rate: u64,
    /// 1/N microseconds that one unit costs.
    price: u64,
    owed: u128,
    /// The microsecond at which all will be paid, and by how many 1/N of one that is too late.
    paid: Timestamp,
    early: u64,
    /// What tells this debt from one made after all was paid.
    anchor: u32,
}

impl Debt {
    /// The debt that [`store`](Self::store) stored, as it is at `now`. It can be no larger than the full bucket's, whatever
    /// a clock that has gone back makes of it.
    #[inline(always)]
    pub(super) fn of(quota: &Quota, capacity: u32, state: &State, now: Timestamp) -> Self {
        let (rate, price) = (quota.amount().into(), quota.period_micros());
        let none = Self { capacity, rate, price, owed: 0, paid: now, early: 0, anchor: low_bits(now) };
        match *state {
            State::Counts { until, amounts: [early, anchor] } if until > now => {
                let early = if u64::from(early) < rate { early.into() } else { 0 };
                let owed = product(until.since(now), rate).saturating_sub(early.into());
                let most = none.worth(capacity);
                let (owed, (paid, early)) =
                    if owed <= most { (owed, (until, early)) } else { (most, paid(most, rate, now)) };
                Self { owed, paid, early, anchor, ..none }
            }
            _ => none,
        }
    }

    /// The answer to a hit of `cost` units on this debt.
    #[inline(always)]
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
    #[inline(always)]
    pub(super) fn until_paid(&self) -> u64 {
        div_ceil(self.owed, self.rate)
    }

    /// The debt with `units` more, which fit. What is divided here does not depend on the debt, so the processor can begin
    /// before it knows it.
    #[inline(always)]
    pub(super) fn plus(self, units: u32) -> Self {
        let worth = self.worth(units);
        let (micros, part) = div_rem(worth, self.rate);
        let (micros, early) = match self.early.checked_sub(part) {
            Some(early) => (micros, early),
            None => (micros.saturating_add(1), self.early + self.rate - part),
        };
        Self { owed: self.owed + worth, paid: self.paid.plus(micros), early, ..self }
    }

    /// The debt without a hit: with as much less as has not been paid back of it yet, first come, first paid.
    #[inline(always)]
    pub(super) fn without(self, now: Timestamp, hit: &Hit) -> Self {
        let unpaid = self.worth(hit.cost).min(product(hit.until.since(now), self.rate));
        let owed = self.owed.saturating_sub(unpaid);
        let (paid, early) = paid(owed, self.rate, now);
        Self { owed, paid, early, ..self }
    }

    /// The debt as a state.
    #[inline(always)]
    pub(super) fn store(&self) -> State {
        if self.owed == 0 {
            return State::Fresh;
        }
        #[allow(clippy::cast_possible_truncation)] // less than the rate, which is a u32
        let early = self.early as u32;
        State::Counts { until: self.paid, amounts: [early, self.anchor] }
    }

    /// Whether `units` more fit now: `units <= remaining()` without the division.
    #[inline(always)]
    pub(super) fn fits(&self, units: u32) -> bool {
        self.capacity.checked_sub(units).is_some_and(|others| self.owed <= self.worth(others))
    }

    /// Whether this debt was made when `hit` was, or after it and before all was paid.
    #[inline(always)]
    pub(super) fn has(&self, hit: &Hit) -> bool {
        self.anchor == hit.anchor
    }

    /// Units that fit now.
    #[inline(always)]
    fn remaining(&self) -> u32 {
        let taken = div_ceil(self.owed, self.price);
        u32::try_from(taken).map_or(0, |taken| self.capacity.saturating_sub(taken))
    }

    /// Microseconds, rounded up, until `units` fit; 0 when they do.
    #[inline(always)]
    fn until_fits(&self, units: u32) -> u64 {
        let may_owe = self.worth(self.capacity.saturating_sub(units));
        div_ceil(self.owed.saturating_sub(may_owe), self.rate)
    }

    #[inline(always)]
    fn worth(&self, units: u32) -> u128 {
        product(self.price, units.into())
    }
}

/// The microsecond at which `owed` will be paid, and by how many 1/N of one that is too late. Not called where a debt only
/// grows.
#[cold]
fn paid(owed: u128, rate: u64, now: Timestamp) -> (Timestamp, u64) {
    let micros = div_ceil(owed, rate);
    #[allow(clippy::cast_possible_truncation)] // less than the rate
    let early = product(micros, rate).saturating_sub(owed) as u64;
    (now.plus(micros), early)
}

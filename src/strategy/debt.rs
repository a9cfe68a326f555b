use super::exact::{div_ceil, product};
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
    /// What tells this debt from one made after all was paid.
    anchor: u32,
}

impl Debt {
    /// The debt that [`store`](Self::store) stored, as it is at `now`. It can be no larger than the full bucket's, whatever
    /// a clock that has gone back makes of it.
    #[inline(always)]
    pub(super) fn of(quota: &Quota, capacity: u32, state: &State, now: Timestamp) -> Self {
        let (rate, price) = (quota.amount().into(), quota.period_micros());
        let none = Self { capacity, rate, price, owed: 0, anchor: low_bits(now) };
        match *state {
            State::Counts { until, amounts: [early, anchor] } if until > now => {
                let early = if u64::from(early) < rate { u128::from(early) } else { 0 };
                let owed = product(until.since(now), rate).saturating_sub(early);
                Self { owed: owed.min(none.worth(capacity)), anchor, ..none }
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

    /// The debt with `units` more, which fit.
    #[inline(always)]
    pub(super) fn plus(self, units: u32) -> Self {
        Self { owed: self.owed + self.worth(units), ..self }
    }

    /// The debt without a hit: with as much less as has not been paid back of it yet, first come, first paid.
    #[inline(always)]
    pub(super) fn without(self, now: Timestamp, hit: &Hit) -> Self {
        let unpaid = self.worth(hit.cost).min(product(hit.until.since(now), self.rate));
        Self { owed: self.owed.saturating_sub(unpaid), ..self }
    }

    /// The debt as a state: the microsecond from which nothing is owed, and by how many 1/N of one that is too late.
    #[inline(always)]
    pub(super) fn store(&self, now: Timestamp) -> State {
        if self.owed == 0 {
            return State::Fresh;
        }
        let micros = self.until_paid();
        #[allow(clippy::cast_possible_truncation)] // less than the rate
        let early = product(micros, self.rate).saturating_sub(self.owed) as u32;
        State::Counts { until: now.plus(micros), amounts: [early, self.anchor] }
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

/// What a bucket's script has to know: the amount, how long the capacity takes to come back, and how long the cost does.
pub(super) fn script_arguments(quota: &Quota, capacity: u32, cost: u32) -> Vec<u64> {
    let (full, span) = (quota.span_of(capacity), quota.span_of(cost));
    vec![quota.amount().into(), full.micros, full.part.into(), span.micros.min(1 << 53), span.part.into()]
}

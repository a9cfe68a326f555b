use super::mark::Mark;
use super::muldiv::{div_ceil, mul_div_floor, product};
use super::{Hit, State, Status};
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
    mark: Mark,
    /// That of a debt as large as the capacity.
    largest: u32,
    /// The clock has gone back since the state was written: it says that more is owed than the bucket holds.
    is_ahead: bool,
}

impl Debt {
    /// The debt that [`store`](Self::store) stored, as it is at `now`.
    ///
    /// What a bucket of another quota owed beyond the capacity of this one counts as paid when the state was written.
    /// What is owed beyond the capacity after that is ahead of a clock that has gone back, and is not owed.
    #[inline(always)]
    pub(super) fn of(quota: &Quota, capacity: u32, largest: u32, state: &State, now: Timestamp) -> Self {
        let (rate, price) = (quota.amount().into(), quota.period_micros());
        let debt = |owed, mark, is_ahead| Self { capacity, rate, price, owed, mark, largest, is_ahead };
        if let State::Counts { until, amounts: [early, mark] } = *state
            && until > now
        {
            let (mut micros, mark) = (until.since(now), Mark::from_amount(mark));
            if mark.amount() > largest {
                micros = converted(micros, mark, price, capacity, rate);
                if micros == 0 {
                    return debt(0, Mark::new(now), false);
                }
            }
            let early = if u64::from(early) < rate { u128::from(early) } else { 0 };
            let owed = product(micros, rate).saturating_sub(early);
            let full = product(price, capacity.into());
            // A little more may be owed where the quota has changed by less than sizes are rounded by.
            if owed > full && micros >= Mark::from_amount(largest).size() {
                return debt(full, mark, true);
            }
            return debt(owed, mark, false);
        }
        debt(0, Mark::new(now), false)
    }

    /// The answer to a hit of `cost` units on this debt.
    #[inline(always)]
    pub(super) fn status(&self, cost: u32) -> Status {
        let (capacity, remaining) = (self.capacity, self.remaining());
        let reset = if remaining == capacity { 0 } else { self.until_fits(remaining + 1) };
        if cost <= remaining {
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
        State::Counts { until: now.plus(micros), amounts: [early, self.mark.with_size(micros, self.largest).amount()] }
    }

    /// Stores a debt that is ahead of the clock as one that was made now. Otherwise each refusal would count anew from
    /// the instant at which it looks.
    #[inline(always)]
    pub(super) fn settle(&self, state: &mut State, now: Timestamp) {
        if self.is_ahead {
            *state = self.store(now);
        }
    }

    /// Whether this debt was made when `hit` was, or after it and before all was paid.
    #[inline(always)]
    pub(super) fn has(&self, hit: &Hit) -> bool {
        self.mark.anchor() == Mark::from_amount(hit.anchor).anchor()
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

/// The rest of a debt of which at most what fits in this bucket was left when a bucket of another quota wrote it.
#[cold]
fn converted(micros: u64, mark: Mark, price: u64, capacity: u32, rate: u64) -> u64 {
    let full = mul_div_floor(price, capacity.into(), rate);
    micros.saturating_sub(mark.size().saturating_sub(full))
}

/// What a bucket's script has to know: the amount, how long the capacity takes to come back, how long the cost does, and the
/// largest mark.
pub(super) fn script_arguments(quota: &Quota, capacity: u32, cost: u32) -> Vec<u64> {
    let (full, span) = (quota.span_of(capacity), quota.span_of(cost));
    let (micros, largest) = (span.micros.min(1 << 53), full.largest_mark().into());
    vec![quota.amount().into(), full.micros, full.part.into(), micros, span.part.into(), largest]
}

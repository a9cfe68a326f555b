use super::exact::Word;
use super::{Hit, State, Status, low_bits};
use crate::{Quota, Timestamp};

/// A bucket that is paid back continuously, counted exactly: what a token bucket and a leaky bucket have in common.
///
/// It is the generic cell rate algorithm (ITU-T I.371), whose one number is the instant at which all debt will be paid.
/// Debt is counted in 1/N microseconds, N being the quota's amount: one unit is P of them, and a microsecond pays N, so
/// nothing is ever rounded. That takes 128 bits where the [capacity is wide](is_wide), and 64 nearly everywhere.
#[derive(Clone, Copy)]
pub(super) struct Debt<W> {
    capacity: u32,
    /// 1/N microseconds that a microsecond pays back.
    rate: W,
    /// 1/N microseconds that one unit costs.
    price: W,
    owed: W,
}

/// Whether counting up to all of the capacity takes more than 64 bits.
#[inline]
pub(super) fn is_wide(quota: &Quota, capacity: u32) -> bool {
    let full = quota.period_micros().checked_mul(capacity.into());
    // Rounding a debt up to a microsecond adds up to the rate.
    full.and_then(|full| full.checked_add(quota.amount().into())).is_none()
}

/// Evaluates an expression with `$W` as a type that is wide enough for the bucket's debts.
macro_rules! by_width {
    ($quota:expr, $capacity:expr, $W:ident => $body:expr) => {
        if $crate::strategy::debt::is_wide($quota, $capacity) {
            type $W = u128;
            $body
        } else {
            type $W = u64;
            $body
        }
    };
}

pub(super) use by_width;

impl<W: Word> Debt<W> {
    /// Nothing owed yet.
    #[inline]
    pub(super) fn none(quota: &Quota, capacity: u32) -> Self {
        let (rate, price) = (u64::from(quota.amount()).into(), quota.period_micros().into());
        Self { capacity, rate, price, owed: W::from(0) }
    }

    /// The debt that [`store`](Self::store) stored, as it is at `now`, and its anchor. It can be no larger than the full
    /// bucket's, whatever a clock that has gone back makes of it.
    #[inline]
    pub(super) fn of(self, state: &State, now: Timestamp) -> (Self, u32) {
        match *state {
            State::Counts { until, amounts: [early, anchor] } if until > now => {
                let early = W::from(early.into());
                let early = if early < self.rate { early } else { W::from(0) };
                let owed = self.paid_back_until(until, now).less(early);
                (Self { owed: owed.min(self.worth(self.capacity)), ..self }, anchor)
            }
            _ => (self, low_bits(now)),
        }
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

    /// Stores a debt that a hit has just made, and shows what remains.
    #[inline]
    pub(super) fn spent(&self, state: &mut State, now: Timestamp, anchor: u32) -> Status {
        *state = self.store(now, anchor);
        self.status(0).forgotten_at(state.until(), anchor)
    }

    /// Microseconds, rounded up, until all is paid.
    #[inline]
    pub(super) fn until_paid(&self) -> u64 {
        self.owed.div_ceil(self.rate)
    }

    /// The debt with `units` more, which fit.
    #[inline]
    pub(super) fn plus(self, units: u32) -> Self {
        Self { owed: self.owed.more(self.worth(units)), ..self }
    }

    /// The debt without a hit: with as much less as has not been paid back of it yet, first come, first paid.
    #[inline]
    pub(super) fn without(self, now: Timestamp, hit: &Hit) -> Self {
        let unpaid = self.worth(hit.cost).min(self.paid_back_until(hit.until, now));
        Self { owed: self.owed.less(unpaid), ..self }
    }

    /// The debt as a state: the microsecond from which nothing is owed, and by how many 1/N of one that is too late.
    #[inline]
    pub(super) fn store(&self, now: Timestamp, anchor: u32) -> State {
        if self.owed == W::from(0) {
            return State::Fresh;
        }
        let micros = self.until_paid();
        let early = W::from(micros).times(self.rate).less(self.owed).low_bits();
        State::Counts { until: now.plus(micros), amounts: [early, anchor] }
    }

    /// Whether `units` more fit now: `units <= remaining()` without the division.
    #[inline]
    pub(super) fn fits(&self, units: u32) -> bool {
        self.capacity.checked_sub(units).is_some_and(|others| self.owed <= self.worth(others))
    }

    /// Units that fit now.
    #[inline]
    fn remaining(&self) -> u32 {
        let taken = self.owed.div_ceil(self.price);
        u32::try_from(taken).map_or(0, |taken| self.capacity.saturating_sub(taken))
    }

    /// Microseconds, rounded up, until `units` fit; 0 when they do.
    #[inline]
    fn until_fits(&self, units: u32) -> u64 {
        let may_owe = self.worth(self.capacity.saturating_sub(units));
        self.owed.less(may_owe).div_ceil(self.rate)
    }

    #[inline]
    fn paid_back_until(&self, until: Timestamp, now: Timestamp) -> W {
        W::from(until.since(now)).times(self.rate)
    }

    #[inline]
    fn worth(&self, units: u32) -> W {
        self.price.times(W::from(units.into()))
    }
}

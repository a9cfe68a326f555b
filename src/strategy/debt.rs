use super::{State, Status};
use crate::{Quota, Timestamp};

/// A bucket that is paid back continuously, counted exactly: what a token bucket and a leaky bucket have in common.
///
/// It is the generic cell rate algorithm (ITU-T I.371), whose one number is the instant at which all debt will be paid.
/// Debt is counted in 1/N microseconds, N being the quota's amount: one unit is P of them, and a microsecond pays N, so
/// nothing is ever rounded.
#[derive(Clone, Copy)]
pub(super) struct Bucket {
    capacity: u32,
    /// 1/N microseconds that a microsecond pays back.
    rate: u128,
    /// 1/N microseconds that one unit costs.
    price: u128,
}

/// A bucket and what it owes at an instant.
#[derive(Clone, Copy)]
pub(super) struct Debt {
    bucket: Bucket,
    owed: u128,
}

impl Bucket {
    pub(super) fn new(quota: &Quota, capacity: u32) -> Self {
        Self { capacity, rate: quota.amount().into(), price: quota.period_micros().into() }
    }

    /// The debt stored by [`Debt::store`], as it is at `now`. A debt can be no larger than the full bucket's, whatever a
    /// clock that has gone back makes of it.
    pub(super) fn owed(self, until: Timestamp, early: u32, now: Timestamp) -> Debt {
        let early = if u128::from(early) < self.rate { u128::from(early) } else { 0 };
        let owed = (u128::from(until.since(now)) * self.rate).saturating_sub(early);
        Debt { bucket: self, owed: owed.min(u128::from(self.capacity) * self.price) }
    }

    pub(super) fn nothing_owed(self) -> Debt {
        Debt { bucket: self, owed: 0 }
    }
}

impl Debt {
    pub(super) fn is_paid(&self) -> bool {
        self.owed == 0
    }

    /// The answer to a hit of `cost` units on this debt.
    pub(super) fn status(&self, cost: u32) -> Status {
        let (capacity, remaining) = (self.bucket.capacity, self.remaining());
        let reset = if remaining == capacity { 0 } else { self.until_fits(remaining + 1) };
        if cost <= remaining {
            Status::admitted(capacity, remaining, reset)
        } else {
            Status::refused(capacity, remaining, reset, (cost <= capacity).then(|| self.until_fits(cost)))
        }
    }

    /// Units that fit now.
    fn remaining(&self) -> u32 {
        let Bucket { capacity, price, .. } = self.bucket;
        let taken = self.owed.div_ceil(price);
        u32::try_from(taken).map_or(0, |taken| capacity.saturating_sub(taken))
    }

    /// Microseconds, rounded up, until `units` fit; 0 when they do.
    fn until_fits(&self, units: u32) -> u64 {
        let Bucket { capacity, price, rate } = self.bucket;
        let may_owe = u128::from(capacity.saturating_sub(units)) * price;
        whole_micros(self.owed.saturating_sub(may_owe).div_ceil(rate))
    }

    /// Microseconds, rounded up, until all is paid.
    pub(super) fn until_paid(&self) -> u64 {
        whole_micros(self.owed.div_ceil(self.bucket.rate))
    }

    pub(super) fn plus(self, units: u32) -> Self {
        Self { owed: self.owed.saturating_add(u128::from(units) * self.bucket.price), ..self }
    }

    pub(super) fn minus(self, units: u32) -> Self {
        Self { owed: self.owed.saturating_sub(u128::from(units) * self.bucket.price), ..self }
    }

    /// The debt as a state: the microsecond from which nothing is owed, and by how many 1/N of one that is too late.
    pub(super) fn store(&self, now: Timestamp, anchor: u32) -> State {
        if self.is_paid() {
            return State::Fresh;
        }
        let micros = self.owed.div_ceil(self.bucket.rate);
        #[allow(clippy::cast_possible_truncation)] // less than the rate, which is a u32
        let early = (micros * self.bucket.rate - self.owed) as u32;
        State::Counts { until: now.plus(whole_micros(micros)), amounts: [early, anchor] }
    }
}

fn whole_micros(micros: u128) -> u64 {
    u64::try_from(micros).unwrap_or(u64::MAX)
}

use std::cmp::Ordering;

use super::mark::Mark;
use super::muldiv::{div_ceil, mul_div_floor, product};
use super::{Hit, State, Status};
use crate::quota::Quota;
use crate::time::Timestamp;

/// The debt of a bucket: the spent units that are not yet refilled. Token buckets and leaky buckets
/// share this implementation.
///
/// This is the generic cell rate algorithm (GCRA, ITU-T I.371). It stores one instant, at which all
/// debt is paid. Debt is measured in 1/N microseconds, where N is the amount of the quota, and P is
/// its period in microseconds. A spent unit adds P, and each microsecond pays N, so nothing is
/// rounded. Large quotas with long periods need more than 64 bits.
#[derive(Clone, Copy)]
pub(super) struct Debt {
    capacity: u32,
    /// The debt that is paid per microsecond, in 1/N microseconds.
    rate: u64,
    /// The debt of one unit, in 1/N microseconds.
    price: u64,
    /// The whole debt, in 1/N microseconds.
    owed: u128,
    mark: Mark,
    /// The mark of a debt as large as the capacity.
    largest: u32,
    /// `true` if the stored debt is larger than possible, because the clock has gone back.
    is_ahead: bool,
}

/// The largest debt in microseconds: 142 years. A charge does not raise a debt above it.
const MOST: u64 = 1 << 52;

impl Debt {
    /// Returns the debt at `now` that [`store`](Self::store) has stored.
    ///
    /// If a bucket of another quota stored more debt than the capacity of this bucket, the excess
    /// counts as paid when it was stored. If the debt still exceeds the capacity, and no charge is
    /// the cause, the clock has gone back. The debt is then reduced to the capacity.
    #[inline(always)]
    pub(super) fn of(quota: &Quota, capacity: u32, largest: u32, state: &State, now: Timestamp) -> Self {
        let (rate, price) = (quota.amount().into(), quota.period_micros());
        let debt = |owed, mark, is_ahead| Self { capacity, rate, price, owed, mark, largest, is_ahead };
        if let State::Counts { until, amounts: [early, mark] } = *state
            && until > now
        {
            let (mut micros, mark) = (until.since(now), Mark::from_amount(mark));
            if mark.amount() > largest {
                let full = mul_div_floor(price, capacity.into(), rate);
                if mark.is_overdrawn() {
                    let Overdraft { micros, early, is_ahead } =
                        Overdraft::of(quota.amount(), full, micros, early, mark);
                    let owed = product(micros, rate).saturating_sub(early.into());
                    return if owed == 0 { debt(0, Mark::new(now), false) } else { debt(owed, mark, is_ahead) };
                }
                micros = converted(micros, mark, full);
                if micros == 0 {
                    return debt(0, Mark::new(now), false);
                }
            }
            let early = if u64::from(early) < rate { u128::from(early) } else { 0 };
            let owed = product(micros, rate).saturating_sub(early);
            let full = product(price, capacity.into());
            // After a small change of the quota the debt may exceed the capacity slightly, because
            // marks are rounded.
            if owed > full && micros >= Mark::from_amount(largest).size() {
                return debt(full, mark, true);
            }
            return debt(owed, mark, false);
        }
        debt(0, Mark::new(now), false)
    }

    /// Returns the status of a hit of `cost` units.
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

    /// Returns the microseconds until all debt is paid, rounded up.
    #[inline(always)]
    pub(super) fn until_paid(&self) -> u64 {
        div_ceil(self.owed, self.rate)
    }

    /// Adds the debt of `units`, which must fit into the bucket.
    #[inline(always)]
    pub(super) fn plus(self, units: u32) -> Self {
        Self { owed: self.owed + self.worth(units), ..self }
    }

    /// Adds the debt of `units`, which may exceed the bucket. The sum is at most [`MOST`].
    pub(super) fn charged(self, units: u32) -> Self {
        Self { owed: (self.owed + self.worth(units)).min(product(MOST, self.rate)), ..self }
    }

    /// Subtracts the unpaid part of `units` of a hit. The debt pays earlier hits first.
    pub(super) fn without(self, now: Timestamp, hit: &Hit, units: u32) -> Self {
        let unpaid = self.worth(units).min(product(hit.until.since(now), self.rate));
        Self { owed: self.owed.saturating_sub(unpaid), ..self }
    }

    /// Returns the state of a debt that fits into the bucket: the instant at which all debt is
    /// paid, rounded up to a microsecond, the 1/N microseconds that the rounding added, and the
    /// mark.
    #[inline(always)]
    pub(super) fn store(&self, now: Timestamp) -> State {
        if self.owed == 0 {
            return State::Fresh;
        }
        let (micros, early) = self.micros();
        let mark = self.mark.with_size(micros, self.largest);
        State::Counts { until: now.plus(micros), amounts: [early, mark.amount()] }
    }

    /// Returns the state of a debt that may exceed the bucket.
    pub(super) fn store_any(&self, now: Timestamp) -> State {
        if self.owed <= self.worth(self.capacity) {
            return self.store(now);
        }
        let (micros, early) = self.micros();
        #[allow(clippy::cast_possible_truncation)] // the amount of the quota
        let amount = self.rate as u32;
        let mark = self.mark.overdrawn(micros, mul_div_floor(self.price, self.capacity.into(), self.rate));
        State::Counts { until: now.plus(micros), amounts: [early + amount * fingerprint(amount), mark.amount()] }
    }

    /// Returns the microseconds until all debt is paid, rounded up, and the 1/N microseconds that
    /// the rounding added.
    #[inline(always)]
    fn micros(&self) -> (u64, u32) {
        let micros = self.until_paid();
        #[allow(clippy::cast_possible_truncation)] // less than the rate
        let early = product(micros, self.rate).saturating_sub(self.owed) as u32;
        (micros, early)
    }

    /// Stores a debt that is ahead of the clock as if it was made now. Without this, the
    /// `retry_after` of each later refusal would end at another instant.
    #[inline(always)]
    pub(super) fn settle(&self, state: &mut State, now: Timestamp) {
        if self.is_ahead {
            *state = self.store_any(now);
        }
    }

    /// Returns `true` if `hit` belongs to this debt, because the bucket was not free of debt since.
    /// Compares the anchors, so the result is wrong with a probability of 1 in 32,749.
    #[inline(always)]
    pub(super) fn has(&self, hit: &Hit) -> bool {
        self.mark.anchor() == Mark::from_amount(hit.anchor).anchor()
    }

    /// Returns the number of units that fit now.
    #[inline(always)]
    fn remaining(&self) -> u32 {
        let taken = div_ceil(self.owed, self.price);
        u32::try_from(taken).map_or(0, |taken| self.capacity.saturating_sub(taken))
    }

    /// Returns the microseconds until `units` fit, rounded up, or 0 if they fit now.
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

/// Returns the rest of a debt that a bucket of another quota stored, reduced to the capacity of
/// this bucket at that time. `full` is the refill time of this bucket in microseconds.
#[cold]
pub(super) fn converted(micros: u64, mark: Mark, full: u64) -> u64 {
    micros.saturating_sub(mark.size().saturating_sub(full))
}

/// The rest of a debt that a charge raised above the capacity of the bucket.
pub(super) struct Overdraft {
    pub(super) micros: u64,
    /// The 1/N microseconds to subtract.
    pub(super) early: u32,
    /// `true` if the stored debt exceeded its bound, because the clock has gone back. It is then
    /// reduced to the bound.
    pub(super) is_ahead: bool,
}

impl Overdraft {
    /// Returns the rest of an overdraft, for a bucket with this amount which refills in `full`
    /// microseconds.
    ///
    /// | the bucket that stored the overdraft had | what counts as paid when it was stored |
    /// |---|---|
    /// | the same amount and capacity | nothing |
    /// | the same amount and a larger capacity | the difference of the two capacities |
    /// | the same amount and a smaller capacity, or another amount | the part that exceeds this bucket |
    ///
    /// So raising a quota never makes a client wait longer than an exhausted client of the new
    /// quota. The stored bound of the debt is too large by up to a factor of 1.6, so a client may
    /// owe less than the full bucket.
    #[cold]
    pub(super) fn of(amount: u32, full: u64, micros: u64, early: u32, mark: Mark) -> Self {
        let most = mark.most();
        let is_of_amount = early / amount == fingerprint(amount);
        let larger = match mark.compare_full(full) {
            _ if !is_of_amount => most,
            Ordering::Equal => 0,
            Ordering::Greater => mark.full_size(),
            Ordering::Less => most,
        };
        let micros_left = micros.min(most).saturating_sub(larger.saturating_sub(full));
        Self { micros: micros_left, early: if is_of_amount { early % amount } else { 0 }, is_ahead: micros > most }
    }
}

/// Returns a number that identifies the amount of a quota. The state of an overdraft contains it:
/// its first amount is N times this number, plus the 1/N microseconds, which are less than N.
///
/// The sum fits into 32 bits. So only 2^32 / N numbers are possible, and a change of an amount of a
/// million stays unnoticed with a probability of about 1 in 4,000. The debt then stays as it is.
#[allow(clippy::cast_possible_truncation)] // less than 2^31
fn fingerprint(amount: u32) -> u32 {
    let amount = u64::from(amount);
    (amount * 48_271 % 2_147_483_647 % ((1 << 32) / amount)) as u32
}

/// Returns the script arguments of a bucket: the amount, the refill time of the capacity and of the
/// cost, and the largest mark.
pub(super) fn script_arguments(quota: &Quota, capacity: u32, cost: u32) -> Vec<u64> {
    let (full, span) = (quota.span_of(capacity), quota.span_of(cost));
    let (micros, largest) = (span.micros.min(1 << 53), full.largest_mark().into());
    vec![quota.amount().into(), full.micros, full.part.into(), micros, span.part.into(), largest]
}

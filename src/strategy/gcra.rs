//! The debt of a bucket, and the mark by which its state survives a change of the quota.
//!
//! A bucket refunds only the units that it has not refilled since, the oldest hit first, so the
//! result is as if the hit had never happened.
//!
//! A bucket of a smaller quota owes only a part of a debt that a larger bucket has stored. It
//! subtracts the excess from the stored instant. Reducing the debt at each request instead restarted
//! the wait each time.
//!
//! The reduced debt is never stored, because the larger bucket still owes the excess. In a rolling
//! deployment, both quotas decide in turn, and each stored result forgave the excess once more. So a
//! hit, a charge or a refund by the smaller bucket moves the stored instant and keeps the mark, from
//! which the next decision computes the same excess. If the smaller bucket owes nothing, a hit
//! stores a new mark, of the stored debt plus the capacity of the smaller bucket. The size of this
//! mark is rounded up, so the larger bucket may owe a 512th more than it spent, but never less.
//!
//! An overdraft must not outlive an upgrade of its quota: a debt of 100 units at ten per minute
//! made a client wait nine minutes under a quota of 100 per minute. An instant alone does not show
//! which quota owes it, so the state also identifies the quota's amount. An overdraft also has a
//! bound. Without it, a clock that goes back by a year would refuse the client for a year. All of
//! this is behind the comparison with the largest mark, so a hit without an overdraft executes no
//! further instruction.

use std::cmp::Ordering;

use super::arithmetic::{div_ceil, mul_div_floor, product};
use super::mark::{CHARGED_SIZES, Mark};
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
    /// The whole debt of this bucket, in 1/N microseconds.
    owed: u128,
    /// The rest of the stored debt in microseconds, which only a bucket of another quota owes.
    excess: u64,
    /// The mark of the stored debt. If there is an excess, the bucket keeps this mark.
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
        let debt = |owed, mark, is_ahead| Self { capacity, rate, price, owed, excess: 0, mark, largest, is_ahead };
        if let State::Counts { until, amounts: [early, mark] } = *state
            && until > now
        {
            let (micros, mark) = (until.since(now), Mark::from_amount(mark));
            if mark.amount() > largest {
                return debt(0, mark, false).under_larger_mark(micros, early);
            }
            let early = if u64::from(early) < rate { u128::from(early) } else { 0 };
            let owed = product(micros, rate).saturating_sub(early);
            let full = product(price, capacity.into());
            // After a small change of the quota the debt may exceed the capacity slightly, because
            // marks are rounded.
            if owed > full && micros > mark.most_stored(largest) {
                return debt(full, mark, true);
            }
            return debt(owed, mark, false);
        }
        debt(0, Mark::new(now), false)
    }

    /// Returns the debt of a state whose mark, the one of `self`, exceeds the largest mark of this
    /// bucket. `stored` is the stored debt in microseconds, and `first` the first amount.
    #[cold]
    fn under_larger_mark(self, stored: u64, first: u32) -> Self {
        let (full, rate) = (self.full(), self.rate);
        if self.mark.is_overdrawn() {
            let Overdraft { micros, early, excess, is_kept, is_ahead } =
                Overdraft::of(self.amount(), full, stored, first, self.mark);
            let owed = product(micros, rate).saturating_sub(early.into());
            return Self { owed, is_ahead, ..self }.with_excess(excess, is_kept, stored);
        }
        let excess = self.mark.excess(full);
        let early = if u64::from(first) < rate { u128::from(first) } else { 0 };
        let owed = product(stored.saturating_sub(excess), rate).saturating_sub(early);
        let most = self.worth(self.capacity);
        let is_ahead = owed > most && stored > self.mark.most_stored(self.largest);
        Self { owed: if is_ahead { most } else { owed }, is_ahead, ..self }.with_excess(excess, true, stored)
    }

    /// Sets the excess. If the mark cannot be kept, or if this bucket owes nothing, replaces the
    /// mark with one that covers the rest of the stored debt and the capacity of this bucket.
    fn with_excess(self, excess: u64, is_kept: bool, stored: u64) -> Self {
        if excess == 0 || (is_kept && self.owed > 0) {
            return Self { excess, ..self };
        }
        let (full, rest) = (self.full(), if self.owed > 0 { excess } else { stored });
        let mark = self.mark.covering(rest.saturating_add(full), self.largest);
        Self { excess: mark.excess(full), mark, ..self }
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

    /// Returns the state without the unpaid part of `units` of a hit. The debt pays earlier hits
    /// first. `state` is the state of this debt.
    pub(super) fn refunded(&self, state: &State, now: Timestamp, hit: &Hit, units: u32) -> State {
        let made = Mark::from_amount(hit.anchor);
        let is_larger = made.amount() > self.largest && !made.is_overdrawn();
        let excess = if is_larger { made.excess(self.full()) } else { 0 };
        let span = mul_div_floor(self.price, units.into(), self.rate);
        // A hit under the mark of a larger bucket was paid before the excess. The end of a hit on a
        // slice of `Leases` may not include the excess.
        let includes_excess = hit.until.since(hit.at) >= excess.saturating_add(span);
        let left = hit.until.minus(if includes_excess { excess } else { 0 }).since(now);
        let unpaid = self.worth(units).min(product(left, self.rate));
        if let State::Counts { until, amounts } = *state
            && self.excess > 0
            && !self.is_ahead
            && (unpaid > self.owed || amounts[1] != self.mark.amount())
        {
            // This bucket owes less than the refund, or cannot write the mark.
            let until = until.minus(span.min(left));
            return if until > now { State::Counts { until, amounts } } else { State::Fresh };
        }
        Self { owed: self.owed.saturating_sub(unpaid), ..*self }.store_any(now)
    }

    /// Returns the state of a debt that fits into the bucket: the instant at which all debt is
    /// paid, rounded up to a microsecond, the 1/N microseconds that the rounding added, and the
    /// mark.
    #[inline(always)]
    pub(super) fn store(&self, now: Timestamp) -> State {
        if self.excess > 0 {
            return self.store_with_excess(now);
        }
        if self.owed == 0 {
            return State::Fresh;
        }
        let (micros, early) = self.micros();
        let mark = self.mark.with_size(micros, self.largest);
        State::Counts { until: now.plus(micros), amounts: [early, mark.amount()] }
    }

    /// Returns the state of a debt that may exceed the bucket.
    pub(super) fn store_any(&self, now: Timestamp) -> State {
        if self.excess > 0 || self.owed <= self.worth(self.capacity) {
            return self.store(now);
        }
        let (micros, early) = self.micros();
        let mark = self.mark.overdrawn(micros, self.full());
        State::Counts { until: now.plus(micros), amounts: [early + self.tag(), mark.amount()] }
    }

    /// Returns the state of a debt that may exceed the bucket, with the excess that a bucket of
    /// another quota owes.
    #[cold]
    fn store_with_excess(&self, now: Timestamp) -> State {
        let (full, capacity) = (self.full(), self.worth(self.capacity));
        let Self { mut mark, mut excess, .. } = *self;
        let (mut micros, mut early) = self.micros();
        if self.owed > capacity {
            if !mark.is_overdrawn() {
                // The debt may now exceed the size of the mark, but the size determines the excess.
                let over = micros - full;
                if over >= (CHARGED_SIZES - 1) * mark.size() {
                    mark = mark.covering(over / (CHARGED_SIZES - 1), self.largest);
                }
                mark = mark.charged();
                excess = mark.excess(full);
            }
            let most = MOST.saturating_sub(excess).max(div_ceil(capacity, self.rate));
            if micros > most {
                (micros, early) = (most, 0);
            }
        }
        let stored = micros.saturating_add(excess);
        if mark.is_overdrawn() {
            (mark, early) = (mark.with_bound(stored), early + self.tag());
        }
        State::Counts { until: now.plus(stored), amounts: [early, mark.amount()] }
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

    /// Returns the refill time of the bucket in microseconds, rounded down.
    fn full(&self) -> u64 {
        mul_div_floor(self.price, self.capacity.into(), self.rate)
    }

    /// Returns the amount of the quota.
    #[allow(clippy::cast_possible_truncation)] // made from 32 bits
    const fn amount(&self) -> u32 {
        self.rate as u32
    }

    /// Returns the part of an overdraft's first amount that identifies the amount of the quota.
    fn tag(&self) -> u32 {
        self.amount() * fingerprint(self.amount())
    }
}

/// The rest of a debt that a charge raised above the capacity of the bucket.
struct Overdraft {
    micros: u64,
    /// The 1/N microseconds to subtract.
    early: u32,
    /// The microseconds that count as paid.
    excess: u64,
    /// `true` if a later overdraft with this mark has the same excess.
    is_kept: bool,
    /// `true` if the stored debt exceeded its bound, because the clock has gone back. It is then
    /// reduced to the bound.
    is_ahead: bool,
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
    fn of(amount: u32, full: u64, stored: u64, first: u32, mark: Mark) -> Self {
        let most = mark.most();
        let is_of_amount = first / amount == fingerprint(amount);
        let order = mark.compare_full(full);
        let larger = match order {
            _ if !is_of_amount => most,
            Ordering::Equal => 0,
            Ordering::Greater => mark.full_size(),
            Ordering::Less => most,
        };
        let excess = larger.saturating_sub(full);
        Self {
            micros: stored.min(most).saturating_sub(excess),
            early: if is_of_amount { first % amount } else { 0 },
            excess,
            is_kept: is_of_amount && order == Ordering::Greater,
            is_ahead: stored > most,
        }
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

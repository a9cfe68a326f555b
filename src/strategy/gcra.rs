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
use super::{Hit, State, Status};
use crate::quota::{MARK_SHIFT, MARK_SIZE, Quota};
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

/// The second amount of a bucket's state: the approximate size of the debt at the last write, and
/// an anchor.
///
/// The size makes decisions exact after a change of the quota. If the stored debt exceeds the
/// capacity of the new quota, a bucket of another quota wrote the state. The excess is subtracted
/// from the stored instant, so the result does not depend on the time of the decision.
///
/// | bits | meaning |
/// |---|---|
/// | 26 to 31 | the shift: one step is 2^shift microseconds. At most 43 |
/// | 16 to 25 | the size in steps, rounded down |
/// | 15 | 1 if a charge by a smaller bucket raised the debt above this size. It is less than 16 times the size |
/// | 0 to 14 | the anchor: the instant of the first hit of this debt, modulo a prime number |
///
/// A full debt is at most 1,023 steps, and at least 512 if a step is longer than a microsecond. So
/// the order of marks is the order of sizes: the mark of a debt that exceeds the capacity is larger
/// than the [largest mark](crate::quota::Span::largest_mark) of the bucket.
///
/// After a charge, a debt can exceed the capacity of its own bucket. The mark of such an overdraft
/// is larger than every other mark. It has the size of the full bucket, and an upper bound of the
/// debt. A larger debt reveals that the clock has gone back.
///
/// | bits | meaning |
/// |---|---|
/// | 30 and 31 | 1 |
/// | 24 to 29 | the shift of the full bucket plus 16 microseconds: one step is 2^shift microseconds |
/// | 20 to 23 | the size of the full bucket plus 16 microseconds in steps, rounded down, minus 16 |
/// | 15 to 19 | n: the debt is at most the full bucket times 1, 1.5, 2, 3, 4, 6, .. (n = 0, 1, 2, ..). 31 means no bound |
/// | 0 to 14 | the anchor |
#[derive(Clone, Copy)]
pub(super) struct Mark(u32);

/// The number of anchors. It is prime, because instants on a regular grid are evenly distributed
/// modulo a prime.
const ANCHORS: u64 = 32_749;

/// The bits of the anchor.
const ANCHOR: u32 = (1 << 15) - 1;

/// The bit of a debt that a charge by a smaller bucket raised above the size of the mark.
const CHARGED: u32 = 1 << 15;

/// The debt with that bit is less than this many sizes.
const CHARGED_SIZES: u64 = 16;

/// The largest size that [`Mark::covering`] can cover in microseconds.
const COVERED: u64 = (1 << 53) - 1;

/// The bits of the shift.
const SCALE: u32 = u32::MAX << MARK_SHIFT;

/// The largest number of steps.
const STEPS: u32 = (1 << (MARK_SHIFT - MARK_SIZE)) - 1;

/// The mark of an overdraft is at least this large. No other mark has a shift above 43.
const OVERDRAFT: u32 = 0b11 << 30;

/// The bits of an overdraft's mark that contain the bound of the debt.
const BOUND: u32 = 31 << 15;

/// The bits of an overdraft's mark that contain the size of the full bucket.
const FULL: u32 = !(OVERDRAFT | BOUND | ANCHOR);

impl Mark {
    /// Creates the mark of a debt that starts now. Its size is 0.
    #[allow(clippy::cast_possible_truncation)] // less than `ANCHORS`
    #[inline(always)]
    pub(super) const fn new(now: Timestamp) -> Self {
        Self((now.as_micros() % ANCHORS) as u32)
    }

    #[inline(always)]
    pub(super) const fn from_amount(amount: u32) -> Self {
        Self(amount)
    }

    #[inline(always)]
    pub(super) const fn amount(self) -> u32 {
        self.0
    }

    /// Sets the size of a debt of `micros` microseconds, which must fit into the bucket with this
    /// largest mark.
    #[allow(clippy::cast_possible_truncation)] // 10 bits
    #[inline(always)]
    pub(super) const fn with_size(self, micros: u64, largest: u32) -> Self {
        let steps = (micros >> (largest >> MARK_SHIFT)) as u32;
        Self((largest & SCALE) | steps << MARK_SIZE | (self.0 & ANCHOR))
    }

    /// Sets the size of a debt of `micros` microseconds that exceeds a bucket which refills in
    /// `full` microseconds.
    #[cold]
    fn overdrawn(self, micros: u64, full: u64) -> Self {
        Self(OVERDRAFT | full_bits(full) | (self.0 & ANCHOR)).with_bound(micros)
    }

    /// Sets the bound of an overdraft for a debt of `micros` microseconds.
    fn with_bound(self, micros: u64) -> Self {
        let bound = (0..31).find(|&bound| micros <= self.bound(bound)).unwrap_or(31);
        Self(self.0 & !BOUND | bound << 15)
    }

    /// Returns the smallest mark that is larger than `largest` and whose size is more than `micros`
    /// microseconds. It has the same anchor.
    #[allow(clippy::cast_possible_truncation)] // 10 bits
    fn covering(self, micros: u64, largest: u32) -> Self {
        let micros = micros.max(Self(largest).size()).min(COVERED);
        let shift = (64 - micros.leading_zeros()).saturating_sub(MARK_SHIFT - MARK_SIZE);
        Self(shift << MARK_SHIFT | ((micros >> shift) as u32) << MARK_SIZE | (self.0 & ANCHOR))
    }

    /// Marks the debt as raised above the size by a charge.
    const fn charged(self) -> Self {
        Self(self.0 | CHARGED)
    }

    /// Returns the part of a debt of this size that exceeds a bucket which refills in `full`
    /// microseconds.
    const fn excess(self, full: u64) -> u64 {
        self.size().saturating_sub(1).saturating_sub(full)
    }

    /// Returns an upper bound of the debt in microseconds that a bucket with this largest mark can
    /// have, if the mark is not that of an overdraft.
    fn most_stored(self, largest: u32) -> u64 {
        if self.0 & CHARGED == 0 { Self(self.0.max(largest)).size() } else { CHARGED_SIZES * self.size() - 1 }
    }

    /// Returns the anchor. It is equal in all states of one debt, until all of it is paid.
    #[inline(always)]
    pub(super) const fn anchor(self) -> u32 {
        self.0 & ANCHOR
    }

    /// Returns `true` if a charge made the debt exceed the bucket that stored it.
    const fn is_overdrawn(self) -> bool {
        self.0 >= OVERDRAFT
    }

    /// Returns an upper bound of an overdrawn debt in microseconds. It is at most about 1.6 times
    /// the debt, or `u64::MAX` if the debt is too large for a bound.
    const fn most(self) -> u64 {
        match (self.0 & BOUND) >> 15 {
            31 => u64::MAX,
            bound => self.bound(bound),
        }
    }

    const fn bound(self, bound: u32) -> u64 {
        let full = self.full_size();
        (if bound % 2 == 1 { full + full / 2 } else { full }).saturating_mul(1 << (bound / 2))
    }

    /// Compares the bucket that stored an overdrawn debt with a bucket which refills in `full`
    /// microseconds. Sizes that differ by less than a 16th may count as equal.
    fn compare_full(self, full: u64) -> Ordering {
        (self.0 & FULL).cmp(&full_bits(full))
    }

    /// Returns an upper bound of the refill time of the bucket that stored an overdrawn debt.
    const fn full_size(self) -> u64 {
        let (shift, steps) = (self.0 >> 24 & 63, (self.0 >> 20 & 15) as u64 + 17);
        // A corrupt mark can have a larger shift.
        (steps << if shift < 48 { shift } else { 48 }) - 16
    }

    /// Returns an upper bound of the size in microseconds. It exceeds the size by at most one step.
    const fn size(self) -> u64 {
        let steps = (self.0 >> MARK_SIZE & STEPS) as u64 + 1;
        steps << (self.0 >> MARK_SHIFT)
    }
}

/// Returns the size of a bucket which refills in `full` microseconds, at most 2^52, as an overdraft
/// stores it. The result is larger for larger buckets.
#[allow(clippy::cast_possible_truncation)] // 4 bits
const fn full_bits(full: u64) -> u32 {
    let full = full + 16;
    let shift = 64 - 5 - full.leading_zeros();
    shift << 24 | ((full >> shift) as u32 - 16) << 20
}

#[cfg(test)]
mod tests {
    use super::*;

    fn largest(full: u64) -> u32 {
        Quota::per(1, std::time::Duration::from_micros(full)).largest_mark()
    }

    #[test]
    fn sizes_are_rounded_up_by_at_most_a_512th_of_the_bucket() {
        for power in 0..52 {
            for full in [1_u64 << power, (1 << power) + (1 << power) / 3, (2 << power) - 1] {
                for debt in [1, full / 1_000, full / 2, full - 1, full].map(|debt| debt.max(1)) {
                    let mark = Mark::new(Timestamp::from_micros(7)).with_size(debt, largest(full));
                    assert!(mark.size() > debt && mark.size() - debt <= 1 + full / 512, "{debt} of {full}");
                    assert!(mark.amount() <= largest(full), "{debt} of {full}");
                    assert_eq!(mark.anchor(), 7);
                }
            }
        }
    }

    #[test]
    fn largest_marks_have_the_order_of_the_refill_times_of_their_buckets() {
        for power in 0..52 {
            let (short, long) = (1_u64 << power, (1_u64 << power) + (1 << power) / 3);
            assert!(largest(short) <= largest(long));
            // A full debt of the shorter bucket fits into the longer one.
            let exhausted = Mark::from_amount(0).with_size(short, largest(short));
            assert!(exhausted.amount() <= largest(long));
        }
    }

    #[test]
    fn covering_mark_is_larger_than_the_bucket_and_than_the_debt() {
        for power in 0..52 {
            for full in [1_u64 << power, (1 << power) + (1 << power) / 3, (2 << power) - 1] {
                let largest = largest(full);
                for debt in [0, full / 2, full, full + full / 3, 3 * full] {
                    let mark = Mark::new(Timestamp::from_micros(7)).covering(debt, largest);
                    let covered = debt.min(COVERED).max(Mark::from_amount(largest).size());
                    assert!(mark.amount() > largest && !mark.is_overdrawn(), "{debt} of {full}");
                    assert!(mark.size() > covered && mark.size() - covered <= 1 + covered / 512, "{debt} of {full}");
                    assert_eq!(mark.anchor(), 7);
                    let charged = mark.charged();
                    assert_eq!((charged.size(), charged.anchor()), (mark.size(), 7));
                    assert_eq!(mark.most_stored(largest), mark.size());
                    assert_eq!(charged.most_stored(largest), 16 * mark.size() - 1);
                }
            }
        }
    }

    /// The size of a corrupt mark loses its high bits.
    #[test]
    fn corrupt_mark_does_not_panic() {
        assert_eq!(Mark::from_amount(u32::MAX).size(), 0);
        assert_eq!(Mark::from_amount(u32::MAX).most(), u64::MAX);
        assert_eq!(Mark::from_amount(u32::MAX - BOUND).most(), (32 << 48) - 16);
        assert_eq!(Mark::from_amount(u32::MAX - (1 << 15)).most(), u64::MAX);
        assert_eq!(Mark::from_amount(0).size(), 1);
    }

    #[test]
    fn overdraft_is_the_largest_mark_and_bounds_the_debt() {
        for power in 0..52 {
            for full in [1_u64 << power, (1 << power) + (1 << power) / 3, (2 << power) - 1] {
                for debt in [full + 1, full + full / 3, 3 * full, 1_000 * full] {
                    let mark = Mark::new(Timestamp::from_micros(7)).overdrawn(debt, full);
                    assert!(mark.is_overdrawn() && mark.amount() > largest((1 << 52) - 1), "{debt} of {full}");
                    assert!(mark.most() >= debt && mark.most() <= debt / 8 * 13 + 32, "{debt} of {full}");
                    assert_eq!(mark.anchor(), 7);
                    assert_eq!(mark.compare_full(full), Ordering::Equal, "{debt} of {full}");
                    assert_eq!(mark.compare_full(full / 4), Ordering::Greater, "{debt} of {full}");
                    assert_eq!(mark.compare_full(2 * full + 4), Ordering::Less, "{debt} of {full}");
                    let excess = mark.full_size() - full;
                    assert!(excess > 0 && excess <= full / 16 + 2, "{debt} of {full}");
                }
            }
        }
    }
}

//! The mark in a bucket's state, by which its debt survives a change of the quota.

use std::cmp::Ordering;

use crate::quota::{MARK_SHIFT, MARK_SIZE};
use crate::time::Timestamp;

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
pub(super) const CHARGED_SIZES: u64 = 16;

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
    pub(super) fn overdrawn(self, micros: u64, full: u64) -> Self {
        Self(OVERDRAFT | full_bits(full) | (self.0 & ANCHOR)).with_bound(micros)
    }

    /// Sets the bound of an overdraft for a debt of `micros` microseconds.
    pub(super) fn with_bound(self, micros: u64) -> Self {
        let bound = (0..31).find(|&bound| micros <= self.bound(bound)).unwrap_or(31);
        Self(self.0 & !BOUND | bound << 15)
    }

    /// Returns the smallest mark that is larger than `largest` and whose size is more than `micros`
    /// microseconds. It has the same anchor.
    #[allow(clippy::cast_possible_truncation)] // 10 bits
    pub(super) fn covering(self, micros: u64, largest: u32) -> Self {
        let micros = micros.max(Self(largest).size()).min(COVERED);
        let shift = (64 - micros.leading_zeros()).saturating_sub(MARK_SHIFT - MARK_SIZE);
        Self(shift << MARK_SHIFT | ((micros >> shift) as u32) << MARK_SIZE | (self.0 & ANCHOR))
    }

    /// Marks the debt as raised above the size by a charge.
    pub(super) const fn charged(self) -> Self {
        Self(self.0 | CHARGED)
    }

    /// Returns the part of a debt of this size that exceeds a bucket which refills in `full`
    /// microseconds.
    pub(super) const fn excess(self, full: u64) -> u64 {
        self.size().saturating_sub(1).saturating_sub(full)
    }

    /// Returns an upper bound of the debt in microseconds that a bucket with this largest mark can
    /// have, if the mark is not that of an overdraft.
    pub(super) fn most_stored(self, largest: u32) -> u64 {
        if self.0 & CHARGED == 0 { Self(self.0.max(largest)).size() } else { CHARGED_SIZES * self.size() - 1 }
    }

    /// Returns the anchor. It is equal in all states of one debt, until all of it is paid.
    #[inline(always)]
    pub(super) const fn anchor(self) -> u32 {
        self.0 & ANCHOR
    }

    /// Returns `true` if a charge made the debt exceed the bucket that stored it.
    pub(super) const fn is_overdrawn(self) -> bool {
        self.0 >= OVERDRAFT
    }

    /// Returns an upper bound of an overdrawn debt in microseconds. It is at most about 1.6 times
    /// the debt, or `u64::MAX` if the debt is too large for a bound.
    pub(super) const fn most(self) -> u64 {
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
    pub(super) fn compare_full(self, full: u64) -> Ordering {
        (self.0 & FULL).cmp(&full_bits(full))
    }

    /// Returns an upper bound of the refill time of the bucket that stored an overdrawn debt.
    pub(super) const fn full_size(self) -> u64 {
        let (shift, steps) = (self.0 >> 24 & 63, (self.0 >> 20 & 15) as u64 + 17);
        // A corrupt mark can have a larger shift.
        (steps << if shift < 48 { shift } else { 48 }) - 16
    }

    /// Returns an upper bound of the size in microseconds. It exceeds the size by at most one step.
    pub(super) const fn size(self) -> u64 {
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
    use crate::quota::Quota;

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

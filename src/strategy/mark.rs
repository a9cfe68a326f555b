use crate::Timestamp;
use crate::quota::{MARK_SHIFT, MARK_SIZE};

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
/// | 15 | 0 |
/// | 0 to 14 | the anchor: the instant of the first hit of this debt, modulo a prime number |
///
/// A full debt is at most 1,023 steps, and at least 512 if a step is longer than a microsecond. So
/// the order of marks is the order of sizes: the mark of a debt that exceeds the capacity is larger
/// than the [largest mark](crate::quota::Span::largest_mark) of the bucket.
///
/// After a charge, a debt can exceed the capacity of its own bucket. The mark of such an overdraft
/// is larger than every other mark. It has two sizes:
///
/// - The size of the full bucket. After a change of the quota, only the difference of the two
///   capacities is subtracted.
/// - An upper bound of the debt. A larger debt reveals that the clock has gone back.
///
/// | bits | meaning |
/// |---|---|
/// | 30 and 31 | 1 |
/// | 24 to 29 | the shift of the full bucket: one step is 2^shift microseconds |
/// | 19 to 23 | the size of the full bucket in steps, rounded down |
/// | 15 to 18 | n: the debt is at most the full bucket, doubled n times. 15 means no bound |
/// | 0 to 14 | the anchor |
#[derive(Clone, Copy)]
pub(super) struct Mark(u32);

/// The number of anchors. It is prime, because instants on a regular grid are evenly distributed
/// modulo a prime.
const ANCHORS: u64 = 32_749;

/// The bits of the anchor.
const ANCHOR: u32 = (1 << 15) - 1;

/// The bits of the shift.
const SCALE: u32 = u32::MAX << MARK_SHIFT;

/// The largest number of steps.
const STEPS: u32 = (1 << (MARK_SHIFT - MARK_SIZE)) - 1;

/// The mark of an overdraft is at least this large. No other mark has a shift above 43.
const OVERDRAFT: u32 = 0b11 << 30;

/// The bits of an overdraft's mark that contain the number of doublings.
const DOUBLINGS: u32 = 15 << 15;

/// The bits of an overdraft's mark that contain the size of the full bucket.
const FULL: u32 = !(OVERDRAFT | DOUBLINGS | ANCHOR);

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

    /// Sets the size of a debt of `micros` microseconds that exceeds the bucket with this largest
    /// mark.
    #[cold]
    pub(super) fn overdrawn(self, micros: u64, largest: u32) -> Self {
        let full = Self(OVERDRAFT | full_bits(largest));
        let doublings = (0..15).find(|&doublings| micros <= full.full_size().saturating_mul(1 << doublings));
        Self(full.0 | doublings.unwrap_or(15) << 15 | (self.0 & ANCHOR))
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

    /// Returns an upper bound of an overdrawn debt in microseconds. It is at most about twice the
    /// debt, or `u64::MAX` if the debt is too large for a bound.
    pub(super) const fn most(self) -> u64 {
        match (self.0 & DOUBLINGS) >> 15 {
            15 => u64::MAX,
            doublings => self.full_size().saturating_mul(1 << doublings),
        }
    }

    /// Returns the microseconds by which the bucket that stored an overdrawn debt is larger than
    /// the bucket with this largest mark and this refill time.
    pub(super) const fn excess(self, largest: u32, full: u64) -> u64 {
        if self.0 & FULL == full_bits(largest) { 0 } else { self.full_size().saturating_sub(full) }
    }

    /// Returns an upper bound of the refill time of the bucket that stored an overdrawn debt.
    const fn full_size(self) -> u64 {
        let steps = (self.0 >> 19 & 31) as u64 + 1;
        let shift = self.0 >> 24 & 63;
        // A corrupt mark can have a larger shift.
        steps << if shift < 52 { shift } else { 52 }
    }

    /// Returns an upper bound of the size in microseconds. It exceeds the size by at most one step.
    pub(super) const fn size(self) -> u64 {
        let steps = (self.0 >> MARK_SIZE & STEPS) as u64 + 1;
        steps << (self.0 >> MARK_SHIFT)
    }
}

/// Returns the size of a full bucket as an overdraft stores it, from its largest mark.
const fn full_bits(largest: u32) -> u32 {
    let steps = largest >> MARK_SIZE & STEPS;
    let extra = (u32::BITS - steps.leading_zeros()).saturating_sub(5);
    ((largest >> MARK_SHIFT) + extra) << 24 | (steps >> extra) << 19
}

#[cfg(test)]
mod tests {
    use crate::Quota;

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

    /// The size of a corrupt mark loses its high bits.
    #[test]
    fn corrupt_mark_does_not_panic() {
        assert_eq!(Mark::from_amount(u32::MAX).size(), 0);
        assert_eq!(Mark::from_amount(u32::MAX).most(), u64::MAX);
        assert_eq!(Mark::from_amount(u32::MAX - DOUBLINGS).most(), 32 << 52);
        assert_eq!(Mark::from_amount(0).size(), 1);
    }

    #[test]
    fn overdraft_is_the_largest_mark_and_bounds_the_debt() {
        for power in 0..52 {
            for full in [1_u64 << power, (1 << power) + (1 << power) / 3, (2 << power) - 1] {
                for debt in [full + 1, full + full / 3, 3 * full, 1_000 * full] {
                    let mark = Mark::new(Timestamp::from_micros(7)).overdrawn(debt, largest(full));
                    assert!(mark.is_overdrawn() && mark.amount() > largest((1 << 52) - 1), "{debt} of {full}");
                    assert!(mark.most() >= debt && mark.most() <= 2 * debt + debt / 8 + 32, "{debt} of {full}");
                    assert_eq!(mark.anchor(), 7);
                    assert_eq!(mark.excess(largest(full), full), 0, "{debt} of {full}");
                    if full < 16 {
                        continue;
                    }
                    let excess = mark.excess(largest(full / 4), full / 4);
                    assert!(excess >= full - full / 4 && excess <= full - full / 4 + full / 16 + 1, "{debt} of {full}");
                }
            }
        }
    }
}

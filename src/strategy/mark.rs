use crate::Timestamp;
use crate::quota::{MARK_SHIFT, MARK_SIZE};

/// The second amount of a bucket's state: the approximate debt at the last write, and an anchor.
///
/// The size makes a change of the quota exact. If the stored debt exceeds the capacity of the new
/// quota, a bucket of another quota wrote the state. The excess is subtracted from the stored
/// instant, so the result does not depend on the time of the decision.
///
/// | bits | meaning |
/// |---|---|
/// | 26 to 31 | the shift: one step is 2^shift microseconds |
/// | 16 to 25 | the size in steps, rounded down |
/// | 15 | 0, reserved |
/// | 0 to 14 | the anchor: the instant of the first hit of this debt, modulo a prime number |
///
/// A full debt is at most 1,023 steps, and at least 512 if a step is longer than a microsecond. So
/// the order of marks is the order of sizes: the mark of a debt that exceeds the capacity is larger
/// than the [largest mark](crate::quota::Span::largest_mark) of the bucket.
#[derive(Clone, Copy)]
pub(super) struct Mark(u32);

/// A prime number, because instants on a regular grid are evenly distributed modulo a prime.
const ANCHORS: u64 = 32_749;

const ANCHOR: u32 = (1 << MARK_SIZE) - 1;
const SCALE: u32 = u32::MAX << MARK_SHIFT;
const STEPS: u32 = (1 << (MARK_SHIFT - MARK_SIZE)) - 1;

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

    /// Sets the size. The debt must fit into the bucket with this largest mark.
    #[allow(clippy::cast_possible_truncation)] // 10 bits
    #[inline(always)]
    pub(super) const fn with_size(self, micros: u64, largest: u32) -> Self {
        let steps = (micros >> (largest >> MARK_SHIFT)) as u32;
        Self((largest & SCALE) | steps << MARK_SIZE | (self.0 & ANCHOR))
    }

    /// Returns the bits that are equal in all states of one debt.
    #[inline(always)]
    pub(super) const fn anchor(self) -> u32 {
        self.0 & ANCHOR
    }

    /// Returns an upper bound of the size in microseconds. It exceeds the size by at most one step.
    pub(super) const fn size(self) -> u64 {
        let steps = (self.0 >> MARK_SIZE & STEPS) as u64 + 1;
        steps << (self.0 >> MARK_SHIFT)
    }
}

#[cfg(test)]
mod tests {
    use crate::Quota;

    use super::*;

    fn largest(full: u64) -> u32 {
        Quota::per(1, std::time::Duration::from_micros(full)).largest_mark()
    }

    #[test]
    fn sizes_are_rounded_up_by_at_most_1_512th_of_the_bucket() {
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
    fn marks_have_the_order_of_the_refill_times_of_their_buckets() {
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
        assert_eq!(Mark::from_amount(0).size(), 1);
    }
}

use crate::Timestamp;

/// The second amount of a bucket's state: about how large its debt was when the state was written, and where it began.
///
/// The size makes a change of the quota exact. A state that owes more than the bucket of the new quota holds was written
/// by another quota. The difference is subtracted from the state's instant once and for all, so the answer does not
/// depend on when somebody looks.
///
/// | bits | meaning |
/// |---|---|
/// | 26 to 31 | the scale: a step is this power of two in microseconds |
/// | 16 to 25 | the size, in steps, rounded down |
/// | 15 | 0, reserved |
/// | 0 to 14 | the anchor: the instant of the first hit of this debt, modulo a prime number |
///
/// A bucket fills in at most 1,023 steps and, if a step is longer than a microsecond, in at least 512. So marks compare
/// like the buckets that wrote them: the mark of a larger debt than fits is larger than the
/// [largest mark](crate::quota::Span::largest_mark) of a bucket.
#[derive(Clone, Copy)]
pub(super) struct Mark(u32);

/// Instants on a regular grid are evenly distributed modulo a prime number.
const ANCHORS: u64 = 32_749;

const ANCHOR: u32 = 0xffff;
const SCALE: u32 = 0xfc00_0000;

impl Mark {
    /// The mark of a debt that begins now. It has no size yet.
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

    /// The mark with the size of a debt that fits in the bucket with this largest mark.
    #[allow(clippy::cast_possible_truncation)] // 10 bits
    #[inline(always)]
    pub(super) const fn with_size(self, micros: u64, largest: u32) -> Self {
        let steps = (micros >> (largest >> 26)) as u32;
        Self((largest & SCALE) | steps << 16 | (self.0 & ANCHOR))
    }

    /// Returns the bits that all states of one debt have in common.
    #[inline(always)]
    pub(super) const fn anchor(self) -> u32 {
        self.0 & ANCHOR
    }

    /// Returns an upper bound of the debt's size in microseconds. It is too large by at most one step.
    pub(super) const fn size(self) -> u64 {
        let steps = (self.0 >> 16 & 0x3ff) as u64 + 1;
        steps << (self.0 >> 26)
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
    fn sizes_are_rounded_up_by_at_most_a_500th_of_the_bucket() {
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
    fn a_larger_mark_is_of_a_bucket_that_fills_in_a_longer_time() {
        for power in 0..52 {
            let (short, long) = (1_u64 << power, (1_u64 << power) + (1 << power) / 3);
            assert!(largest(short) <= largest(long));
            // What the shorter bucket wrote fits in the longer one.
            let exhausted = Mark::from_amount(0).with_size(short, largest(short));
            assert!(exhausted.amount() <= largest(long));
        }
    }

    #[test]
    fn garbage_has_a_size() {
        assert_eq!(Mark::from_amount(u32::MAX).size(), 1 << 10 << 63);
        assert_eq!(Mark::from_amount(0).size(), 1);
    }
}

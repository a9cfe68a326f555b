//! Arithmetic on products that may need 128 bits. Nearly all of them do not, and 64 are several times faster.

/// An unsigned integer whose arithmetic stops at its ends.
pub(super) trait Word: Copy + Ord + From<u64> {
    fn more(self, other: Self) -> Self;
    fn less(self, other: Self) -> Self;
    fn times(self, other: Self) -> Self;
    /// The quotient rounded up, at most 2^64 - 1.
    fn div_ceil(self, divisor: Self) -> u64;
    /// The lowest 32 bits.
    fn low_bits(self) -> u32;
}

macro_rules! word {
    ($type:ty) => {
        impl Word for $type {
            #[inline]
            fn more(self, other: Self) -> Self {
                self.saturating_add(other)
            }

            #[inline]
            fn less(self, other: Self) -> Self {
                self.saturating_sub(other)
            }

            #[inline]
            fn times(self, other: Self) -> Self {
                self.saturating_mul(other)
            }

            #[inline]
            #[allow(irrefutable_let_patterns, clippy::unnecessary_fallible_conversions, reason = "true of u64 alone")]
            fn div_ceil(self, divisor: Self) -> u64 {
                u64::try_from(<$type>::div_ceil(self, divisor)).unwrap_or(u64::MAX)
            }

            #[inline]
            #[allow(clippy::cast_possible_truncation)]
            fn low_bits(self) -> u32 {
                self as u32
            }
        }
    };
}

word!(u64);
word!(u128);

/// `a * b / divisor`, rounded down; the largest number when it does not fit.
#[inline]
pub(super) fn mul_div_floor(a: u64, b: u64, divisor: u64) -> u64 {
    match a.checked_mul(b) {
        Some(product) => product / divisor,
        None => u64::try_from(u128::from(a) * u128::from(b) / u128::from(divisor)).unwrap_or(u64::MAX),
    }
}

/// `a * b / divisor`, rounded up; the largest number when it does not fit.
#[inline]
pub(super) fn mul_div_ceil(a: u64, b: u64, divisor: u64) -> u64 {
    match a.checked_mul(b) {
        Some(product) => product.div_ceil(divisor),
        None => Word::div_ceil(u128::from(a) * u128::from(b), u128::from(divisor)),
    }
}

//! Arithmetic of the strategies, mostly on products that may need 128 bits. Most fit into 64 bits,
//! for which division is several times faster.

use crate::time::Timestamp;

/// Returns the low 32 bits of an instant as an anchor, which distinguishes the windows of one key.
#[allow(clippy::cast_possible_truncation)]
#[inline]
pub(super) const fn low_bits(now: Timestamp) -> u32 {
    now.as_micros() as u32
}

/// Returns `dividend / divisor`, rounded up. Saturates at `u64::MAX`.
#[inline(always)]
pub(super) fn div_ceil(dividend: u128, divisor: u64) -> u64 {
    match u64::try_from(dividend) {
        Ok(dividend) => dividend.div_ceil(divisor),
        Err(_) => wide_div_ceil(dividend, divisor),
    }
}

#[cold]
fn wide_div_ceil(dividend: u128, divisor: u64) -> u64 {
    u64::try_from(dividend.div_ceil(divisor.into())).unwrap_or(u64::MAX)
}

/// Returns `a * b`, which always fits into 128 bits.
#[inline(always)]
pub(super) fn product(a: u64, b: u64) -> u128 {
    u128::from(a) * u128::from(b)
}

/// Returns `a * b / divisor`, rounded down. Saturates at `u64::MAX`.
#[inline(always)]
pub(super) fn mul_div_floor(a: u64, b: u64, divisor: u64) -> u64 {
    let product = product(a, b);
    match u64::try_from(product) {
        Ok(product) => product / divisor,
        Err(_) => wide_div_floor(product, divisor),
    }
}

#[cold]
fn wide_div_floor(dividend: u128, divisor: u64) -> u64 {
    u64::try_from(dividend / u128::from(divisor)).unwrap_or(u64::MAX)
}

/// Returns `a * b / divisor`, rounded up. Saturates at `u64::MAX`.
#[inline(always)]
pub(super) fn mul_div_ceil(a: u64, b: u64, divisor: u64) -> u64 {
    div_ceil(product(a, b), divisor)
}

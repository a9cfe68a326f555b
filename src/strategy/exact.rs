//! Quotients of products that need up to 128 bits. Nearly all of them do not.

/// `dividend / divisor`, rounded down; the largest number when it does not fit.
#[inline]
pub(super) fn div_floor(dividend: u128, divisor: u64) -> u64 {
    match u64::try_from(dividend) {
        Ok(dividend) => dividend / divisor,
        Err(_) => wide(dividend / u128::from(divisor)),
    }
}

/// `dividend / divisor`, rounded up; the largest number when it does not fit.
#[inline]
pub(super) fn div_ceil(dividend: u128, divisor: u64) -> u64 {
    match u64::try_from(dividend) {
        Ok(dividend) => dividend.div_ceil(divisor),
        Err(_) => wide(dividend.div_ceil(u128::from(divisor))),
    }
}

#[cold]
fn wide(quotient: u128) -> u64 {
    u64::try_from(quotient).unwrap_or(u64::MAX)
}

//! Numbers as header values, without an allocation for each.

use std::cell::RefCell;

use bytes::BytesMut;
use http::header::HeaderValue;

/// The numbers below this one are slices of a static text, because most limits are small.
const SMALL: usize = 10_000;

/// The small numbers with four digits each: `000000010002` and so on.
static DIGITS: [u8; 4 * SMALL] = {
    let mut digits = [b'0'; 4 * SMALL];
    let mut at = 0;
    while at < digits.len() {
        let power = [1_000, 100, 10, 1][at % 4];
        digits[at] += (at / 4 / power % 10) as u8;
        at += 1;
    }
    digits
};

/// The size of the blocks that larger numbers are written into, one after the other. A value keeps
/// its block alive.
const BLOCK: usize = 1_024;

pub(super) fn number(number: u64) -> HeaderValue {
    match usize::try_from(number) {
        Ok(small) if small < SMALL => {
            let len = small.checked_ilog10().map_or(1, |log| log as usize + 1);
            let digits = str::from_utf8(&DIGITS[4 * (small + 1) - len..4 * (small + 1)]);
            HeaderValue::from_static(digits.expect("digits are ASCII"))
        }
        _ => large(number),
    }
}

/// Allocates once for each block. A block whose values have been dropped is used again.
fn large(number: u64) -> HeaderValue {
    thread_local! { static NEXT: RefCell<BytesMut> = RefCell::new(BytesMut::with_capacity(BLOCK)) }
    let mut buffer = itoa::Buffer::new();
    let digits = buffer.format(number).as_bytes();
    let shared = NEXT.try_with(|next| {
        let mut next = next.borrow_mut();
        next.extend_from_slice(digits);
        HeaderValue::from_maybe_shared(next.split().freeze())
    });
    // The block is gone while the thread exits.
    shared.unwrap_or_else(|_| HeaderValue::from_bytes(digits)).expect("digits are a valid header value")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_the_digits_of_their_number() {
        let large = [10_000, 1_728_000_060, u64::from(u32::MAX), u64::MAX];
        let values: Vec<_> = (0..SMALL as u64).chain(large).map(|it| (it, number(it))).collect();
        for (it, value) in values {
            assert_eq!(value, it.to_string());
        }
    }

    #[test]
    fn blocks_are_reused_after_their_values_are_dropped() {
        let first = number(1_000_000).as_bytes().as_ptr();
        let repeats = (0..10 * BLOCK).filter(|_| number(1_000_000).as_bytes().as_ptr() == first).count();
        assert!(repeats > 10, "{repeats}");
    }
}

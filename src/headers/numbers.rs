//! Numbers in header fields: the capacity, the remaining units and the reset in `X-RateLimit-*` and
//! in `RateLimit-*` of draft 6.
//!
//! A value needs no allocation of its own. Numbers below 10,000 are slices of a static text. Larger
//! amounts and times repeat, so each thread caches the values that it wrote last. Larger remaining
//! units change with each request, so they are written into a block of 1 KB, which is used again
//! after its values have been dropped.
//!
//! The fields of draft 6 stay, because they are the only IETF fields that the npm package
//! `ratelimit-header-parser` reads correctly.

use std::cell::RefCell;

use bytes::BytesMut;
use http::header::{HeaderMap, HeaderName, HeaderValue, IntoHeaderName};

use crate::decision::Decision;
use crate::policy::Limit;
use crate::storage::StorageRequest;
use crate::strategy::Status;
use crate::time::seconds_up;

/// The names of the three fields of a family.
pub(super) struct FieldNames {
    pub(super) limit: HeaderName,
    /// Reports the remaining units.
    pub(super) remaining: HeaderName,
    /// Reports the time at which more units remain.
    pub(super) reset: HeaderName,
}

pub(super) const X: FieldNames = FieldNames {
    limit: HeaderName::from_static("x-ratelimit-limit"),
    remaining: HeaderName::from_static("x-ratelimit-remaining"),
    reset: HeaderName::from_static("x-ratelimit-reset"),
};

pub(super) const DRAFT_6: FieldNames = FieldNames {
    limit: HeaderName::from_static("ratelimit-limit"),
    remaining: HeaderName::from_static("ratelimit-remaining"),
    reset: HeaderName::from_static("ratelimit-reset"),
};

/// The reset of a limit on requests in flight, whose end is not known. No field reports it.
const NO_RESET: u64 = u64::MAX;

/// The values of the three fields for a decision. An admitted request carries them to its response
/// instead of the whole decision, which is larger.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Numbers {
    limit: u32,
    remaining: u32,
    /// In seconds, from now or since the Unix epoch, or [`NO_RESET`].
    reset: u64,
    /// The seconds until more units remain, rounded up, or 0 if another hit of the same cost would
    /// be admitted now.
    wait: u32,
}

impl Numbers {
    #[inline]
    pub(super) fn of(shown: &Status, reset: u64, wait: u32) -> Self {
        Self { limit: shown.capacity(), remaining: shown.remaining(), reset, wait }
    }

    /// Removes the wait, for a hit that is refunded.
    pub(crate) fn without_wait(self) -> Self {
        Self { wait: 0, ..self }
    }

    /// Returns the values of a limit on requests in flight.
    pub(super) fn in_flight(limit: u32, remaining: u32) -> Self {
        Self { limit, remaining, reset: NO_RESET, wait: 0 }
    }

    /// Removes the reset and the wait, for a limit on requests in flight.
    pub(crate) fn without_reset(self) -> Self {
        Self::in_flight(self.limit, self.remaining)
    }

    pub(super) fn wait(self) -> u32 {
        self.wait
    }

    /// Writes the fields and replaces existing ones.
    #[inline]
    pub(super) fn write(self, names: FieldNames, headers: &mut HeaderMap) {
        set(headers, names.limit, repeated(self.limit.into()));
        set(headers, names.remaining, number(self.remaining.into()));
        if self.reset == NO_RESET {
            headers.remove(names.reset);
        } else {
            set(headers, names.reset, repeated(self.reset));
        }
    }

    /// Writes the fields, unless the response already has all three and reports at most as many
    /// remaining units. On a tie, the fields of the inner layer stay.
    ///
    /// The fields of a rate stay or replace those of a limit on requests in flight, which have no reset,
    /// because a client can plan with them.
    pub(super) fn write_if_fewer(self, names: FieldNames, headers: &mut HeaderMap) {
        let written = |name| headers.get(name).and_then(digits);
        let is_complete = written(&names.limit).is_some() && written(&names.reset).is_some();
        let stays = match written(&names.remaining) {
            None => false,
            Some(_) if self.reset == NO_RESET && is_complete => true,
            Some(remaining) => {
                let is_in_flight = self.reset == NO_RESET && !headers.contains_key(&names.reset);
                remaining <= self.remaining.into() && written(&names.limit).is_some() && (is_complete || is_in_flight)
            }
        };
        if !stays {
            self.write(names, headers);
        }
    }
}

fn digits(value: &HeaderValue) -> Option<u64> {
    let text = value.to_str().ok()?;
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?
}

/// Returns 0 if other hits of the same costs would be admitted now. Otherwise returns the seconds until
/// more units remain, rounded up. A hit of several units may have to wait longer.
///
/// Limits on requests in flight have no wait, because the end of a request is not known.
#[inline]
pub(super) fn wait(decisions: &[Decision], requests: &[StorageRequest<'_>]) -> u32 {
    let decided = decisions.iter().zip(requests).filter(|(_, request)| !request.policy.counts_in_flight());
    let waits = decided.flat_map(|(decision, request)| {
        let limits = decision.statuses().iter().zip(request.policy.limits());
        limits.map(|(status, limit)| wait_of(status, limit, request.cost))
    });
    waits.max().unwrap_or(0)
}

/// Returns the [`wait`] for one limit.
#[inline]
pub(super) fn wait_of(status: &Status, limit: &Limit, cost: u32) -> u32 {
    if status.counted_remaining() >= limit.needed(cost) {
        return 0;
    }
    u32::try_from(seconds_up(status.reset_after())).unwrap_or(u32::MAX)
}

/// Sets a field. Does nothing if the map is full.
#[inline]
pub(super) fn set(headers: &mut HeaderMap, name: impl IntoHeaderName, value: HeaderValue) {
    let _ = headers.try_insert(name, value);
}

/// The numbers below this one are slices of a static text, because most limits are small.
const SMALL: usize = 10_000;

/// The small numbers with four digits each: `000000010002` and so on.
static DIGITS: &str = {
    static BYTES: [u8; 4 * SMALL] = {
        let mut digits = [b'0'; 4 * SMALL];
        let mut at = 0;
        while at < digits.len() {
            let power = [1_000, 100, 10, 1][at % 4];
            #[allow(clippy::cast_possible_truncation)] // a digit
            let digit = (at / 4 / power % 10) as u8;
            digits[at] += digit;
            at += 1;
        }
        digits
    };
    match str::from_utf8(&BYTES) {
        Ok(digits) => digits,
        Err(_) => unreachable!(),
    }
};

/// The size in bytes of the blocks that larger numbers are written into, one after the other. A
/// value keeps its block alive.
const BLOCK: usize = 1_024;

#[inline]
fn small(number: u64) -> Option<HeaderValue> {
    let number = usize::try_from(number).ok().filter(|number| *number < SMALL)?;
    let len = number.checked_ilog10().map_or(1, |log| log as usize + 1);
    Some(HeaderValue::from_static(&DIGITS[4 * (number + 1) - len..4 * (number + 1)]))
}

/// Returns a number as a header value. Suits numbers that change with each request.
fn number(number: u64) -> HeaderValue {
    small(number).unwrap_or_else(|| large(number))
}

/// Writes the number into the block of this thread. Allocates once for each block, and reuses a
/// block whose values have been dropped.
fn large(number: u64) -> HeaderValue {
    thread_local! { static NEXT: RefCell<BytesMut> = RefCell::new(BytesMut::with_capacity(BLOCK)) }
    let mut buffer = itoa::Buffer::new();
    let digits = buffer.format(number).as_bytes();
    let shared = NEXT.try_with(|next| {
        let mut next = next.borrow_mut();
        next.extend_from_slice(digits);
        HeaderValue::from_maybe_shared(next.split().freeze())
    });
    // While the thread exits, its block is already destroyed.
    shared.unwrap_or_else(|_| HeaderValue::from_bytes(digits)).expect("digits are a valid header value")
}

/// Returns a number as a header value. Each thread caches the values of recent numbers. Suits
/// numbers that many requests share, such as an amount or a time.
pub(super) fn repeated(number: u64) -> HeaderValue {
    const SLOTS: usize = 64;
    thread_local! { static RECENT: RefCell<[Option<(u64, HeaderValue)>; SLOTS]> = const { RefCell::new([const { None }; SLOTS]) } }
    let find = |recent: &RefCell<[Option<(u64, HeaderValue)>; SLOTS]>| {
        // A multiplicative hash, because two times often differ by a round number.
        #[allow(clippy::cast_possible_truncation)] // six bits
        let slot = &mut recent.borrow_mut()[(number.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 58) as usize];
        match slot {
            Some((cached, value)) if *cached == number => value.clone(),
            // The value is not a part of a block, because a cached value would keep its whole block
            // alive.
            _ => slot.insert((number, number.into())).1.clone(),
        }
    };
    small(number).unwrap_or_else(|| RECENT.try_with(find).unwrap_or_else(|_| number.into()))
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
            assert_eq!([repeated(it), repeated(it)], [value.clone(), value]);
        }
    }

    #[test]
    fn blocks_are_reused_after_their_values_are_dropped() {
        let first = number(1_000_000).as_bytes().as_ptr();
        let repeats = (0..10 * BLOCK).filter(|_| number(1_000_000).as_bytes().as_ptr() == first).count();
        assert!(repeats > 10, "{repeats}");
    }
}

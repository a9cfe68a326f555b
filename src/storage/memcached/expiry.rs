//! The expiry time of an item, in the format of memcached.

use std::time::Duration;

use crate::time::Timestamp;

/// The longest relative expiry. A server reads a larger number as an instant, in seconds since
/// 1970.
const MAX_RELATIVE: u64 = 30 * 86_400;

/// No expiry: the item stays until it is evicted. Used for instants after January 2038, which do
/// not fit into 32 bits, and if the server's time is unknown. The states in the text contain their
/// own expiry.
const NEVER: i32 = 0;

/// The margin for the uncertainty of a server's time, in seconds. It is added to an expiry that is
/// an instant, so that the item does not expire early.
const UNCERTAINTY: u64 = 3;

/// Returns the expiry for a text that is kept for `keep`, on a server whose clock shows `now`.
///
/// Servers count in whole seconds, and the first second may end immediately. So one second is
/// added.
///
/// If `now` is unknown, an expiry of more than 30 days is [`NEVER`], because an instant could be in
/// the server's past.
pub(super) fn after(keep: Duration, now: Option<Timestamp>) -> i32 {
    let partial = u64::from(keep.subsec_nanos() > 0);
    let span = keep.as_secs().saturating_add(partial + 1);
    let expiry = match now {
        _ if span <= MAX_RELATIVE => span,
        Some(now) => now.as_secs_ceil().saturating_add(span).saturating_add(UNCERTAINTY),
        None => return NEVER,
    };
    i32::try_from(expiry).unwrap_or(NEVER)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Guards against this defect: items with an expiry of more than 30 days expired at once.
    #[test]
    fn long_expiries_are_instants() {
        let now = Some(Timestamp::from_micros(1_800_000_000_000_000));
        for (millis, expected) in [
            (0, 1),
            (1, 2),
            (1_000, 2),
            (1_001, 3),
            (2_591_999_000, 2_592_000),
            (2_591_999_001, 1_802_592_004),
            (2_592_000_000, 1_802_592_004),
            (347_483_643_000, i32::MAX),
            (347_483_644_000, NEVER),
            (u64::MAX, NEVER),
        ] {
            assert_eq!(after(Duration::from_millis(millis), now), expected, "{millis} ms");
        }
        assert_eq!(after(Duration::MAX, now), NEVER);
    }

    #[test]
    fn server_with_an_unknown_clock_gets_no_instant() {
        for (secs, expected) in [(0, 1), (2_591_999, 2_592_000), (2_592_000, NEVER), (u64::MAX, NEVER)] {
            assert_eq!(after(Duration::from_secs(secs), None), expected, "{secs} s");
        }
    }
}

//! Until when a server keeps something, as it wants to be told.

use std::time::Duration;

use crate::Timestamp;

/// What is more is taken for an instant: seconds since 1970.
const LONGEST_SPAN: u64 = 30 * 86_400;

/// Until it is pushed out by others. Instants after January 2038 cannot be told; what stands there says by itself how long it matters.
const FOREVER: i32 = 0;

/// The time of a server is known to two and a half seconds: smaller differences are not corrected.
const UNCERTAIN: u64 = 3;

/// Returns the expiry for a text that is kept for `keep`, on a server whose clock shows `now`.
///
/// Servers count in whole seconds, and the first may be over at once: so it is one more than `keep` has.
/// If the server's time is unknown, it gets no instant, which it could take for one in the past.
pub(super) fn after(keep: Duration, now: Option<Timestamp>) -> i32 {
    let begun = u64::from(keep.subsec_nanos() > 0);
    let span = keep.as_secs().saturating_add(begun + 1);
    let expiry = match now {
        _ if span <= LONGEST_SPAN => span,
        Some(now) => now.as_secs_ceil().saturating_add(span).saturating_add(UNCERTAIN),
        None => return FOREVER,
    };
    i32::try_from(expiry).unwrap_or(FOREVER)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Field defect: what is to expire in more than 30 days is gone at once.
    #[test]
    fn long_spans_are_instants() {
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
            (347_483_644_000, FOREVER),
            (u64::MAX, FOREVER),
        ] {
            assert_eq!(after(Duration::from_millis(millis), now), expected, "{millis} ms");
        }
        assert_eq!(after(Duration::MAX, now), FOREVER);
    }

    #[test]
    fn server_with_an_unknown_clock_gets_no_instant() {
        for (secs, expected) in [(0, 1), (2_591_999, 2_592_000), (2_592_000, FOREVER), (u64::MAX, FOREVER)] {
            assert_eq!(after(Duration::from_secs(secs), None), expected, "{secs} s");
        }
    }
}

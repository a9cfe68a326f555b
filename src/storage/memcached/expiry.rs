//! Until when a server keeps something, as it wants to be told.

use std::time::{Duration, SystemTime};

/// What is more is taken for an instant: seconds since 1970.
const LONGEST_SPAN: u64 = 30 * 86_400;

/// Until it is pushed out by others. Instants after January 2038 cannot be told; what stands there says by itself how long it matters.
const FOREVER: i32 = 0;

/// Servers count in whole seconds, and the first may be over at once: so one more than `keep` has.
pub(super) fn after(keep: Duration) -> i32 {
    at(keep, SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default())
}

fn at(keep: Duration, now: Duration) -> i32 {
    let begun = u64::from(keep.subsec_nanos() > 0);
    let span = keep.as_secs().saturating_add(begun + 1);
    let told = if span <= LONGEST_SPAN { span } else { now.as_secs().saturating_add(span) };
    i32::try_from(told).unwrap_or(FOREVER)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Field defect: what is to expire in more than 30 days is gone at once.
    #[test]
    fn long_spans_are_instants() {
        let now = Duration::from_secs(1_800_000_000);
        for (millis, expected) in [
            (0, 1),
            (1, 2),
            (1_000, 2),
            (1_001, 3),
            (2_591_999_000, 2_592_000),
            (2_591_999_001, 1_802_592_001),
            (2_592_000_000, 1_802_592_001),
            (347_483_646_000, i32::MAX),
            (347_483_647_000, FOREVER),
            (u64::MAX, FOREVER),
        ] {
            assert_eq!(at(Duration::from_millis(millis), now), expected, "{millis} ms");
        }
        assert_eq!(at(Duration::MAX, now), FOREVER);
    }
}

//! The windows that were computed last.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use super::Unit;
use crate::time::Timestamp;

/// The bits of a window's duration in whole seconds. A year has less than 2^25 of them.
const DURATION_BITS: u32 = 25;

/// The bits of the unit.
const UNIT_BITS: u32 = 2;

const SECOND: u64 = 1_000_000;

/// A few windows that were computed last: the current one, and those before and after it. So no hit
/// computes with dates while a window lasts.
///
/// A window is one number, so that a reader never sees a part of it: its first instant, its duration
/// and its unit. Both times are whole seconds, because time zones are.
#[derive(Debug, Default)]
pub(in super::super) struct RecentWindows {
    windows: [AtomicU64; 4],
    /// The number of windows that were stored. The next one replaces the oldest.
    stored: AtomicUsize,
}

impl RecentWindows {
    /// Returns the window of this unit that contains `now`. Computes and stores it if it is not one of
    /// the recent ones.
    #[inline]
    pub(in super::super) fn get(
        &self,
        unit: Unit,
        now: Timestamp,
        compute: impl FnOnce() -> Range<Timestamp>,
    ) -> Range<Timestamp> {
        let mut known = self.windows.iter().map(|packed| unpack(packed.load(Ordering::Relaxed)));
        let found = known.find(|(of, window)| *of == unit as u64 && window.contains(&now));
        found.map_or_else(|| self.store(unit, compute()), |(_, window)| window)
    }

    #[cold]
    fn store(&self, unit: Unit, window: Range<Timestamp>) -> Range<Timestamp> {
        if let Some(packed) = pack(unit, &window) {
            let oldest = self.stored.fetch_add(1, Ordering::Relaxed) % self.windows.len();
            self.windows[oldest].store(packed, Ordering::Relaxed);
        }
        window
    }
}

/// A copy starts without windows.
impl Clone for RecentWindows {
    fn clone(&self) -> Self {
        Self::default()
    }
}

/// Returns the window as a number, if it is exact.
fn pack(unit: Unit, window: &Range<Timestamp>) -> Option<u64> {
    let [start, duration] = [window.start.as_micros(), window.end.since(window.start)].map(|micros| micros / SECOND);
    let packed = (start << (DURATION_BITS + UNIT_BITS)) | (duration << UNIT_BITS) | unit as u64;
    (unpack(packed) == (unit as u64, window.clone())).then_some(packed)
}

/// Returns the unit and the window. An empty window is none.
#[inline]
fn unpack(packed: u64) -> (u64, Range<Timestamp>) {
    let duration = (packed >> UNIT_BITS) % (1 << DURATION_BITS) * SECOND;
    let start = Timestamp::from_micros((packed >> (DURATION_BITS + UNIT_BITS)) * SECOND);
    (packed % (1 << UNIT_BITS), start..start.plus(duration))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn window(start: u64, end: u64) -> Range<Timestamp> {
        Timestamp::from_micros(start)..Timestamp::from_micros(end)
    }

    #[test]
    fn recent_windows_are_not_computed_again() {
        let recent = RecentWindows::default();
        let get = |unit, now, computed| {
            let mut is_computed = false;
            let found = recent.get(unit, Timestamp::from_micros(now), || {
                is_computed = true;
                computed
            });
            (found, is_computed)
        };
        let [first, second] = [window(SECOND, 3 * SECOND), window(3 * SECOND, 9 * SECOND)];
        assert_eq!(get(Unit::Day, SECOND, first.clone()), (first.clone(), true));
        assert_eq!(get(Unit::Day, 3 * SECOND, second.clone()), (second.clone(), true));
        assert_eq!(get(Unit::Day, SECOND, window(0, 0)), (first.clone(), false));
        assert_eq!(get(Unit::Day, 3 * SECOND - 1, window(0, 0)), (first, false));
        assert_eq!(get(Unit::Day, 9 * SECOND - 1, window(0, 0)), (second.clone(), false));
        assert_eq!(get(Unit::Week, SECOND, second.clone()), (second, true), "the unit is another one");
    }

    #[test]
    fn windows_that_are_no_whole_seconds_are_not_stored() {
        for window in [window(1, SECOND), window(0, u64::MAX), window(u64::MAX - 1, u64::MAX)] {
            let recent = RecentWindows::default();
            for _ in 0..2 {
                assert_eq!(recent.get(Unit::Year, window.start, || window.clone()), window);
            }
            assert!(recent.windows.iter().all(|packed| packed.load(Ordering::Relaxed) == 0));
        }
    }
}

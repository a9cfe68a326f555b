//! Estimates the time of a server. Decisions on its keys, and long expiries, use that time.
//!
//! A server reports its time in `stats`, in whole seconds. So this machine knows the difference to
//! its own clock only to within 1.5 seconds, and corrects only larger differences. With NTP on all
//! machines, there is nothing to correct.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::storage::Clock;
use crate::time::Timestamp;

/// The time between two requests for the server's time, while the server is in use.
const INTERVAL: Duration = Duration::from_secs(60);

/// The mean delay of a reported time, in microseconds. A server counts whole seconds from its
/// start, and its timer may be late. So the reported time is between 2 seconds ago and now.
const DELAY: i64 = 1_000_000;

/// The uncertainty of an offset, in microseconds. Smaller offsets are not corrected.
const TOLERANCE: i64 = 1_500_000;

/// The clock of this machine.
#[derive(Debug)]
pub(super) struct MachineClock;

impl Clock for MachineClock {
    fn now(&self) -> Timestamp {
        Timestamp::wall_clock()
    }
}

/// An estimate of one server's time.
pub(super) struct ServerTime {
    machine: Arc<dyn Clock>,
    started: Instant,
    is_known: AtomicBool,
    /// The correction of the machine's time, in microseconds.
    offset: AtomicI64,
    /// The time of the last request, in microseconds since `started`.
    requested: AtomicU64,
}

impl ServerTime {
    pub(super) fn new(machine: Arc<dyn Clock>) -> Self {
        Self {
            machine,
            started: Instant::now(),
            is_known: AtomicBool::new(false),
            offset: AtomicI64::new(0),
            requested: AtomicU64::new(0),
        }
    }

    /// Returns the estimate of the server's time: the machine's time plus the correction.
    pub(super) fn now(&self) -> Timestamp {
        self.corrected(self.machine.now())
    }

    /// Returns [`now`](Self::now), or `None` if the server has not reported its time.
    pub(super) fn known(&self) -> Option<Timestamp> {
        self.is_known.load(Ordering::Relaxed).then(|| self.now())
    }

    /// Returns the machine's time, for [`learn`](Self::learn).
    pub(super) fn machine(&self) -> Timestamp {
        self.machine.now()
    }

    /// Returns `true` if the last request for the server's time was at least a minute ago. Then the
    /// caller must send a request, because this call is recorded as one.
    pub(super) fn is_due(&self) -> bool {
        let (now, requested) = (self.elapsed(), self.requested.load(Ordering::Relaxed));
        let is_due = u128::from(now.saturating_sub(requested)) >= INTERVAL.as_micros();
        is_due && self.requested.compare_exchange(requested, now, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    /// Updates the estimate. The server reported `seconds` since 1970, and the machine's clock
    /// showed `requested_at` when the request was sent.
    pub(super) fn learn(&self, requested_at: Timestamp, seconds: u64) {
        let trip = signed(self.machine.now().since(requested_at));
        let measured =
            signed(seconds.saturating_mul(1_000_000)) + DELAY - (signed(requested_at.as_micros()) + trip / 2);
        self.requested.store(self.elapsed(), Ordering::Relaxed);
        self.is_known.store(true, Ordering::Relaxed);
        let known = self.offset.load(Ordering::Relaxed);
        // Small differences are ignored, so that the time does not jump at every report.
        if measured.abs_diff(known) <= (TOLERANCE + trip / 2).unsigned_abs() {
            return;
        }
        let offset = if measured.abs() <= TOLERANCE + trip / 2 { 0 } else { measured };
        self.offset.store(offset, Ordering::Relaxed);
        #[cfg(feature = "tracing")]
        tracing::warn!(
            seconds = offset / 1_000_000,
            "clock of this machine differs from the memcached server's clock, which is used; check NTP on both"
        );
    }

    fn corrected(&self, machine: Timestamp) -> Timestamp {
        let offset = self.offset.load(Ordering::Relaxed);
        if offset < 0 { machine.minus(offset.unsigned_abs()) } else { machine.plus(offset.unsigned_abs()) }
    }

    fn elapsed(&self) -> u64 {
        crate::time::micros(self.started.elapsed())
    }
}

/// Converts microseconds to a signed number of at most `i64::MAX / 4`. This is later than every
/// valid instant, and leaves room for the sums in [`learn`](ServerTime::learn).
fn signed(micros: u64) -> i64 {
    i64::try_from(micros).unwrap_or(i64::MAX).min(i64::MAX / 4)
}

impl fmt::Debug for ServerTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServerTime")
            .field("offset", &self.offset)
            .field("is_known", &self.is_known)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::storage::ManualClock;

    const YEAR: u64 = 365 * 86_400;

    /// Returns the time that a correct server reports, with a delay in microseconds.
    fn reported(now: Timestamp, delay: u64) -> u64 {
        now.minus(delay).as_micros() / 1_000_000
    }

    #[test]
    fn correct_machine_clock_is_not_changed() {
        for delay in (0..1_000_000).step_by(99_000) {
            for fraction in (0..1_000_000).step_by(70_000) {
                let clock = ManualClock::new(Timestamp::from_micros(1_800_000_000_000_000 + fraction));
                let time = ServerTime::new(Arc::new(clock.clone()));
                assert_eq!(time.known(), None);
                for _ in 0..3 {
                    time.learn(clock.now(), reported(clock.now(), delay));
                    assert_eq!(time.known(), Some(clock.now()));
                    clock.advance(Duration::from_millis(60_123));
                }
            }
        }
    }

    #[test]
    fn largest_times_do_not_overflow() {
        for seconds in [9_223_372_036_853, 9_223_372_036_854, 9_223_372_036_855, u64::MAX] {
            let time = ServerTime::new(Arc::new(ManualClock::default()));
            time.learn(time.machine(), seconds);
            assert!(time.now() > time.machine(), "{seconds} s");
        }
    }

    #[test]
    fn wrong_machine_clock_is_corrected_to_a_second() {
        let right = ManualClock::new(Timestamp::from_micros(1_800_000_000_300_000));
        for ahead in [3, 60, 61, 90 * 86_400, YEAR] {
            for is_ahead in [false, true] {
                let wrong =
                    |now: Timestamp| if is_ahead { now.plus(ahead * 1_000_000) } else { now.minus(ahead * 1_000_000) };
                let clock = ManualClock::new(wrong(right.now()));
                let time = ServerTime::new(Arc::new(clock.clone()));
                time.learn(clock.now(), reported(right.now(), 400_000));
                let off = time.now().as_micros().abs_diff(right.now().as_micros());
                assert!(off <= 1_000_000, "{off} us off, of {ahead} s");
                // The next report changes nothing.
                let before = time.now();
                time.learn(clock.now(), reported(right.now(), 900_000));
                assert_eq!(time.now(), before);
                // An operator corrects the machine's clock.
                clock.set(right.now());
                time.learn(clock.now(), reported(right.now(), 400_000));
                assert_eq!(time.now(), right.now());
            }
        }
    }
}

//! The clock of a server, by which its keys are decided and expire.
//!
//! A server reports its time in `stats`, in whole seconds. So a node learns how far its own clock is off,
//! to about a second, and corrects what is beyond that. Nodes with clocks set by NTP correct nothing.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::Timestamp;
use crate::storage::Clock;

/// The time between two questions for a server's time while it is in use.
const EVERY: Duration = Duration::from_secs(60);

/// A server counts whole seconds, from the second of its start, and its timer may be late. So the time that
/// it reports is between 2 seconds ago and now.
const LATE: i64 = 1_000_000;

/// An offset that is as uncertain as that is not corrected.
const TOLERANCE: i64 = 1_500_000;

/// The clock of this machine.
#[derive(Debug)]
pub(super) struct MachineClock;

impl Clock for MachineClock {
    fn now(&self) -> Timestamp {
        Timestamp::wall_clock()
    }
}

/// One server's time, as far as it is known.
pub(super) struct ServerTime {
    machine: Arc<dyn Clock>,
    started: Instant,
    is_known: AtomicBool,
    /// The correction of the machine's time, in microseconds.
    offset: AtomicI64,
    /// When it was last asked for, in microseconds since `started`.
    asked: AtomicU64,
}

impl ServerTime {
    pub(super) fn new(machine: Arc<dyn Clock>) -> Self {
        Self {
            machine,
            started: Instant::now(),
            is_known: AtomicBool::new(false),
            offset: AtomicI64::new(0),
            asked: AtomicU64::new(0),
        }
    }

    /// Returns the machine's time, corrected by the server's.
    pub(super) fn now(&self) -> Timestamp {
        self.corrected(self.machine.now())
    }

    /// Returns the same if the server has reported its time.
    pub(super) fn known(&self) -> Option<Timestamp> {
        self.is_known.load(Ordering::Relaxed).then(|| self.now())
    }

    /// The machine's time, for [`learn`](Self::learn).
    pub(super) fn machine(&self) -> Timestamp {
        self.machine.now()
    }

    /// Returns `true` once a minute: the caller asks the server.
    pub(super) fn is_due(&self) -> bool {
        let (now, asked) = (self.elapsed(), self.asked.load(Ordering::Relaxed));
        let is_due = u128::from(now.saturating_sub(asked)) >= EVERY.as_micros();
        is_due && self.asked.compare_exchange(asked, now, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    /// Learns from a report of `seconds` that was asked for when the machine's clock showed `asked`.
    pub(super) fn learn(&self, asked: Timestamp, seconds: u64) {
        let answered = self.machine.now();
        let trip = signed(answered.since(asked));
        let measured = signed(seconds.saturating_mul(1_000_000)) + LATE - (signed(asked.as_micros()) + trip / 2);
        self.asked.store(self.elapsed(), Ordering::Relaxed);
        self.is_known.store(true, Ordering::Relaxed);
        let known = self.offset.load(Ordering::Relaxed);
        // A small difference changes nothing: time should not jump at every report.
        if measured.abs_diff(known) <= (TOLERANCE + trip / 2).unsigned_abs() {
            return;
        }
        let offset = if measured.abs() <= TOLERANCE + trip / 2 { 0 } else { measured };
        self.offset.store(offset, Ordering::Relaxed);
        #[cfg(feature = "tracing")]
        tracing::warn!(
            seconds = offset / 1_000_000,
            "this machine's clock differs from the memcached server's, which decides: check NTP on both"
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

/// No instant is that late.
fn signed(micros: u64) -> i64 {
    i64::try_from(micros).unwrap_or(i64::MAX / 4)
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

    /// The time that a server reports which is right, up to 2 seconds late.
    fn reported(now: Timestamp, late: u64) -> u64 {
        now.minus(late).as_micros() / 1_000_000
    }

    #[test]
    fn machine_that_is_right_corrects_nothing() {
        for late in (0..1_000_000).step_by(99_000) {
            for fraction in (0..1_000_000).step_by(70_000) {
                let clock = ManualClock::new(Timestamp::from_micros(1_800_000_000_000_000 + fraction));
                let time = ServerTime::new(Arc::new(clock.clone()));
                assert_eq!(time.known(), None);
                for _ in 0..3 {
                    time.learn(clock.now(), reported(clock.now(), late));
                    assert_eq!(time.known(), Some(clock.now()));
                    clock.advance(Duration::from_millis(60_123));
                }
            }
        }
    }

    #[test]
    fn machine_that_is_wrong_is_corrected_to_a_second() {
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
                // The next report does not make it jump.
                let before = time.now();
                time.learn(clock.now(), reported(right.now(), 900_000));
                assert_eq!(time.now(), before);
                // The machine's clock is set.
                clock.set(right.now());
                time.learn(clock.now(), reported(right.now(), 400_000));
                assert_eq!(time.now(), right.now());
            }
        }
    }
}

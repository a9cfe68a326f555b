use std::time::Instant;

use super::wall_time::TickSource;
use crate::time::micros;

/// Measures time with the processor's tick counter, which is faster to read than the system's
/// clock.
#[derive(Debug)]
pub(super) struct Ticks {
    counter: quanta::Clock,
    /// The value of the counter at the start.
    first: u64,
    /// The length of a tick, in 2^-64 microseconds.
    micros_per_tick: u64,
    start: Instant,
}

impl TickSource for Ticks {
    fn start() -> Self {
        let counter = quanta::Clock::new();
        let (first, start) = (counter.raw(), Instant::now());
        Self { micros_per_tick: micros_per_tick(&counter), counter, first, start }
    }

    #[inline]
    fn elapsed(&self) -> u64 {
        let ticks = self.counter.raw().saturating_sub(self.first);
        #[allow(clippy::cast_possible_truncation)] // the upper 64 bits of 128
        let elapsed = ((u128::from(ticks) * u128::from(self.micros_per_tick)) >> 64) as u64;
        elapsed
    }

    fn monotonic(&self, _elapsed: u64) -> u64 {
        micros(self.start.elapsed())
    }
}

/// Returns the length of a tick in 2^-64 microseconds: the length of many ticks, divided by their
/// number. The rounding error is less than a nanosecond per second.
fn micros_per_tick(counter: &quanta::Clock) -> u64 {
    const MANY: u32 = 40;
    // Nanoseconds of 2^40 ticks, which are 2^24 / 1000 times the microseconds of 2^64 ticks.
    let nanos = u128::from(counter.delta_as_nanos(0, 1 << MANY));
    u64::try_from((nanos << (u64::BITS - MANY)) / 1_000).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conversion_of_ticks_is_exact_to_a_microsecond() {
        let ticks = Ticks::start();
        for count in [1_000_000, 3_000_000_000, 1 << 40] {
            let nanos = ticks.counter.delta_as_nanos(0, count);
            #[allow(clippy::cast_possible_truncation)]
            let micros = ((u128::from(count) * u128::from(ticks.micros_per_tick)) >> 64) as u64;
            assert!(micros.abs_diff(nanos / 1_000) <= 1, "{count} ticks are {nanos} ns, not {micros} us");
        }
    }

    #[test]
    fn counter_that_restarts_reads_as_zero() {
        let mut ticks = Ticks::start();
        ticks.first += 1_000_000_000_000_000;
        assert_eq!(ticks.elapsed(), 0);
    }
}

//! The memory of a log.

use std::time::Duration;

use super::*;

#[test]
fn a_log_that_was_long_releases_memory() {
    let mut log = Log::default();
    for at in 0..1_000 {
        log.add(Timestamp::from_micros(at), 2_000, 1);
    }
    assert!(log.bytes() >= 1_000);
    log.add(Timestamp::from_micros(2_998), 2_000, 1);
    assert!(log.bytes() < 300, "{} bytes of {:?}", log.bytes(), log);
}

#[test]
fn a_long_log_releases_memory_while_its_entries_expire() {
    let mut log = Log::default();
    for at in 0..40_000 {
        log.add(Timestamp::from_micros(at), PERIOD, 1);
    }
    // Each of these hits drops many entries.
    for step in 1..=400 {
        let now = PERIOD + step * 100 - 1;
        log.add(Timestamp::from_micros(now), PERIOD, 1);
        let entries = log.entries().count();
        assert!(log.bytes() <= 6 * entries + 24 * MOST, "{} bytes of {entries}", log.bytes());
    }
    assert_eq!(log.entries().count(), 400);
    assert!(log.bytes() <= 17 * MOST, "{} bytes", log.bytes());
}

/// Logs of hits at random instants, at a steady rate on average.
#[test]
fn a_full_log_takes_at_most_six_bytes_per_hit_from_a_thousand_hits_on() {
    const DAY: u64 = 86_400_000_000;
    for (amount, most) in [(150, 12.0), (400, 8.5), (1_000, 6.0), (2_000, 6.0), (10_000, 6.0), (100_000, 6.0)] {
        let mut pair = Pair::new(amount);
        let mut log = Log::default();
        let (mut now, mut sum, mut hits) = (DAY, 0, 0);
        for hit in 0..3 * amount {
            // The time between hits, in microseconds, is exponentially distributed.
            #[allow(clippy::cast_precision_loss)]
            let (random, mean) = ((pair.below(1 << 30) + 1) as f64 / f64::from(1 << 30), (DAY / amount) as f64);
            now += Duration::from_secs_f64(-random.ln() * mean).as_secs();
            log.add(Timestamp::from_micros(now), DAY, 1);
            if hit >= 2 * amount && hit % (amount / 50) == 0 {
                sum += log.bytes() as u64;
                hits += log.entries().count() as u64;
            }
        }
        #[allow(clippy::cast_precision_loss)]
        let mean = sum as f64 / hits as f64;
        assert!(mean <= most, "{mean} bytes for each of {amount} hits");
    }
}

#[test]
fn refunds_in_the_middle_of_a_long_log_release_memory() {
    let mut log = Log::default();
    for at in 0..60_000 {
        log.add(Timestamp::from_micros(at), PERIOD, 1);
    }
    for at in (0..60_000).filter(|at| at % 100 != 0) {
        log.take_back(Timestamp::from_micros(at), PERIOD, 1);
    }
    log.add(Timestamp::from_micros(60_000), PERIOD, 1);
    assert_eq!(log.entries().count(), 601);
    assert!(log.bytes() <= 6 * 601 + 16 * MOST / 4, "{} bytes", log.bytes());
}

/// Refunds leave few entries after those in the ring.
#[test]
fn a_log_is_a_ring_again_when_half_of_the_entries_of_a_ring_are_left() {
    let longest = LONGEST_RING as u64;
    for (left, is_ring) in [(40, true), (longest / 2, true), (longest / 2 + 1, false), (longest - 1, false)] {
        let mut log = Log::default();
        for at in 0..=longest {
            assert!(log.entries.is_ring());
            log.add(Timestamp::from_micros(at), PERIOD, 1);
        }
        assert!(!log.entries.is_ring(), "{} entries", longest + 1);
        for at in left..=longest {
            log.take_back(Timestamp::from_micros(at), PERIOD, 1);
        }
        log.add(Timestamp::from_micros(longest + 1), PERIOD, 1);
        assert_eq!((log.entries().count() as u64, log.entries.is_ring()), (left + 1, is_ring));
        let entries = (0..left).chain([longest + 1]).map(|at| (Timestamp::from_micros(at), 1));
        assert!(log.entries().eq(entries), "the entries differ");
    }
}

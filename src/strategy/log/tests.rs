use std::time::Duration;

use super::chunks::MOST;
use super::*;

/// A reference implementation: a plain list of instants and units that computes every result by a
/// sum.
#[derive(Debug, Default)]
struct Model {
    until: u64,
    entries: VecDeque<(u64, u32)>,
}

impl Model {
    fn add(&mut self, now: u64, period: u64, units: u32) {
        while self.entries.front().is_some_and(|&(at, _)| now.saturating_sub(at) >= period) {
            self.entries.pop_front();
        }
        let mut here = units;
        while let Some(&(_, ahead)) = self.entries.back().filter(|&&(at, _)| at >= now) {
            here += ahead;
            self.entries.pop_back();
        }
        if here > 0 {
            self.entries.push_back((now, here));
        }
        self.until = now + period;
    }

    fn take_back(&mut self, at: u64, period: u64, units: u32) -> bool {
        if let Some(index) = self.entries.iter().position(|entry| entry.0 == at) {
            let left = self.entries[index].1.saturating_sub(units);
            self.entries[index].1 = left;
            if left == 0 {
                self.entries.remove(index);
            }
        }
        self.until = self.entries.back().map_or(0, |&(at, _)| at + period);
        !self.entries.is_empty()
    }

    fn active(&self, now: u64, period: u64) -> u64 {
        let is_active = |at: u64| now.saturating_sub(at) < period;
        self.entries.iter().filter(|&&(at, _)| is_active(at)).map(|&(_, units)| u64::from(units)).sum()
    }

    fn falls_to(&self, units: u64, now: u64, period: u64) -> Option<u64> {
        let mut left: u64 = self.entries.iter().map(|&(_, units)| u64::from(units)).sum();
        for &(at, here) in &self.entries {
            left -= u64::from(here);
            if left <= units {
                return Some(at.min(now) + period);
            }
        }
        None
    }
}

/// A log and its model, to which the same operations are applied.
struct Pair {
    log: Log,
    model: Model,
    now: u64,
    random: u64,
}

const PERIOD: u64 = 1_000_000;

impl Pair {
    fn new(seed: u64) -> Self {
        Self { log: Log::default(), model: Model::default(), now: 10 * PERIOD, random: seed }
    }

    /// Returns a random number below `end` (splitmix64).
    fn below(&mut self, end: usize) -> usize {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.random;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((mixed ^ (mixed >> 31)) % end.max(1) as u64).unwrap()
    }

    fn len(&self) -> usize {
        self.model.entries.len()
    }

    fn add(&mut self, units: u32) {
        let now = Timestamp::from_micros(self.now);
        let (growth, bytes, until) = (self.log.growth_at(now), self.log.bytes(), self.log.until());
        let (last, is_ring) = (self.log.entries.last_at(), self.log.entries.is_ring());
        self.log.add(now, PERIOD, units);
        self.model.add(self.now, PERIOD, units);
        let added = self.log.bytes().saturating_sub(bytes);
        // A part of a chunk, if expired entries make less room than the new one takes.
        let part = if growth == 0 && !is_ring { 2 * MOST } else { 0 };
        // Adding 0 units moves the end of a log and adds no entry. Strategies do it only if the
        // clock goes back.
        let is_predictable = last.is_none_or(|last| last.plus(PERIOD) == until);
        assert!(!is_predictable || added <= growth + part, "{added} added, {growth} predicted, {} entries", self.len());
    }

    /// Adds `times` entries, at intervals below `step`.
    fn add_many(&mut self, times: usize, step: usize) {
        for _ in 0..times {
            self.now += self.below(step) as u64;
            let units = u32::try_from(self.below(4)).unwrap();
            self.add(units);
        }
    }

    /// Refunds up to `units` of each of `times` entries, starting with index `from`.
    fn refund(&mut self, from: usize, times: usize, units: u32) {
        for (at, _) in self.model.entries.iter().skip(from).take(times).copied().collect::<Vec<_>>() {
            let left = self.log.take_back(Timestamp::from_micros(at), PERIOD, units);
            assert_eq!(left, self.model.take_back(at, PERIOD, units));
        }
    }

    fn check(&mut self) {
        let entries = self.model.entries.iter().map(|&(at, units)| (Timestamp::from_micros(at), units));
        assert!(self.log.entries().eq(entries.clone()), "the entries differ");
        assert_eq!(self.log.until(), Timestamp::from_micros(self.model.until));
        assert_eq!(self.log, Log::from_entries(self.log.until(), entries));
        let total = usize::try_from(self.model.active(self.now, u64::MAX)).unwrap();
        for _ in 0..20 {
            let now = self.now - PERIOD / 4 + self.below(usize::try_from(PERIOD * 2).unwrap()) as u64;
            let at = Timestamp::from_micros(now);
            assert_eq!(self.log.active(at, PERIOD), self.model.active(now, PERIOD));
            let units = self.below(total + 2) as u64;
            let falls = self.model.falls_to(units, now, PERIOD).map(Timestamp::from_micros);
            assert_eq!(self.log.falls_to(units, at, PERIOD), falls, "to {units} of {total}");
        }
    }
}

/// Applies random additions, refunds, expiries and clock steps to logs of up to 24,000 entries.
#[test]
fn a_log_behaves_like_a_plain_list() {
    for seed in 0..6 {
        let mut pair = Pair::new(seed);
        let mut longest = 0;
        pair.add_many(17_500, 40);
        for _ in 0..60 {
            match pair.below(12) {
                0..=4 => {
                    let times = pair.below(6_000);
                    pair.add_many(times, 40);
                }
                // Adds single entries, so that the oldest chunks expire.
                5 => pair.add_many(300, 2_000),
                6 => pair.now += pair.below(300_000) as u64,
                7 => pair.now -= pair.below(30_000) as u64,
                8 => {
                    let from = pair.below(pair.len());
                    let times = pair.below(1_200);
                    pair.refund(from, times, 4);
                }
                9 => {
                    for _ in 0..100 {
                        let from = pair.below(pair.len());
                        pair.refund(from, 1, 1);
                    }
                }
                10 => pair.refund(0, 20, 2),
                _ => pair.refund(pair.len().saturating_sub(20), 20, 2),
            }
            pair.check();
            longest = longest.max(pair.len());
        }
        assert!(longest > LONGEST_RING, "seed {seed}: the log never has chunks, it has at most {longest} entries");
        pair.now += 2 * PERIOD;
        pair.add(1);
        pair.check();
        assert!(pair.log.bytes() <= 16 * 16);
    }
}

#[test]
fn refunding_every_entry_leaves_an_empty_log() {
    for from_the_newest in [false, true] {
        let mut log = Log::default();
        let entries = (0..20_000).map(|at| (10 * PERIOD + at, 2)).collect::<Vec<_>>();
        for &(at, units) in &entries {
            log.add(Timestamp::from_micros(at), PERIOD, units);
        }
        let mut order = entries.clone();
        if from_the_newest {
            order.reverse();
        }
        for (taken, &(at, _)) in order.iter().enumerate() {
            let at = Timestamp::from_micros(at);
            assert!(log.take_back(at, PERIOD, 1));
            assert_eq!(log.take_back(at, PERIOD, 5), taken + 1 < order.len());
            let left = 2 * (order.len() - taken - 1) as u64;
            assert_eq!(log.active(at, PERIOD), left);
        }
        assert_eq!(log.entries().count(), 0);
        assert_eq!(log.until(), Timestamp::EPOCH);
    }
}

#[test]
fn entries_ahead_of_a_clock_that_went_back_move_to_now() {
    for back in [0, 1, 500, 1_024, 1_025, 10_000, 18_976, 19_999, 20_000, 30_000] {
        let mut log = Log::default();
        for at in 0..20_000 {
            log.add(Timestamp::from_micros(50_000 + at), PERIOD, 1);
        }
        let now = 50_000 + 19_999 - back;
        log.add(Timestamp::from_micros(now), PERIOD, 1);
        let kept = 20_000_u64.saturating_sub(back + 1);
        let expected = (0..kept).map(|at| (50_000 + at, 1)).chain([(now, u32::try_from(20_001 - kept).unwrap())]);
        assert!(log.entries().eq(expected.map(|(at, units)| (Timestamp::from_micros(at), units))), "{back} back");
    }
}

#[test]
fn a_clone_of_a_long_log_evolves_like_the_original() {
    let mut log = Log::default();
    for at in 0..20_000 {
        log.add(Timestamp::from_micros(at), PERIOD, 1);
    }
    let mut clone = log.clone();
    for at in 20_000..23_000 {
        log.add(Timestamp::from_micros(at), PERIOD, 1);
        clone.add(Timestamp::from_micros(at), PERIOD, 1);
    }
    assert_eq!(log, clone);
}

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

#[test]
fn a_log_is_a_ring_again_when_its_ring_has_room_for_all_entries_and_the_next_one() {
    let (longest, first) = (LONGEST_RING as u64, FIRST as u64);
    for (left, is_ring) in [(20, true), (first - 1, true), (first, false), (longest / 2, false), (longest - 1, false)] {
        let mut log = Log::default();
        for at in 0..=longest {
            assert!(log.entries.is_ring());
            log.add(Timestamp::from_micros(at), PERIOD, 1);
        }
        assert!(!log.entries.is_ring(), "{} entries", longest + 1);
        let oldest = longest + 1 - left;
        for at in 0..oldest {
            assert!(log.take_back(Timestamp::from_micros(at), PERIOD, 1));
        }
        assert!(!log.entries.is_ring(), "refunds decode only the oldest entries");
        let bytes = log.bytes();
        log.add(Timestamp::from_micros(longest + 1), PERIOD, 1);
        assert_eq!((log.entries().count() as u64, log.entries.is_ring()), (left + 1, is_ring));
        assert!(!is_ring || log.bytes() < bytes, "{} bytes, {bytes} before", log.bytes());
        let entries = (oldest..=longest + 1).map(|at| (Timestamp::from_micros(at), 1));
        assert!(log.entries().eq(entries), "the entries differ");
    }
}

/// Guards against this defect: a chunk is decoded as a whole, so a log grows although nothing has
/// checked that there is room.
#[test]
fn a_long_log_does_not_grow_when_its_oldest_entries_expire() {
    const LONG: u64 = 1_000 * PERIOD;
    // The time between hits in microseconds, which determines the number of entries of a chunk.
    for step in [1, 10, 1_000] {
        let mut log = Log::default();
        for number in 0..2_000 {
            log.add(Timestamp::from_micros(number * step), LONG, 1);
        }
        for number in 0..2_000 {
            let bytes = log.bytes();
            assert_eq!(log.expire(Timestamp::from_micros(number * step + LONG), LONG), number < 1_999);
            assert!(log.bytes() <= bytes, "{} bytes, {bytes} before entry {number} expired", log.bytes());
            assert_eq!(log.entries().count() as u64, 1_999 - number);
        }
    }
}

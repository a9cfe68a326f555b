//! Pseudorandom numbers and limits, the same in each run.

use std::time::Duration;

use tower_ratelimit::{
    Decision, ElasticWindow, FixedWindow, LeakyBucket, Limit, MovingWindow, Quota, SlidingWindowCounter, TokenBucket,
};

/// Pseudorandom numbers, the same in each run.
#[derive(Clone, Debug)]
pub struct Numbers(pub u64);

impl Numbers {
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit.max(1)
    }

    pub fn one_of<T: Copy>(&mut self, these: &[T]) -> T {
        these[usize::try_from(self.below(these.len() as u64)).unwrap()]
    }
}

/// A limit of any strategy and size.
pub fn random_limit(numbers: &mut Numbers) -> Limit {
    let micros = match numbers.below(6) {
        0 => 1 + numbers.below(50_000),
        1 => 1 + numbers.below(100_000_000),
        2 => 86_400_000_000 * (1 + numbers.below(30)),
        // Periods around which the instants of a log need one more byte.
        3 => (1 << numbers.one_of(&[31, 39, 47])) - numbers.below(2),
        4 => 1 + numbers.below(8),
        // A long period. An instant two periods from now is still exact in a double.
        _ => 1 << 50,
    };
    let kind = numbers.below(8);
    random_amount(numbers, kind, micros)
}

/// A limit of a random amount, with strategy number `kind` and a period of `micros` microseconds.
pub fn random_amount(numbers: &mut Numbers, kind: u64, micros: u64) -> Limit {
    let amount = match numbers.below(4) {
        0 => 1 + numbers.below(4),
        1 => 1 + numbers.below(50),
        2 => 1 + numbers.below(1_000_000),
        _ => u64::from(u32::MAX) - numbers.below(5),
    };
    let quota = Quota::per(u32::try_from(amount).unwrap(), Duration::from_micros(micros));
    let made = match kind {
        0 => Limit::try_new(FixedWindow::new(), quota),
        1 => Limit::try_new(FixedWindow::aligned(), quota),
        2 => Limit::try_new(ElasticWindow::new(), quota),
        3 => Limit::try_new(MovingWindow::new(), quota),
        4 => Limit::try_new(SlidingWindowCounter::new(), quota),
        5 => Limit::try_new(SlidingWindowCounter::aligned(), quota),
        6 => {
            let burst = u32::try_from(1 + numbers.below(2 * amount).min(4_000_000_000)).unwrap();
            quota.try_burst(burst).and_then(|quota| Limit::try_new(TokenBucket::new(), quota))
        }
        _ => Limit::try_new(LeakyBucket::new().queue(u32::try_from(numbers.below(9)).unwrap()), quota),
    };
    made.unwrap_or_else(|_| Limit::new(FixedWindow::new(), quota))
}

/// The actual cost of a hit: nothing, less, or up to three times the capacity more.
pub fn actual_cost(numbers: &mut Numbers, hit: &Decision, capacity: u64) -> u32 {
    let cost = u64::from(hit.cost());
    let actual = match numbers.below(3) {
        0 => 0,
        1 => numbers.below(cost + 1),
        _ => cost + numbers.below(3 * capacity),
    };
    u32::try_from(actual).unwrap_or(u32::MAX)
}

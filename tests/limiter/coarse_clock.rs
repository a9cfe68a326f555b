//! A memory storage whose clock advances in ticks, as the system's coarse clock does: strategies
//! admit no more than they promise plus the units of one tick, and `retry_after` is never too
//! short.

use std::time::Duration;

use common::policy;
use common::random::Numbers;
use tower_ratelimit::storage::{Clock, ManualClock};
use tower_ratelimit::{Decision, Key, MemoryStorage, RateLimiter, Timestamp};

const PERIOD: u64 = 1_000_000;
const AMOUNT: usize = 10;

/// The ticks of kernels with 1,000, 250, 300 and 100 timer interrupts per second, in microseconds.
const TICKS: [u64; 4] = [1_000, 4_000, 3_333, 10_000];

/// A tick that does not divide the period. Otherwise the ends of windows would coincide with ticks.
const UNEVEN_TICK: u64 = 3_333;

/// Each strategy, with the most units that it may admit in any period.
const POLICIES: [(&str, usize); 9] = [
    ("fixed-window 10/second", 2 * AMOUNT - 1),
    ("fixed-window-aligned 10/second", 2 * AMOUNT),
    ("elastic-window 10/second", AMOUNT),
    ("moving-window 10/second", AMOUNT),
    ("sliding-window-counter 10/second", 2 * AMOUNT),
    ("sliding-window-counter-aligned 10/second", 2 * AMOUNT),
    ("token-bucket 10/second", 2 * AMOUNT),
    ("token-bucket 10/second burst 3", 3 + AMOUNT),
    // A hit of 3 units starts all of them when the first is due.
    ("leaky-bucket 10/second queue 2", AMOUNT + 2),
];

/// Shows the time of the last tick of another clock.
#[derive(Debug)]
struct TickingClock {
    exact: ManualClock,
    tick: u64,
    resolution: u64,
}

impl Clock for TickingClock {
    fn now(&self) -> Timestamp {
        self.exact.now().floor_to(self.tick)
    }

    fn resolution(&self) -> Duration {
        Duration::from_micros(self.resolution)
    }
}

/// A client that sends hits, and waits for `retry_after` after about half of its refusals.
struct Client {
    exact: ManualClock,
    limiter: RateLimiter,
    numbers: Numbers,
    /// The exact times at which units started.
    admitted: Vec<(Timestamp, usize)>,
    refused: usize,
}

impl Client {
    fn new(text: &str, tick: u64, resolution: u64) -> Self {
        let exact = ManualClock::default();
        let clock = TickingClock { exact: exact.clone(), tick, resolution };
        let storage = MemoryStorage::builder().clock(clock).build().unwrap();
        let limiter = RateLimiter::with_storage(policy(text), storage);
        Self { exact, limiter, numbers: Numbers(tick + 7), admitted: Vec::new(), refused: 0 }
    }

    async fn hit(&mut self, cost: u32) -> Decision {
        let decision = self.limiter.hit_with_cost(&Key::from("k"), cost).await.unwrap();
        if decision.is_admitted() {
            let delay = u64::try_from(decision.delay().as_micros()).unwrap();
            self.admitted.push((self.exact.now().plus(delay), cost as usize));
        }
        decision
    }

    /// Returns the number of refusals of hits that had waited for `retry_after`.
    async fn run(&mut self) -> usize {
        let mut early = 0;
        for _ in 0..2_000 {
            self.exact.advance(Duration::from_micros(match self.numbers.below(40) {
                0 => self.numbers.below(3 * PERIOD),
                1..20 => 0,
                _ => self.numbers.below(PERIOD / 20),
            }));
            let cost = self.numbers.one_of(&[1, 1, 1, 2, 3]);
            let decision = self.hit(cost).await;
            if decision.is_admitted() {
                continue;
            }
            self.refused += 1;
            if self.numbers.below(2) == 0 {
                self.exact.advance(decision.retry_after().expect("the cost is within the capacity"));
                early += usize::from(self.hit(cost).await.is_refused());
            }
        }
        self.admitted.sort();
        early
    }

    /// Returns the most units that started within less than `span` of exact time.
    fn most_within(&self, span: u64) -> usize {
        let from = |first: usize| {
            let start = self.admitted[first].0;
            self.admitted[first..].iter().take_while(move |(at, _)| at.since(start) < span)
        };
        (0..self.admitted.len()).map(|first| from(first).map(|(_, units)| units).sum()).max().unwrap()
    }
}

#[tokio::test]
async fn no_period_minus_one_tick_has_more_units_than_promised() {
    for (text, most) in POLICIES {
        let mut exact = Client::new(text, 1, 0);
        exact.run().await;
        assert!(exact.most_within(PERIOD) <= most, "{text}: the clock is exact");
        for tick in TICKS {
            let mut client = Client::new(text, tick, tick);
            client.run().await;
            let units = client.most_within(PERIOD - tick);
            assert!(units <= most, "{text}, ticks of {tick} us: {units} units, at most {most} are promised");
            let counts = (client.admitted.len(), client.refused);
            assert!(counts.0 > 500 && counts.1 > 100, "{text}: {counts:?} hits were admitted and refused");
        }
    }
}

/// Shows that the test above can fail.
#[tokio::test]
async fn clock_that_lags_further_breaks_the_promise() {
    let tick = PERIOD / 4;
    // The promise of a moving window is tight: busy clients reach it.
    let mut client = Client::new("moving-window 10/second", tick, tick);
    client.run().await;
    assert!(client.most_within(PERIOD - tick) <= AMOUNT);
    assert!(client.most_within(PERIOD - tick / 3) > AMOUNT, "the promise holds with a longer tick, too");
}

#[tokio::test]
async fn retry_after_is_never_too_short() {
    for (text, _) in POLICIES {
        for (tick, resolution) in TICKS.map(|tick| (tick, tick)).into_iter().chain([(1, 0)]) {
            let early = Client::new(text, tick, resolution).run().await;
            assert_eq!(early, 0, "{text}, ticks of {tick} us");
        }
    }
}

/// Shows that the test above can fail.
#[tokio::test]
async fn retry_after_without_the_resolution_would_be_too_short() {
    for (text, _) in POLICIES.into_iter().filter(|(text, _)| !text.contains("aligned")) {
        let early = Client::new(text, UNEVEN_TICK, 0).run().await;
        assert!(early > 0, "{text}");
    }
}

#[tokio::test]
async fn retry_after_is_longer_by_the_resolution() {
    for (text, _) in POLICIES {
        let [mut exact, mut coarse] = [0, 4_000].map(|resolution| Client::new(text, 4_000, resolution));
        loop {
            let (first, second) = (exact.hit(1).await, coarse.hit(1).await);
            assert_eq!(first.is_admitted(), second.is_admitted(), "{text}");
            if let (Some(first), Some(second)) = (first.retry_after(), second.retry_after()) {
                assert_eq!(second.saturating_sub(first), Duration::from_millis(4), "{text}");
                break;
            }
        }
    }
}

/// A cost above the capacity is never admitted, so there is no wait to lengthen.
#[tokio::test]
async fn cost_above_the_capacity_has_no_retry_after() {
    for (text, _) in POLICIES {
        let decision = Client::new(text, 4_000, 4_000).hit(100).await;
        assert_eq!((decision.is_refused(), decision.retry_after()), (true, None), "{text}");
    }
}

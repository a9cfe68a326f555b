//! The slowest hits while a million keys come in.

use rustix::time::{ClockId, clock_gettime};
use tower_ratelimit::{Key, Policy, RateLimiter, SlidingWindowCounter, TokenBucket};

use crate::keys::{Orders, address};
use crate::measure::Samples;
use crate::subject::{self, admits};
use crate::table::{Goal, Table, Unit};

const KEYS: u32 = 1_000_000;
const FILLS: usize = 3;

/// 99.999 % of hits are faster.
const SLOWEST: usize = KEYS as usize / 100_000;
const SLOW: u64 = 300_000;

pub fn measure(table: &mut Table) {
    let name = |what: &str, strategy: &str| format!("A million new keys, {what}, {strategy}");
    let strategies = [
        ("TokenBucket", subject::daily(TokenBucket::new())),
        ("SlidingWindowCounter", subject::daily(SlidingWindowCounter::new())),
    ];
    let whats = ["99.999 % of hits", "slower than 0.3 ms", "slowest"];
    if !table.wants_any(strategies.iter().flat_map(|(strategy, _)| whats.map(|what| name(what, strategy)))) {
        return;
    }
    let (keys, addresses) = (Orders::new(KEYS, |i| Key::from(address(i))), Orders::new(KEYS, address));
    let governor = fills(addresses.all(), subject::governor, |governor, key| governor.check_key(key).is_ok());
    for (strategy, policy) in strategies {
        let ours = fills(keys.all(), || RateLimiter::new(Policy::clone(&policy)), admits);
        let [usual, slow, worst] = whats.map(|what| name(what, strategy));
        let goal = Goal::AtMost(SLOW as f64 / 1_000.0);
        table.row(&usual, Unit::Microseconds, &ours.usual, ("governor", &governor.usual), goal);
        table.row(&slow, Unit::Hits, &ours.slow, ("governor", &governor.slow), Goal::None);
        table.row(&worst, Unit::Microseconds, &ours.worst, ("governor", &governor.worst), Goal::None);
    }
}

/// A figure from each time the keys came in; times in microseconds of the thread's own.
struct Fills {
    usual: Samples,
    slow: Samples,
    worst: Samples,
}

fn fills<K, L>(keys: &[K], limiter: impl Fn() -> L, admits: impl Fn(&L, &K) -> bool) -> Fills {
    let fills: Vec<_> = (0..FILLS).map(|_| fill(keys, &limiter(), &admits)).collect();
    let each = |figure: fn(&[u64]) -> f64| Samples::new(fills.iter().map(|fill| figure(fill)).collect());
    Fills {
        usual: each(|sorted| micros(sorted[sorted.len() - 1 - SLOWEST])),
        slow: each(|sorted| (sorted.len() - sorted.partition_point(|&nanos| nanos <= SLOW)) as f64),
        worst: each(|sorted| micros(sorted[sorted.len() - 1])),
    }
}

/// What each hit cost in nanoseconds of the thread's own time, sorted.
fn fill<K, L>(keys: &[K], limiter: &L, admits: impl Fn(&L, &K) -> bool) -> Vec<u64> {
    let mut costs = vec![1; keys.len()];
    for (key, cost) in keys.iter().zip(&mut costs) {
        let start = thread_nanos();
        assert!(admits(limiter, key));
        *cost = thread_nanos() - start;
    }
    costs.sort_unstable();
    costs
}

/// Not what the clock on the wall says: somebody else's turn on the processor is no cost of a hit.
fn thread_nanos() -> u64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec.cast_unsigned() * 1_000_000_000 + time.tv_nsec.cast_unsigned()
}

fn micros(nanos: u64) -> f64 {
    nanos as f64 / 1_000.0
}

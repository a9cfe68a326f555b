//! The slowest hits while a million keys are added.

use tower_ratelimit::{Key, LocalLimiter, Policy, SlidingWindowCounter, TokenBucket};

use crate::keys::{Orders, address};
use crate::measure::{Samples, thread_time};
use crate::subject::{self, admits};
use crate::table::{Goal, Table, Unit};

const KEYS: u32 = 1_000_000;
const FILLS: usize = 3;

/// The number of hits above the 99.999th percentile.
const SLOWEST: usize = KEYS as usize / 100_000;
/// The CPU time above which a hit counts as slow, in nanoseconds.
const SLOW: u64 = 300_000;

pub fn measure(table: &mut Table) {
    let name = |figure: &str, strategy: &str| format!("A million new keys, {figure}, {strategy}");
    let strategies = [
        ("TokenBucket", subject::daily(TokenBucket::new())),
        ("SlidingWindowCounter", subject::daily(SlidingWindowCounter::new())),
    ];
    let figures = ["99.999 % of hits", "slower than 0.3 ms", "slowest"];
    if !table.wants_any(strategies.iter().flat_map(|(strategy, _)| figures.map(|figure| name(figure, strategy)))) {
        return;
    }
    let (keys, addresses) = (Orders::new(KEYS, |i| Key::from(address(i))), Orders::new(KEYS, address));
    let governor = fills(addresses.all(), subject::governor, |governor, key| governor.check_key(key).is_ok());
    for (strategy, policy) in strategies {
        let ours = fills(keys.all(), || LocalLimiter::new(Policy::clone(&policy)), admits);
        let [usual, slow, worst] = figures.map(|figure| name(figure, strategy));
        let goal = Goal::AtMost(SLOW as f64 / 1_000.0);
        table.row(&usual, Unit::Microseconds, &ours.usual, ("governor", &governor.usual), goal);
        table.row(&slow, Unit::Hits, &ours.slow, ("governor", &governor.slow), Goal::None);
        table.row(&worst, Unit::Microseconds, &ours.worst, ("governor", &governor.worst), Goal::None);
    }
}

/// The results, one figure per fill. Times are CPU times in microseconds.
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

/// Returns the CPU time of each hit in nanoseconds, sorted.
fn fill<K, L>(keys: &[K], limiter: &L, admits: impl Fn(&L, &K) -> bool) -> Vec<u64> {
    let mut costs = vec![1; keys.len()];
    for (key, cost) in keys.iter().zip(&mut costs) {
        let start = thread_time();
        assert!(admits(limiter, key));
        *cost = u64::try_from((thread_time() - start).as_nanos()).expect("a hit takes less than centuries");
    }
    costs.sort_unstable();
    costs
}

fn micros(nanos: u64) -> f64 {
    nanos as f64 / 1_000.0
}

//! Hits on new keys when the storage is full.

use std::cell::Cell;

use tower_ratelimit::{Key, LocalLimiter, MemoryStorage, Policy, SlidingWindowCounter, TokenBucket};

use crate::alloc::Count;
use crate::keys::{Orders, address};
use crate::measure::{Samples, interleave, time_each};
use crate::subject::{self, admits};
use crate::table::{Goal, Table, Unit};

const CAP: u32 = 100_000;

/// The number of new keys per sample, which evicts all known keys twice.
const BATCH: u32 = 2 * CAP;

pub fn measure(table: &mut Table) {
    memory(table, "Flood, bytes after 10 times the cap, TokenBucket", subject::daily(TokenBucket::new()));
    memory(
        table,
        "Flood, bytes after 10 times the cap, SlidingWindowCounter",
        subject::daily(SlidingWindowCounter::new()),
    );
    cost(table, "Flood, hit of a new key, TokenBucket", subject::daily(TokenBucket::new()), true);
    cost(table, "Flood, hit of a new key, SlidingWindowCounter", subject::daily(SlidingWindowCounter::new()), true);
    cost(table, "Flood, new key that finds no room, TokenBucket", subject::stingy(TokenBucket::new()), false);
}

fn capped(policy: Policy) -> LocalLimiter {
    let storage = MemoryStorage::builder().max_keys(CAP as usize).build().expect("the configuration is valid");
    LocalLimiter::with_storage(policy, storage)
}

fn memory(table: &mut Table, name: &str, policy: Policy) {
    if !table.wants(name) {
        return;
    }
    let count = Count::start();
    let limiter = capped(policy);
    let live_after = |new: std::ops::Range<u32>| {
        for i in new {
            assert!(admits(&limiter, &Key::from(address(i))));
        }
        Samples::one(count.live_bytes() / 1_000.0)
    };
    let (once, ten_times) = (live_after(0..CAP), live_after(CAP..10 * CAP));
    table.row(name, Unit::Kilobytes, &ten_times, ("once the cap", &once), Goal::CostAtMost(1.05));
}

/// Measures hits on new keys. `expected` is `true` if a full storage admits them.
fn cost(table: &mut Table, name: &str, policy: Policy, expected: bool) {
    if !table.wants(name) {
        return;
    }
    let (calm, flooded) = (capped(subject::daily(TokenBucket::new())), capped(policy));
    let known = Orders::new(CAP, |i| Key::from(address(i)));
    for key in known.all() {
        assert!(admits(&calm, key) && admits(&flooded, key));
    }
    let seen = Cell::new(CAP);
    let [new, known] = interleave([
        &mut || {
            let first = seen.replace(seen.get() + BATCH);
            let new: Vec<_> = (first..first + BATCH).map(|i| Key::from(address(i))).collect();
            time_each(&new, |key| assert_eq!(admits(&flooded, key), expected))
        },
        &mut || time_each(known.all(), |key| assert!(admits(&calm, key))),
    ]);
    let goal = if expected { Goal::CostAtMost(2.0) } else { Goal::None };
    table.row(name, Unit::Nanoseconds, &new, ("known key", &known), goal);
}

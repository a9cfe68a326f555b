//! The cost of complex policies: several limits, a long log.

use std::time::Duration;

use tower_ratelimit::storage::ManualClock;
use tower_ratelimit::{Key, LocalLimiter, MemoryStorage, MovingWindow, Policy, Quota};

use crate::alloc::allocations_per_call;
use crate::keys::{Orders, address};
use crate::measure::{Samples, interleave, time};
use crate::subject::{self, admits};
use crate::table::{Goal, Table, Unit};

pub fn measure(table: &mut Table) {
    three_limits(table, "Three limits in one policy, 1 address", 1);
    three_limits(table, "Three limits in one policy, 100,000 addresses", 100_000);
    moving_window(table);
    allocations(table);
}

fn three_limits(table: &mut Table, name: &str, count: u32) {
    if !table.wants(name) {
        return;
    }
    let (keys, addresses) = (Orders::new(count, |i| Key::from(address(i))), Orders::new(count, address));
    let limiter = LocalLimiter::new(subject::three_token_buckets(u32::MAX));
    subject::prepare(&limiter, keys.all());
    let governors = [(); 3].map(|()| subject::governor());
    for governor in &governors {
        subject::prepare_governor(governor, addresses.all());
    }
    let [ours, theirs] = interleave([
        &mut || {
            let mut keys = keys.walk(0);
            time(|| assert!(admits(&limiter, keys.next())))
        },
        &mut || {
            let mut keys = addresses.walk(0);
            time(|| {
                let key = keys.next();
                assert!(governors.iter().all(|governor| governor.check_key(key).is_ok()));
            })
        },
    ]);
    table.row(name, Unit::Nanoseconds, &ours, ("3 governors", &theirs), Goal::CostAtMost(0.6));
}

fn moving_window(table: &mut Table) {
    const NAME: &str = "MovingWindow, limit 10,000";
    if !table.wants(NAME) {
        return;
    }
    let subject = |limit: u32| {
        let clock = ManualClock::default();
        let storage = MemoryStorage::builder().clock(clock.clone()).build().expect("the configuration is valid");
        let policy = Policy::new(MovingWindow::new(), Quota::per_minute(limit));
        let (limiter, key) = (LocalLimiter::with_storage(policy, storage), Key::from("alice"));
        // The log is full, and the clock advances by the time until the next hit is admitted.
        let pace = Duration::from_secs(60) / limit;
        let hit = move || {
            clock.advance(pace);
            assert!(admits(&limiter, &key));
        };
        (0..limit).for_each(|_| hit());
        hit
    };
    let (mut long, mut short) = (subject(10_000), subject(10));
    let [long, short] = interleave([&mut || time(&mut long), &mut || time(&mut short)]);
    table.row(NAME, Unit::Nanoseconds, &long, ("limit 10", &short), Goal::CostAtMost(2.0));
}

fn allocations(table: &mut Table) {
    for (name, policy) in [
        ("Allocations of a hit, TokenBucket", subject::token_bucket()),
        ("Allocations of a hit, SlidingWindowCounter", subject::sliding_window_counter()),
        ("Allocations of a hit, three limits", subject::three_token_buckets(u32::MAX)),
        ("Allocations of a refused hit, MovingWindow", subject::stingy(MovingWindow::new())),
    ] {
        if !table.wants(name) {
            continue;
        }
        let (limiter, governor) = (LocalLimiter::new(policy), subject::governor());
        let (address, key) = (address(0), Key::from(address(0)));
        let ours = Samples::one(allocations_per_call(|| _ = admits(&limiter, &key)));
        let theirs = Samples::one(allocations_per_call(|| _ = governor.check_key(&address)));
        table.row(name, Unit::Allocations, &ours, ("governor", &theirs), Goal::AtMost(0.0));
    }
}

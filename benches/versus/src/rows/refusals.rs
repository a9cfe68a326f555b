//! Refusals: on one key from two threads, and compared with admissions.

use tower_ratelimit::{Key, LocalLimiter, Policy, SlidingWindowCounter, TokenBucket};

use crate::keys::{Orders, THREADS, address};
use crate::measure::{Samples, interleave, time, time_on};
use crate::subject::{self, admits};
use crate::table::{Goal, Table, Unit};

pub fn measure(table: &mut Table) {
    hot_key(table);
    let (bucket, counter) = (TokenBucket::new(), SlidingWindowCounter::new());
    for (count, keys) in [(1, "1 address"), (100_000, "100,000 addresses")] {
        let row = |strategy: &str| format!("Refusal, {strategy}, {keys}");
        let (generous, stingy) = (subject::token_bucket(), subject::stingy(bucket));
        against_admission(table, &row("TokenBucket"), count, generous, stingy);
        let (generous, stingy) = (subject::sliding_window_counter(), subject::stingy(counter));
        against_admission(table, &row("SlidingWindowCounter"), count, generous, stingy);
    }
}

/// Compares the time per refusal of two concurrent threads with that of one thread.
fn hot_key(table: &mut Table) {
    let names = ["TokenBucket", "SlidingWindowCounter", "governor"]
        .map(|of| format!("Refusal of one hot key, 2 threads, {of}"));
    if !table.wants_any(&names) {
        return;
    }
    let address = address(0);
    let key = Key::from(address);
    let refuses = |limiter: &LocalLimiter, threads| time_on(threads, |_| || assert!(!admits(limiter, &key)));
    let (bucket, counter) = (
        refusing(subject::stingy(TokenBucket::new()), &key),
        refusing(subject::stingy(SlidingWindowCounter::new()), &key),
    );
    let governor = subject::stingy_governor();
    assert!(governor.check_key(&address).is_ok());
    let governor_refuses = |threads| time_on(threads, |_| || assert!(governor.check_key(&address).is_err()));

    let [bucket, bucket_alone, counter, counter_alone, governor, governor_alone] = interleave([
        &mut || refuses(&bucket, THREADS),
        &mut || refuses(&bucket, 1),
        &mut || refuses(&counter, THREADS),
        &mut || refuses(&counter, 1),
        &mut || governor_refuses(THREADS),
        &mut || governor_refuses(1),
    ]);
    let mut row = |name: &str, shared: &Samples, alone: &Samples, goal| {
        table.row(name, Unit::Nanoseconds, &shared.times(1.0 / THREADS as f64), ("1 thread", alone), goal);
    };
    row(&names[0], &bucket, &bucket_alone, Goal::SpeedAtLeast(1.0));
    row(&names[1], &counter, &counter_alone, Goal::SpeedAtLeast(1.0));
    row(&names[2], &governor, &governor_alone, Goal::None);
}

fn against_admission(table: &mut Table, name: &str, count: u32, generous: Policy, stingy: Policy) {
    if !table.wants(name) {
        return;
    }
    let keys = Orders::new(count, |i| Key::from(address(i)));
    let [generous, stingy] = [generous, stingy].map(LocalLimiter::new);
    subject::prepare(&generous, keys.all());
    for key in keys.all() {
        assert!(admits(&stingy, key));
    }
    let hit = |limiter: &LocalLimiter, expected: bool| {
        let mut keys = keys.walk(0);
        time(|| assert_eq!(admits(limiter, keys.next()), expected))
    };
    let [refusal, admission] = interleave([&mut || hit(&stingy, false), &mut || hit(&generous, true)]);
    table.row(name, Unit::Nanoseconds, &refusal, ("admission", &admission), Goal::CostAtMost(1.3));
}

/// Returns a limiter that has exhausted the limit of the key.
fn refusing(policy: Policy, key: &Key) -> LocalLimiter {
    let limiter = LocalLimiter::new(policy);
    assert!(admits(&limiter, key));
    limiter
}

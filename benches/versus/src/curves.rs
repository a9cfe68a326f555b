//! The time of a hit by the number of keys, limits and threads.

use std::net::IpAddr;
use std::slice::from_ref;
use std::thread::available_parallelism;
use std::time::Instant;

use tower_ratelimit::{Key, LocalLimiter, Policy, Quota, TokenBucket};

use crate::keys::{Orders, address};
use crate::measure::{interleave_rounds, time, time_on};
use crate::picture::{Curve, Panel, Scale};
use crate::subject::{self, admits, decides};

/// The number of rounds. It is smaller than for a row, because outliers are visible in a curve.
const ROUNDS: usize = 9;

const KEYS: [u32; 7] = [1, 10, 100, 1_000, 10_000, 100_000, 1_000_000];
const LIMITS: [u32; 6] = [1, 2, 3, 4, 6, 8];
const THREADS: [u32; 3] = [1, 2, 4];

/// Measures all panels, and prints their numbers.
pub fn measure() -> [Panel; 3] {
    let panels = [by_keys(), by_limits(), by_threads()];
    for panel in &panels {
        println!("{panel}");
    }
    panels
}

/// Returns the curves of `figures`, with one point per count.
fn curves<const N: usize>(names: [&str; N], counts: &[u32], figures: impl Fn(u32) -> [f64; N]) -> Vec<Curve> {
    let mut curves = names.map(|name| Curve { name: name.to_owned(), points: Vec::new() });
    for &count in counts {
        for (curve, figure) in curves.iter_mut().zip(figures(count)) {
            curve.points.push((f64::from(count), figure));
        }
    }
    curves.into()
}

fn medians<const N: usize>(subjects: [&mut dyn FnMut() -> f64; N]) -> [f64; N] {
    interleave_rounds(ROUNDS, subjects).map(|samples| samples.median())
}

fn by_keys() -> Panel {
    let shown = ["ours, admit", "ours, hit (all numbers)", "governor", "axum_gcra"];
    Panel {
        title: "ns per hit by number of keys".to_owned(),
        x: "addresses",
        scale: Scale::Logarithmic,
        curves: curves(shown, &KEYS, at_keys),
    }
}

fn at_keys(count: u32) -> [f64; 4] {
    let (keys, addresses) = (Orders::new(count, |i| Key::from(address(i))), Orders::new(count, address));
    let limiter = LocalLimiter::new(subject::token_bucket());
    subject::prepare(&limiter, keys.all());
    let governor = subject::governor();
    subject::prepare_governor(&governor, addresses.all());
    let (gcra, quota) = (subject::gcra::<IpAddr>(), subject::gcra_quota());
    let ours = |hit: fn(&LocalLimiter, &Key) -> bool| {
        let mut keys = keys.walk(0);
        time(|| assert!(hit(&limiter, keys.next())))
    };
    let governor = || {
        let mut keys = addresses.walk(0);
        time(|| assert!(governor.check_key(keys.next()).is_ok()))
    };
    let gcra = || {
        let mut keys = addresses.walk(0);
        time(|| assert!(gcra.req_sync(*keys.next(), quota, Instant::now()).is_ok()))
    };
    medians([&mut || ours(admits), &mut || ours(decides), &mut { governor }, &mut { gcra }])
}

fn by_limits() -> Panel {
    let shown = ["ours, admit", "ours, hit (all numbers)", "as many governors"];
    Panel {
        title: "ns per hit by limits in the policy".to_owned(),
        x: "token buckets under one key",
        scale: Scale::Linear,
        curves: curves(shown, &LIMITS, at_limits),
    }
}

fn at_limits(limits: u32) -> [f64; 3] {
    let address = address(0);
    let key = Key::from(address);
    let limiter = LocalLimiter::new(token_buckets(limits));
    subject::prepare(&limiter, from_ref(&key));
    let governors: Vec<_> = (0..limits).map(|_| subject::governor()).collect();
    for governor in &governors {
        subject::prepare_governor(governor, &[address]);
    }
    medians([
        &mut || time(|| assert!(admits(&limiter, &key))),
        &mut || time(|| assert!(decides(&limiter, &key))),
        &mut || time(|| assert!(governors.iter().all(|governor| governor.check_key(&address).is_ok()))),
    ])
}

fn token_buckets(limits: u32) -> Policy {
    let quota = |i| Quota::per_second(1_000_000).burst(u32::MAX - i);
    (1..limits).fold(subject::bursting(u32::MAX), |policy, i| policy.limit(TokenBucket::new(), quota(i)))
}

fn by_threads() -> Panel {
    let address = address(0);
    let key = Key::from(address);
    let [generous, stingy] = [subject::token_bucket(), subject::stingy(TokenBucket::new())].map(LocalLimiter::new);
    subject::prepare(&generous, from_ref(&key));
    assert!(admits(&stingy, &key));
    let governor = subject::governor();
    subject::prepare_governor(&governor, &[address]);

    let shown = ["ours, admitting", "ours, refusing", "governor, admitting"];
    let at_threads = |count: u32| {
        let threads = count as usize;
        // The throughput of all threads. 1,000 ns per hit are a million hits per second per thread.
        medians([
            &mut || time_on(threads, |_| || assert!(admits(&generous, &key))),
            &mut || time_on(threads, |_| || assert!(!admits(&stingy, &key))),
            &mut || time_on(threads, |_| || assert!(governor.check_key(&address).is_ok())),
        ])
        .map(|time| f64::from(count) * 1_000.0 / time)
    };
    let cores = available_parallelism().map_or(1, usize::from);
    Panel {
        title: format!("million hits per second by threads ({cores} cores)"),
        x: "threads on one hot key",
        scale: Scale::Linear,
        curves: curves(shown, &THREADS, at_threads),
    }
}

//! Bytes per key.

use tower_ratelimit::{LocalLimiter, Policy, SlidingWindowCounter, TokenBucket};

use crate::alloc::Count;
use crate::keys::{Orders, PeerKey, address, string};
use crate::measure::Samples;
use crate::subject::{self, admits};
use crate::table::{Goal, Table, Unit};

const KEYS: u32 = 1_000_000;

/// The number of keys at the first sample. Tables grow in steps, so the result is the mean of
/// several samples.
const FIRST_SAMPLE: usize = 500_000;
const SAMPLE_EVERY: usize = 50_000;

pub fn measure(table: &mut Table) {
    key_set(table, "address", address);
    key_set(table, "13-byte string", string);
}

fn key_set<K: PeerKey>(table: &mut Table, label: &str, key: fn(u32) -> K) {
    let names = ["TokenBucket", "SlidingWindowCounter"].map(|strategy| format!("Bytes per {label}, {strategy}"));
    if !table.wants_any(&names) {
        return;
    }
    let (keys, peer_keys) = (Orders::new(KEYS, |i| key(i).ours()), Orders::new(KEYS, key));
    let governor = bytes_per_key(peer_keys.all(), subject::governor, |governor, key| governor.check_key(key).is_ok());
    let ours = |policy: Policy| bytes_per_key(keys.all(), || LocalLimiter::new(policy), admits);
    let bucket = ours(subject::daily(TokenBucket::new()));
    let counter = ours(subject::daily(SlidingWindowCounter::new()));
    table.row(&names[0], Unit::Bytes, &bucket, ("governor", &governor), Goal::AtMost(40.0));
    table.row(&names[1], Unit::Bytes, &counter, ("governor", &governor), Goal::AtMost(64.0));
}

fn bytes_per_key<K, L>(keys: &[K], limiter: impl FnOnce() -> L, admits: impl Fn(&L, &K) -> bool) -> Samples {
    let count = Count::start();
    let limiter = limiter();
    let (mut sum, mut samples) = (0.0, 0.0);
    for (known, key) in (1..).zip(keys) {
        assert!(admits(&limiter, key));
        if known >= FIRST_SAMPLE && known % SAMPLE_EVERY == 0 {
            sum += count.live_bytes() / known as f64;
            samples += 1.0;
        }
    }
    Samples::one(sum / samples)
}

//! An admitted hit in memory on a known key.

use std::time::Instant;

use tower_ratelimit::{Key, LocalLimiter};

use crate::keys::{Orders, PeerKey, THREADS, address, string};
use crate::measure::{interleave, time_on};
use crate::subject::{self, Gcra, Governor, SnapshotGovernor, admits, decides};
use crate::table::{Goal, Table, Unit};

const TOKEN_BUCKET: Goal = Goal::SpeedAtLeast(1.1);
const SLIDING_WINDOW_COUNTER: Goal = Goal::SpeedAtLeast(1.2);
const MEAN: Goal = Goal::SpeedAtLeast(1.3);

pub fn measure(table: &mut Table) {
    let mut ratios = Vec::new();
    for (label, count) in [
        ("1 address", 1),
        ("1,000 addresses", 1_000),
        ("100,000 addresses", 100_000),
        ("1,000,000 addresses", 1_000_000),
    ] {
        key_set(table, &mut ratios, label, count, address);
    }
    for (label, count) in [("1,000 strings", 1_000), ("1,000,000 strings", 1_000_000)] {
        key_set(table, &mut ratios, label, count, string);
    }
    table.mean("TokenBucket, mean of all rows", &ratios, MEAN);
}

/// Measures the rows of one set of keys, and appends the ratio of governor's time to ours to
/// `ratios`.
fn key_set<K: PeerKey>(table: &mut Table, ratios: &mut Vec<f64>, label: &str, count: u32, key: fn(u32) -> K) {
    let rows = [(1, "1 thread"), (THREADS, "2 threads")].map(|(threads, suffix)| {
        let bucket = format!("TokenBucket, {label}, {suffix}");
        let counter = format!("SlidingWindowCounter, {label}, {suffix}");
        (threads, [bucket.clone(), counter, bucket.clone() + ", against axum_gcra", bucket + ", all numbers"])
    });
    if !table.wants_any(rows.iter().flat_map(|(_, names)| names)) {
        return;
    }
    let subjects = Subjects::new(count, key);
    for (threads, names @ [of_bucket, of_counter, against_gcra, of_numbers]) in &rows {
        if !table.wants_any(names) {
            continue;
        }
        let [bucket, governor, counter, gcra, numbers, snapshot_times] = interleave([
            &mut || subjects.ours(&subjects.bucket, *threads, admits),
            &mut || subjects.governor(*threads),
            &mut || subjects.ours(&subjects.counter, *threads, admits),
            &mut || subjects.gcra(*threads),
            &mut || subjects.ours(&subjects.bucket, *threads, decides),
            &mut || subjects.governor_with_snapshot(*threads),
        ]);
        ratios.push(governor.over(&bucket).median());
        table.row(of_bucket, Unit::Nanoseconds, &bucket, ("governor", &governor), TOKEN_BUCKET);
        table.row(of_counter, Unit::Nanoseconds, &counter, ("governor", &governor), SLIDING_WINDOW_COUNTER);
        table.row(against_gcra, Unit::Nanoseconds, &bucket, ("axum_gcra", &gcra), Goal::None);
        table.row(of_numbers, Unit::Nanoseconds, &numbers, ("governor's snapshot", &snapshot_times), Goal::None);
    }
}

/// A function that hits a limiter, and returns `true` if the hit was admitted.
trait Admits: Fn(&LocalLimiter, &Key) -> bool + Copy + Sync {}

impl<F: Fn(&LocalLimiter, &Key) -> bool + Copy + Sync> Admits for F {}

/// All limiters, with states of all keys.
struct Subjects<K: PeerKey> {
    keys: Orders<Key>,
    peer_keys: Orders<K>,
    bucket: LocalLimiter,
    counter: LocalLimiter,
    governor: Governor<K>,
    governor_with_snapshot: SnapshotGovernor<K>,
    gcra: Gcra<K>,
}

impl<K: PeerKey> Subjects<K> {
    fn new(count: u32, key: fn(u32) -> K) -> Self {
        let subjects = Self {
            keys: Orders::new(count, |i| key(i).ours()),
            peer_keys: Orders::new(count, key),
            bucket: LocalLimiter::new(subject::token_bucket()),
            counter: LocalLimiter::new(subject::sliding_window_counter()),
            governor: subject::governor(),
            governor_with_snapshot: subject::governor_with_snapshot(),
            gcra: subject::gcra(),
        };
        subject::prepare_governor(&subjects.governor, subjects.peer_keys.all());
        subject::prepare_governor(&subjects.governor_with_snapshot, subjects.peer_keys.all());
        subject::prepare(&subjects.bucket, subjects.keys.all());
        for key in subjects.keys.all() {
            assert!(admits(&subjects.counter, key));
        }
        subjects
    }

    fn ours(&self, limiter: &LocalLimiter, threads: usize, admits: impl Admits) -> f64 {
        time_on(threads, |thread| {
            let mut keys = self.keys.walk(thread);
            move || assert!(admits(limiter, keys.next()))
        })
    }

    fn governor(&self, threads: usize) -> f64 {
        time_on(threads, |thread| {
            let mut keys = self.peer_keys.walk(thread);
            move || assert!(self.governor.check_key(keys.next()).is_ok())
        })
    }

    fn governor_with_snapshot(&self, threads: usize) -> f64 {
        time_on(threads, |thread| {
            let mut keys = self.peer_keys.walk(thread);
            move || {
                let result = self.governor_with_snapshot.check_key(keys.next());
                assert!(result.is_ok_and(|snapshot| snapshot.remaining_burst_capacity() > 0));
            }
        })
    }

    /// Clones the key, because the middleware of `axum_gcra` creates an owned key per request.
    fn gcra(&self, threads: usize) -> f64 {
        let quota = subject::gcra_quota();
        time_on(threads, |thread| {
            let mut keys = self.peer_keys.walk(thread);
            move || assert!(self.gcra.req_sync(keys.next().clone(), quota, Instant::now()).is_ok())
        })
    }
}

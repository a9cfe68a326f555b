//! Decisions in memory, without HTTP.
//!
//! A step is 1,000 decisions, so the microseconds of a step are the nanoseconds of a decision. With
//! two threads, each thread is timed separately.

mod support;

use std::time::Duration;

use divan::counter::ItemsCount;
use divan::{Bencher, Divan};
use tower_ratelimit::LocalLimiter;

use support::hits::{BATCH, Hits};
use support::limiters::admits;

const KEYS: [u32; 4] = [1, 1_000, 100_000, 1_000_000];

fn main() {
    // Samples take at least a millisecond, so that threads that start one after another overlap.
    Divan::default().sample_size(16).sample_count(200).max_time(Duration::from_millis(250)).config_with_args().main();
}

/// Measures hits that are all admitted, or all refused.
fn measure(bencher: Bencher<'_, '_>, limiter: &LocalLimiter, hits: &Hits, admitted: bool) {
    bencher
        .counter(ItemsCount::new(BATCH))
        .with_inputs(|| hits.batch())
        .bench_values(|batch| batch.each(|key| assert_eq!(admits(limiter, key), admitted)));
}

mod admitted {
    use divan::Bencher;
    use tower_ratelimit::{ElasticWindow, FixedWindow, LeakyBucket, SlidingWindowCounter, TokenBucket};

    use super::support::hits::{Hits, MakeKey, address, long_string, string};
    use super::support::limiters::{Generous, several, with_known_keys};
    use super::{KEYS, measure};

    fn known_keys<S: Generous>(bencher: Bencher<'_, '_>, keys: u32, key: MakeKey) {
        measure(bencher, &with_known_keys(S::generous(), keys, key), &Hits::round_robin(keys, key), true);
    }

    #[divan::bench(
        types = [TokenBucket, SlidingWindowCounter, FixedWindow, ElasticWindow, LeakyBucket],
        args = KEYS,
        threads = [1, 2],
    )]
    fn address_key<S: Generous>(bencher: Bencher<'_, '_>, keys: u32) {
        known_keys::<S>(bencher, keys, address);
    }

    #[divan::bench(types = [TokenBucket, SlidingWindowCounter], args = KEYS, threads = [1, 2])]
    fn string_key<S: Generous>(bencher: Bencher<'_, '_>, keys: u32) {
        known_keys::<S>(bencher, keys, string);
    }

    #[divan::bench(types = [TokenBucket], args = KEYS, threads = [1, 2])]
    fn long_string_key<S: Generous>(bencher: Bencher<'_, '_>, keys: u32) {
        known_keys::<S>(bencher, keys, long_string);
    }

    /// A realistic load: a few clients send most of the hits.
    #[divan::bench(types = [TokenBucket, SlidingWindowCounter], args = &KEYS[1..], threads = [1, 2])]
    fn popular_keys<S: Generous>(bencher: Bencher<'_, '_>, keys: u32) {
        let limiter = with_known_keys(S::generous(), keys, address);
        measure(bencher, &limiter, &Hits::by_popularity(keys, address), true);
    }

    #[divan::bench(consts = [1, 2, 3, 4], args = [1, 100_000])]
    fn several_limits_in_one_policy<const LIMITS: u32>(bencher: Bencher<'_, '_>, keys: u32) {
        let limiter = with_known_keys(several(LIMITS, u32::MAX), keys, address);
        measure(bencher, &limiter, &Hits::round_robin(keys, address), true);
    }
}

mod refused {
    use divan::Bencher;
    use tower_ratelimit::strategy::Strategy;
    use tower_ratelimit::{FixedWindow, LocalLimiter, MovingWindow, SlidingWindowCounter, TokenBucket};

    use super::support::hits::{Hits, address};
    use super::support::limiters::{hit_once, stingy};
    use super::{KEYS, measure};

    #[divan::bench(
        types = [TokenBucket, SlidingWindowCounter, FixedWindow, MovingWindow],
        args = KEYS,
        threads = [1, 2],
    )]
    fn address_key<S: Strategy + Default>(bencher: Bencher<'_, '_>, keys: u32) {
        let limiter = hit_once(LocalLimiter::new(stingy::<S>()), keys, address);
        measure(bencher, &limiter, &Hits::round_robin(keys, address), false);
    }
}

/// Each hit is on a new key, and the storage is full.
mod flood_of_new_keys {
    use std::sync::atomic::{AtomicU32, Ordering};

    use divan::Bencher;
    use divan::counter::ItemsCount;
    use tower_ratelimit::{Policy, Quota, TokenBucket};

    use super::support::hits::{BATCH, address};
    use super::support::limiters::{admits, capped, hit_once, stingy};

    const CAP: u32 = 100_000;

    #[divan::bench(sample_size = 1, sample_count = 2_000)]
    fn old_keys_are_evicted(bencher: Bencher<'_, '_>) {
        let policy = Policy::new(TokenBucket::new(), Quota::per_day(10_000));
        flood(bencher, policy, true);
    }

    #[divan::bench(sample_size = 1, sample_count = 2_000)]
    fn new_keys_are_refused(bencher: Bencher<'_, '_>) {
        flood(bencher, stingy::<TokenBucket>(), false);
    }

    fn flood(bencher: Bencher<'_, '_>, policy: Policy, admitted: bool) {
        let limiter = hit_once(capped(policy, CAP), CAP, address);
        let seen = AtomicU32::new(CAP);
        let new_keys = || {
            let first = seen.fetch_add(u32::try_from(BATCH).expect("small"), Ordering::Relaxed);
            (first..).take(BATCH).map(address).collect::<Vec<_>>()
        };
        bencher.counter(ItemsCount::new(BATCH)).with_inputs(new_keys).bench_refs(|keys| {
            for key in keys {
                assert_eq!(admits(&limiter, key), admitted);
            }
        });
    }
}

/// Hits on a full log.
mod moving_window {
    use divan::Bencher;
    use divan::counter::ItemsCount;
    use tower_ratelimit::Key;

    use super::support::hits::BATCH;
    use super::support::limiters::{admits, full_log};

    const AMOUNTS: [u32; 4] = [10, 100, 1_000, 10_000];

    #[divan::bench(args = AMOUNTS)]
    fn admitted(bencher: Bencher<'_, '_>, amount: u32) {
        let key = Key::from("alice");
        let (limiter, clock, pace) = full_log(amount, &key);
        bencher.counter(ItemsCount::new(BATCH)).bench_local(|| {
            for _ in 0..BATCH {
                clock.advance(pace);
                assert!(admits(&limiter, &key));
            }
        });
    }

    #[divan::bench(args = AMOUNTS)]
    fn refused(bencher: Bencher<'_, '_>, amount: u32) {
        let key = Key::from("alice");
        let (limiter, ..) = full_log(amount, &key);
        bencher.counter(ItemsCount::new(BATCH)).bench_local(|| {
            for _ in 0..BATCH {
                assert!(!admits(&limiter, &key));
            }
        });
    }
}

/// Hits through wrappers, compared with the memory storage alone.
mod wrappers {
    use std::time::Duration;

    use divan::Bencher;
    use divan::counter::ItemsCount;
    use tower_ratelimit::storage::{Breaker, Leases, RefusalCache};
    use tower_ratelimit::{FixedWindow, MemoryStorage, Storage};

    use super::KEYS;
    use super::support::hits::{BATCH, Hits, address};
    use super::support::limiters::{FailingStorage, Generous, decides, stingy};

    fn each(bencher: Bencher<'_, '_>, keys: u32, storage: &impl Storage, admitted: bool) {
        let policy = if admitted { FixedWindow::generous() } else { stingy::<FixedWindow>() };
        for key in (0..keys).map(address) {
            assert!(decides(storage, &policy, &key));
        }
        let hits = Hits::round_robin(keys, address);
        bencher
            .counter(ItemsCount::new(BATCH))
            .with_inputs(|| hits.batch())
            .bench_values(|batch| batch.each(|key| assert_eq!(decides(storage, &policy, key), admitted)));
    }

    #[divan::bench(args = KEYS)]
    fn admitted_by_memory(bencher: Bencher<'_, '_>, keys: u32) {
        each(bencher, keys, &MemoryStorage::new(), true);
    }

    #[divan::bench(args = KEYS)]
    fn admitted_through_a_breaker(bencher: Bencher<'_, '_>, keys: u32) {
        each(bencher, keys, &Breaker::new(MemoryStorage::new()).fallback(MemoryStorage::new(), 3), true);
    }

    /// The primary storage is down.
    #[divan::bench(args = KEYS)]
    fn admitted_by_a_fallback(bencher: Bencher<'_, '_>, keys: u32) {
        let hour = Duration::from_secs(3_600);
        let breaker = Breaker::new(FailingStorage).failures(1).probe_after(hour, hour);
        each(bencher, keys, &breaker.fallback(MemoryStorage::new(), 3), true);
    }

    #[divan::bench(args = KEYS)]
    fn admitted_through_a_refusal_cache(bencher: Bencher<'_, '_>, keys: u32) {
        each(bencher, keys, &RefusalCache::new(MemoryStorage::new()), true);
    }

    #[divan::bench(args = &KEYS[..3])]
    fn admitted_from_a_lease(bencher: Bencher<'_, '_>, keys: u32) {
        each(bencher, keys, &Leases::new(MemoryStorage::new(), 1_000_000).max_keys(1_000_000), true);
    }

    #[divan::bench(args = &KEYS[..3])]
    fn refused_by_memory(bencher: Bencher<'_, '_>, keys: u32) {
        each(bencher, keys, &MemoryStorage::new(), false);
    }

    #[divan::bench(args = &KEYS[..3])]
    fn refused_from_a_refusal_cache(bencher: Bencher<'_, '_>, keys: u32) {
        each(bencher, keys, &RefusalCache::new(MemoryStorage::new()).max_keys(1_000_000), false);
    }
}

//! A full memory storage: its counts, and the keys that it evicts.

use std::time::Duration;

use common::{now, policy};
use tower_ratelimit::storage::{ManualClock, OnFull, StorageRequest, Summary};
use tower_ratelimit::strategy::Status;
use tower_ratelimit::{Decision, Key, MemoryStorage, Op, Policy, RateLimiter, Storage};

const MIB: usize = 1 << 20;

fn hit(limiter: &RateLimiter, key: impl Into<Key>) -> Decision {
    now(limiter.hit(&key.into()))
}

/// Sends a hit as a layer does: with `try_admit` first. Returns `true` if it was admitted.
fn hit_like_a_layer(storage: &MemoryStorage, policy: &Policy, key: impl Into<Key>) -> bool {
    let (key, mut summary) = (key.into(), Summary::default());
    let request = StorageRequest::new(policy, &key, Op::Hit, 1);
    if storage.try_admit(request, Some(&mut summary)) {
        return true;
    }
    assert_eq!(summary, Summary::default(), "`decide` counts the refusal");
    let decision = now(storage.decide(request));
    assert!(decision.is_admitted() || decision.is_storage_full());
    decision.is_admitted()
}

fn counts(storage: &MemoryStorage) -> (u64, u64, u64) {
    let stats = storage.stats();
    (stats.newcomers_admitted, stats.newcomers_refused, stats.logs_refused)
}

#[test]
fn new_key_without_room_is_counted_once() {
    for text in ["fixed-window 1/day", "fixed-window 1/day; token-bucket 1/day"] {
        for on_full in [OnFull::Refuse, OnFull::Admit] {
            let builder = MemoryStorage::builder().max_keys(100).on_full(on_full).clock(ManualClock::default());
            let (storage, policy) = (builder.build().unwrap(), policy(text));
            assert!((0..100_u64).all(|key| hit_like_a_layer(&storage, &policy, key)));
            for key in 100..150_u64 {
                assert_eq!(hit_like_a_layer(&storage, &policy, key), on_full == OnFull::Admit, "{text}");
            }
            let peeking = RateLimiter::with_storage(policy, storage.clone());
            let _ = now(peeking.peek(&Key::from("peeks are not counted")));
            assert_eq!(counts(&storage), if on_full == OnFull::Admit { (50, 0, 0) } else { (0, 50, 0) }, "{text}");
        }
    }
}

#[test]
fn new_key_without_room_waits_for_the_first_of_the_refused_keys() {
    let clock = ManualClock::default();
    let storage = MemoryStorage::builder().max_keys(8).clock(clock.clone()).build().unwrap();
    let limiter = RateLimiter::with_storage(policy("fixed-window 1/day"), storage);
    for key in 0..8_u64 {
        assert!(hit(&limiter, key).is_admitted());
        clock.advance(Duration::from_secs(1));
    }
    for key in 8..50_u64 {
        assert_eq!(hit(&limiter, key).retry_after(), Some(Duration::from_secs(86_400 - 8)));
    }
}

#[test]
fn long_log_without_room_is_counted_once() {
    for on_full in [OnFull::Refuse, OnFull::Admit] {
        let clock = ManualClock::default();
        let builder = MemoryStorage::builder().max_bytes(MIB).on_full(on_full).clock(clock.clone());
        let (storage, policy) = (builder.build().unwrap(), policy("moving-window 1000000/day"));
        while hit_like_a_layer(&storage, &policy, "greedy") {
            clock.advance(Duration::from_millis(20));
        }
        assert_eq!(counts(&storage), (0, 0, 1));
        // Long logs do not grow into the last quarter of the room for logs, which is half of all.
        let (log_bytes, most) = (storage.stats().log_bytes, MIB / 2 / 4 * 3);
        assert!((most - most / 20..=most).contains(&log_bytes), "{log_bytes} bytes");
        for _ in 0..128 {
            assert!(hit_like_a_layer(&storage, &policy, "modest"), "a log of 128 entries is short");
            clock.advance(Duration::from_millis(20));
        }
        assert_eq!((counts(&storage), storage.stats().evicted), ((0, 0, 1), 0));
        while hit_like_a_layer(&storage, &policy, "modest") {
            clock.advance(Duration::from_millis(20));
        }
        let modest = storage.stats().log_bytes - log_bytes;
        assert!((2_100..=2_304).contains(&modest), "a log of {modest} bytes is long");
    }
}

/// `OnFull::Admit` admits new keys only. A stored key would otherwise have no limit.
#[test]
fn stored_key_whose_short_log_has_no_room_is_refused_and_counted() {
    let clock = ManualClock::default();
    let builder = MemoryStorage::builder().max_bytes(65_536).on_full(OnFull::Admit).clock(clock.clone());
    let storage = builder.build().unwrap();
    let others = RateLimiter::with_storage(policy("moving-window 1/day"), storage.clone());
    let newcomers = (0..).take_while(|&key| hit(&others, key).is_admitted() && storage.stats().newcomers_admitted == 0);
    assert!(newcomers.count() > 50);
    now(others.clear(&Key::from(0_u64)));
    let limiter = RateLimiter::with_storage(policy("moving-window 1000/day"), storage.clone());
    let mut admitted = 0;
    let refused = loop {
        clock.advance(Duration::from_millis(1));
        let decision = hit(&limiter, "stored");
        if decision.is_refused() {
            break decision;
        }
        admitted += 1;
    };
    assert!(refused.is_storage_full() && (4..100).contains(&admitted), "{admitted} were admitted");
    assert_eq!(counts(&storage), (1, 0, 1));
}

#[test]
fn key_with_a_log_and_other_states_is_evicted_for_a_log() {
    for text in [
        "fixed-window 3/day; moving-window 3/day",
        "moving-window 3/day; fixed-window 3/day",
        "moving-window 3/day; moving-window 4/day",
    ] {
        let clock = ManualClock::default();
        let storage = MemoryStorage::builder().max_bytes(MIB).clock(clock.clone()).build().unwrap();
        let limiter = RateLimiter::with_storage(policy(text), storage.clone());
        for key in 0..10_000_u64 {
            clock.advance(Duration::from_millis(1));
            assert!(hit(&limiter, key).is_admitted(), "{text}: key {key}");
        }
        let stats = storage.stats();
        assert!(stats.log_bytes <= MIB / 2 && stats.evicted == 10_000 - stats.keys as u64, "{text}: {stats:?}");
    }
}

#[test]
fn only_keys_that_have_not_expired_are_counted_as_evicted() {
    for text in ["fixed-window 2/day", "fixed-window 2/day; token-bucket 2/day", "moving-window 2/day"] {
        let clock = ManualClock::default();
        // A search for a key to evict examines eight keys, so it always finds an expired one.
        let storage = MemoryStorage::builder().max_keys(8).clock(clock.clone()).build().unwrap();
        let limiter = RateLimiter::with_storage(policy(text), storage.clone());
        let mut keys = 0..1_000_u64;
        for key in keys.by_ref().take(12) {
            clock.advance(Duration::from_millis(1));
            assert!(hit(&limiter, key).is_admitted());
        }
        assert_eq!((storage.stats().evicted, storage.stats().keys), (4, 8), "{text}");
        clock.advance(Duration::from_secs(2 * 86_400));
        for key in keys.take(8) {
            assert!(hit(&limiter, key).is_admitted());
        }
        assert_eq!(storage.stats().evicted, 4, "{text}");
    }
}

/// New keys with one state evict keys with several states and logs.
#[test]
fn eviction_removes_all_states_of_a_key() {
    const KEYS: u64 = 100;
    const MOST: usize = 300;
    let (clock, texts) =
        (ManualClock::default(), ["fixed-window 3/day; token-bucket 3/2 days", "moving-window 3/day", "3/day"]);
    let storage = MemoryStorage::builder().max_keys(MOST).clock(clock.clone()).build().unwrap();
    let limiters = texts.map(|text| RateLimiter::with_storage(policy(text), storage.clone()));
    for key in 0..KEYS {
        for limiter in &limiters {
            clock.advance(Duration::from_millis(1));
            assert!(hit(limiter, key).is_admitted());
        }
    }
    let flood = RateLimiter::with_storage(policy("fixed-window 3/hour"), storage.clone());
    for key in 0..KEYS {
        assert!(hit(&flood, key).is_admitted());
        for other in 0..KEYS {
            for limiter in &limiters {
                let peek = now(limiter.peek(&other.into()));
                let left: Vec<u32> = peek.statuses().iter().map(Status::remaining).collect();
                assert!(left.iter().all(|each| *each == left[0]), "{left:?} units are left");
            }
        }
    }
    assert_eq!((storage.stats().keys, storage.stats().evicted), (MOST, KEYS));
    for limiter in limiters.iter().chain([&flood]) {
        (0..KEYS).for_each(|key| now(limiter.clear(&key.into())));
    }
    let stats = storage.stats();
    assert_eq!((stats.keys, stats.bytes, stats.log_bytes), (0, 0, 0));
}

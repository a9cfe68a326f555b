use std::thread;

use super::inner::KEYS_PER_SHARD;
use super::shard::{KeyHash, Shard};
use super::shard_cell::RefusalHint;
use super::*;
use crate::quota::Quota;
use crate::strategy::State;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::time::Timestamp;

/// Large tables would stall a request for milliseconds while they grow, so all tables are small.
#[test]
fn tables_stay_small() {
    let storage = MemoryStorage::builder().max_keys(200_000).build().unwrap();
    let policy = Policy::from(Quota::per_hour(9));
    for key in 0..200_000_u64 {
        let _ = storage.0.decide(&StorageRequest::new(&policy, &key.into(), Op::Hit, 1));
    }
    assert_eq!(storage.stats().keys, 200_000);
    let slots: Vec<_> = storage.0.shards.iter().map(|cell| cell.lock().slots()).collect();
    let (all, largest) = (slots.iter().sum::<usize>(), slots.iter().max().unwrap());
    assert!(*largest < 2 * KEYS_PER_SHARD, "{largest} slots in one table");
    assert!(all < 200_000 * 4 / 3, "{all} slots for 200,000 keys");
}

/// A new key must not be refused because only its own shard has no room.
#[test]
fn new_key_evicts_a_key_of_another_shard() {
    for text in ["fixed-window 1/day", "fixed-window 1/day; fixed-window 1/week"] {
        let storage = MemoryStorage::builder().max_keys(4 * KEYS_PER_SHARD).build().unwrap();
        let last = storage.0.shards.len() - 1;
        assert_eq!(last, 63);
        let exhausts: Policy = text.parse().unwrap();
        let spends: Policy = "fixed-window 9/day".parse().unwrap();
        let shard_of = |policy: &Policy, key: u64| storage.0.locate(policy, &key.into()).1;
        let admits = |policy: &Policy, key: u64| {
            storage.0.decide(&StorageRequest::new(policy, &key.into(), Op::Hit, 1)).is_admitted()
        };
        // The keys of the first shard are being refused. Those of the last one can be evicted.
        let mut keys = 0_u64..;
        while storage.stats().keys < 4 * KEYS_PER_SHARD {
            let key = keys.next().unwrap();
            if shard_of(&spends, key) == last {
                assert!(admits(&spends, key));
            } else if shard_of(&exhausts, key) != last {
                assert!(admits(&exhausts, key));
            }
        }
        let newcomers: Vec<_> = keys.filter(|&key| shard_of(&exhausts, key) == 0).take(200).collect();
        for key in newcomers {
            assert!(admits(&exhausts, key) && !admits(&exhausts, key), "{text}");
        }
        assert_eq!(storage.stats().newcomers_refused, 0);
        assert!(storage.stats().keys <= 4 * KEYS_PER_SHARD);
    }
}

/// A decision on several keys has locked the only shard with a key to evict.
#[test]
fn several_new_keys_evict_a_key_of_each_others_shard() {
    let storage = MemoryStorage::builder().max_keys(256).build().unwrap();
    assert_eq!(storage.0.shards.len(), 2);
    let exhausts = "fixed-window 1/day".parse::<Policy>().unwrap();
    let spends = "fixed-window 9/day".parse::<Policy>().unwrap();
    let shard_of = |policy: &Policy, key: u64| storage.0.locate(policy, &key.into()).1;
    let hit = |policy: &Policy, key: u64| {
        storage.0.decide(&StorageRequest::new(policy, &key.into(), Op::Hit, 1)).is_admitted()
    };
    // The keys of the first shard are being refused. Those of the second one can be evicted.
    let mut keys = 0_u64..;
    while storage.stats().keys < 256 {
        let key = keys.next().unwrap();
        let (policy, shard) = if key % 2 == 0 { (&exhausts, 0) } else { (&spends, 1) };
        if shard_of(policy, key) == shard {
            assert!(hit(policy, key));
        }
    }
    let in_shard =
        |policy: &Policy, shard| keys.clone().filter(|&key| shard_of(policy, key) == shard).take(50).collect();
    let (first, second): (Vec<_>, Vec<_>) = (in_shard(&exhausts, 0), in_shard(&spends, 1));
    for (first, second) in first.into_iter().zip(second) {
        let (first, second) = (first.into(), second.into());
        let members = [&exhausts, &spends].into_iter().zip([&first, &second]);
        let members: Vec<_> = members.map(|(policy, key)| StorageRequest::new(policy, key, Op::Hit, 1)).collect();
        let decisions = super::members::decide(&storage.0, &members);
        assert!(decisions.iter().all(Decision::is_admitted), "{decisions:?}");
    }
    assert_eq!(storage.stats().newcomers_refused, 0);
}

#[test]
fn time_goes_back_only_if_the_clock_does() {
    let clock = crate::storage::ManualClock::default();
    let (early, late) = (clock.now(), clock.now().plus(100));
    clock.set(late);
    let (mut shard, time) = (Shard::default(), StorageClock::Other(Box::new(clock.clone())));
    assert_eq!(shard.time(late, &time), late);
    assert_eq!(shard.time(early, &time), late, "another thread decided after the clock was read");
    clock.set(early);
    assert_eq!(shard.time(early, &time), early);
}

fn key_hash(hash: u64) -> KeyHash {
    KeyHash { hash, rest: 0 }
}

fn state(number: u32) -> State {
    State::Counts { until: Timestamp::from_micros(number.into()), amounts: [number, number] }
}

#[test]
fn only_the_last_published_key_is_read() {
    let hint = RefusalHint::default();
    hint.publish(key_hash(1), 0, &state(1), Timestamp::EPOCH);
    assert_eq!(hint.read(key_hash(1), 0, Timestamp::EPOCH), Some(state(1)));
    assert_eq!(hint.read(key_hash(1), 2, Timestamp::EPOCH), None, "another limit");
    hint.publish(key_hash(2), 0, &state(2), Timestamp::EPOCH);
    assert_eq!(
        (hint.read(key_hash(1), 0, Timestamp::EPOCH), hint.read(key_hash(2), 0, Timestamp::EPOCH)),
        (None, Some(state(2)))
    );
    hint.clear();
    assert_eq!(hint.read(key_hash(2), 0, Timestamp::EPOCH), None);
}

#[test]
fn hint_is_not_read_before_the_time_of_its_write() {
    let hint = RefusalHint::default();
    let [earlier, now, later] = [9, 10, 11].map(Timestamp::from_micros);
    hint.publish(key_hash(1), 0, &state(99), now);
    assert_eq!([earlier, now, later].map(|at| hint.read(key_hash(1), 0, at).is_some()), [false, true, true]);
}

/// All fields of a read are from the same write.
#[test]
fn hint_is_never_read_partially_written() {
    let hint = RefusalHint::default();
    let done = AtomicU64::new(0);
    thread::scope(|scope| {
        scope.spawn(|| {
            for number in (1..).take_while(|_| done.load(Ordering::Relaxed) == 0) {
                hint.publish(key_hash(u64::from(number % 2) + 1), 0, &state(number), Timestamp::EPOCH);
            }
        });
        for hash in [1, 2].into_iter().cycle().take(3_000_000) {
            let Some(read) = hint.read(key_hash(hash), 0, Timestamp::EPOCH) else { continue };
            let State::Counts { amounts: [number, _], .. } = read else { unreachable!() };
            assert_eq!((read, u64::from(number % 2) + 1), (state(number), hash));
        }
        done.store(1, Ordering::Relaxed);
    });
}

//! Models of the refusal hint. `scripts/loom` runs all of their interleavings.
//!
//! loom supports release and acquire fences and stale relaxed loads. It does not model a load that
//! returns a value before another thread has stored it, which C11 allows in theory.
//!
//! No model fails if [`ShardCell::clear_hint`] resets only the hash or only the hint. Either is enough
//! for correctness. Resetting both saves readers the time to look at a hint that is not valid.

use std::sync::Arc;

use loom::sync::atomic::AtomicBool;
use loom::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use super::MemoryStorage;
use super::shard::KeyHash;
use super::shard_cell::{RefusalHint, ShardCell};
use crate::key::Key;
use crate::policy::{Op, Policy};
use crate::quota::Quota;
use crate::storage::{ManualClock, Storage, StorageRequest};
use crate::strategy::State;
use crate::sync::race::model;
use crate::time::Timestamp;

fn key(hash: u64) -> KeyHash {
    KeyHash { hash, rest: 0 }
}

/// Returns a state whose fields have the same value, which makes a mix of two writes visible.
fn state(number: u32) -> State {
    State::Counts { until: Timestamp::from_micros(number.into()), amounts: [number, number] }
}

#[test]
fn reader_never_sees_a_write_in_progress() {
    model(|race| {
        let hint = Arc::new(RefusalHint::default());
        let write = |hint: &RefusalHint| hint.publish(key(1), 0, &state(1), Timestamp::EPOCH);
        let ((), read) = race.run(&hint, write, |hint| hint.read(key(1), 0, Timestamp::EPOCH));
        assert!(read.is_none() || read == Some(state(1)), "{read:?}");
        assert_eq!(hint.read(key(1), 0, Timestamp::EPOCH), Some(state(1)));
    });
}

#[test]
fn reader_never_mixes_two_states_of_one_key() {
    model(|race| {
        let hint = Arc::new(RefusalHint::default());
        let write = |hint: &RefusalHint| {
            hint.publish(key(1), 0, &state(1), Timestamp::EPOCH);
            hint.publish(key(1), 0, &state(2), Timestamp::EPOCH);
        };
        let ((), read) = race.run(&hint, write, |hint| hint.read(key(1), 0, Timestamp::EPOCH));
        assert!(read.is_none() || read == Some(state(1)) || read == Some(state(2)), "{read:?}");
        assert_eq!(hint.read(key(1), 0, Timestamp::EPOCH), Some(state(2)));
    });
}

#[test]
fn reader_never_mixes_the_states_of_two_keys() {
    for read_key in [1, 2] {
        model(move |race| {
            let hint = Arc::new(RefusalHint::default());
            hint.publish(key(1), 0, &state(1), Timestamp::EPOCH);
            let write = |hint: &RefusalHint| hint.publish(key(2), 0, &state(2), Timestamp::EPOCH);
            let ((), read) = race.run(&hint, write, move |hint| hint.read(key(read_key.into()), 0, Timestamp::EPOCH));
            assert!(read.is_none() || read == Some(state(read_key)), "{read:?}");
            assert_eq!(
                (hint.read(key(1), 0, Timestamp::EPOCH), hint.read(key(2), 0, Timestamp::EPOCH)),
                (None, Some(state(2)))
            );
        });
    }
}

#[test]
fn reader_never_mixes_a_state_with_its_removal() {
    model(|race| {
        let hint = Arc::new(RefusalHint::default());
        hint.publish(key(1), 0, &state(1), Timestamp::EPOCH);
        let ((), read) = race.run(&hint, RefusalHint::clear, |hint| hint.read(key(1), 0, Timestamp::EPOCH));
        assert!(read.is_none() || read == Some(state(1)), "{read:?}");
        assert_eq!(hint.read(key(1), 0, Timestamp::EPOCH), None);
    });
}

/// The writer uses relaxed loads, because the lock orders them.
#[test]
fn hint_of_two_writers_is_from_one_of_them() {
    model(|race| {
        let cell = Arc::new(ShardCell::default());
        let write = |number: u32| {
            move |cell: &ShardCell| {
                let shard = cell.shard.lock().unwrap();
                cell.publish(key(number.into()), 0, &state(number), Timestamp::EPOCH);
                drop(shard);
                cell.published(key(2), 0, Timestamp::EPOCH)
            }
        };
        let reads = race.run(&cell, write(1), write(2));
        for read in <[_; 2]>::from(reads) {
            assert!(read.is_none() || read == Some(state(2)), "{read:?}");
        }
        let read = (cell.published(key(1), 0, Timestamp::EPOCH), cell.published(key(2), 0, Timestamp::EPOCH));
        assert!([(Some(state(1)), None), (None, Some(state(2)))].contains(&read), "{read:?}");
    });
}

/// The flag represents the state that the lock guards.
#[test]
fn cleared_hint_is_not_read_by_later_lock_holders() {
    for refuses_another in [false, true] {
        model(move |race| {
            let cell = Arc::new((ShardCell::default(), AtomicBool::new(false)));
            cell.0.publish(key(1), 0, &state(1), Timestamp::EPOCH);
            let change = move |(cell, flag): &(ShardCell, AtomicBool)| {
                let shard = cell.shard.lock().unwrap();
                cell.clear_hint(1);
                flag.store(true, Relaxed);
                if refuses_another {
                    cell.publish(key(2), 0, &state(2), Timestamp::EPOCH);
                }
                drop(shard);
            };
            let read = |(cell, flag): &(ShardCell, AtomicBool)| {
                let shard = cell.shard.lock().unwrap();
                let has_changed = flag.load(Relaxed);
                drop(shard);
                (has_changed, cell.published(key(1), 0, Timestamp::EPOCH))
            };
            let ((), (has_changed, read)) = race.run(&cell, change, read);
            assert!(read.is_none() || !has_changed && read == Some(state(1)), "{read:?}");
        });
    }
}

#[test]
fn cleared_hint_is_not_read_after_a_release_store() {
    model(|race| {
        let cell = Arc::new((ShardCell::default(), AtomicBool::new(false)));
        cell.0.publish(key(1), 0, &state(1), Timestamp::EPOCH);
        let change = |(cell, flag): &(ShardCell, AtomicBool)| {
            let shard = cell.shard.lock().unwrap();
            cell.clear_hint(1);
            drop(shard);
            flag.store(true, Release);
        };
        let read =
            |(cell, flag): &(ShardCell, AtomicBool)| (flag.load(Acquire), cell.published(key(1), 0, Timestamp::EPOCH));
        let ((), (has_changed, read)) = race.run(&cell, change, read);
        assert!(read.is_none() || !has_changed && read == Some(state(1)), "{read:?}");
    });
}

/// Repeats the model above with the whole storage. It makes too few decisions for a sweep, so that
/// all runs are alike.
#[test]
fn cleared_key_is_admitted_after_a_release_store() {
    fn policy() -> Policy {
        Policy::from(Quota::per_hour(1))
    }
    fn is_admitted(storage: &MemoryStorage, op: Op) -> bool {
        storage.0.decide(&StorageRequest::new(&policy(), &Key::from("alice"), op, 1)).is_admitted()
    }
    model(|race| {
        let storage = MemoryStorage::builder().max_keys(1).clock(ManualClock::default()).build().unwrap();
        assert!(is_admitted(&storage, Op::Hit));
        assert!(!is_admitted(&storage, Op::Hit));
        let shared = Arc::new((storage, AtomicBool::new(false)));
        let clear = |(storage, flag): &(MemoryStorage, AtomicBool)| {
            // A memory storage is ready at once.
            drop(storage.clear(&policy(), &Key::from("alice")));
            flag.store(true, Release);
        };
        let peek = |(storage, flag): &(MemoryStorage, AtomicBool)| {
            let is_cleared = flag.load(Acquire);
            (is_cleared, is_admitted(storage, Op::Peek))
        };
        let ((), (is_cleared, admitted)) = race.run(&shared, clear, peek);
        assert!(admitted || !is_cleared);
        assert!(is_admitted(&shared.0, Op::Peek));
    });
}

/// The two threads name their keys in different orders, so they would wait for each other if they
/// locked the shards in that order.
#[test]
fn hits_on_the_same_two_keys_never_wait_for_each_other() {
    model(|race| {
        let storage = MemoryStorage::builder().max_keys(256).clock(ManualClock::default()).build().unwrap();
        assert_eq!(storage.0.shards.len(), 2);
        let policy = Policy::from(Quota::per_hour(1));
        let mut keys = (0_u64..).map(Key::from);
        let mut in_shard = |number| keys.find(|key| storage.0.locate(&policy, key).1 == number).unwrap();
        let keys = [in_shard(0), in_shard(1)];
        let shared = Arc::new((storage, policy, keys));
        let hit = |order: [usize; 2]| {
            move |(storage, policy, keys): &(MemoryStorage, Policy, [Key; 2])| {
                let requests = order.map(|at| StorageRequest::new(policy, &keys[at], Op::Hit, 1));
                super::members::decide(&storage.0, &requests).iter().all(|decision| decision.is_admitted())
            }
        };
        let (first, second) = race.run(&shared, hit([0, 1]), hit([1, 0]));
        assert!(first != second, "one unit fits: {first}, {second}");
    });
}

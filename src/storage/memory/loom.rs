//! Models of the notice that `scripts/loom` runs in all their interleavings.
//!
//! loom knows release and acquire fences and stale relaxed loads. It does not model a load that
//! returns a value before another thread has stored it, which C11 allows in theory.

use std::sync::Arc;

use loom::model;
use loom::sync::atomic::AtomicBool;
use loom::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use loom::thread;

use super::notice::Notice;
use super::padded::Padded;
use super::shard::KeyHash;
use super::{MemoryStorage, Time};
use crate::storage::{Ask, ManualClock, Storage};
use crate::strategy::State;
use crate::{Key, Op, Policy, Quota, Timestamp};

fn key(hash: u64) -> KeyHash {
    KeyHash { hash, rest: 0 }
}

/// All fields hold the same number, so a mix of two writes shows.
fn state(number: u32) -> State {
    State::Counts { until: Timestamp::from_micros(number.into()), amounts: [number, number] }
}

#[test]
fn reader_never_sees_a_write_in_progress() {
    model(|| {
        let notice = Arc::new(Notice::default());
        let writer = {
            let notice = Arc::clone(&notice);
            thread::spawn(move || notice.put_up(key(1), 0, &state(1)))
        };
        let read = notice.read(key(1), 0);
        assert!(read.is_none() || read == Some(state(1)), "{read:?}");
        writer.join().unwrap();
        assert_eq!(notice.read(key(1), 0), Some(state(1)));
    });
}

#[test]
fn reader_never_mixes_two_states_of_one_key() {
    model(|| {
        let notice = Arc::new(Notice::default());
        let writer = {
            let notice = Arc::clone(&notice);
            thread::spawn(move || {
                notice.put_up(key(1), 0, &state(1));
                notice.put_up(key(1), 0, &state(2));
            })
        };
        let read = notice.read(key(1), 0);
        assert!(read.is_none() || read == Some(state(1)) || read == Some(state(2)), "{read:?}");
        writer.join().unwrap();
        assert_eq!(notice.read(key(1), 0), Some(state(2)));
    });
}

#[test]
fn reader_never_mixes_the_states_of_two_keys() {
    model(|| {
        let notice = Arc::new(Notice::default());
        notice.put_up(key(1), 0, &state(1));
        let writer = {
            let notice = Arc::clone(&notice);
            thread::spawn(move || notice.put_up(key(2), 0, &state(2)))
        };
        let read = notice.read(key(1), 0);
        assert!(read.is_none() || read == Some(state(1)), "{read:?}");
        let read = notice.read(key(2), 0);
        assert!(read.is_none() || read == Some(state(2)), "{read:?}");
        writer.join().unwrap();
        assert_eq!((notice.read(key(1), 0), notice.read(key(2), 0)), (None, Some(state(2))));
    });
}

#[test]
fn reader_never_mixes_a_state_with_its_removal() {
    model(|| {
        let notice = Arc::new(Notice::default());
        notice.put_up(key(1), 0, &state(1));
        let writer = {
            let notice = Arc::clone(&notice);
            thread::spawn(move || notice.take_down())
        };
        let read = notice.read(key(1), 0);
        assert!(read.is_none() || read == Some(state(1)), "{read:?}");
        writer.join().unwrap();
        assert_eq!(notice.read(key(1), 0), None);
    });
}

/// The writer's own loads are relaxed: the lock orders them.
#[test]
fn notice_of_two_writers_is_one_of_theirs() {
    model(|| {
        let padded = Arc::new(Padded::default());
        let other = {
            let padded = Arc::clone(&padded);
            thread::spawn(move || {
                let shard = padded.shard.lock().unwrap();
                padded.put_up(key(1), 0, &state(1));
                drop(shard);
            })
        };
        let shard = padded.shard.lock().unwrap();
        padded.put_up(key(2), 0, &state(2));
        drop(shard);
        let read = padded.noticed(key(2), 0);
        assert!(read.is_none() || read == Some(state(2)), "{read:?}");
        other.join().unwrap();
        let read = (padded.noticed(key(1), 0), padded.noticed(key(2), 0));
        assert!([(Some(state(1)), None), (None, Some(state(2)))].contains(&read), "{read:?}");
    });
}

/// The flag stands for the state that the lock guards.
#[test]
fn removed_refusal_is_not_seen_after_the_lock() {
    model(|| {
        let padded = Arc::new((Padded::default(), AtomicBool::new(false)));
        padded.0.put_up(key(1), 0, &state(1));
        let writer = {
            let padded = Arc::clone(&padded);
            thread::spawn(move || {
                let shard = padded.0.shard.lock().unwrap();
                padded.0.take_down(1);
                padded.1.store(true, Relaxed);
                padded.0.put_up(key(2), 0, &state(2));
                drop(shard);
            })
        };
        let shard = padded.0.shard.lock().unwrap();
        let has_changed = padded.1.load(Relaxed);
        drop(shard);
        let read = padded.0.noticed(key(1), 0);
        assert!(read.is_none() || !has_changed && read == Some(state(1)), "{read:?}");
        writer.join().unwrap();
    });
}

#[test]
fn removed_refusal_is_not_seen_by_a_thread_that_knows_of_the_change() {
    model(|| {
        let padded = Arc::new((Padded::default(), AtomicBool::new(false)));
        padded.0.put_up(key(1), 0, &state(1));
        let writer = {
            let padded = Arc::clone(&padded);
            thread::spawn(move || {
                let shard = padded.0.shard.lock().unwrap();
                padded.0.take_down(1);
                drop(shard);
                padded.1.store(true, Release);
            })
        };
        let has_changed = padded.1.load(Acquire);
        let read = padded.0.noticed(key(1), 0);
        assert!(read.is_none() || !has_changed && read == Some(state(1)), "{read:?}");
        writer.join().unwrap();
    });
}

/// The same with the storage itself. Peeks do not sweep, so each run does the same.
#[test]
fn cleared_key_is_admitted_by_a_thread_that_knows_of_it() {
    model(|| {
        let storage = MemoryStorage::with(1, Time::Other(Box::new(ManualClock::default())));
        let (policy, key) = (Policy::from(Quota::per_hour(1)), Key::from("alice"));
        let ask = |op| storage.0.decide(&Ask::new(&policy, &key, op, 1));
        assert!(ask(Op::Hit).is_admitted());
        assert!(ask(Op::Hit).is_refused());
        let is_cleared = Arc::new(AtomicBool::new(false));
        let other = {
            let (storage, policy, key) = (storage.clone(), policy.clone(), key.clone());
            let is_cleared = Arc::clone(&is_cleared);
            thread::spawn(move || {
                let _ = storage.clear(&policy, &key);
                is_cleared.store(true, Release);
            })
        };
        let knows = is_cleared.load(Acquire);
        assert!(ask(Op::Peek).is_admitted() || !knows);
        other.join().unwrap();
        assert!(ask(Op::Peek).is_admitted());
    });
}

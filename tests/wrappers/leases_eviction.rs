//! Leases in a full table.

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{FakeStorage, decide, hit, memory_with_manual_clock, policy, poll, start_hit};
use tokio::task::yield_now;
use tower_ratelimit::storage::{Clock, Leases, ManualClock};
use tower_ratelimit::{Key, Op, Timestamp};

/// In a full table, the key that was not used for the longest time makes room, unless it has units.
#[tokio::test]
async fn leases_are_not_evicted() {
    let (memory, clock) = memory_with_manual_clock();
    let storage = FakeStorage::around(memory);
    let leases = Leases::new(storage.clone(), 10).max_keys(2).clock(clock.clone());
    let policy = policy("fixed-window 1000/day");
    for key in ["a", "a", "b", "b", "c", "c", "c"] {
        assert!(hit(&leases, &policy, key, 1).await.is_admitted());
        clock.advance(Duration::from_millis(1));
    }
    assert_eq!((leases.len(), storage.take_decisions()), (2, 2 + 2 + 3));
    for key in ["a", "b"] {
        for _ in 0..10 {
            assert!(hit(&leases, &policy, key, 1).await.is_admitted());
        }
    }
    assert_eq!(storage.take_decisions(), 0);
    // All units of both leases are spent.
    for key in ["c", "c", "d", "d"] {
        assert!(hit(&leases, &policy, key, 1).await.is_admitted());
    }
    assert_eq!(leases.len(), 2);
}

/// Runs a step when the clock is read the next time.
#[derive(Clone, Default)]
struct SteppingClock(ManualClock, Arc<Mutex<Option<Step>>>);

type Step = Box<dyn FnOnce() + Send>;

impl fmt::Debug for SteppingClock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SteppingClock").field(&self.0).finish_non_exhaustive()
    }
}

impl Clock for SteppingClock {
    fn now(&self) -> Timestamp {
        let step = self.1.lock().unwrap().take();
        if let Some(step) = step {
            step();
        }
        self.0.now()
    }
}

/// Another thread can hit another key of a full table after a slice has arrived and before it is
/// leased. Here, the clock does so, because the worker reads it in between.
#[tokio::test]
async fn slice_whose_key_was_evicted_meanwhile_is_refunded() {
    let (clock, policy) = (SteppingClock::default(), policy("fixed-window 1000/minute"));
    let storage = FakeStorage::around(memory_with_manual_clock().0);
    let leases = Leases::new(storage.clone(), 10).max_keys(1).clock(clock.clone());
    let _ = hit(&leases, &policy, "a", 1).await;
    storage.close();
    let mut slice = start_hit(&leases, &policy, &Key::from("a"), 1);
    assert!(poll(&mut slice).is_pending());
    yield_now().await;
    assert_eq!(storage.take_decisions(), 2, "the slice is in flight");
    let (other, of_other) = (leases.clone(), policy.clone());
    let evict = move || assert!(poll(&mut start_hit(&other, &of_other, &Key::from("b"), 1)).is_ready());
    *clock.1.lock().unwrap() = Some(Box::new(evict));
    storage.open();
    assert!(slice.await.unwrap().is_admitted());
    for _ in 0..20 {
        yield_now().await;
    }
    assert!(leases.is_empty() && clock.1.lock().unwrap().is_none());
    assert_eq!(storage.take_changes(), 1);
    assert_eq!(decide(&storage, &policy, "a", Op::Peek, 1).await.remaining(), 998);
}

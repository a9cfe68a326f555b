//! Leases at shutdown: unspent units go back to the storage.

use std::sync::Arc;
use std::time::Duration;

use common::random::Numbers;
use common::{
    Behavior, FAILURE, FakeStorage, decide, hit, memory_with_manual_clock, message, policy, poll, slow, start_hit,
};
use tokio::task::{JoinSet, yield_now};
use tokio::time::sleep;
use tower_ratelimit::storage::{Leases, ManualClock, TokioClock};
use tower_ratelimit::{Decision, Key, MemoryStorage, Op, Policy, Storage};

fn leased(slice: u32) -> (Leases, FakeStorage, ManualClock) {
    let (memory, clock) = memory_with_manual_clock();
    let storage = FakeStorage::around(memory);
    (Leases::new(storage.clone(), slice).clock(clock.clone()), storage, clock)
}

/// Returns the remaining units of a key in the storage.
async fn remains(storage: &impl Storage, policy: &Policy, key: &str) -> u32 {
    decide(storage, policy, key, Op::Peek, 1).await.remaining()
}

/// Takes a slice: the second hit of a key does.
async fn lease(storage: &impl Storage, policy: &Policy, key: &str, cost: u32) -> Decision {
    let _ = hit(storage, policy, key, 1).await;
    hit(storage, policy, key, cost).await
}

/// Lets spawned tasks run.
async fn run_tasks() {
    for _ in 0..20 {
        yield_now().await;
    }
}

#[tokio::test]
async fn close_refunds_every_lease_and_later_hits_request_only_their_cost() {
    for text in ["fixed-window 1000/minute", "moving-window 1000/minute", "sliding-window-counter 1000/minute"] {
        let (leases, storage, _) = leased(10);
        let policy = policy(text);
        let keys: Vec<String> = (0..500).map(|key| key.to_string()).collect();
        let mut spent = None;
        for key in &keys {
            spent = Some(lease(&leases, &policy, key, 3).await);
        }
        leases.clone().close().await.unwrap();
        assert_eq!((storage.take_changes(), leases.len()), (500, 0));
        for key in &keys {
            assert_eq!(remains(&storage, &policy, key).await, 996);
        }
        // A second `close` has nothing to refund.
        leases.close().await.unwrap();
        assert_eq!(storage.take_changes(), 0);

        storage.take_decisions();
        for left in [995, 994] {
            let decision = hit(&leases, &policy, "0", 1).await;
            assert_eq!((decision.remaining(), remains(&storage, &policy, "0").await), (left, left));
        }
        assert_eq!((storage.take_decisions(), leases.len()), (4, 0));
        // A refund and a clear go to the storage, too.
        leases.settle(&policy, &Key::from("499"), &spent.unwrap(), 0).await.unwrap();
        leases.clear(&policy, &Key::from("0")).await.unwrap();
        for (key, left) in [("499", 999), ("0", 1_000)] {
            assert_eq!(remains(&leases, &policy, key).await, left);
        }
    }
}

#[tokio::test]
async fn close_refunds_the_units_that_a_bucket_has_not_refilled() {
    for (passed, left) in [(0, 998), (50, 999), (100, 999)] {
        let (leases, storage, clock) = leased(10);
        let policy = policy("token-bucket 6000/minute burst 1000");
        let _ = lease(&leases, &policy, "a", 1).await;
        clock.advance(Duration::from_millis(passed));
        assert_eq!(remains(&storage, &policy, "a").await, 1_000 - 12 + u32::try_from(passed).unwrap() / 10);
        leases.close().await.unwrap();
        // An idle bucket refills the slice of eleven units in 110 ms.
        assert_eq!(remains(&storage, &policy, "a").await, left, "{passed} ms");
    }
}

#[tokio::test]
async fn close_waits_for_slices_in_flight_and_serves_their_callers() {
    let (leases, storage, _) = leased(10);
    let (policy, key) = (policy("fixed-window 1000/minute"), Key::from("a"));
    let _ = hit(&leases, &policy, "a", 1).await;
    storage.close();
    let mut first = start_hit(&leases, &policy, &key, 1);
    assert!(poll(&mut first).is_pending());
    run_tasks().await;
    let mut queued = start_hit(&leases, &policy, &key, 2);
    assert!(poll(&mut queued).is_pending());
    let mut close = Box::pin(leases.close());
    assert!(poll(&mut close).is_pending());
    storage.open();
    close.await.unwrap();
    assert_eq!(remains(&storage, &policy, "a").await, 996);
    assert!(first.await.unwrap().is_admitted() && queued.await.unwrap().is_admitted());
    run_tasks().await;
    assert_eq!((remains(&storage, &policy, "a").await, leases.len()), (996, 0));
}

/// During `close`, some leases are already refunded and others are not.
#[tokio::test]
async fn refunds_during_close_are_not_lost() {
    let (leases, storage, _) = leased(10);
    let policy = policy("fixed-window 1000/minute");
    let keys: Vec<Key> = (0..500_u32).map(|key| Key::from(key.to_string().as_str())).collect();
    let mut spent = Vec::new();
    for key in 0..500_u32 {
        spent.push(lease(&leases, &policy, &key.to_string(), 4).await);
    }
    storage.close();
    let mut close = Box::pin(leases.close());
    assert!(poll(&mut close).is_pending());
    let mut refunds: Vec<_> =
        keys.iter().zip(&spent).map(|(key, spent)| leases.settle(&policy, key, spent, 0)).collect();
    refunds.retain_mut(|refund| poll(refund).is_pending());
    storage.open();
    close.await.unwrap();
    for refund in refunds {
        refund.await.unwrap();
    }
    for key in 0..500_u32 {
        assert_eq!(remains(&storage, &policy, &key.to_string()).await, 999);
    }
}

/// Hits race with the close on several threads. When all are done, the storage has counted the
/// admitted hits and nothing else.
#[test]
fn close_during_hits_loses_no_units() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(4).enable_time().build().unwrap();
    let policy = policy("fixed-window 100000/day");
    for round in 0..100 {
        let storage = slow(memory_with_manual_clock().0);
        let leases = Leases::new(storage.clone(), 50).clock(ManualClock::default());
        let admitted = runtime.block_on(async {
            let mut hits = JoinSet::new();
            for task in 0..4 {
                let (leases, policy) = (leases.clone(), policy.clone());
                hits.spawn(async move {
                    for _ in 0..60 {
                        let key = if task % 2 == 0 { "a" } else { "b" };
                        assert!(hit(&leases, &policy, key, 1).await.is_admitted());
                    }
                    60
                });
            }
            for _ in 0..round {
                yield_now().await;
            }
            leases.close().await.unwrap();
            hits.join_all().await.into_iter().sum::<u32>()
        });
        let remaining = ["a", "b"].map(|key| runtime.block_on(remains(&storage, &policy, key)));
        assert_eq!(200_000 - remaining.into_iter().sum::<u32>(), admitted, "round {round}");
    }
}

#[tokio::test]
async fn lease_of_an_ended_window_is_not_refunded() {
    let (leases, storage, clock) = leased(10);
    let policy = policy("fixed-window 1000/minute");
    let _ = lease(&leases, &policy, "a", 1).await;
    clock.advance(Duration::from_secs(60));
    assert!(hit(&storage, &policy, "a", 20).await.is_admitted());
    leases.close().await.unwrap();
    assert_eq!((storage.take_changes(), remains(&storage, &policy, "a").await), (0, 980));
}

#[tokio::test]
async fn close_reports_a_failed_refund_and_tries_all_others() {
    let (leases, storage, _) = leased(10);
    let policy = policy("fixed-window 1000/minute");
    for key in ["a", "b", "c"] {
        let _ = lease(&leases, &policy, key, 1).await;
    }
    storage.set_changes(Behavior::Fails);
    assert_eq!(message(leases.close().await.unwrap_err()), FAILURE);
    assert_eq!(storage.take_changes(), 3);
    // The same for a slice that is in flight when the leases are closed.
    let (leases, storage, _) = leased(10);
    let _ = hit(&leases, &policy, "a", 1).await;
    storage.close();
    let mut hit = start_hit(&leases, &policy, &Key::from("a"), 1);
    assert!(poll(&mut hit).is_pending());
    run_tasks().await;
    storage.set_changes(Behavior::Fails);
    let mut close = Box::pin(leases.close());
    assert!(poll(&mut close).is_pending());
    storage.open();
    assert_eq!(message(close.await.unwrap_err()), FAILURE);
    assert!(hit.await.unwrap().is_admitted());
}

/// The next `close` refunds the leases that the dropped one has not reached.
#[tokio::test]
async fn dropped_close_keeps_the_leases_that_it_has_not_reached() {
    let (leases, storage, _) = leased(10);
    let policy = policy("fixed-window 1000/minute");
    for key in 0..500_u32 {
        let _ = lease(&leases, &policy, &key.to_string(), 1).await;
    }
    storage.close();
    let mut close = Box::pin(leases.close());
    assert!(poll(&mut close).is_pending());
    drop(close);
    let begun = storage.take_changes();
    assert!((1..100).contains(&begun) && leases.len() > 300, "{begun} refunds in flight");
    storage.open();
    let held = leases.len() as u64;
    leases.close().await.unwrap();
    assert_eq!((storage.take_changes(), leases.len()), (held, 0));
}

/// The worker runs in another runtime, which may have stopped. Its slice is refunded when its lease
/// ends.
#[test]
fn close_does_not_wait_for_another_runtime() {
    let (leases, storage, clock) = leased(10);
    let policy = policy("fixed-window 1000/minute");
    let [one, two] = [(); 2].map(|()| tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap());
    two.block_on(async { drop(hit(&leases, &policy, "a", 1).await) });
    storage.close();
    let inside = one.enter();
    let mut asking = start_hit(&leases, &policy, &Key::from("a"), 1);
    assert!(poll(&mut asking).is_pending());
    drop(inside);
    one.block_on(run_tasks());
    two.block_on(leases.close()).unwrap();
    storage.open();
    one.block_on(async {
        assert!(asking.await.unwrap().is_admitted());
        clock.advance(Duration::from_secs(1));
        while remains(&storage, &policy, "a").await != 998 {
            sleep(Duration::from_millis(5)).await;
        }
    });
}

/// The handles are dropped while a lease exists, or while its slice is in flight.
#[tokio::test(start_paused = true)]
async fn drop_of_the_last_handle_refunds_every_lease_at_its_end() {
    for is_in_flight in [false, true] {
        let clock = Arc::new(TokioClock::new());
        let storage = FakeStorage::around(MemoryStorage::builder().clock(Arc::clone(&clock)).build().unwrap());
        let leases = Leases::new(storage.clone(), 10).clock(clock);
        let policy = policy("fixed-window 1000/minute");
        let _ = hit(&leases, &policy, "a", 1).await;
        if is_in_flight {
            storage.close();
        }
        let mut slice = start_hit(&leases, &policy, &Key::from("a"), 1);
        assert!(poll(&mut slice).is_pending());
        run_tasks().await;
        drop((slice, leases));
        storage.open();
        sleep(Duration::from_millis(1_002)).await;
        run_tasks().await;
        // A decision that was on its way to a caller that left is spent.
        let spent = if is_in_flight { 1 } else { 2 };
        assert_eq!((remains(&storage, &policy, "a").await, storage.take_changes()), (1_000 - spent, 1));
    }
}

/// A runtime that shuts down with a task that owns the last handle does not panic.
#[test]
fn drop_without_a_runtime_does_not_panic() {
    let policy = policy("fixed-window 1000/minute");
    for is_owned_by_a_task in [false, true] {
        let (leases, storage, _) = leased(10);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        assert!(runtime.block_on(lease(&leases, &policy, "a", 1)).is_admitted());
        if is_owned_by_a_task {
            runtime.spawn(async move {
                std::future::pending::<()>().await;
                drop(leases);
            });
            runtime.block_on(run_tasks());
            drop(runtime);
        } else {
            drop((runtime, leases));
        }
        assert_eq!(storage.take_changes(), 0);
    }
}

/// Deploys 20 processes several times a day, one process after the other, with some hits between
/// them. Then all processes spend the rest of the quota. Returns the unused units.
async fn lost_by_rolling_restarts(is_closed: bool, deployments: u32) -> u32 {
    const QUOTA: u32 = 10_000;
    let (memory, clock) = memory_with_manual_clock();
    let storage = FakeStorage::around(memory);
    let policy = policy(&format!("fixed-window {QUOTA}/day"));
    let start = || Leases::new(storage.clone(), 100).clock(clock.clone());
    let mut processes: Vec<_> = (0..20).map(|_| start()).collect();
    let (mut numbers, mut admitted) = (Numbers(20), 0);
    for _ in 0..deployments {
        for restarted in 0..processes.len() {
            for _ in 0..30 {
                let at = usize::try_from(numbers.below(20)).unwrap();
                admitted += u32::from(hit(&processes[at], &policy, "a", 1).await.is_admitted());
                clock.advance(Duration::from_millis(1));
            }
            let old = std::mem::replace(&mut processes[restarted], start());
            if is_closed {
                old.close().await.unwrap();
            } else {
                std::mem::forget(old);
            }
            run_tasks().await;
        }
    }
    for process in &processes {
        while hit(process, &policy, "a", 1).await.is_admitted() {
            admitted += 1;
        }
    }
    QUOTA - admitted
}

#[tokio::test]
async fn rolling_restarts_of_twenty_processes_lose_nothing() {
    assert_eq!(lost_by_rolling_restarts(true, 10).await, 0);
}

#[tokio::test]
async fn crash_of_twenty_processes_loses_at_most_one_slice_each() {
    let lost = lost_by_rolling_restarts(false, 1).await;
    assert!((1..=20 * 100).contains(&lost), "{lost}");
}

//! Leases: slices of a window are spent without the storage, and never exceed the limit.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::Poll;
use std::time::Duration;

use common::random::Numbers;
use common::{
    Behavior, FAILURE, FakeStorage, decide, hit, memory_with_manual_clock, message, panic_message, policy, poll,
    start_hit,
};
use tokio::task::JoinSet;
use tower_ratelimit::storage::{
    Breaker, Clock, Leases, ManualClock, StorageError, StorageFuture, StorageRequest, Summary,
};
use tower_ratelimit::strategy::Status;
use tower_ratelimit::{
    Decision, FixedWindow, Key, Limit, MemoryStorage, OnError, Op, PeerIp, Policy, Quota, RateLimitLayer, RateLimiter,
    Storage, Timestamp, TokenBucket,
};

/// Leases on a storage that counts its calls, and the manual clock of both.
fn leased(slice: u32) -> (Leases, FakeStorage, ManualClock) {
    let (memory, clock) = memory_with_manual_clock();
    let storage = FakeStorage::around(memory);
    (Leases::new(storage.clone(), slice).clock(clock.clone()), storage, clock)
}

/// Starts `count` hits of one unit, which all wait for the storage.
fn waiting_hits(storage: &impl Storage, policy: &Policy, key: &Key, count: usize) -> Vec<StorageFuture<Decision>> {
    let mut hits: Vec<_> = (0..count).map(|_| start_hit(storage, policy, key, 1)).collect();
    assert!(hits.iter_mut().all(|hit| poll(hit).is_pending()));
    hits
}

/// Returns the remaining units that the storage reports to a peek.
async fn remains(storage: &impl Storage, policy: &Policy) -> u32 {
    decide(storage, policy, "a", Op::Peek, 1).await.remaining()
}

#[tokio::test]
async fn slice_costs_one_round_trip() {
    let (leases, storage, _) = leased(10);
    let policy = policy("fixed-window 1000/minute");
    for spent in 1..=10 {
        let decision = hit(&leases, &policy, "a", 1).await;
        assert_eq!((decision.is_admitted(), decision.remaining()), (true, 1000 - spent));
        assert_eq!(decision.reset_after(), Duration::from_secs(60));
    }
    assert_eq!((storage.take_decisions(), leases.misses(), leases.local_decisions(), leases.len()), (1, 1, 9, 1));
    assert!(!leases.try_admit(StorageRequest::new(&policy, &Key::from("a"), Op::Hit, 1), None), "no unit is leased");
    let _ = hit(&leases, &policy, "a", 1).await;
    let mut shown = Summary::default();
    assert!(leases.try_admit(StorageRequest::new(&policy, &Key::from("a"), Op::Hit, 3), Some(&mut shown)));
    assert_eq!((storage.take_decisions(), shown.limit.remaining()), (1, 986));
}

/// Slices shrink with the units that remain, and the last units are taken one by one, so the limit
/// is exact.
#[tokio::test]
async fn last_units_are_not_leased_in_slices() {
    let (leases, storage, clock) = leased(1_000);
    let (other, policy) = (Leases::new(storage.clone(), 1_000).clock(clock), policy("fixed-window 100/minute"));
    assert!(hit(&leases, &policy, "a", 1).await.is_admitted());
    assert_eq!(remains(&storage, &policy).await, 94);
    let mut admitted = 1;
    while hit(&leases, &policy, "a", 1).await.is_admitted() {
        admitted += 1;
    }
    assert_eq!(admitted, 100);
    assert!(leases.misses() < 60, "{}", leases.misses());
    assert!(hit(&other, &policy, "a", 1).await.is_refused());
}

/// A refusal reports all remaining units: those leased here and those in the storage.
#[tokio::test]
async fn cost_is_paid_from_the_lease_and_the_storage() {
    let (leases, storage, _) = leased(4);
    let policy = policy("fixed-window 20/minute");
    for (cost, left) in [(3, 17), (3, 14), (9, 5), (3, 2)] {
        assert_eq!(hit(&leases, &policy, "a", cost).await.remaining(), left);
    }
    let refused = hit(&leases, &policy, "a", 3).await;
    assert_eq!((refused.is_refused(), refused.remaining()), (true, 2));
    assert_eq!(refused.retry_after(), Some(Duration::from_secs(60)));
    assert_eq!(hit(&leases, &policy, "a", 21).await.retry_after(), None);
    assert_eq!(remains(&leases, &policy).await, 2);
    assert!(hit(&leases, &policy, "a", 2).await.is_admitted());
    assert_eq!(remains(&storage, &policy).await, 0);
}

/// The nodes hit in random order, with random costs, refunds and new windows. The units admitted in
/// a window never exceed the limit.
#[tokio::test]
async fn several_nodes_never_exceed_the_limit() {
    let mut numbers = Numbers(42);
    for round in 0..200 {
        let (memory, clock) = memory_with_manual_clock();
        let storage = FakeStorage::around(memory);
        let (count, limit) = (2 + numbers.below(5), numbers.one_of(&[5, 40, 300]));
        let slice = numbers.one_of(&[2, 10, 100]);
        let nodes: Vec<Leases> = (0..count).map(|_| Leases::new(storage.clone(), slice).clock(clock.clone())).collect();
        let text = if round % 2 == 0 { "fixed-window" } else { "fixed-window-aligned" };
        let policy = policy(&format!("{text} {limit}/minute"));
        // The spent units by the end of their window.
        let mut spent: HashMap<u64, u32> = HashMap::new();
        let window = |decision: &Decision| decision.shown().hit(decision.at(), 1).until.as_micros();
        let mut last = None;
        for _ in 0..400 {
            let node = &nodes[usize::try_from(numbers.below(count)).unwrap()];
            clock.advance(Duration::from_millis(numbers.below(600)));
            if let (0, Some((decision, of))) = (numbers.below(10), last.take()) {
                let of: &Leases = of;
                of.settle(&policy, &Key::from("a"), &decision, 0).await.unwrap();
                if clock.now().as_micros() < window(&decision) {
                    *spent.get_mut(&window(&decision)).unwrap() -= decision.cost();
                }
                continue;
            }
            let decision = hit(node, &policy, "a", numbers.one_of(&[1, 1, 1, 2, 3])).await;
            if decision.is_admitted() {
                let spent = spent.entry(window(&decision)).or_default();
                *spent += decision.cost();
                assert!(*spent <= limit, "{spent} of {limit}");
                assert!(clock.now().as_micros() < window(&decision), "the window has ended");
                last = Some((decision, node));
            }
        }
    }
}

/// Eight tasks on each of several nodes over one storage, on one thread and on several.
#[test]
fn concurrent_tasks_on_several_nodes_admit_exactly_the_limit() {
    let runtimes = [
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap(),
        tokio::runtime::Builder::new_multi_thread().worker_threads(4).enable_all().build().unwrap(),
    ];
    for (runtime, nodes, slice) in
        runtimes.iter().flat_map(|runtime| [(runtime, 1, 50), (runtime, 4, 50), (runtime, 3, 7)])
    {
        let (memory, clock) = memory_with_manual_clock();
        let storage = FakeStorage::around(memory);
        let limit = 2_000;
        let policy = policy(&format!("fixed-window {limit}/day"));
        let (admitted, calls) = runtime.block_on(async {
            let admitted = Arc::new(AtomicU32::new(0));
            let mut all = JoinSet::new();
            let nodes: Vec<Leases> =
                (0..nodes).map(|_| Leases::new(storage.clone(), slice).clock(clock.clone())).collect();
            for task in 0..8 * nodes.len() {
                let (node, policy, admitted) =
                    (nodes[task % nodes.len()].clone(), policy.clone(), Arc::clone(&admitted));
                all.spawn(async move {
                    loop {
                        let at_once = node.try_admit(StorageRequest::new(&policy, &Key::from("a"), Op::Hit, 1), None);
                        if !at_once && hit(&node, &policy, "a", 1).await.is_refused() {
                            break;
                        }
                        admitted.fetch_add(1, Ordering::SeqCst);
                        tokio::task::yield_now().await;
                    }
                });
            }
            while let Some(done) = all.join_next().await {
                done.unwrap();
            }
            (admitted.load(Ordering::SeqCst), storage.take_decisions())
        });
        // All nodes continued until they were refused, so no unit is left.
        assert_eq!(admitted, limit, "{nodes} nodes, slices of {slice}");
        assert!(calls < 1_500, "{calls} round trips");
    }
}

/// One call is in flight for all waiting callers, and it requests the units that they all need.
#[tokio::test]
async fn callers_of_one_key_share_one_round_trip() {
    let (leases, storage, _) = leased(10);
    let policy = policy("fixed-window 1000/minute");
    storage.close();
    let key = Key::from("a");
    let waiting = waiting_hits(&leases, &policy, &key, 100);
    assert_eq!(storage.take_decisions(), 1);
    storage.open();
    for caller in waiting {
        assert!(caller.await.unwrap().is_admitted());
    }
    assert!(storage.take_decisions() <= 2, "one for the first caller, one for all others");
    // Another key does not wait.
    storage.close();
    let mut first = start_hit(&leases, &policy, &key, 50);
    let _ = poll(&mut first);
    let mut other = leases.decide(StorageRequest::new(&policy, &Key::from("b"), Op::Hit, 1));
    assert!(poll(&mut other).is_pending());
    assert_eq!(storage.take_decisions(), 2);
}

/// A lease ends with its window, for any delay of the reply and any difference of the clocks.
#[tokio::test]
async fn leased_units_are_not_spent_after_their_window() {
    for (decides_late, trip) in [(false, 0), (false, 300), (false, 999), (false, 1_500), (true, 300), (true, 1_500)] {
        // The clocks are an hour apart and advance together.
        let (memory, theirs) = memory_with_manual_clock();
        let ours = ManualClock::new(theirs.now().plus(3_600_000_000));
        let storage = FakeStorage::around(memory);
        let leases = Leases::new(storage.clone(), 10).clock(ours.clone());
        let pass = |millis: u64| {
            for clock in [&ours, &theirs] {
                clock.advance(Duration::from_millis(millis));
            }
        };
        let (policy, key) = (policy("fixed-window 1000/second"), Key::from("a"));
        storage.work_when_open(decides_late);
        storage.close();
        let mut first = start_hit(&leases, &policy, &key, 1);
        assert!(poll(&mut first).is_pending());
        let start = theirs.now();
        pass(trip);
        let decided = if decides_late { theirs.now() } else { start };
        storage.open();
        let first = first.await.unwrap();
        assert!(first.is_admitted(), "the requesting hit is admitted");
        storage.work_when_open(false);
        storage.take_decisions();
        let mut here = 0;
        for _ in 0..9 {
            let now = theirs.now();
            let at_once = leases.try_admit(StorageRequest::new(&policy, &key, Op::Hit, 1), None);
            if at_once {
                here += 1;
                assert!(now.since(decided) < 1_000_000 - trip * 1_000 * u64::from(decides_late), "{now:?}");
            }
            pass(100);
        }
        assert_eq!(storage.take_decisions(), 0);
        let spans = (1_000_u64.saturating_sub(trip)).div_ceil(100);
        assert_eq!(here, spans.min(9), "{decides_late} {trip}");
        // The next window is complete.
        pass(1_000);
        let next = hit(&leases, &policy, "a", 1).await;
        assert_eq!((next.is_admitted(), next.remaining()), (true, 999));
    }
}

/// The times in a local decision are those of the storage's clock.
#[tokio::test]
async fn local_hit_reports_the_time_of_the_storage() {
    let (leases, storage, clock) = leased(10);
    let policy = policy("fixed-window-aligned 1000/minute");
    clock.advance(Duration::from_secs(15));
    let first = hit(&leases, &policy, "a", 1).await;
    clock.advance(Duration::from_secs(20));
    let second = hit(&leases, &policy, "a", 1).await;
    assert_eq!(storage.take_decisions(), 1);
    assert_eq!(second.at(), first.at().plus(20_000_000));
    assert_eq!((first.reset_after(), second.reset_after()), (Duration::from_secs(45), Duration::from_secs(25)));
}

#[tokio::test]
async fn refunds_return_to_the_lease_or_the_storage() {
    let (leases, storage, clock) = leased(10);
    let (policy, key) = (policy("fixed-window 1000/minute"), Key::from("a"));
    let (first, second) = (hit(&leases, &policy, "a", 3).await, hit(&leases, &policy, "a", 4).await);
    assert_eq!((remains(&storage, &policy).await, remains(&leases, &policy).await), (990, 993));
    leases.settle(&policy, &key, &second, 0).await.unwrap();
    assert_eq!((remains(&storage, &policy).await, remains(&leases, &policy).await), (990, 997));
    assert_eq!(storage.take_changes(), 0);
    // All units are refunded, as if there had been no hit.
    leases.settle(&policy, &key, &first, 0).await.unwrap();
    assert_eq!((storage.take_changes(), remains(&storage, &policy).await), (1, 1000));
    // A node without a lease refunds to the storage.
    let second_handle = Leases::new(storage.clone(), 10).clock(clock.clone());
    let taken = hit(&leases, &policy, "a", 10).await;
    second_handle.settle(&policy, &key, &taken, 0).await.unwrap();
    assert_eq!((storage.take_changes(), remains(&storage, &policy).await), (1, 1000));
    // After its window a hit is not refunded.
    let old = hit(&leases, &policy, "a", 10).await;
    clock.advance(Duration::from_secs(60));
    let _ = hit(&leases, &policy, "a", 1).await;
    leases.settle(&policy, &key, &old, 0).await.unwrap();
    assert_eq!(remains(&leases, &policy).await, 999);
    // Refusals and free hits refund nothing.
    storage.take_changes();
    let refused = hit(&leases, &policy, "a", 1001).await;
    leases.settle(&policy, &key, &refused, 0).await.unwrap();
    assert_eq!(storage.take_changes(), 0);
}

#[tokio::test]
async fn clear_drops_the_lease_and_a_slice_in_flight() {
    let (leases, storage, _) = leased(10);
    let (policy, key) = (policy("fixed-window 1000/minute"), Key::from("a"));
    assert!(hit(&leases, &policy, "a", 1).await.is_admitted());
    leases.clear(&policy, &key).await.unwrap();
    assert_eq!((leases.len(), remains(&storage, &policy).await), (0, 1000));
    // The same while a slice is in flight.
    storage.close();
    let mut late = start_hit(&leases, &policy, &key, 1);
    assert!(poll(&mut late).is_pending());
    let mut clear = leases.clear(&policy, &key);
    assert!(poll(&mut clear).is_pending());
    storage.open();
    assert!(late.await.unwrap().is_admitted());
    clear.await.unwrap();
    assert_eq!((leases.len(), remains(&storage, &policy).await), (0, 1000));
}

/// A caller queued before the clear takes a slice while the clear waits. That slice is dropped too.
#[tokio::test]
async fn clear_drops_a_lease_taken_while_it_waited() {
    let (leases, storage, _) = leased(10);
    let (policy, key) = (policy("fixed-window 1000/minute"), Key::from("a"));
    storage.close();
    let begin = || start_hit(&leases, &policy, &key, 1);
    let (mut asking, mut behind, mut clear) = (begin(), begin(), leases.clear(&policy, &key));
    assert!(poll(&mut asking).is_pending() && poll(&mut behind).is_pending() && poll(&mut clear).is_pending());
    storage.open();
    assert!(asking.await.unwrap().is_admitted() && behind.await.unwrap().is_admitted());
    clear.await.unwrap();
    assert_eq!((leases.len(), remains(&leases, &policy).await), (0, 1000));
    let mut admitted = 0;
    while hit(&leases, &policy, "a", 1).await.is_admitted() {
        admitted += 1;
    }
    assert_eq!(admitted, 1000);
}

/// A clear in another runtime does not queue behind the hits, so it drops the units that are leased
/// when it ends.
#[test]
fn clear_in_another_runtime_drops_the_lease_when_it_ends() {
    for is_given_up in [false, true] {
        let (leases, storage, _) = leased(10);
        let (policy, key) = (policy("fixed-window 1000/minute"), Key::from("a"));
        let [one, two] = [(); 2].map(|()| tokio::runtime::Builder::new_current_thread().build().unwrap());
        storage.close();
        let begin = || start_hit(&leases, &policy, &key, 1);
        let inside = one.enter();
        let (mut asking, mut behind) = (begin(), begin());
        assert!(poll(&mut asking).is_pending() && poll(&mut behind).is_pending());
        drop(inside);
        let inside = two.enter();
        storage.work_when_open(true);
        let mut clear = leases.clear(&policy, &key);
        assert!(poll(&mut clear).is_pending());
        storage.work_when_open(false);
        drop(inside);
        storage.open();
        one.block_on(async { assert!(asking.await.unwrap().is_admitted() && behind.await.unwrap().is_admitted()) });
        assert_eq!(leases.len(), 1);
        if is_given_up {
            drop(clear);
        } else {
            two.block_on(clear).unwrap();
            assert_eq!(one.block_on(remains(&storage, &policy)), 1000);
        }
        assert_eq!(leases.len(), 0);
    }
}

/// The slice was decided before the clear, and arrives after it.
#[test]
fn slice_that_arrives_after_a_clear_in_another_runtime_is_dropped() {
    let (leases, storage, _) = leased(10);
    let (policy, key) = (policy("fixed-window 1000/minute"), Key::from("a"));
    let [one, two] = [(); 2].map(|()| tokio::runtime::Builder::new_current_thread().build().unwrap());
    storage.close();
    let inside = one.enter();
    let mut asking = start_hit(&leases, &policy, &key, 1);
    assert!(poll(&mut asking).is_pending());
    drop(inside);
    storage.open();
    two.block_on(leases.clear(&policy, &key)).unwrap();
    assert!(one.block_on(asking).unwrap().is_admitted());
    assert_eq!((leases.len(), one.block_on(remains(&storage, &policy))), (0, 1000));
}

/// A hit in another runtime bypasses the lease, so its refund goes to the storage.
#[test]
fn refund_of_a_hit_in_another_runtime_goes_to_the_storage() {
    let (leases, storage, _) = leased(6);
    let (policy, key) = (policy("fixed-window 100/minute"), Key::from("a"));
    let [one, two] = [(); 2].map(|()| tokio::runtime::Builder::new_current_thread().build().unwrap());
    assert!(one.block_on(hit(&leases, &policy, "a", 1)).is_admitted());
    storage.close();
    let inside = one.enter();
    let mut asking = leases.decide(StorageRequest::new(&policy, &key, Op::Peek, 1));
    assert!(poll(&mut asking).is_pending());
    drop(inside);
    storage.open();
    two.block_on(async {
        let beside = hit(&leases, &policy, "a", 10).await;
        leases.settle(&policy, &key, &beside, 0).await.unwrap();
    });
    one.block_on(async {
        assert_eq!(asking.await.unwrap().remaining(), 99);
        for _ in 0..99 {
            assert!(hit(&leases, &policy, "a", 1).await.is_admitted());
        }
    });
}

#[tokio::test]
async fn refused_slices_fall_back_to_the_needed_cost() {
    // The storage reports five units but admits only one at a time, as if other nodes were always
    // faster.
    let (storage, _) = FakeStorage::scripted(|request| {
        let status = Status::refused(1_000, 5, 9_000_000, Some(9_000_000));
        (request.cost > 1).then(|| Ok(Decision::of(Timestamp::EPOCH, request.cost, status)))
    });
    let leases = Leases::new(storage.clone(), 100).clock(ManualClock::default());
    let (policy, key) = (policy("fixed-window 1000/day"), Key::from("a"));
    storage.close();
    let waiting = waiting_hits(&leases, &policy, &key, 6);
    storage.open();
    for caller in waiting {
        assert!(caller.await.unwrap().is_admitted());
    }
    assert!(storage.take_decisions() < 40);
}

/// A storage that refuses but reports that all units remain. If `fails`, it fails for all costs but
/// 1.
fn contradictory(fails: bool) -> FakeStorage {
    let calls = AtomicU32::new(0);
    let (storage, _) = FakeStorage::scripted(move |request| {
        assert!(calls.fetch_add(1, Ordering::SeqCst) < 100, "the storage is called forever");
        let status = Status::refused(1_000, 1_000, 9_000_000, Some(9_000_000));
        let refused = Decision::of(Timestamp::EPOCH, request.cost, status);
        Some(if fails && request.cost > 1 { Err(StorageError::from_boxed("too much")) } else { Ok(refused) })
    });
    storage
}

/// Leases do not loop on a contradictory storage, even if a fallback decides sometimes.
#[tokio::test]
async fn contradictory_decisions_are_returned_unchanged() {
    let policy = policy("fixed-window 1000/day");
    let refused = hit(&Leases::new(contradictory(false), 10), &policy, "a", 2).await;
    assert_eq!((refused.is_refused(), refused.cost(), refused.remaining()), (true, 2, 1_000));
    let breaker = Breaker::new(contradictory(true)).failures(1_000).fallback(memory_with_manual_clock().0, 1);
    let admitted = hit(&Leases::new(breaker, 10), &policy, "a", 1).await;
    assert_eq!((admitted.is_admitted(), admitted.cost(), admitted.is_from_fallback()), (true, 1, true));
}

#[tokio::test]
async fn caller_that_runs_the_requests_of_others_returns_once_its_own_hit_is_decided() {
    // At each call of the storage another caller arrives, so that there is always more work.
    let (cell, calls) = (Arc::new(OnceLock::<Leases>::new()), Arc::new(AtomicU32::new(0)));
    let (others, count) = (Arc::clone(&cell), Arc::clone(&calls));
    let (storage, clock) = FakeStorage::scripted(move |request| {
        if count.fetch_add(1, Ordering::SeqCst) < 10_000 {
            tokio::spawn(others.get().unwrap().decide(request));
        }
        None
    });
    let leases = Leases::new(storage, 10).clock(clock);
    cell.set(leases.clone()).unwrap();
    let (policy, key) = (policy("fixed-window 1/day"), Key::from("a"));
    let mut first = start_hit(&leases, &policy, &key, 1);
    assert!(matches!(poll(&mut first), Poll::Ready(Ok(decision)) if decision.is_admitted()));
    assert!(calls.load(Ordering::SeqCst) < 100);
    // The others get their decisions, too.
    while calls.load(Ordering::SeqCst) < 10_000 {
        tokio::task::yield_now().await;
    }
    assert!(hit(&leases, &policy, "a", 1).await.is_refused());
}

#[tokio::test]
async fn contended_peek_is_passed_on_unchanged() {
    let (storage, _) = FakeStorage::scripted(|request| {
        (request.op == Op::Peek).then(|| Ok(request.policy.refuse(Timestamp::EPOCH, request.cost, 9).contended()))
    });
    let leases = Leases::new(storage, 10);
    let policy = policy("fixed-window 1000/day");
    assert!(hit(&leases, &policy, "a", 1).await.is_admitted());
    let peek = decide(&leases, &policy, "a", Op::Peek, 1).await;
    assert!(leases.len() == 1 && peek.is_refused() && peek.is_contended());
}

/// Callers that are dropped before or after units were assigned to them spend nothing.
#[tokio::test]
async fn dropped_callers_spend_nothing() {
    let (leases, storage, _) = leased(10);
    let (policy, key) = (policy("fixed-window 1000/minute"), Key::from("a"));
    let begin = || start_hit(&leases, &policy, &key, 3);
    for left_after in ["never polled", "asking", "answered"] {
        storage.close();
        let (mut one, mut two) = (begin(), begin());
        if left_after != "never polled" {
            assert!(poll(&mut one).is_pending() && poll(&mut two).is_pending());
        }
        if left_after == "answered" {
            storage.open();
            tokio::task::yield_now().await;
            while storage.take_decisions() > 0 || leases.is_empty() {
                tokio::task::yield_now().await;
            }
        }
        drop((one, two));
        storage.open();
        // The next caller is served after them.
        let third = hit(&leases, &policy, "a", 1).await;
        assert_eq!(third.remaining(), 999, "{left_after}");
        leases.clear(&policy, &key).await.unwrap();
    }
}

#[tokio::test]
async fn units_of_callers_dropped_at_random_points_are_not_lost() {
    let mut numbers = Numbers(7);
    for _ in 0..100 {
        let (leases, storage, _) = leased(numbers.one_of(&[1, 3, 20]));
        let (policy, key) = (policy("fixed-window 200/minute"), Key::from("a"));
        let (mut spent, mut waiting) = (0, Vec::new());
        for _ in 0..80 {
            match numbers.below(6) {
                0 => {
                    if numbers.below(2) == 0 {
                        storage.open();
                    } else {
                        storage.close();
                    }
                }
                1 => tokio::task::yield_now().await,
                2 if !waiting.is_empty() => {
                    let gone = usize::try_from(numbers.below(waiting.len() as u64)).unwrap();
                    drop(waiting.swap_remove(gone));
                }
                _ => waiting.push(leases.decide(StorageRequest::new(
                    &policy,
                    &key,
                    Op::Hit,
                    numbers.one_of(&[1, 1, 2, 5]),
                ))),
            }
            waiting.retain_mut(|hit| match poll(hit) {
                Poll::Ready(decision) => {
                    let decision = decision.unwrap();
                    spent += if decision.is_admitted() { decision.cost() } else { 0 };
                    false
                }
                Poll::Pending => true,
            });
        }
        drop(waiting);
        storage.open();
        // The peek is queued behind everything that is in flight.
        assert_eq!(remains(&leases, &policy).await, 200 - spent);
        while hit(&leases, &policy, "a", 1).await.is_admitted() {
            spent += 1;
        }
        assert_eq!(spent, 200);
    }
}

#[tokio::test]
async fn storage_failure_reaches_all_waiting_callers_and_is_not_cached() {
    let (leases, storage, _) = leased(10);
    let (policy, key) = (policy("fixed-window 100/minute"), Key::from("a"));
    storage.set(Behavior::FailsAfterCounting);
    storage.close();
    let waiting = waiting_hits(&leases, &policy, &key, 5);
    storage.open();
    for caller in waiting {
        assert_eq!(message(caller.await.unwrap_err()), FAILURE);
    }
    assert_eq!(storage.take_decisions(), 1);
    storage.set(Behavior::Works);
    // The first hit after a failure takes no slice.
    for _ in 0..2 {
        assert!(hit(&leases, &policy, "a", 1).await.is_admitted());
    }
    storage.set(Behavior::FailsAfterCounting);
    assert!(hit(&leases, &policy, "a", 1).await.is_admitted(), "leased units are spent during an outage");
}

/// Without a runtime a hit fails instead of hanging. A stopped runtime does not block callers in
/// another one.
#[test]
fn stopped_runtime_does_not_block_callers() {
    let (leases, storage, _) = leased(10);
    let (policy, key) = (policy("fixed-window 1000/minute"), Key::from("a"));
    storage.close();
    let mut alone = start_hit(&leases, &policy, &key, 1);
    let Poll::Ready(Err(error)) = poll(&mut alone) else { panic!("the hit is pending") };
    assert!(error.to_string().contains("need a running tokio runtime"), "{error}");
    let [one, two] = [(); 2].map(|()| tokio::runtime::Builder::new_current_thread().build().unwrap());
    let inside = one.enter();
    let mut waiting = start_hit(&leases, &policy, &key, 1);
    assert!(poll(&mut waiting).is_pending());
    drop(inside);
    storage.open();
    two.block_on(async {
        assert!(hit(&leases, &policy, "a", 1).await.is_admitted());
        leases.clear(&policy, &key).await.unwrap();
    });
    drop(one);
    two.block_on(async {
        assert!(waiting.await.is_err(), "the worker has ended");
        assert_eq!(hit(&leases, &policy, "a", 1).await.remaining(), 999);
        assert_eq!(leases.len(), 1);
    });
}

/// In a full table the least recently used lease is evicted, and its units are refunded.
#[tokio::test]
async fn evicted_leases_are_refunded() {
    let (leases, storage, clock) = leased(10);
    let (leases, policy) = (leases.max_keys(2), policy("fixed-window 1000/day"));
    for key in ["a", "b", "a", "c", "d"] {
        assert!(decide(&leases, &policy, key, Op::Hit, 1).await.is_admitted());
        assert!(leases.len() <= 2);
        clock.advance(Duration::from_millis(1));
    }
    for (key, here, there) in [("a", 998, 998), ("b", 999, 999), ("c", 999, 990), ("d", 999, 990)] {
        let remaining = decide(&storage, &policy, key, Op::Peek, 1).await.remaining();
        assert_eq!((decide(&leases, &policy, key, Op::Peek, 1).await.remaining(), remaining), (here, there), "{key}");
    }
    for key in 0..1_000_u32 {
        assert!(decide(&leases, &policy, &key.to_string(), Op::Hit, 1).await.is_admitted());
        assert!(leases.len() <= 2);
    }
}

#[tokio::test]
async fn busy_entries_are_not_evicted() {
    let (leases, storage, _) = leased(10);
    let (leases, policy) = (leases.max_keys(1), policy("fixed-window 1000/day"));
    storage.close();
    let hit = |key: &str| leases.decide(StorageRequest::new(&policy, &Key::from(key), Op::Hit, 1));
    let (mut first, mut second) = (hit("a"), hit("b"));
    assert!(poll(&mut first).is_pending() && poll(&mut second).is_pending());
    storage.open();
    assert!(first.await.unwrap().is_admitted() && second.await.unwrap().is_admitted());
    assert_eq!((remains(&storage, &policy).await, leases.len()), (990, 1), "only the first is leased");
}

#[tokio::test]
async fn only_policies_of_a_single_fixed_window_are_leased() {
    let leases = || Leases::new(MemoryStorage::new(), 10);
    for text in
        ["10/minute", "token-bucket 10/minute", "fixed-window 1/second; fixed-window 9/minute", "elastic-window 1/day"]
    {
        let error = RateLimiter::try_with_storage(policy(text), leases()).unwrap_err().to_string();
        assert!(error.contains("fixed-window 10000/minute") && error.contains(&policy(text).to_string()), "{error}");
    }
    for text in ["fixed-window-aligned 9/day", "calendar 9/month from 15 in Europe/Berlin"] {
        assert!(RateLimiter::try_with_storage(policy(text), leases()).is_ok());
    }
    assert!(panic_message(|| Leases::new(MemoryStorage::new(), 0)).contains("for example 100"));
    for max_keys in [0, usize::MAX] {
        assert!(panic_message(|| leases().max_keys(max_keys)).contains("10_000"));
    }
    // Policies chosen for a request and shadow limits go to the storage unchanged.
    let (leases, storage, _) = leased(10);
    let tried = policy("fixed-window 9/day").shadow(Limit::new(TokenBucket::new(), Quota::per_day(9)));
    let tried = tried.shadow(Limit::new(FixedWindow::new(), Quota::per_day(1_000)));
    let layer = RateLimitLayer::new(tried.clone(), PeerIp::new());
    assert!(layer.try_storage(leases.clone(), OnError::Admit).is_ok());
    for shadow in tried.shadows() {
        leases.validate(shadow).unwrap();
        for _ in 0..3 {
            assert!(hit(&leases, shadow, "a", 1).await.is_admitted());
        }
        assert_eq!((storage.take_decisions(), leases.len()), (3, 0));
    }
    let two = policy("2/minute");
    for left in [1, 0] {
        assert_eq!(hit(&leases, &two, "a", 1).await.remaining(), left);
    }
    assert!(hit(&leases, &two, "a", 1).await.is_refused());
    assert_eq!((storage.take_decisions(), leases.len()), (3, 0));
}

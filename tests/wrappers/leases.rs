//! Leases: units are spent without the storage for a short time.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::fake_cas_store::FakeCasStore;
use common::{
    Behavior, FAILURE, FakeStorage, decide, hit, memory_with_manual_clock, message, outside_of_a_runtime,
    panic_message, policy, poll, start_hit,
};
use tokio::task::{JoinSet, yield_now};
use tokio::time::sleep;
use tower_ratelimit::storage::{
    Breaker, Cas, Clock, Leases, ManualClock, StorageFuture, StorageRequest, Summary, TokioClock,
};
use tower_ratelimit::{
    Decision, FixedWindow, Key, Limit, MemoryStorage, OnError, Op, PeerIp, Policy, Quota, RateLimitLayer, RateLimiter,
    Storage, Timestamp, TokenBucket,
};

/// Every strategy that can be leased, with 1,000 units per minute, so that leases end after a second.
const LEASABLE: [&str; 6] = [
    "fixed-window 1000/minute",
    "fixed-window-aligned 1000/minute",
    "moving-window 1000/minute",
    "sliding-window-counter 1000/minute",
    "sliding-window-counter-aligned 1000/minute",
    "token-bucket 1000/minute",
];

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

fn admits_locally(storage: &impl Storage, policy: &Policy) -> bool {
    storage.try_admit(StorageRequest::new(policy, &Key::from("a"), Op::Hit, 1), None)
}

/// Lets spawned tasks run.
async fn run_tasks() {
    for _ in 0..20 {
        yield_now().await;
    }
}

#[tokio::test]
async fn first_hit_goes_to_the_storage_and_the_second_takes_a_slice() {
    for text in LEASABLE {
        let (leases, storage, _) = leased(10);
        let policy = policy(text);
        for spent in 1..=12 {
            let decision = hit(&leases, &policy, "a", 1).await;
            assert_eq!((decision.is_admitted(), decision.remaining()), (true, 1_000 - spent), "{text}");
        }
        assert_eq!((storage.take_decisions(), leases.misses(), leases.local_decisions()), (2, 2, 10), "{text}");
        assert_eq!((leases.len(), remains(&storage, &policy).await), (1, 988), "{text}");
        assert!(!admits_locally(&leases, &policy), "no unit is leased");
        let _ = hit(&leases, &policy, "a", 1).await;
        let mut shown = Summary::default();
        assert!(leases.try_admit(StorageRequest::new(&policy, &Key::from("a"), Op::Hit, 3), Some(&mut shown)));
        assert_eq!(shown.limit.remaining(), 984, "{text}");
    }
}

/// A lease ends after its time, counted from when the request was sent, for any delay of the reply and
/// any difference of the clocks.
#[tokio::test]
async fn lease_ends_after_its_time() {
    for (text, trip) in LEASABLE.into_iter().flat_map(|text| [0, 300, 999, 1_500].map(|trip| (text, trip))) {
        let (memory, theirs) = memory_with_manual_clock();
        let ours = ManualClock::new(theirs.now().plus(3_600_000_000));
        let storage = FakeStorage::around(memory);
        let leases = Leases::new(storage.clone(), 10).clock(ours.clone());
        let pass = |millis: u64| [&ours, &theirs].map(|clock| clock.advance(Duration::from_millis(millis)));
        let (policy, key) = (policy(text), Key::from("a"));
        let _ = hit(&leases, &policy, "a", 1).await;
        storage.close();
        let mut waiting = start_hit(&leases, &policy, &key, 1);
        assert!(poll(&mut waiting).is_pending());
        run_tasks().await;
        pass(trip);
        storage.open();
        assert!(waiting.await.unwrap().is_admitted(), "the storage has admitted it");
        run_tasks().await;
        let mut local = 0;
        while local < 20 && admits_locally(&leases, &policy) {
            local += 1;
            pass(100);
        }
        assert_eq!(local, 1_000_u64.saturating_sub(trip).div_ceil(100).min(10), "{text}, {trip} ms");
    }
}

#[tokio::test]
async fn lease_ends_with_its_window() {
    for text in [
        "fixed-window 1000/second",
        "fixed-window-aligned 1000/second",
        "calendar 1000/day",
        "fixed-window 9999/hour; 1000/second",
    ] {
        let (leases, _, clock) = leased(10);
        let (leases, policy) = (leases.ttl(Duration::from_secs(9)), policy(text));
        // The last second of the day.
        clock.advance(Duration::from_secs(86_399));
        for _ in 0..2 {
            let _ = hit(&leases, &policy, "a", 1).await;
        }
        clock.advance(Duration::from_millis(999));
        assert!(admits_locally(&leases, &policy));
        clock.advance(Duration::from_millis(if text.contains(';') { 1_001 } else { 1 }));
        assert!(!admits_locally(&leases, &policy), "{text}");
    }
}

/// The time of a lease is a twentieth of the shortest period, and at most a second.
#[tokio::test]
async fn time_of_a_lease_follows_from_the_shortest_period() {
    for (text, millis) in [("1000/10s", 500), ("1000/day", 1_000), ("1000/hour; fixed-window 1000/2s", 100)] {
        let (leases, _, clock) = leased(10);
        for (leases, millis) in [(leases.clone(), millis), (leases.ttl(Duration::from_millis(3)), 3)] {
            for _ in 0..2 {
                let _ = hit(&leases, &policy(text), "a", 1).await;
            }
            clock.advance(Duration::from_micros(millis * 1_000 - 1));
            assert!(admits_locally(&leases, &policy(text)), "{text}");
            clock.advance(Duration::from_micros(1));
            assert!(!admits_locally(&leases, &policy(text)), "{text}");
        }
    }
}

/// A clock that goes back ends the lease.
#[tokio::test]
async fn lease_ends_when_the_clock_goes_back() {
    let (leases, _, clock) = leased(10);
    let policy = policy("fixed-window 1000/minute");
    for _ in 0..2 {
        let _ = hit(&leases, &policy, "a", 1).await;
    }
    clock.set(clock.now().minus(1));
    assert!(!admits_locally(&leases, &policy));
}

/// A token bucket has refilled the slice when its lease ends, so nothing is refunded.
#[tokio::test(start_paused = true)]
async fn unspent_units_are_refunded_when_the_lease_ends() {
    for text in LEASABLE {
        // A clock that starts at the same time in each run, because a window must not end
        // meanwhile.
        let ((leases, storage, clock), policy) = (leased(10), policy(text));
        let is_bucket = text.starts_with("token");
        for _ in 0..2 {
            let _ = hit(&leases, &policy, "a", 1).await;
        }
        assert_eq!((remains(&storage, &policy).await, storage.take_changes()), (988, 0), "{text}");
        clock.advance(Duration::from_millis(1_002));
        sleep(Duration::from_millis(1_002)).await;
        run_tasks().await;
        let expected = if is_bucket { (1_000, 0) } else { (998, 1) };
        assert_eq!((remains(&storage, &policy).await, storage.take_changes()), expected, "{text}");
    }
}

/// Returns the units of each request to the storage, after hits at these intervals in milliseconds.
async fn requested(text: &str, slice: u32, intervals: &[u64]) -> Vec<u32> {
    let costs = Arc::new(Mutex::new(Vec::new()));
    let recorded = Arc::clone(&costs);
    let (storage, clock) = FakeStorage::scripted(move |request| {
        recorded.lock().unwrap().push(request.cost);
        None
    });
    let leases = Leases::new(storage, slice).clock(clock.clone());
    for interval in intervals {
        clock.advance(Duration::from_millis(*interval));
        assert!(hit(&leases, &policy(text), "a", 1).await.is_admitted());
    }
    std::mem::take(&mut *costs.lock().unwrap())
}

#[tokio::test]
async fn slice_has_the_units_that_are_spent_in_the_time_of_a_lease() {
    // One hit in 100 ms is ten in a second.
    assert_eq!(requested("fixed-window 1000/minute", 100, &[0, 100]).await, [1, 1 + 10]);
    // The eleven hits of that lease took 100 ms.
    let twelve = [0, 100, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10];
    assert_eq!(requested("fixed-window 2000/minute", 200, &twelve).await, [1, 1 + 10, 1 + 100]);
    // A key with less than one hit in a second is not leased.
    assert_eq!(requested("fixed-window 1000/minute", 100, &[0, 1_500, 1_500, 1_500]).await, [1; 4]);
}

#[tokio::test]
async fn slice_is_bounded() {
    // By the configured slice, and by a sixteenth of the units that remain.
    assert_eq!(requested("moving-window 1000/minute", 7, &[0, 0]).await, [1, 1 + 7]);
    assert_eq!(requested("moving-window 1000/minute", 500, &[0, 0]).await, [1, 1 + 999 / 16]);
    assert_eq!(requested("moving-window 16/minute", 500, &[0, 0, 0]).await, [1; 3]);
    assert_eq!(requested("fixed-window 9999/hour; 1000/minute", 500, &[0, 0]).await, [1, 1 + 999 / 16]);
    // By the refill of a bucket in a second.
    assert_eq!(requested("token-bucket 600/minute burst 6000", 500, &[0, 0]).await, [1, 1 + 10]);
    assert_eq!(requested("token-bucket 30/minute burst 6000", 500, &[0, 0]).await, [1; 2]);
    let together = "sliding-window-counter 9000/hour; token-bucket 300/minute burst 6000";
    assert_eq!(requested(together, 500, &[0, 0]).await, [1, 1 + 5]);
}

/// The last units are taken one by one, so the limit is exact.
#[tokio::test]
async fn several_processes_admit_exactly_the_limit() {
    for text in LEASABLE {
        let (memory, clock) = memory_with_manual_clock();
        let storage = FakeStorage::around(memory);
        let nodes: Vec<_> = (0..4).map(|_| Leases::new(storage.clone(), 50).clock(clock.clone())).collect();
        let (policy, mut admitted) = (policy(text), 0);
        for node in nodes.iter().chain(&nodes) {
            for _ in 0..60 {
                admitted += u32::from(hit(node, &policy, "a", 1).await.is_admitted());
            }
        }
        for node in &nodes {
            while hit(node, &policy, "a", 1).await.is_admitted() {
                admitted += 1;
            }
        }
        assert_eq!(admitted, 1_000, "{text}");
        assert!(storage.take_decisions() < 250, "{text}");
    }
}

/// A refusal reports the remaining units of the storage.
#[tokio::test]
async fn rest_of_a_lease_is_refunded_before_a_larger_hit() {
    let (leases, storage, _) = leased(4);
    let policy = policy("fixed-window 100/minute");
    for (cost, left) in [(1, 99), (1, 98), (3, 95), (2, 93), (93, 0)] {
        assert_eq!(hit(&leases, &policy, "a", cost).await.remaining(), left);
    }
    let refused = hit(&leases, &policy, "a", 1).await;
    assert_eq!((refused.is_refused(), refused.remaining()), (true, 0));
    assert_eq!(refused.retry_after(), Some(Duration::from_secs(60)));
    assert_eq!(hit(&leases, &policy, "a", 101).await.retry_after(), None);
    assert_eq!(remains(&storage, &policy).await, 0);
}

/// Tasks on each of several nodes over one storage, on one thread and on several.
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
        let policy = policy(&format!("sliding-window-counter {limit}/day"));
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
                        if !admits_locally(&node, &policy) && hit(&node, &policy, "a", 1).await.is_refused() {
                            break;
                        }
                        admitted.fetch_add(1, Ordering::SeqCst);
                        yield_now().await;
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
    let (policy, key) = (policy("fixed-window 1000/minute"), Key::from("a"));
    let _ = hit(&leases, &policy, "a", 1).await;
    storage.take_decisions();
    storage.close();
    let mut waiting = waiting_hits(&leases, &policy, &key, 50);
    run_tasks().await;
    waiting.extend(waiting_hits(&leases, &policy, &key, 50));
    assert_eq!(storage.take_decisions(), 1);
    // Another key does not wait.
    let mut other = start_hit(&leases, &policy, &Key::from("b"), 1);
    assert!(poll(&mut other).is_pending());
    assert_eq!(storage.take_decisions(), 1);
    storage.open();
    for caller in waiting {
        assert!(caller.await.unwrap().is_admitted());
    }
    assert_eq!(storage.take_decisions(), 1, "one more for all others");
}

/// The storage reports 1,000 units but admits only one at a time, as if other processes were faster.
#[tokio::test]
async fn hits_of_a_refused_slice_are_sent_alone() {
    let (storage, clock) = FakeStorage::scripted(|request| {
        (request.cost > 1).then(|| Ok(request.policy.refusal(ManualClock::default().now(), request.cost, 9)))
    });
    let leases = Leases::new(storage.clone(), 100).clock(clock);
    let (policy, key) = (policy("fixed-window 1000/day"), Key::from("a"));
    assert!(hit(&leases, &policy, "a", 1).await.is_admitted());
    storage.take_decisions();
    for caller in waiting_hits(&leases, &policy, &key, 6) {
        assert!(caller.await.unwrap().is_admitted());
    }
    assert_eq!(storage.take_decisions(), 1 + 6);
    assert!(hit(&leases, &policy, "a", 5).await.is_refused());
}

#[tokio::test]
async fn refunds_return_to_the_lease_or_the_storage() {
    for text in LEASABLE {
        let (leases, storage, clock) = leased(10);
        let (policy, key) = (policy(text), Key::from("a"));
        let _ = hit(&leases, &policy, "a", 1).await;
        let (first, second) = (hit(&leases, &policy, "a", 3).await, hit(&leases, &policy, "a", 4).await);
        assert_eq!((remains(&storage, &policy).await, remains(&leases, &policy).await), (986, 992), "{text}");
        leases.settle(&policy, &key, &second, 0).await.unwrap();
        assert_eq!((remains(&storage, &policy).await, remains(&leases, &policy).await), (986, 996), "{text}");
        assert_eq!(storage.take_changes(), 0, "{text}");
        // After the lease, the same hit is refunded to the storage, once for each settlement.
        clock.advance(Duration::from_secs(1));
        leases.settle(&policy, &key, &first, 1).await.unwrap();
        assert_eq!(storage.take_changes(), 1, "{text}");
        let _ = hit(&leases, &policy, "a", 1).await;
        let expected = if text.starts_with("token") { 999 } else { 1_000 - 1 - 1 - 1 };
        assert_eq!(remains(&leases, &policy).await, expected, "{text}");
        // Refusals and free hits refund nothing.
        let refused = hit(&leases, &policy, "a", 1_001).await;
        storage.take_changes();
        leases.settle(&policy, &key, &refused, 0).await.unwrap();
        assert!(refused.is_refused() && storage.take_changes() == 0, "{text}");
    }
}

/// A moving window keeps one entry for each slice.
#[tokio::test]
async fn local_hits_report_the_time_of_their_slice() {
    let (leases, _, clock) = leased(10);
    let policy = policy("moving-window 1000/minute");
    let _ = hit(&leases, &policy, "a", 1).await;
    let slice = hit(&leases, &policy, "a", 1).await;
    clock.advance(Duration::from_millis(700));
    let local = hit(&leases, &policy, "a", 1).await;
    assert_eq!((local.at(), local.reset_after()), (slice.at(), slice.reset_after()));
}

#[tokio::test]
async fn clear_drops_the_lease_and_a_slice_in_flight() {
    let (leases, storage, _) = leased(10);
    let (policy, key) = (policy("fixed-window 1000/minute"), Key::from("a"));
    for _ in 0..2 {
        let _ = hit(&leases, &policy, "a", 1).await;
    }
    leases.clear(&policy, &key).await.unwrap();
    assert_eq!((leases.len(), remains(&storage, &policy).await), (0, 1_000));
    // The same while a slice is in flight.
    storage.close();
    let mut late = start_hit(&leases, &policy, &key, 1);
    assert!(poll(&mut late).is_pending());
    run_tasks().await;
    let mut clear = leases.clear(&policy, &key);
    assert!(poll(&mut clear).is_pending());
    storage.open();
    assert!(late.await.unwrap().is_admitted());
    clear.await.unwrap();
    run_tasks().await;
    assert_eq!((leases.len(), remains(&storage, &policy).await), (0, 1_000));
}

/// The clear began before the slice was decided, and ends after it.
#[tokio::test]
async fn slice_that_arrives_during_a_clear_is_dropped() {
    let (leases, storage, _) = leased(10);
    let (policy, key) = (policy("fixed-window 1000/minute"), Key::from("a"));
    let _ = hit(&leases, &policy, "a", 1).await;
    storage.work_when_open(true);
    storage.close();
    let mut clear = leases.clear(&policy, &key);
    assert!(poll(&mut clear).is_pending());
    storage.work_when_open(false);
    storage.open();
    assert!(hit(&leases, &policy, "a", 1).await.is_admitted());
    assert_eq!(leases.len(), 1);
    clear.await.unwrap();
    assert_eq!((leases.len(), remains(&storage, &policy).await), (0, 1_000));
}

#[tokio::test]
async fn peeks_show_leased_units_and_undecided_ones_are_passed_on() {
    let is_contended = Arc::new(Mutex::new(false));
    let contended = Arc::clone(&is_contended);
    let (storage, clock) = FakeStorage::scripted(move |request| {
        (request.op == Op::Peek && *contended.lock().unwrap())
            .then(|| Ok(request.policy.refusal(ManualClock::default().now(), request.cost, 9).contended()))
    });
    let (leases, policy) = (Leases::new(storage.clone(), 10).clock(clock), policy("token-bucket 6000/minute"));
    for _ in 0..2 {
        let _ = hit(&leases, &policy, "a", 1).await;
    }
    let peek = decide(&leases, &policy, "a", Op::Peek, 5_998).await;
    assert_eq!((peek.is_admitted(), peek.remaining(), remains(&storage, &policy).await), (true, 5_998, 5_988));
    let peek = decide(&leases, &policy, "a", Op::Peek, 5_999).await;
    assert_eq!((peek.is_admitted(), peek.remaining()), (false, 5_998));
    assert!(peek.retry_after().is_some());
    *is_contended.lock().unwrap() = true;
    let peek = decide(&leases, &policy, "a", Op::Peek, 1).await;
    assert!(leases.len() == 1 && peek.is_refused() && peek.is_contended());
}

/// Callers that leave before their units were assigned to them spend nothing.
#[tokio::test]
async fn callers_that_leave_before_the_answer_spend_nothing() {
    for is_sent in [false, true] {
        let (leases, storage, _) = leased(10);
        let (policy, key) = (policy("fixed-window 1000/minute"), Key::from("a"));
        let _ = hit(&leases, &policy, "a", 1).await;
        storage.close();
        let mut hits = [start_hit(&leases, &policy, &key, 3), start_hit(&leases, &policy, &key, 3)];
        if is_sent {
            assert!(hits.iter_mut().all(|hit| poll(hit).is_pending()));
            run_tasks().await;
        }
        drop(hits);
        storage.open();
        run_tasks().await;
        assert_eq!(hit(&leases, &policy, "a", 1).await.remaining(), 998, "{is_sent}");
    }
}

#[tokio::test]
async fn storage_failure_reaches_all_waiting_callers() {
    let (leases, storage, _) = leased(10);
    let (policy, key) = (policy("fixed-window 1000/minute"), Key::from("a"));
    let _ = hit(&leases, &policy, "a", 1).await;
    storage.set(Behavior::FailsAfterCounting);
    storage.close();
    let waiting = waiting_hits(&leases, &policy, &key, 5);
    storage.take_decisions();
    storage.open();
    for caller in waiting {
        assert_eq!(message(caller.await.unwrap_err()), FAILURE);
    }
    assert_eq!(storage.take_decisions(), 1);
    storage.set(Behavior::Works);
    // The first hit after a failure is sent alone.
    for _ in 0..2 {
        assert!(hit(&leases, &policy, "a", 1).await.is_admitted());
    }
    storage.set(Behavior::FailsAfterCounting);
    assert!(hit(&leases, &policy, "a", 1).await.is_admitted(), "leased units are spent during an outage");
}

/// A fallback's decision serves the hits that wait for it. Nothing is leased from it.
#[tokio::test]
async fn slice_of_a_fallback_is_refunded() {
    let (primary, clock) = FakeStorage::in_memory(Behavior::Works);
    let (fallback, _) = memory_with_manual_clock();
    let breaker = Breaker::new(primary.clone()).failures(1_000).fallback(fallback.clone(), 1);
    let leases = Leases::new(breaker, 10).clock(clock);
    let policy = policy("fixed-window 1000/minute");
    let _ = hit(&leases, &policy, "a", 1).await;
    primary.set(Behavior::Fails);
    for left in [999, 998] {
        let decision = hit(&leases, &policy, "a", 1).await;
        assert!(decision.is_admitted() && decision.is_from_fallback());
        run_tasks().await;
        assert_eq!((leases.len(), remains(&fallback, &policy).await), (0, left));
    }
}

/// Nothing is leased without a runtime. A stopped runtime does not block callers in another one.
#[test]
fn runtimes_do_not_block_each_other() {
    let (leases, storage, _) = leased(10);
    let (policy, key) = (policy("fixed-window 1000/minute"), Key::from("a"));
    for spent in 1..=3 {
        assert_eq!(outside_of_a_runtime(hit(&leases, &policy, "a", 1)).remaining(), 1_000 - spent);
    }
    assert_eq!(storage.take_decisions(), 3);
    storage.close();
    let [one, two] = [(); 2].map(|()| tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap());
    let inside = one.enter();
    let mut waiting = start_hit(&leases, &policy, &key, 1);
    assert!(poll(&mut waiting).is_pending());
    drop(inside);
    one.block_on(run_tasks());
    storage.open();
    two.block_on(async {
        assert!(hit(&leases, &policy, "a", 1).await.is_admitted());
        leases.clear(&policy, &key).await.unwrap();
    });
    drop(one);
    two.block_on(async {
        assert!(waiting.await.unwrap_err().to_string().contains("runtime has shut down"));
        // The slice in flight was lost.
        for left in [999, 998] {
            assert_eq!(hit(&leases, &policy, "a", 1).await.remaining(), left);
        }
        assert_eq!(leases.len(), 1);
    });
}

#[tokio::test]
async fn policies_whose_states_change_with_each_hit_are_rejected() {
    let leases = || Leases::new(MemoryStorage::new(), 10);
    for text in [
        "elastic-window 1/day",
        "leaky-bucket 1/second queue 3",
        "lockout 3/minute for 1m",
        "9/second; lockout 5 refusals/m for 1h",
        "fixed-window 1/second; elastic-window 9/minute",
    ] {
        let error = RateLimiter::try_with_storage(policy(text), leases()).unwrap_err().to_string();
        assert!(error.contains("cannot lease units of") && error.contains("token bucket"), "{error}");
    }
    for text in LEASABLE
        .into_iter()
        .chain(["fixed-window 1/second; token-bucket 9/minute burst 20", "calendar 9/month from 15 in Europe/Berlin"])
    {
        assert!(RateLimiter::try_with_storage(policy(text), leases()).is_ok(), "{text}");
    }
    assert!(panic_message(|| Leases::new(MemoryStorage::new(), 0)).contains("for example 100"));
    for max_keys in [0, usize::MAX] {
        assert!(panic_message(|| leases().max_keys(max_keys)).contains("10_000"));
    }
    for ttl in [Duration::ZERO, Duration::MAX] {
        assert!(panic_message(|| leases().ttl(ttl)).contains("Duration::from_secs(1)"));
    }
    // A shadow limit is leased, too. A policy that is chosen for a request may be of any strategy.
    let tried = policy("fixed-window 9/day").shadow(Limit::new(TokenBucket::new(), Quota::per_day(9)));
    let tried = tried.shadow(Limit::new(FixedWindow::new(), Quota::per_day(1_000)));
    assert!(RateLimitLayer::new(tried, PeerIp::new()).try_storage(leases(), OnError::Admit).is_ok());
    let (leases, storage, _) = leased(10);
    let elastic = policy("elastic-window 2/minute");
    for left in [1, 0] {
        assert_eq!(hit(&leases, &elastic, "a", 1).await.remaining(), left);
    }
    assert!(hit(&leases, &elastic, "a", 1).await.is_refused());
    assert_eq!((storage.take_decisions(), leases.len(), leases.misses()), (3, 0, 0));
}

/// A policy of the same name with another quota cannot spend the lease. It is refunded first.
#[tokio::test]
async fn lease_of_another_policy_of_the_name_is_refunded() {
    let (leases, storage, _) = leased(10);
    let [one, two] = ["fixed-window 1000/minute", "fixed-window 500/minute"].map(|it| policy(it).with_name("api"));
    for _ in 0..2 {
        let _ = hit(&leases, &one, "a", 1).await;
    }
    assert_eq!(remains(&storage, &one).await, 988);
    assert_eq!(hit(&leases, &two, "a", 1).await.remaining(), 497);
    assert_eq!(storage.take_changes(), 1);
}

/// Guards against this defect: a policy and its shadow refund each other's leases with each hit.
#[tokio::test]
async fn shadow_policy_has_leases_of_its_own() {
    let (leases, storage, _) = leased(10);
    let policy = policy("fixed-window 1000/minute").shadow(Limit::new(FixedWindow::new(), Quota::per_minute(500)));
    let [shadow] = policy.shadows() else { panic!("no shadow") };
    for spent in 1..=12 {
        assert_eq!(hit(&leases, &policy, "a", 1).await.remaining(), 1_000 - spent);
        assert_eq!(hit(&leases, shadow, "a", 1).await.remaining(), 500 - spent);
    }
    assert_eq!((storage.take_decisions(), storage.take_changes(), leases.len()), (4, 0, 2));
}

/// Hits twice on tokio's clock, so that ten units are leased for a second.
async fn ten_leased_units(policy: &Policy) -> (Leases, FakeStorage) {
    let clock = Arc::new(TokioClock::new());
    let storage = FakeStorage::around(MemoryStorage::builder().clock(Arc::clone(&clock)).build().unwrap());
    let leases = Leases::new(storage.clone(), 10).clock(clock);
    for _ in 0..2 {
        let _ = hit(&leases, policy, "a", 1).await;
    }
    assert_eq!((leases.len(), remains(&storage, policy).await), (1, 988));
    (leases, storage)
}

/// Starts a charge of more units than are leased. It is in flight and not executed.
fn charge_in_flight(leases: &Leases, storage: &FakeStorage, policy: &Policy) -> StorageFuture<Decision> {
    storage.work_when_open(true);
    storage.close();
    let mut charge = leases.decide(StorageRequest::new(policy, &Key::from("a"), Op::Charge, 50));
    assert!(poll(&mut charge).is_pending() && leases.is_empty());
    charge
}

#[tokio::test(start_paused = true)]
async fn dropped_charge_gives_its_lease_back() {
    let policy = policy("fixed-window 1000/minute");
    for (after, locally) in [(0, true), (1_500, false)] {
        let (leases, storage) = ten_leased_units(&policy).await;
        let charge = charge_in_flight(&leases, &storage, &policy);
        sleep(Duration::from_millis(after)).await;
        drop(charge);
        storage.open();
        assert_eq!(admits_locally(&leases, &policy), locally, "{after} ms");
        sleep(Duration::from_millis(1_100)).await;
        run_tasks().await;
        assert_eq!(remains(&storage, &policy).await, 998 - u32::from(locally), "{after} ms");
    }
}

/// A clear while the charge was in flight has freed the units of the lease.
#[tokio::test(start_paused = true)]
async fn lease_of_a_dropped_charge_does_not_survive_a_clear() {
    let policy = policy("fixed-window 1000/minute");
    let (leases, storage) = ten_leased_units(&policy).await;
    let charge = charge_in_flight(&leases, &storage, &policy);
    storage.set_changes(Behavior::WorksAfterPolls(0));
    leases.clear(&policy, &Key::from("a")).await.unwrap();
    drop(charge);
    storage.open();
    assert_eq!((leases.len(), remains(&storage, &policy).await), (0, 1_000));
}

#[tokio::test(start_paused = true)]
async fn failed_charge_gives_its_lease_back_with_a_timer() {
    let policy = policy("fixed-window 1000/minute");
    for (fails_after, leased) in [(500, 1), (1_500, 0)] {
        let (leases, storage) = ten_leased_units(&policy).await;
        storage.set(Behavior::FailsAfter(Duration::from_millis(fails_after)));
        storage.set_changes(Behavior::Works);
        leases.decide(StorageRequest::new(&policy, &Key::from("a"), Op::Charge, 50)).await.unwrap_err();
        storage.set(Behavior::Works);
        assert_eq!(leases.len(), leased);
        sleep(Duration::from_millis(1_100)).await;
        run_tasks().await;
        assert_eq!(remains(&storage, &policy).await, 998, "{fails_after} ms");
    }
    // The timer of the first lease ends while the second one pays for the charge.
    let (leases, storage) = ten_leased_units(&policy).await;
    sleep(Duration::from_millis(900)).await;
    let _ = hit(&leases, &policy, "a", 11).await;
    assert_eq!((leases.len(), remains(&storage, &policy).await), (1, 1_000 - 2 - 12));
    storage.set(Behavior::FailsAfter(Duration::from_millis(300)));
    storage.set_changes(Behavior::Works);
    leases.decide(StorageRequest::new(&policy, &Key::from("a"), Op::Charge, 50)).await.unwrap_err();
    storage.set(Behavior::Works);
    assert_eq!(leases.len(), 1);
    sleep(Duration::from_secs(1)).await;
    run_tasks().await;
    assert_eq!(remains(&storage, &policy).await, 1_000 - 2 - 11);
}

/// Each slice of the other runtime starts a timer. The timers before it end when they wake.
#[test]
fn runtimes_that_share_a_key_have_one_timer() {
    let (leases, _, _) = leased(10);
    let policy = policy("fixed-window 4000000/day");
    let runtimes = [(); 2]
        .map(|()| tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap());
    for runtime in runtimes.iter().cycle().take(80) {
        // More units than are leased, so each hit takes a slice.
        assert!(runtime.block_on(hit(&leases, &policy, "a", 12)).is_admitted());
    }
    let timers = runtimes.each_ref().map(|runtime| {
        runtime.block_on(async {
            sleep(Duration::from_millis(1_100)).await;
            run_tasks().await;
        });
        runtime.metrics().num_alive_tasks()
    });
    assert_eq!((leases.len(), timers), (1, [0, 1]));
}

/// A node that is behind by more than `max_skew` (5 s) decides at the time of the key, and reports its
/// own.
#[tokio::test]
async fn lease_of_a_node_whose_clock_is_behind_ends_with_its_window() {
    for text in ["fixed-window 1000 per 10 seconds", "moving-window 1000 per 10 seconds"] {
        let (world, policy) = (ManualClock::default(), policy(text));
        let store = FakeCasStore::expiring_by(world.clone());
        let [fast, slow] = [8, 0].map(|ahead| ManualClock::new(world.now().plus(ahead * 1_000_000)));
        let node = |clock: &ManualClock| Cas::new(store.clone()).timeout(Duration::from_secs(20)).clock(clock.clone());
        assert!(hit(&node(&fast), &policy, "a", 1).await.is_admitted());
        let leases = Leases::new(node(&slow), 10).ttl(Duration::from_secs(60)).clock(slow.clone());
        for _ in 0..2 {
            assert!(hit(&leases, &policy, "a", 1).await.is_admitted());
        }
        slow.advance(Duration::from_micros(9_999_999));
        assert!(admits_locally(&leases, &policy), "{text}");
        slow.advance(Duration::from_micros(1));
        assert!(!admits_locally(&leases, &policy), "{text}");
    }
}

/// A clock that is five seconds ahead of the wall clock.
#[derive(Debug)]
struct Ahead(ManualClock);

impl Clock for Ahead {
    fn now(&self) -> Timestamp {
        self.0.now().plus(5_000_000)
    }

    fn ahead_of_wall_clock(&self) -> u32 {
        5
    }
}

#[tokio::test]
async fn summary_of_a_local_hit_has_the_time_of_the_wall_clock() {
    let wall = ManualClock::default();
    let memory = MemoryStorage::builder().clock(Ahead(wall.clone())).build().unwrap();
    let (leases, policy) = (Leases::new(memory, 10).clock(wall.clone()), policy("fixed-window 1000/minute"));
    let _ = hit(&leases, &policy, "a", 1).await;
    let _ = hit(&leases, &policy, "a", 1).await;
    let mut shown = Summary::default();
    assert!(leases.try_admit(StorageRequest::new(&policy, &Key::from("a"), Op::Hit, 1), Some(&mut shown)));
    assert_eq!(shown.at, wall.now());
}

//! The circuit breaker: it stops calls to a failing storage, and a fallback decides instead.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use common::fake_cas_store::FakeCasStore;
use common::{
    Behavior, EVERY_STRATEGY, FAILURE, FakeStorage, Inner, ask, counted, failing, get, memory_with_manual_clock,
    message, numbers, panic_message, policy, poll, retry_after, spend, with,
};
use tokio::task::JoinSet;
use tokio::time::{Instant, advance, sleep};
use tower::Layer;
use tower_ratelimit::extract::Head;
use tower_ratelimit::storage::{
    AnyStorage, Breaker, Cas, Circuit, Leases, Phase, RefusalCache, StorageErrorKind, StorageRequest, Summary,
};
use tower_ratelimit::strategy::{Divided, Strategy};
use tower_ratelimit::{
    ConfigError, Decision, DecisionSource, FixedWindow, Global, Headers, Key, LeakyBucket, LivePolicy, MemoryStorage,
    OnError, Op, Policy, Quota, RateLimitLayer, RateLimiter, Storage, Timestamp, policy_by,
};

const MS: Duration = Duration::from_millis(1);
const SHORTEST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(1);

/// Returns a limiter on a breaker for `replicas` replicas, its primary, and its fallback.
fn limiter(text: &str, behavior: Behavior, replicas: u32) -> (RateLimiter, FakeStorage, MemoryStorage) {
    let ((primary, _), (fallback, _)) = (FakeStorage::in_memory(behavior), memory_with_manual_clock());
    let breaker = Breaker::new(primary.clone()).fallback(fallback.clone(), replicas);
    (RateLimiter::with_storage(policy(text), breaker), primary, fallback)
}

fn circuit(limiter: &RateLimiter) -> &Circuit {
    limiter.storage().downcast_ref::<Breaker>().unwrap().circuit()
}

/// Opens the circuit by five hits that fail.
async fn open(limiter: &RateLimiter) {
    for failures in 1..=5 {
        assert_eq!(circuit(limiter).state().phase, Phase::Closed);
        let _ = limiter.hit(&Key::from("other")).await;
        assert_eq!(circuit(limiter).state().failures, failures);
    }
    assert_eq!(circuit(limiter).state().phase, Phase::Open);
}

/// Hits with another key until the circuit is closed.
async fn until_closed(limiter: &RateLimiter) {
    let started = Instant::now();
    while circuit(limiter).state().phase != Phase::Closed {
        assert!(started.elapsed() <= LONGEST + 10 * MS, "{:?}", circuit(limiter).state());
        sleep(MS).await;
        let _ = limiter.hit(&Key::from("other")).await;
    }
}

#[tokio::test(start_paused = true)]
async fn circuit_opens_after_five_failures() {
    let (limiter, primary, _) = limiter("fixed-window 1000/day", Behavior::Fails, 2);
    for calls in 1..=5 {
        let decision = spend(&limiter, 1).await;
        assert!(decision.is_admitted() && decision.is_from_fallback());
        assert_eq!(primary.decisions(), calls);
    }
    let state = circuit(&limiter).state();
    assert_eq!((state.phase, state.failures), (Phase::Open, 5));
    let probe_in = state.probe_in.unwrap();
    assert!((SHORTEST / 2..=SHORTEST).contains(&probe_in), "{probe_in:?}");
    for _ in 0..100 {
        assert!(spend(&limiter, 1).await.is_from_fallback());
    }
    assert_eq!(primary.decisions(), 5);
    let state = circuit(&limiter).state();
    assert_eq!((state.by_primary, state.by_fallback, state.by_none), (0, 105, 0));
}

#[tokio::test(start_paused = true)]
async fn only_one_of_a_hundred_concurrent_hits_probes() {
    let (limiter, primary, _) = limiter("fixed-window 1000/day", Behavior::Fails, 2);
    open(&limiter).await;
    primary.set(Behavior::FailsAfter(50 * MS));
    for round in 1..=5 {
        while !circuit(&limiter).state().probe_in.unwrap().is_zero() {
            advance(MS).await;
        }
        let (started, mut hits) = (Instant::now(), JoinSet::new());
        for _ in 0..100 {
            let limiter = limiter.clone();
            hits.spawn(async move {
                let decision = spend(&limiter, 1).await;
                assert!(decision.is_admitted() && decision.is_from_fallback());
                started.elapsed()
            });
        }
        tokio::task::yield_now().await;
        assert_eq!(circuit(&limiter).state().phase, Phase::Probing);
        assert_eq!(circuit(&limiter).state().probe_in, None);
        let took = hits.join_all().await;
        assert_eq!(took.iter().filter(|took| took.is_zero()).count(), 99);
        assert_eq!(took.iter().max(), Some(&(50 * MS)));
        assert_eq!(primary.decisions(), 5 + round);
    }
    assert_eq!(circuit(&limiter).state().failures, 10);
}

#[tokio::test(start_paused = true)]
async fn probe_delay_doubles_up_to_one_second() {
    let (limiter, primary, _) = limiter("fixed-window 100000/day", Behavior::Fails, 2);
    open(&limiter).await;
    let (mut last, mut calls, mut gaps) = (Instant::now(), primary.decisions(), Vec::new());
    while gaps.len() < 12 {
        sleep(MS).await;
        assert!(spend(&limiter, 1).await.is_from_fallback());
        if primary.decisions() > calls {
            calls += 1;
            assert_eq!(primary.decisions(), calls);
            gaps.push(last.elapsed());
            last = Instant::now();
        }
    }
    let most = [100, 200, 400, 800].map(Duration::from_millis).into_iter().chain(std::iter::repeat(LONGEST));
    for (gap, most) in gaps.iter().zip(most) {
        assert!((most / 2..=most + 2 * MS).contains(gap), "{gaps:?}");
    }
    assert!(gaps[4..].iter().any(|gap| *gap != gaps[4]), "the delays are random: {gaps:?}");
}

#[tokio::test(start_paused = true)]
async fn successful_probe_closes_the_circuit() {
    let (limiter, primary, fallback) = limiter("fixed-window 100/day", Behavior::Works, 2);
    assert!(!spend(&limiter, 1).await.is_from_fallback());
    primary.set(Behavior::Fails);
    open(&limiter).await;
    assert_eq!(spend(&limiter, 1).await.remaining(), 49);
    primary.set(Behavior::Works);
    let before = Instant::now();
    until_closed(&limiter).await;
    assert!(before.elapsed() <= SHORTEST + 2 * MS);
    assert_eq!(circuit(&limiter).state().failures, 0);
    let calls = primary.decisions();
    for spent in 2..=11 {
        let decision = spend(&limiter, 1).await;
        assert!(!decision.is_from_fallback());
        assert_eq!(decision.remaining(), 100 - spent, "only the units that the primary counted");
    }
    assert_eq!(primary.decisions(), calls + 10);
    assert_eq!(counted(&fallback, &policy("fixed-window 100/day")), 1);
    // The next outage starts with the shortest delay again.
    primary.set(Behavior::Fails);
    open(&limiter).await;
    assert!(circuit(&limiter).state().probe_in.unwrap() <= SHORTEST);
}

#[tokio::test(start_paused = true)]
async fn only_consecutive_failures_of_writes_count() {
    let (limiter, primary, _) = limiter("fixed-window 100/day", Behavior::Works, 2);
    for behavior in [[Behavior::Fails; 4].as_slice(), &[Behavior::Works], &[Behavior::Fails; 4]].concat() {
        primary.set(behavior);
        let _ = spend(&limiter, 1).await;
    }
    assert_eq!((circuit(&limiter).state().phase, circuit(&limiter).state().failures), (Phase::Closed, 4));
    // A successful read does not reset the failures of writes.
    primary.set(Behavior::OnlyReads);
    let peek = limiter.peek(&Key::global()).await.unwrap();
    assert!(!peek.is_from_fallback());
    assert_eq!(circuit(&limiter).state().failures, 4);
    assert!(spend(&limiter, 1).await.is_from_fallback());
    assert_eq!(circuit(&limiter).state().phase, Phase::Open);
    // A peek is not a probe.
    sleep(LONGEST).await;
    assert!(limiter.peek(&Key::global()).await.unwrap().is_from_fallback());
    assert!(limiter.hit_with_cost(&Key::global(), 0).await.unwrap().is_from_fallback());
    let calls = primary.decisions();
    let _ = spend(&limiter, 1).await;
    assert_eq!(primary.decisions(), calls + 1);
}

#[tokio::test(start_paused = true)]
async fn refused_and_contended_hits_are_not_failures() {
    let (contended, _) = FakeStorage::scripted(|request| {
        Some(Ok(request.policy.refusal(Timestamp::EPOCH, request.cost, 7).contended()))
    });
    let breaker = Breaker::new(contended).failures(1).fallback(memory_with_manual_clock().0, 2);
    let limiter = RateLimiter::with_storage(policy("9/day"), breaker);
    for _ in 0..20 {
        let decision = limiter.hit(&Key::global()).await.unwrap();
        assert!(decision.is_contended() && !decision.is_from_fallback());
    }
    let state = circuit(&limiter).state();
    assert_eq!((state.phase, state.failures, state.by_primary), (Phase::Closed, 0, 20));

    let (limiter, ..) = self::limiter("fixed-window 1/day", Behavior::Works, 2);
    for _ in 0..20 {
        let _ = spend(&limiter, 1).await;
    }
    assert_eq!(circuit(&limiter).state().phase, Phase::Closed);
}

/// Guards against this defect: the primary is called before the runtime is entered, which fails.
#[test]
fn clear_can_be_awaited_by_a_runtime_that_was_not_entered_before() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let primary = Cas::new(FakeCasStore::default()).timeout(Duration::from_secs(60));
    let breaker = Breaker::new(primary).fallback(memory_with_manual_clock().0, 2);
    let limiter = RateLimiter::with_storage(policy("fixed-window 5/day"), breaker);
    let key = Key::from("k");
    assert_eq!(runtime.block_on(limiter.hit(&key)).unwrap().remaining(), 4);
    runtime.block_on(limiter.clear(&key)).unwrap();
    assert_eq!(runtime.block_on(limiter.hit(&key)).unwrap().remaining(), 4);
}

/// Guards against this defect: a client whose key has a state in an unknown format, or whose
/// settlements are contended, opens the circuit for all other clients.
#[tokio::test(start_paused = true)]
async fn errors_of_one_key_are_not_failures() {
    let store = FakeCasStore::default();
    let breaker = Breaker::new(Cas::new(store.clone()));
    let limiter = RateLimiter::with_storage(policy("fixed-window 1000/day").with_name("p"), breaker.clone());
    let (key, other) = (Key::from("k"), Key::from("other"));
    let spent = limiter.hit(&other).await.unwrap();
    store.put("p|t:k", "v9 of a later version");
    store.lose(u64::MAX);
    for _ in 0..10 {
        assert_eq!(limiter.hit(&key).await.unwrap_err().kind(), StorageErrorKind::Unsupported);
        let contended = common::settle(&limiter, &other, &spent, 0).await.unwrap_err();
        assert_eq!(contended.kind(), StorageErrorKind::Contended);
    }
    let state = breaker.circuit().state();
    assert_eq!((state.phase, state.failures), (Phase::Closed, 0));
}

#[tokio::test(start_paused = true)]
async fn refusals_that_only_read_do_not_reset_failures() {
    let store = FakeCasStore::with_max_len(1_000);
    let breaker = Breaker::new(Cas::new(store.clone())).fallback(memory_with_manual_clock().0, 2);
    let limiter = RateLimiter::with_storage(policy("fixed-window 1/day"), breaker.clone());
    let (hot, state) = (Key::from("hot"), || breaker.circuit().state());
    assert!(limiter.hit(&hot).await.unwrap().is_admitted());
    store.hang_from_swap(1);
    for failures in 1..=5 {
        let refused = limiter.hit(&hot).await.unwrap();
        assert!(refused.is_refused() && !refused.is_from_fallback());
        let new_key = limiter.hit(&Key::from(format!("new {failures}"))).await.unwrap();
        assert!(new_key.is_admitted() && new_key.is_from_fallback());
        assert_eq!(state().failures, failures);
    }
    assert_eq!(state().phase, Phase::Open);
    // A refused probe closes the circuit too, because a spent window returns only
    // refusals.
    sleep(SHORTEST).await;
    assert!(!limiter.hit(&hot).await.unwrap().is_from_fallback());
    assert_eq!((state().phase, state().failures), (Phase::Closed, 0));
}

#[tokio::test(start_paused = true)]
async fn policies_too_large_for_the_primary_do_not_affect_the_circuit() {
    let store = FakeCasStore::with_max_len(1_000);
    let breaker = Breaker::new(Cas::new(store.clone())).fallback(memory_with_manual_clock().0, 2);
    let (kept, too_long) = (policy("fixed-window 1000/day"), policy("moving-window 100000/day"));
    let (key, state) = (Key::global(), || breaker.circuit().state());
    let hit = async |policy: &Policy| breaker.decide(StorageRequest::new(policy, &key, Op::Hit, 1)).await.unwrap();
    for _ in 0..10 {
        assert!(hit(&too_long).await.is_from_fallback());
        assert!(!hit(&kept).await.is_from_fallback());
        assert!(hit(&too_long).await.is_from_fallback());
    }
    for _ in 0..10 {
        assert!(hit(&too_long).await.is_from_fallback());
        assert_eq!((state().phase, state().failures), (Phase::Closed, 0));
    }
    store.hang_from_swap(1);
    for _ in 0..5 {
        assert!(hit(&kept).await.is_from_fallback());
    }
    store.hang_from_swap(0);
    // A hit with an unsupported policy does not count as a failed probe either.
    sleep(SHORTEST).await;
    assert!(hit(&too_long).await.is_from_fallback());
    assert_eq!((state().phase, state().failures), (Phase::Open, 5));
    assert!(state().probe_in.unwrap() <= SHORTEST);
    sleep(SHORTEST).await;
    assert!(!hit(&kept).await.is_from_fallback());
}

#[tokio::test(start_paused = true)]
async fn late_results_from_before_a_transition_are_ignored() {
    let (limiter, primary, _) = limiter("fixed-window 1000/day", Behavior::FailsAfter(300 * MS), 2);
    let mut late = JoinSet::new();
    for _ in 0..50 {
        let limiter = limiter.clone();
        late.spawn(async move { assert!(spend(&limiter, 1).await.is_from_fallback()) });
    }
    tokio::task::yield_now().await;
    assert_eq!(primary.decisions(), 50);
    primary.set(Behavior::Fails);
    open(&limiter).await;
    primary.set(Behavior::Works);
    until_closed(&limiter).await;
    late.join_all().await;
    assert_eq!((circuit(&limiter).state().phase, circuit(&limiter).state().failures), (Phase::Closed, 0));

    // A late success does not close the circuit either.
    primary.set(Behavior::WorksAfter(20 * MS));
    let good = tokio::spawn({
        let limiter = limiter.clone();
        async move { spend(&limiter, 1).await }
    });
    tokio::task::yield_now().await;
    primary.set(Behavior::Fails);
    open(&limiter).await;
    assert!(!good.await.unwrap().is_from_fallback());
    assert_eq!((circuit(&limiter).state().phase, circuit(&limiter).state().failures), (Phase::Open, 5));
}

#[tokio::test(start_paused = true)]
async fn dropped_probe_allows_another() {
    for polled in [true, false] {
        let (limiter, primary, _) = limiter("fixed-window 1000/day", Behavior::Fails, 2);
        open(&limiter).await;
        primary.set(Behavior::Hangs);
        sleep(SHORTEST).await;
        let mut probe = limiter.hit(&Key::global());
        assert!(!polled || poll(&mut probe).is_pending());
        assert_eq!(circuit(&limiter).state().phase, Phase::Probing);
        assert!(spend(&limiter, 1).await.is_from_fallback(), "other hits do not wait for the probe");
        drop(probe);
        let state = circuit(&limiter).state();
        assert_eq!((state.phase, state.failures), (Phase::Open, 5));
        assert!(state.probe_in.unwrap() <= SHORTEST);
        primary.set(Behavior::Works);
        until_closed(&limiter).await;
    }
}

#[tokio::test(start_paused = true)]
async fn probe_without_a_result_expires_after_a_second() {
    let (limiter, primary, _) = limiter("fixed-window 1000/day", Behavior::Fails, 2);
    open(&limiter).await;
    sleep(SHORTEST).await;
    primary.set(Behavior::WorksAfter(10 * LONGEST));
    let lost = tokio::spawn({
        let limiter = limiter.clone();
        async move { spend(&limiter, 1).await }
    });
    tokio::task::yield_now().await;
    assert_eq!(primary.decisions(), 6);
    sleep(999 * MS).await;
    assert!(spend(&limiter, 1).await.is_from_fallback());
    assert_eq!(primary.decisions(), 6);
    sleep(MS).await;
    primary.set(Behavior::Fails);
    assert!(spend(&limiter, 1).await.is_from_fallback());
    assert_eq!(primary.decisions(), 7);
    assert_eq!(circuit(&limiter).state().failures, 6);
    // The late success of the first probe closes the circuit.
    assert!(!lost.await.unwrap().is_from_fallback());
    assert_eq!(circuit(&limiter).state().phase, Phase::Closed);
}

#[tokio::test(start_paused = true)]
async fn expired_probe_that_fails_or_is_dropped_is_ignored() {
    for (behavior, left) in [(Behavior::FailsAfter(LONGEST + 10 * MS), false), (Behavior::Hangs, true)] {
        let (limiter, primary, _) = limiter("fixed-window 1000/day", Behavior::Fails, 2);
        open(&limiter).await;
        sleep(SHORTEST).await;
        let probe = |behavior| {
            primary.set(behavior);
            let limiter = limiter.clone();
            tokio::spawn(async move { spend(&limiter, 1).await })
        };
        let first = probe(behavior);
        sleep(LONGEST).await;
        let second = probe(Behavior::WorksAfter(50 * MS));
        sleep(20 * MS).await;
        assert_eq!(primary.decisions(), 7);
        if left {
            first.abort();
            assert!(first.await.unwrap_err().is_cancelled());
        } else {
            assert!(first.await.unwrap().is_from_fallback());
        }
        assert_eq!((circuit(&limiter).state().phase, circuit(&limiter).state().failures), (Phase::Probing, 5));
        assert!(!second.await.unwrap().is_from_fallback());
        assert_eq!(circuit(&limiter).state().phase, Phase::Closed);
    }
}

#[tokio::test(start_paused = true)]
async fn cost_above_the_divided_quota_may_retry_soon_while_the_circuit_is_closed() {
    let (limiter, ..) = limiter("fixed-window 100/day", Behavior::Fails, 2);
    let large = limiter.hit_with_cost(&Key::global(), 60).await.unwrap();
    assert_eq!((circuit(&limiter).state().phase, large.retry_after()), (Phase::Closed, Some(SHORTEST)));
}

#[tokio::test(start_paused = true)]
async fn hit_that_failed_after_counting_is_refunded_on_the_fallback_only() {
    let whole = policy("fixed-window 100/day");
    let (limiter, primary, fallback) = limiter("fixed-window 100/day", Behavior::FailsAfterCounting, 2);
    let mut last = None;
    for hits in 1..=5 {
        last = Some(spend(&limiter, 1).await);
        assert_eq!((counted(primary.inner(), &whole), counted(&fallback, &whole)), (hits, hits));
    }
    // A hit that the fallback decided is refunded to the fallback.
    primary.set(Behavior::Works);
    common::settle(&limiter, &Key::global(), &last.unwrap(), 0).await.unwrap();
    assert_eq!((counted(primary.inner(), &whole), counted(&fallback, &whole)), (5, 4));
    assert_eq!(primary.changes(), 0);
}

#[tokio::test(start_paused = true)]
async fn refunds_go_to_the_storage_that_decided_and_clears_to_both() {
    let whole = policy("fixed-window 100/day");
    let (limiter, primary, fallback) = limiter("fixed-window 100/day", Behavior::Works, 2);
    let (key, now) = (Key::global(), || (counted(primary.inner(), &whole), counted(&fallback, &whole)));
    let (of_primary, kept) = (spend(&limiter, 1).await, spend(&limiter, 1).await);
    primary.set(Behavior::Fails);
    open(&limiter).await;
    let (of_fallback, last) = (spend(&limiter, 1).await, spend(&limiter, 1).await);
    assert_eq!(now(), (2, 2));
    common::settle(&limiter, &key, &of_fallback, 0).await.unwrap();
    assert_eq!(now(), (2, 1));
    let lost = common::settle(&limiter, &key, &of_primary, 0).await.unwrap_err();
    assert!(lost.is_circuit_open() && primary.changes() == 0, "the primary is not called: {lost}");
    assert!(message(lost).ends_with(&format!(": {FAILURE}")));
    // Refusals and free hits have nothing to refund, so the primary is not called.
    let free = limiter.hit_with_cost(&key, 0).await.unwrap().with_source(DecisionSource::Primary);
    limiter.storage().settle(&whole, &key, &free, 0).await.unwrap();
    let refused = limiter.hit_with_cost(&key, 60).await.unwrap();
    assert!(refused.is_refused());
    limiter.storage().settle(&whole, &key, &refused, 0).await.unwrap();
    primary.set(Behavior::Works);
    until_closed(&limiter).await;
    common::settle(&limiter, &key, &of_primary, 0).await.unwrap();
    common::settle(&limiter, &key, &last, 0).await.unwrap();
    assert_eq!(now(), (1, 0));

    assert!(kept.is_admitted());
    primary.set(Behavior::Fails);
    open(&limiter).await;
    let _ = spend(&limiter, 1).await;
    assert!(limiter.clear(&key).await.unwrap_err().is_circuit_open());
    assert_eq!(now(), (1, 0), "the fallback is cleared at once");
    primary.set(Behavior::Works);
    // A clear may be the probe.
    sleep(SHORTEST).await;
    limiter.clear(&key).await.unwrap();
    assert_eq!((now(), circuit(&limiter).state().phase), ((0, 0), Phase::Closed));
}

#[tokio::test(start_paused = true)]
async fn refund_may_probe_and_its_failure_counts() {
    let (limiter, primary, _) = limiter("fixed-window 100/day", Behavior::Works, 2);
    let spent = spend(&limiter, 1).await;
    primary.set(Behavior::Fails);
    for failures in 1..=5 {
        assert!(!common::settle(&limiter, &Key::global(), &spent, 0).await.unwrap_err().is_circuit_open());
        assert_eq!(circuit(&limiter).state().failures, failures);
    }
    sleep(SHORTEST).await;
    assert!(!common::settle(&limiter, &Key::global(), &spent, 0).await.unwrap_err().is_circuit_open());
    assert_eq!(circuit(&limiter).state().failures, 6);
    sleep(2 * SHORTEST).await;
    primary.set(Behavior::Works);
    common::settle(&limiter, &Key::global(), &spent, 0).await.unwrap();
    assert_eq!(circuit(&limiter).state().phase, Phase::Closed);
    assert_eq!(limiter.peek(&Key::global()).await.unwrap().remaining(), 100);
}

/// Guards against this defect: the fallback gives every replica the whole quota.
#[tokio::test(start_paused = true)]
async fn each_replica_admits_exactly_its_divided_quota() {
    let more = ["leaky-bucket 10/second queue 20", "token-bucket 10/second burst 50", "10/second; moving-window 7/day"];
    for text in EVERY_STRATEGY.into_iter().chain(more) {
        for replicas in [1, 2, 3, 100] {
            let whole = policy(text);
            let share = whole.divide(NonZeroU32::new(replicas).unwrap()).unwrap();
            let most = share.limits().iter().map(tower_ratelimit::Limit::capacity).min().unwrap();
            let (limiter, ..) = limiter(text, Behavior::Fails, replicas);
            let mut admitted = 0;
            let refused = loop {
                let decision = spend(&limiter, 1).await;
                assert!(decision.is_from_fallback());
                assert_eq!(decision.capacity(), most, "{text} by {replicas}");
                if decision.is_refused() {
                    break decision;
                }
                admitted += 1;
                assert!(admitted <= most, "{text} by {replicas}");
            };
            assert_eq!(admitted, most, "{text} by {replicas}");
            assert!(refused.retry_after().is_some());
            // This cost fits only into the whole quota. The next one exceeds both quotas.
            let capacity = whole.limits().iter().map(tower_ratelimit::Limit::capacity).min().unwrap();
            let key = Key::from("a large one");
            let peek = limiter.peek_with_cost(&key, capacity).await.unwrap();
            let large = limiter.hit_with_cost(&key, capacity).await.unwrap();
            assert_eq!(large.is_admitted(), capacity <= most, "{text} by {replicas}");
            if capacity > most {
                for answer in [peek, large] {
                    let wait = answer.retry_after().expect("it fits later");
                    assert!(!wait.is_zero() && wait <= LONGEST, "{text} by {replicas}: {wait:?}");
                    assert!(answer.is_from_fallback() && answer.cost() == capacity);
                }
            }
            let never = limiter.hit_with_cost(&key, capacity + 1).await.unwrap();
            assert_eq!((never.is_refused(), never.retry_after()), (true, None), "{text} by {replicas}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn three_replicas_together_admit_at_most_the_limit() {
    let (primary, _) = FakeStorage::in_memory(Behavior::Fails);
    let mut admitted = 0;
    for _ in 0..3 {
        let breaker = Breaker::new(primary.clone()).fallback(memory_with_manual_clock().0, 3);
        let limiter = RateLimiter::with_storage(policy("moving-window 100/day"), breaker);
        while spend(&limiter, 1).await.is_admitted() {
            admitted += 1;
        }
    }
    assert_eq!(admitted, 99);
}

#[tokio::test(start_paused = true)]
async fn fallback_extends_elastic_windows_and_queues_hits() {
    let ((primary, _), (fallback, clock)) = (FakeStorage::in_memory(Behavior::Fails), memory_with_manual_clock());
    let breaker = Breaker::new(primary).fallback(fallback, 2);
    let elastic = RateLimiter::with_storage(policy("elastic-window 2 per 10 seconds"), breaker.clone());
    assert!(spend(&elastic, 1).await.is_admitted());
    clock.advance(Duration::from_secs(9));
    assert_eq!(
        spend(&elastic, 1).await.retry_after(),
        Some(Duration::from_secs(10)),
        "the refused hit has moved the end"
    );

    let queue = Policy::new(LeakyBucket::new().queue(4), Quota::per_second(4));
    let leaky = RateLimiter::with_storage(queue, breaker);
    let hits = [spend(&leaky, 1).await, spend(&leaky, 1).await, spend(&leaky, 1).await];
    assert_eq!(hits.each_ref().map(Decision::delay), [0, 500, 1_000].map(Duration::from_millis));
    assert!(spend(&leaky, 1).await.is_refused());
    common::settle(&leaky, &Key::global(), &hits[2], 0).await.unwrap();
    assert_eq!(spend(&leaky, 1).await.delay(), Duration::from_secs(1), "the last slot was refunded");
}

#[tokio::test(start_paused = true)]
async fn fallback_has_locks_of_its_own_and_the_primary_keeps_those_of_before() {
    let (limiter, primary, _) = limiter("lockout 4 per hour for 1 day", Behavior::Works, 2);
    assert!(spend(&limiter, 4).await.new_lock().is_some());
    primary.set(Behavior::Fails);
    open(&limiter).await;
    // The fallback does not know the lock. It admits its share, and then locks the key itself.
    assert!(spend(&limiter, 2).await.new_lock().is_some());
    for cost in [1, 3] {
        let refused = spend(&limiter, cost).await;
        assert!(refused.is_refused() && refused.is_from_fallback());
        assert!(refused.statuses()[0].lock().is_some(), "also for a cost that fits only into the whole quota");
    }
    primary.set(Behavior::Works);
    until_closed(&limiter).await;
    let refused = spend(&limiter, 1).await;
    assert!(refused.is_refused() && !refused.is_from_fallback());
}

#[tokio::test(start_paused = true)]
async fn open_circuit_without_a_fallback_fails_at_once() {
    let (store, within) = (FakeCasStore::default(), 70 * MS);
    store.hang(true);
    let primary = FakeStorage::around(Cas::new(store.clone()).timeout(within));
    let breaker = Breaker::new(primary.clone());
    let limiter = RateLimiter::with_storage(policy("9/day"), breaker.clone());
    let key = Key::global();
    for _ in 0..5 {
        let started = Instant::now();
        let error = limiter.hit(&key).await.unwrap_err();
        assert!(!error.is_circuit_open() && started.elapsed() == within);
        assert_eq!(message(error), "the store did not return the state within the timeout");
    }
    let started = Instant::now();
    for _ in 0..50 {
        let error = limiter.hit(&key).await.unwrap_err();
        assert!(error.is_circuit_open());
        let text = "rate limit storage is not called while the circuit breaker is open: the store did not return the state within the timeout";
        assert_eq!(message(error), text);
    }
    assert!(limiter.clear(&key).await.unwrap_err().is_circuit_open());
    for (on_error, status) in [(OnError::Admit, 200), (OnError::Refuse, 503)] {
        let layer = RateLimitLayer::new(policy("9/day"), Global::new()).storage(breaker.clone(), on_error);
        assert_eq!(ask(&layer.layer(Inner::default()), get("/")).await.status(), status);
    }
    assert!(started.elapsed().is_zero());
    assert_eq!(primary.decisions(), 5);
    let state = breaker.circuit().state();
    assert_eq!((state.by_primary, state.by_fallback, state.by_none), (0, 0, 57));
    store.hang(false);
    sleep(SHORTEST).await;
    assert_eq!(limiter.hit(&key).await.unwrap().remaining(), 8);
    assert_eq!(breaker.circuit().state().by_primary, 1);
}

#[tokio::test(start_paused = true)]
async fn failing_fallback_is_an_error() {
    let ((primary, _), (other, _)) = (FakeStorage::in_memory(Behavior::Fails), FakeStorage::in_memory(Behavior::Works));
    let limiter = RateLimiter::with_storage(policy("9/day"), Breaker::new(primary).fallback(other.clone(), 2));
    let spent = spend(&limiter, 1).await;
    other.set(Behavior::Fails);
    let kept = common::settle(&limiter, &Key::global(), &spent, 0).await.unwrap_err();
    assert_eq!(message(kept), format!("rate limit storage and its fallback failed: {FAILURE}"));
    let error = limiter.hit(&Key::global()).await.unwrap_err();
    assert_eq!(message(error), format!("rate limit storage and its fallback failed: {FAILURE}"));
    assert_eq!(circuit(&limiter).state().by_none, 1);
}

/// Asserts that a breaker rejects this storage as its primary and as its fallback.
fn assert_is_not_nestable(storage: impl Storage + Clone) {
    let message = "a breaker cannot contain another breaker: wrap the storage of the inner breaker instead";
    let fallback = storage.clone();
    assert_eq!(panic_message(|| Breaker::new(MemoryStorage::new()).fallback(fallback, 1)), message);
    assert_eq!(panic_message(|| Breaker::new(storage)), message);
}

#[tokio::test]
async fn nested_breakers_are_rejected() {
    let breaker = || Breaker::new(MemoryStorage::new());
    assert_is_not_nestable(breaker());
    assert_is_not_nestable(breaker().fallback(MemoryStorage::new(), 2));
    assert_is_not_nestable(RefusalCache::new(breaker()));
    assert_is_not_nestable(Leases::new(breaker(), 2));
    assert_is_not_nestable(AnyStorage::new(RefusalCache::new(AnyStorage::new(breaker()))));
    assert_is_not_nestable(Arc::new(breaker()));
    let shared: Arc<dyn Storage> = Arc::new(breaker().fallback(MemoryStorage::new(), 1));
    assert_is_not_nestable(Arc::clone(&shared));
    assert_is_not_nestable(AnyStorage::new(Arc::new(RefusalCache::new(shared))));
    let storage = AnyStorage::new(Arc::new(RefusalCache::new(MemoryStorage::new())));
    assert_eq!(Breaker::new(storage).circuit().state().phase, Phase::Closed);
}

#[tokio::test(start_paused = true)]
async fn try_admit_uses_a_memory_primary_or_the_fallback() {
    let (policy, key) = (policy("fixed-window 8/day"), Key::global());
    let request = StorageRequest::new(&policy, &key, Op::Hit, 1);
    let breaker = Breaker::new(memory_with_manual_clock().0);
    let mut shown = Summary::default();
    assert!(breaker.try_admit(request, Some(&mut shown)));
    assert_eq!((shown.limit.remaining(), breaker.circuit().state().by_primary), (7, 1));

    let ((primary, _), (fallback, _)) = (FakeStorage::in_memory(Behavior::Fails), memory_with_manual_clock());
    let breaker = Breaker::new(primary.clone()).fallback(fallback, 4);
    assert!(!breaker.try_admit(request, None), "the primary is remote");
    let limiter = RateLimiter::with_storage(policy.clone(), breaker.clone());
    open(&limiter).await;
    assert!(breaker.try_admit(request, Some(&mut shown)));
    assert_eq!((shown.limit.capacity(), shown.limit.remaining()), (2, 1));
    assert!(breaker.try_admit(request, None));
    assert!(!breaker.try_admit(request, None), "the divided quota is spent");
    assert_eq!(breaker.circuit().state().by_fallback, 5 + 2);
    limiter.clear(&key).await.unwrap_err();
    sleep(SHORTEST).await;
    assert!(!breaker.try_admit(request, None), "the next hit is a probe");
    primary.set(Behavior::Works);
    assert!(!spend(&limiter, 1).await.is_from_fallback());
}

/// A unit of a lease does not show that the storage works.
#[tokio::test]
async fn hit_that_the_primary_admits_without_a_call_ends_no_series_of_failures() {
    let (inner, clock) = FakeStorage::in_memory(Behavior::Works);
    let (policy, key) = (policy("fixed-window 1000/minute"), Key::global());
    let breaker = Breaker::new(Leases::new(inner.clone(), 10).clock(clock));
    let limiter = RateLimiter::with_storage(policy.clone(), breaker.clone());
    for _ in 0..2 {
        assert!(spend(&limiter, 1).await.is_admitted());
    }
    inner.set(Behavior::Fails);
    for failures in 1..=5 {
        assert!(breaker.try_admit(StorageRequest::new(&policy, &key, Op::Hit, 1), None));
        limiter.hit(&Key::from("other")).await.unwrap_err();
        assert_eq!(breaker.circuit().state().failures, failures);
    }
    assert_eq!(breaker.circuit().state().phase, Phase::Open);
}

/// A fixed window that counts the calls of `divide`.
#[derive(Clone, Debug)]
struct CountsDivisions(Arc<AtomicUsize>);

impl Strategy for CountsDivisions {
    fn name(&self) -> &'static str {
        "divided"
    }

    common::decides_like_a_fixed_window!();

    fn divide(&self, quota: &Quota, replicas: NonZeroU32) -> Option<Divided> {
        self.0.fetch_add(1, Ordering::SeqCst);
        if quota.amount() == 13 {
            return Some(Divided::new(FixedWindow::new(), Quota::per_second(1).burst(1)));
        }
        Some(Divided::new(self.clone(), quota.divide(replicas)))
    }
}

#[tokio::test(start_paused = true)]
async fn each_policy_is_divided_once_even_if_names_are_equal() {
    let divided = CountsDivisions(Arc::default());
    let breaker = Breaker::new(failing()).fallback(memory_with_manual_clock().0, 2);
    let amounts = [20, 40];
    let tiers = amounts.map(|amount| Policy::named("tier").limit(divided.clone(), Quota::per_minute(amount)));
    for _ in 0..10 {
        // A clone is not divided again.
        for (policy, amount) in tiers.clone().iter().zip(amounts) {
            let hit = breaker.decide(StorageRequest::new(policy, &Key::global(), Op::Hit, 1)).await.unwrap();
            assert_eq!(hit.capacity(), amount / 2);
        }
    }
    assert_eq!(divided.0.load(Ordering::SeqCst), 2);
}

/// A fixed window with a share per replica that its text does not contain.
#[derive(Clone, Debug)]
struct HasShare(u32);

impl Strategy for HasShare {
    fn name(&self) -> &'static str {
        "has-share"
    }

    common::decides_like_a_fixed_window!();

    fn divide(&self, _: &Quota, _: NonZeroU32) -> Option<Divided> {
        Some(Divided::new(self.clone(), Quota::per_minute(self.0)))
    }
}

/// Guards against this defect: after a live policy was set to another custom strategy of the same
/// text, the fallback decides by the first one.
#[tokio::test(start_paused = true)]
async fn fallback_follows_a_live_policy_to_a_strategy_of_the_same_text() {
    let of = |share| Policy::named("api").limit(HasShare(share), Quota::per_minute(20));
    let (first, second) = (of(10), of(5));
    assert_eq!(first, second);
    let live = LivePolicy::new(first.clone());
    let breaker = Breaker::new(failing()).fallback(memory_with_manual_clock().0, 2);
    let limiter = RateLimiter::with_storage(live.clone(), breaker);
    for (policy, share) in [(&first, 10), (&second, 5)].into_iter().cycle().take(8) {
        live.set(policy.clone()).unwrap();
        assert_eq!(spend(&limiter, 1).await.capacity(), share);
    }
    assert_eq!(circuit(&limiter).state().phase, Phase::Open);
}

#[tokio::test(start_paused = true)]
async fn policy_that_the_primary_or_the_fallback_rejects_is_rejected_by_the_limiter() {
    let small = |most| failing().holding_at_most(most);
    let error = |breaker: Result<_, ConfigError>| breaker.err().map(|error| error.to_string());
    let breaker = Breaker::new(small(100)).fallback(small(10), 4);
    assert_eq!(error(RateLimiter::try_with_storage(policy("40/day"), breaker.clone())), None);
    assert_eq!(error(RateLimiter::try_with_storage(policy("44/day"), breaker.clone())), Some("at most 10".to_owned()));
    assert_eq!(
        error(RateLimiter::try_with_storage(policy("101/day"), breaker.clone())),
        Some("at most 100".to_owned())
    );
    let alone = RateLimiter::try_with_storage(policy("101/day"), Breaker::new(small(100)));
    assert_eq!(
        error(alone.map(|_| RateLimiter::with_storage(policy("1/day"), breaker.clone()))),
        Some("at most 100".to_owned())
    );

    // A policy that cannot be divided is rejected by the limiter, or by the storage if it is chosen
    // for a request.
    let odd = Policy::new(CountsDivisions(Arc::default()), Quota::per_minute(13));
    let text = "fixed-window does not support a burst";
    assert!(error(RateLimiter::try_with_storage(odd.clone(), breaker.clone())).unwrap().starts_with(text));
    let failed = breaker.decide(StorageRequest::new(&odd, &Key::global(), Op::Hit, 1)).await.unwrap_err();
    assert_eq!(failed.kind(), StorageErrorKind::Unsupported);
    assert!(message(failed).contains(text));
    assert_eq!(breaker.circuit().state().by_none, 1);
}

#[tokio::test(start_paused = true)]
async fn layer_reports_the_divided_quota_and_refunds_the_deciding_storage() {
    let ((primary, _), (fallback, _)) = (FakeStorage::in_memory(Behavior::Works), memory_with_manual_clock());
    let breaker = Breaker::new(primary.clone()).fallback(fallback.clone(), 3);
    let tiers = |head: &Head<'_>| {
        let paid = head.headers.contains_key("x-paid");
        policy(if paid { "fixed-window 90/day" } else { "fixed-window 9/day; shadow fixed-window 6/day" })
    };
    let layer = RateLimitLayer::new(policy_by(tiers), Global::new())
        .storage(breaker.clone(), OnError::Refuse)
        .headers(Headers::x_rate_limit().and(Headers::draft11()))
        .charge_when(|response: &tower_ratelimit::ResponseHead<'_>| response.headers.get("free").is_none());
    let service = layer.layer(Inner::default());
    let limit = async |request| numbers(&ask(&service, request).await).map(|[limit, remaining, _]| [limit, remaining]);
    assert_eq!(limit(get("/")).await, Some([9, 8]));
    primary.set(Behavior::Fails);
    assert_eq!(limit(with("x-paid", "1")).await, Some([30, 29]));
    assert_eq!(limit(get("/")).await, Some([3, 2]));
    for _ in 0..2 {
        assert_eq!(ask(&service, get("/")).await.status(), 200);
    }
    let refused = ask(&service, get("/")).await;
    assert_eq!(refused.status(), 429);
    assert!(retry_after(&refused).is_some());
    let policy_field = refused.headers()["ratelimit-policy"].to_str().unwrap().to_owned();
    assert_eq!(policy_field, "\"fixed-window 9/day\";q=3;w=86400");
    // The shadow limit is divided too, and has its own states.
    let shadow = tiers(&Head::from_request(&get("/"))).shadows()[0].clone();
    assert_eq!(
        (counted(&fallback, &shadow.divide(NonZeroU32::new(3).unwrap()).unwrap()), shadow.limits().len()),
        (2, 1)
    );
    primary.set(Behavior::Works);
    sleep(SHORTEST).await;
    assert_eq!(limit(get("/")).await, Some([9, 7]));
}

#[tokio::test(start_paused = true)]
async fn ratelimit_policy_field_shows_the_window_of_the_divided_policy() {
    for (text, own, of_share) in [
        ("token-bucket 1/minute burst 100", "q=100;w=6000", "q=1"),
        ("leaky-bucket 100/minute queue 59", "q=60;w=36", "q=2"),
        ("token-bucket 200/minute", "q=200;w=60", "q=2;w=60"),
        ("300/minute", "q=300;w=60", "q=3;w=60"),
    ] {
        let (primary, _) = FakeStorage::in_memory(Behavior::Works);
        let breaker = Breaker::new(primary.clone()).fallback(memory_with_manual_clock().0, 100);
        let layer = RateLimitLayer::new(policy(text), Global::new())
            .storage(breaker, OnError::Refuse)
            .headers(Headers::draft11());
        let service = layer.layer(Inner::default());
        for (behavior, parameters) in [(Behavior::Works, own), (Behavior::Fails, of_share)] {
            primary.set(behavior);
            let response = ask(&service, get("/")).await;
            let field = response.headers()["ratelimit-policy"].to_str().unwrap();
            assert_eq!(field, format!("\"{text}\";{parameters}").replace("\"300/", "\"sliding-window-counter 300/"));
        }
    }
}

#[test]
fn panics_on_invalid_options_suggest_valid_values() {
    let breaker = || Breaker::new(MemoryStorage::new());
    assert!(panic_message(|| breaker().fallback(MemoryStorage::new(), 0)).contains("at least 1"));
    assert!(panic_message(|| breaker().failures(0)).contains("for example 5"));
    for (shortest, longest) in [(Duration::ZERO, LONGEST), (LONGEST, SHORTEST), (LONGEST, Duration::from_secs(3_601))] {
        let example = "for example Duration::from_millis(100) and Duration::from_secs(1)";
        assert!(panic_message(|| breaker().probe_after(shortest, longest)).contains(example));
    }
}

#[tokio::test(start_paused = true)]
async fn options_work_in_any_order() {
    let ((primary, _), (fallback, _)) = (FakeStorage::in_memory(Behavior::Fails), memory_with_manual_clock());
    let (soon, late) = (10 * MS, 15 * MS);
    let first = Breaker::new(primary.clone()).failures(2).probe_after(soon, late).fallback(fallback.clone(), 2);
    let last = Breaker::new(primary.clone()).fallback(fallback.clone(), 2).probe_after(soon, late).failures(2);
    for breaker in [first, last] {
        let limiter = RateLimiter::with_storage(policy("fixed-window 1000/day"), breaker);
        for phase in [Phase::Closed, Phase::Open] {
            assert!(spend(&limiter, 1).await.is_from_fallback());
            assert_eq!(circuit(&limiter).state().phase, phase);
        }
        assert!((soon / 2..=soon).contains(&circuit(&limiter).state().probe_in.unwrap()));
        for _ in 0..5 {
            sleep(late).await;
            let _ = spend(&limiter, 1).await;
            assert!(circuit(&limiter).state().probe_in.unwrap() <= late);
        }
        assert_eq!(circuit(&limiter).state().failures, 7);
    }
}

/// Guards against this defect: a fallback is cleared only after the primary has replied.
#[tokio::test]
async fn clear_reaches_the_fallback_while_the_primary_hangs() {
    let (primary, _clock) = FakeStorage::in_memory(Behavior::Works);
    let fallback = FakeStorage::around(memory_with_manual_clock().0);
    let (breaker, policy, key) =
        (Breaker::new(primary.clone()).fallback(fallback.clone(), 1), policy("fixed-window 5/minute"), Key::from("k"));
    let _ = fallback.decide(StorageRequest::new(&policy, &key, Op::Hit, 1)).await.unwrap();
    primary.set(Behavior::Hangs);
    let request = |op| StorageRequest::new(&policy, &key, op, 1);
    let mut clearing = breaker.clear(&policy, &key);
    assert!(poll(&mut clearing).is_pending());
    drop(clearing);
    assert_eq!(fallback.decide(request(Op::Peek)).await.unwrap().remaining(), 5);
    let _ = fallback.decide(request(Op::Hit)).await.unwrap();
    let mut clearing = breaker.clear_all();
    assert!(poll(&mut clearing).is_pending());
    drop(clearing);
    assert_eq!(fallback.decide(request(Op::Peek)).await.unwrap().remaining(), 5);
}

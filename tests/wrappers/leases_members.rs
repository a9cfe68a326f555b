//! Several keys, of which the policy of all clients is leased.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use common::{Behavior, FakeStorage, Inner, memory_with_manual_clock, policy, poll, status};
use http::Request;
use tokio::task::JoinSet;
use tower::Layer;
use tower_ratelimit::storage::{
    AnyStorage, InOrder, Leases, RefusalCache, StorageError, StorageErrorKind, StorageRequest,
};
use tower_ratelimit::{Decision, Global, Header, Key, MemoryStorage, OnError, Op, Policy, RateLimitLayer, Storage};

/// The policies of a user and of all clients.
fn two([user, all]: [&str; 2]) -> [Policy; 2] {
    [policy(user).with_name("user"), policy(all).with_name("all")]
}

fn keys(user: u64) -> [Key; 2] {
    [Key::from(user), Key::global()]
}

fn hits<'a>(policies: &'a [Policy], keys: &'a [Key]) -> Vec<StorageRequest<'a>> {
    policies.iter().zip(keys).map(|(policy, key)| StorageRequest::new(policy, key, Op::Hit, 1)).collect()
}

async fn hit(storage: &impl Storage, policies: &[Policy], user: u64) -> Vec<Decision> {
    storage.decide_all(&hits(policies, &keys(user))).await.unwrap()
}

fn are_admitted(decisions: &[Decision]) -> bool {
    decisions.iter().all(Decision::is_admitted)
}

async fn spent(storage: &impl Storage, policy: &Policy, key: &Key) -> u32 {
    let peek = storage.decide(StorageRequest::new(policy, key, Op::Peek, 0)).await.unwrap();
    peek.capacity() - peek.remaining()
}

#[tokio::test]
async fn refusal_by_the_user_returns_the_unit_to_the_lease() {
    let (memory, clock) = memory_with_manual_clock();
    let leases = Leases::new(memory.clone(), 100).only("all").clock(clock);
    let policies = two(["fixed-window 3/minute", "fixed-window 100000/minute"]);
    for user in 0..50 {
        for round in 0..6 {
            let decisions = hit(&leases, &policies, user).await;
            let admitted = user * 3 + round.min(2) + 1;
            assert_eq!(are_admitted(&decisions), round < 3, "user {user}, round {round}");
            assert!(decisions.iter().all(|decision| decision.has_spent() == (round < 3)), "{decisions:?}");
            assert_eq!(u64::from(decisions[1].remaining()), 100_000 - admitted, "user {user}, round {round}");
        }
        assert_eq!(spent(&memory, &policies[0], &Key::from(user)).await, 3);
    }
    assert!(leases.misses() < 10 && leases.local_decisions() > 280, "{leases:?}");
    leases.close().await.unwrap();
    assert_eq!(spent(&memory, &policies[1], &Key::global()).await, 150);
}

#[tokio::test]
async fn refusal_by_the_leased_policy_spends_nothing_of_the_user() {
    let (memory, clock) = memory_with_manual_clock();
    let leases = Leases::new(memory.clone(), 100).only("all").clock(clock);
    let policies = two(["fixed-window 900/minute", "fixed-window 200/minute"]);
    for round in 0..250 {
        let decisions = hit(&leases, &policies, 1).await;
        let admitted: u32 = (round + 1).min(200);
        assert_eq!((decisions[0].is_admitted(), decisions[1].is_admitted()), (true, round < 200), "round {round}");
        assert!(decisions.iter().all(|decision| decision.has_spent() == (round < 200)), "{decisions:?}");
        assert_eq!(decisions.iter().map(Decision::remaining).collect::<Vec<_>>(), [900 - admitted, 200 - admitted]);
    }
    assert_eq!(spent(&memory, &policies[0], &Key::from(1)).await, 200);
}

/// Two processes on one storage: every key has spent exactly the admitted hits after the leases are
/// closed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_hits_of_two_processes_are_exact() {
    let memory = MemoryStorage::new();
    let processes = [(); 2].map(|()| Leases::new(memory.clone(), 50).only("all"));
    let policies = Arc::new(two(["fixed-window 40/day", "fixed-window 100000/day"]));
    let mut tasks = JoinSet::new();
    for task in 0..16 {
        let (leases, policies) = (processes[task % 2].clone(), Arc::clone(&policies));
        tasks.spawn(async move {
            let mut admitted = 0;
            for number in 0..100 {
                admitted += u32::from(are_admitted(&hit(&leases, &*policies, (task as u64 + number) % 8).await));
            }
            admitted
        });
    }
    let admitted: u32 = tasks.join_all().await.into_iter().sum();
    assert_eq!(admitted, 8 * 40);
    for leases in processes {
        leases.close().await.unwrap();
    }
    for user in 0..8 {
        assert_eq!(spent(&memory, &policies[0], &Key::from(user)).await, 40);
    }
    assert_eq!(spent(&memory, &policies[1], &Key::global()).await, admitted);
}

#[tokio::test]
async fn failure_of_the_storage_returns_the_unit() {
    let fails = Arc::new(AtomicBool::new(false));
    let user_fails = Arc::clone(&fails);
    let (fake, clock) = FakeStorage::scripted(move |request| {
        let fails = request.policy.name() == Some("user") && user_fails.load(Ordering::Relaxed);
        fails.then(|| Err(StorageError::new(StorageErrorKind::Refused, "no connection")))
    });
    let leases = Leases::new(InOrder::new(fake.clone()), 100).only("all").clock(clock);
    let policies = two(["fixed-window 900/minute", "fixed-window 20/minute"]);
    assert!(are_admitted(&hit(&leases, &policies, 1).await));
    fails.store(true, Ordering::Relaxed);
    for _ in 0..30 {
        let error = leases.decide_all(&hits(&policies, &keys(1))).await.unwrap_err();
        assert_eq!((error.kind(), error.may_have_counted()), (StorageErrorKind::Refused, false));
    }
    fails.store(false, Ordering::Relaxed);
    for round in 1..40 {
        assert_eq!(are_admitted(&hit(&leases, &policies, 1).await), round < 20, "round {round}");
    }
    // The refusal of the leased policy stays one.
    fails.store(true, Ordering::Relaxed);
    let refused = hit(&leases, &policies, 1).await;
    assert!(refused[1].is_refused() && refused[0].statuses().is_empty(), "{refused:?}");
}

/// A client that its own limit refuses could use up the lease by leaving early.
#[tokio::test]
async fn request_that_is_dropped_returns_the_unit_to_the_lease() {
    let (memory, clock) = memory_with_manual_clock();
    let storage = FakeStorage::around(memory);
    let leases = Leases::new(storage.clone(), 100).only("all").clock(clock);
    let policies = two(["fixed-window 3/minute", "fixed-window 1000/minute"]);
    for _ in 0..2 {
        hit(&leases, &policies, 1).await;
    }
    storage.close();
    for _ in 0..50 {
        let mut dropped = leases.decide_all(&hits(&policies, &keys(2)));
        assert!(poll(&mut dropped).is_pending());
    }
    storage.open();
    assert_eq!(hit(&leases, &policies, 3).await[1].remaining(), 1_000 - 3);
}

#[tokio::test]
async fn layer_leases_the_policy_of_all_clients_alone() {
    let layer = |storage: Leases| {
        let [user, all] = two(["elastic-window 2/minute", "1000/minute"]);
        let layer = RateLimitLayer::new(user, Header::new("x-user")).and(all, Global::new());
        layer.try_storage(storage, OnError::Refuse)
    };
    let from = |user: &str| Request::get("/").header("x-user", user).body(()).unwrap();
    let leases = Leases::new(MemoryStorage::new(), 100);
    let error = layer(leases.clone()).unwrap_err().to_string();
    assert!(error.contains(r#".only("all")"#), "{error}");
    let service = layer(leases.clone().only("all")).unwrap().layer(Inner::default());
    for user in ["alice", "bob"] {
        for expected in [200, 200, 429] {
            assert_eq!(status(&service, from(user)).await, expected, "{user}");
        }
    }
    let policies = two(["9/minute", "9/minute"]);
    let error = leases.validate_members(&policies).unwrap_err().to_string();
    assert!(error.contains(r#".only("all")"#), "{error}");
    let failed = leases.decide_all(&hits(&policies, &keys(1))).await.unwrap_err();
    assert!(format!("{failed:#}").contains(&error) && !failed.may_have_counted(), "{failed:#}");
    let leaky = policy("leaky-bucket 9/second queue 9").with_name("all");
    let leases = Leases::new(MemoryStorage::new(), 100).only("all");
    assert!(leases.validate(&leaky).is_err() && leases.validate(&leaky.with_name("user")).is_ok());
    assert!(are_admitted(&leases.decide_all(&hits(&policies[..1], &keys(1))).await.unwrap()));
    assert!(are_admitted(&leases.decide_all(&hits(&policies[1..], &keys(1)[1..])).await.unwrap()));
}

/// The layer does not know the policies that are chosen for each request, so one known policy beside
/// the leased one does not show that there are no more.
#[tokio::test]
async fn storage_that_decides_one_key_needs_in_order_which_adds_no_call() {
    let (fake, clock) = FakeStorage::in_memory(Behavior::Works);
    let policies = two(["fixed-window 900/minute", "fixed-window 100000/minute"]);
    let error = Leases::new(fake.clone(), 100).only("all").validate_members(&policies).unwrap_err().to_string();
    assert!(error.contains("InOrder::new(storage)"), "{error}");
    let leases = Leases::new(InOrder::new(fake.clone()), 100).only("all").clock(clock);
    leases.validate_members(&policies).unwrap();
    for _ in 0..200 {
        let requests = leases.misses();
        assert!(are_admitted(&hit(&leases, &policies, 1).await));
        assert_eq!(fake.take_decisions(), 1 + leases.misses() - requests);
    }
    assert!(leases.misses() < 20, "{leases:?}");
}

/// A refused client would otherwise cause a call of the server with each request.
#[tokio::test]
async fn refusal_by_the_leased_policy_from_a_cache_asks_for_no_other_key() {
    for is_shared in [false, true] {
        let (fake, clock) = FakeStorage::in_memory(Behavior::Works);
        let cache = RefusalCache::new(fake.clone()).clock(clock.clone());
        let cache = if is_shared { AnyStorage::new(Arc::new(cache)) } else { AnyStorage::new(cache) };
        let leases = Leases::new(InOrder::new(cache), 100).only("all").clock(clock);
        let policies = two(["fixed-window 900/minute", "fixed-window 20/minute"]);
        for round in 0..20 {
            assert!(are_admitted(&hit(&leases, &policies, 1).await), "round {round}");
        }
        for round in 0..50 {
            fake.take_decisions();
            let decisions = hit(&leases, &policies, 1).await;
            let is_refused = decisions[1].is_refused() && decisions.iter().all(|decision| !decision.has_spent());
            assert!(is_refused, "{decisions:?}");
            assert!(decisions[0].is_admitted() && decisions[0].statuses().is_empty(), "{decisions:?}");
            assert!(round == 0 || fake.take_decisions() == 0, "round {round}");
        }
        assert_eq!(spent(fake.inner(), &policies[0], &Key::from(1)).await, 20);
    }
}

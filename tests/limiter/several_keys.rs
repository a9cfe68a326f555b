//! Decisions on several keys together, on the memory storage and one after the other.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use common::{Behavior, FakeStorage, hit, memory_with_manual_clock, now, panic_message, policy};
use tower_ratelimit::storage::{
    AnyStorage, InOrder, OnFull, RefusalCache, StorageError, StorageErrorKind, StorageRequest,
};
use tower_ratelimit::strategy::{Hit, Outcome, State, Status, Strategy};
use tower_ratelimit::{Decision, FixedWindow, Key, MemoryStorage, Op, Policy, Quota, Storage, Timestamp};

fn named(text: &str, name: &str) -> Policy {
    policy(text).with_name(name)
}

/// The members of a hit of one unit.
fn requests<'a>(policies: &'a [Policy], keys: &'a [Key]) -> Vec<StorageRequest<'a>> {
    policies.iter().zip(keys).map(|(policy, key)| StorageRequest::new(policy, key, Op::Hit, 1)).collect()
}

fn verdicts(decisions: &[Decision]) -> Vec<bool> {
    decisions.iter().map(Decision::is_admitted).collect()
}

#[test]
fn refusals_that_count_reach_only_the_member_that_refuses() {
    let (storage, clock) = memory_with_manual_clock();
    let policies = [named("elastic-window 1 per 10 seconds", "a"), named("elastic-window 2 per 10 seconds", "b")];
    let keys = [Key::from("a"), Key::from("b")];
    let hit = || now(storage.decide_all(&requests(&policies, &keys)));
    assert_eq!(verdicts(&hit()), [true, true]);
    clock.advance(Duration::from_secs(5));
    let refused = hit();
    assert_eq!(verdicts(&refused), [false, true]);
    assert_eq!(refused[0].retry_after(), Some(Duration::from_secs(10)), "the refusal moves the end");
    assert!(!refused[1].has_spent());
    clock.advance(Duration::from_secs(5));
    let peek = |at: usize| now(storage.decide(StorageRequest::new(&policies[at], &keys[at], Op::Peek, 1)));
    assert_eq!((peek(0).remaining(), peek(1).remaining()), (0, 2), "the second window was not moved");
}

#[test]
fn lockout_by_refusals_locks_only_the_member_that_refuses() {
    let (storage, _clock) = memory_with_manual_clock();
    let counts = "fixed-window 1/minute; lockout 2 refusals/hour for 1 day";
    let policies = [named("fixed-window 9/minute", "a"), named(counts, "b")];
    let keys = [Key::from("a"), Key::from("b")];
    for expected in [[true, true], [true, false], [true, false]] {
        assert_eq!(verdicts(&now(storage.decide_all(&requests(&policies, &keys)))), expected);
    }
    let locked = now(storage.decide_all(&requests(&policies, &keys)));
    assert_eq!(locked[1].retry_after(), Some(Duration::from_secs(86_400)));
    assert_eq!(locked[0].remaining(), 8);
}

/// Makes its state fresh again at a refusal, and if `forgets_hits`, at a hit after the first one.
#[derive(Clone, Copy, Debug)]
struct Forgetful {
    admits: u32,
    forgets_hits: bool,
}

impl Strategy for Forgetful {
    fn name(&self) -> &'static str {
        "forgetful"
    }

    fn check(&self, _: &Quota, state: &State, _: Timestamp, cost: u32) -> Status {
        let hits = if let State::Counts { amounts: [hits, _], .. } = state { *hits } else { 0 };
        if hits + cost <= self.admits {
            Status::admitted(9, 9 - hits, 1)
        } else {
            Status::refused(9, 9 - hits, 1, Some(1))
        }
    }

    fn spend(&self, quota: &Quota, state: &mut State, now: Timestamp, _: u32) -> u64 {
        let until = now.plus(quota.period_micros());
        *state = match state {
            State::Counts { .. } if self.forgets_hits => State::Fresh,
            State::Counts { amounts: [hits, _], .. } => State::Counts { until, amounts: [*hits + 1, 0] },
            _ => State::Counts { until, amounts: [1, 0] },
        };
        0
    }

    fn refuse(&self, _: &Quota, state: &mut State, _: Timestamp) {
        *state = State::Fresh;
    }

    fn counts_refusals(&self) -> bool {
        true
    }

    fn refund(&self, _: &Quota, _: &mut State, _: Timestamp, _: &Hit, _: u32) {}
}

#[test]
fn state_that_a_decision_makes_fresh_is_removed() {
    let forgetful = |admits, forgets_hits| Policy::new(Forgetful { admits, forgets_hits }, Quota::per_day(9));
    let by_another_limit = forgetful(9, false).limit(FixedWindow::new(), Quota::per_day(1));
    let keys = [Key::from("a"), Key::from("b")];
    for (policy, expected) in [
        (forgetful(9, true), [[8, 8], [9, 7], [8, 6]]),
        (forgetful(1, false), [[8, 8], [9, 8], [8, 7]]),
        (by_another_limit, [[8, 8], [9, 8], [9, 8]]),
    ] {
        let (storage, _clock) = memory_with_manual_clock();
        let policies = [policy, named("fixed-window 9/day", "other")];
        for remaining in expected {
            let decisions = now(storage.decide_all(&requests(&policies, &keys)));
            let of_first_limit = |decision: &Decision| decision.statuses()[0].remaining();
            assert_eq!([0, 1].map(|at| of_first_limit(&decisions[at])), remaining, "{}", policies[0]);
        }
    }
}

/// Panics when it checks a state with two hits.
#[derive(Clone, Copy, Debug)]
struct PanicsAfterTwo;

impl Strategy for PanicsAfterTwo {
    fn name(&self) -> &'static str {
        "panics-after-two"
    }

    fn check(&self, _: &Quota, state: &State, _: Timestamp, _: u32) -> Status {
        assert!(!matches!(state, State::Counts { amounts: [2, _], .. }), "panics on purpose");
        Status::admitted(9, 8, 1)
    }

    fn spend(&self, quota: &Quota, state: &mut State, now: Timestamp, _: u32) -> u64 {
        let hits = if let State::Counts { amounts: [hits, _], .. } = state { *hits } else { 0 };
        *state = State::Counts { until: now.plus(quota.period_micros()), amounts: [hits + 1, 0] };
        0
    }

    fn hit(&self, quota: &Quota, state: &mut State, now: Timestamp, cost: u32) -> Outcome {
        Outcome::Spent { delay: self.spend(quota, state, now, cost) }
    }

    fn refund(&self, _: &Quota, _: &mut State, _: Timestamp, _: &Hit, _: u32) {}
}

/// The status of the second member panics after both hits were admitted.
#[test]
fn panic_of_a_strategy_spends_nothing_of_any_key() {
    let (storage, _clock) = memory_with_manual_clock();
    let policies = [
        named("fixed-window 9/day", "first"),
        Policy::new(PanicsAfterTwo, Quota::per_day(9)).with_name("panics"),
        named("fixed-window 9/day", "last"),
    ];
    let keys = ["a", "b", "c"].map(Key::from);
    assert_eq!(verdicts(&now(storage.decide_all(&requests(&policies, &keys)))), [true; 3]);
    let message = panic_message(|| now(storage.decide_all(&requests(&policies, &keys))));
    assert!(message.contains("panics on purpose"), "{message}");
    for at in [0, 1, 2] {
        let peek = now(storage.decide(StorageRequest::new(&policies[at], &keys[at], Op::Peek, 1)));
        assert_eq!(peek.remaining(), 8, "member {at}");
    }
}

/// A member without room refuses, so the others spend nothing and evict nothing.
#[test]
fn full_storage_refuses_all_members() {
    let full = |on_full| {
        let storage = MemoryStorage::builder().max_keys(1).on_full(on_full).build().unwrap();
        let exhausted = named("fixed-window 1/day", "exhausted");
        assert!(now(storage.decide(StorageRequest::new(&exhausted, &Key::from("x"), Op::Hit, 1))).is_admitted());
        storage
    };
    let policies = [named("fixed-window 5/day", "a"), named("fixed-window 5/day", "b")];
    let keys = [Key::from("a"), Key::from("b")];
    let storage = full(OnFull::Refuse);
    for _ in 0..3 {
        let refused = now(storage.decide_all(&requests(&policies, &keys)));
        assert!(refused.iter().all(|decision| decision.is_storage_full() && !decision.has_spent()), "{refused:?}");
    }
    assert_eq!((storage.stats().keys, storage.stats().newcomers_refused), (1, 6));

    let storage = full(OnFull::Admit);
    assert_eq!(verdicts(&now(storage.decide_all(&requests(&policies, &keys)))), [true, true]);
    assert_eq!((storage.stats().keys, storage.stats().newcomers_admitted), (1, 2));
}

#[test]
fn refused_members_evict_no_other_key() {
    let storage = MemoryStorage::builder().max_keys(2).build().unwrap();
    let (kept, refuses) = (named("fixed-window 5/day", "kept"), named("fixed-window 1/day", "refuses"));
    now(storage.decide_all(&[
        StorageRequest::new(&kept, &Key::from("kept"), Op::Hit, 1),
        StorageRequest::new(&refuses, &Key::global(), Op::Hit, 1),
    ]));
    for user in 0..100_u64 {
        let decisions = now(storage.decide_all(&[
            StorageRequest::new(&kept, &Key::from(user), Op::Hit, 1),
            StorageRequest::new(&refuses, &Key::global(), Op::Hit, 1),
        ]));
        assert_eq!(verdicts(&decisions), [true, false]);
    }
    assert_eq!((storage.stats().keys, storage.stats().evicted), (2, 0));
    let peek = now(storage.decide(StorageRequest::new(&kept, &Key::from("kept"), Op::Peek, 1)));
    assert_eq!(peek.remaining(), 4);
}

/// The bytes of the states are counted exactly, also for logs and for evictions of other members.
#[test]
fn size_of_the_storage_is_zero_after_a_clear() {
    let storage = MemoryStorage::builder().max_keys(40).max_bytes(65_536).build().unwrap();
    let policies = [
        named("moving-window 50/day", "a"),
        named("fixed-window 500/day; moving-window 20/day", "b"),
        named("token-bucket 900/day", "c"),
    ];
    for round in 0..3_000_u64 {
        let keys = [Key::from(round % 30), Key::from(round % 7), Key::from(round % 3)];
        let _ = now(storage.decide_all(&requests(&policies, &keys)));
        let stats = storage.stats();
        assert!(stats.keys <= 43 && stats.bytes <= 75_000, "{stats:?}");
    }
    now(storage.clear_all());
    let stats = storage.stats();
    assert_eq!((stats.keys, stats.bytes, stats.log_bytes), (0, 0, 0));
}

#[test]
fn threads_with_different_orders_of_keys_are_exact_and_never_block() {
    let (storage, _clock) = memory_with_manual_clock();
    let storage = Arc::new(storage);
    let admitted = AtomicU32::new(0);
    let policies: Vec<_> = (0..4).map(|at| named("fixed-window 1000/day", &format!("{at}"))).collect();
    let keys: Vec<_> = (0..4_u64).map(Key::from).collect();
    thread::scope(|scope| {
        for thread in 0..8 {
            let (storage, policies, keys, admitted) = (&storage, &policies, &keys, &admitted);
            scope.spawn(move || {
                for round in 0..500_usize {
                    let order: Vec<_> = (0..4).map(|at| (at * (2 * (thread % 2) + 1) + round) % 4).collect();
                    let members: Vec<_> =
                        order.iter().map(|&at| StorageRequest::new(&policies[at], &keys[at], Op::Hit, 1)).collect();
                    let decisions = now(storage.decide_all(&members));
                    admitted.fetch_add(u32::from(decisions.iter().all(Decision::is_admitted)), Ordering::Relaxed);
                }
            });
        }
    });
    assert_eq!(admitted.into_inner(), 1_000);
    for (policy, key) in policies.iter().zip(&keys) {
        assert_eq!(now(storage.decide(StorageRequest::new(policy, key, Op::Peek, 1))).remaining(), 0);
    }
}

#[tokio::test]
async fn cached_refusal_of_a_member_needs_no_call() {
    let (memory, clock) = memory_with_manual_clock();
    let counted = FakeStorage::around(memory);
    let storage = RefusalCache::new(InOrder::new(counted.clone())).clock(clock.clone());
    let policies = [named("fixed-window 9/minute", "a"), named("fixed-window 1/minute", "b")];
    let keys = [Key::from("a"), Key::from("b")];
    assert_eq!(verdicts(&storage.decide_all(&requests(&policies, &keys)).await.unwrap()), [true, true]);
    assert_eq!(verdicts(&storage.decide_all(&requests(&policies, &keys)).await.unwrap()), [true, false]);
    let calls = counted.decisions();
    let refused = storage.decide_all(&requests(&policies, &keys)).await.unwrap();
    assert_eq!((verdicts(&refused), counted.decisions()), (vec![true, false], calls));
    assert_eq!(refused[1].retry_after(), Some(Duration::from_secs(60)));
    assert!(refused.iter().all(|decision| !decision.has_spent()));
    // The refusal is cached under the member's own key, and other members are not affected.
    assert!(hit(&storage, &policies[1], "b", 1).await.is_refused());
    assert_eq!(counted.decisions(), calls);
    let other = [Key::from("a"), Key::from("another")];
    assert_eq!(verdicts(&storage.decide_all(&requests(&policies, &other)).await.unwrap()), [true, true]);
}

/// All cached members answer, so the response reports the longest wait.
#[tokio::test]
async fn cached_refusals_of_several_members_all_answer() {
    let (memory, clock) = memory_with_manual_clock();
    let storage = RefusalCache::new(memory).clock(clock);
    let policies = [named("fixed-window 1/minute", "a"), named("fixed-window 1/day", "b")];
    let keys = [Key::from("a"), Key::from("b")];
    for expected in [[true, true], [false, false], [false, false]] {
        let decisions = storage.decide_all(&requests(&policies, &keys)).await.unwrap();
        assert_eq!(verdicts(&decisions), expected);
        if !expected[0] {
            let waits = decisions.iter().map(Decision::retry_after).collect::<Vec<_>>();
            assert_eq!(waits, [Some(Duration::from_secs(60)), Some(Duration::from_secs(86_400))]);
        }
    }
    assert_eq!((storage.misses(), storage.local_decisions(), storage.len()), (4, 2, 2));
}

#[tokio::test]
async fn member_that_counts_refusals_is_asked_in_spite_of_a_cached_refusal() {
    let (memory, clock) = memory_with_manual_clock();
    let counted = FakeStorage::around(memory);
    let storage = RefusalCache::new(InOrder::new(counted.clone())).clock(clock.clone()).ttl(Duration::from_secs(60));
    let policies = [named("elastic-window 2 per 10 seconds", "a"), named("fixed-window 1/minute", "b")];
    let keys = [Key::from("a"), Key::from("b")];
    for expected in [[true, true], [true, false]] {
        assert_eq!(verdicts(&storage.decide_all(&requests(&policies, &keys)).await.unwrap()), expected);
    }
    assert!(hit(&storage, &policies[0], "a", 1).await.is_admitted());
    clock.advance(Duration::from_secs(5));
    let refused = storage.decide_all(&requests(&policies, &keys)).await.unwrap();
    assert_eq!(refused[0].retry_after(), Some(Duration::from_secs(10)), "the refusal moves the end of the window");
    // The hits of the first member and of the request that was refused from the cache are none of these.
    assert_eq!((storage.misses(), storage.local_decisions()), (7, 0));
}

/// Each member's peeks or refunds fail after the second member has refused.
#[tokio::test]
async fn refused_request_stays_refused_if_the_storage_fails_after_the_refusal() {
    let fails = Arc::new(AtomicBool::new(false));
    let peeks_fail = Arc::clone(&fails);
    let (fake, _clock) = FakeStorage::scripted(move |request| {
        let fails = request.op == Op::Peek && peeks_fail.load(Ordering::Relaxed);
        fails.then(|| Err(StorageError::new(StorageErrorKind::Other, "no peek")))
    });
    let storage = InOrder::new(fake.clone());
    let policies =
        [named("fixed-window 9/minute", "a"), named("fixed-window 1/minute", "b"), named("fixed-window 9/minute", "c")];
    let keys = ["a", "b", "c"].map(Key::from);
    let hit = || storage.decide_all(&requests(&policies, &keys));
    assert_eq!(verdicts(&hit().await.unwrap()), [true, true, true]);

    fails.store(true, Ordering::Relaxed);
    let refused = hit().await.unwrap();
    assert_eq!(verdicts(&refused), [true, false, true]);
    assert_eq!(refused[1].retry_after(), Some(Duration::from_secs(60)));
    assert_eq!(refused.iter().map(|decision| decision.statuses().len()).collect::<Vec<_>>(), [0, 1, 0]);
    fails.store(false, Ordering::Relaxed);
    assert_eq!(hit().await.unwrap()[0].remaining(), 8, "the hits were refunded");

    fake.set_changes(Behavior::Fails);
    let refused = hit().await.unwrap();
    assert_eq!(verdicts(&refused), [true, false, true]);
    assert_eq!((refused[0].remaining(), refused[2].remaining()), (7, 8), "the unit stays spent");
    assert!(refused.iter().all(|decision| !decision.has_spent()));
}

#[tokio::test]
async fn failed_hit_whose_earlier_hits_are_not_refunded_may_have_counted() {
    let (fake, _clock) = FakeStorage::scripted(|request| {
        let fails = request.policy.name() == Some("b");
        fails.then(|| Err(StorageError::new(StorageErrorKind::Refused, "no connection")))
    });
    let storage = InOrder::new(fake.clone());
    let policies = [named("fixed-window 9/minute", "a"), named("fixed-window 1/minute", "b")];
    let keys = [Key::from("a"), Key::from("b")];
    for (changes, may_have_counted) in [(Behavior::Works, false), (Behavior::Fails, true)] {
        fake.set_changes(changes);
        let error = storage.decide_all(&requests(&policies, &keys)).await.unwrap_err();
        assert_eq!((error.kind(), error.may_have_counted()), (StorageErrorKind::Refused, may_have_counted));
    }
}

#[tokio::test]
async fn storage_without_support_says_what_to_do() {
    let storage = FakeStorage::around(MemoryStorage::new());
    let policies = [named("1/minute", "a"), named("1/minute", "b")];
    let error = storage.decide_all(&requests(&policies, &[Key::from("a"), Key::from("b")])).await.unwrap_err();
    assert_eq!(error.kind(), StorageErrorKind::Unsupported);
    assert!(format!("{error:#}").contains("InOrder::new(storage)"), "{error:#}");
    let one = storage.decide_all(&requests(&policies[..1], &[Key::from("a")])).await.unwrap();
    assert_eq!(verdicts(&one), [true]);
}

#[tokio::test]
async fn charge_among_several_keys_is_an_error() {
    let policies = [named("9/minute", "a"), named("9/minute", "b")];
    let keys = [Key::from("a"), Key::from("b")];
    let memory = MemoryStorage::new();
    for storage in [AnyStorage::new(memory.clone()), AnyStorage::new(InOrder::new(memory.clone()))] {
        let mut members = requests(&policies, &keys);
        members[1].op = Op::Charge;
        let error = storage.decide_all(&members).await.unwrap_err();
        assert_eq!(error.kind(), StorageErrorKind::Unsupported);
        assert!(error.to_string().contains("charge each key by itself"), "{error}");
        assert_eq!(memory.stats().keys, 0);
        assert!(storage.decide_all(&members[1..]).await.unwrap()[0].is_admitted());
        storage.clear(&policies[1], &keys[1]).await.unwrap();
    }
}

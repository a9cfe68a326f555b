//! The refusal cache: it repeats refusals without the storage.

use std::time::Duration;

use common::random::Numbers;
use common::{
    Behavior, FAILURE, FakeStorage, Inner, T0, ask, get, hit, memory_with_manual_clock, message, numbers,
    panic_message, policy, poll, start_hit,
};
use tower::Layer;
use tower_ratelimit::storage::{Clock, ManualClock, RefusalCache, StorageRequest};
use tower_ratelimit::{Global, Headers, Key, MemoryStorage, OnError, Op, RateLimitLayer, Storage, Timestamp};

const SECOND: Duration = Duration::from_secs(1);

/// A cache around a storage that counts its calls, and the manual clock of both.
fn cached() -> (RefusalCache, FakeStorage, ManualClock) {
    let (memory, clock) = memory_with_manual_clock();
    let storage = FakeStorage::around(memory);
    (RefusalCache::new(storage.clone()).clock(clock.clone()), storage, clock)
}

/// The storage decides once per key until the wait ends or the time to live expires.
#[tokio::test]
async fn repeated_refusals_reach_the_storage_once_per_ttl_or_wait() {
    for (text, ttl, seconds, most) in [
        ("fixed-window 1/hour", 1_000, 10, 10),
        ("1/hour", 1_000, 10, 10),
        ("token-bucket 1/hour", 250, 10, 40),
        ("moving-window 1/hour; 1/day", 5_000, 10, 2),
        // Each wait ends with one admitted hit, which is a cache miss too.
        ("fixed-window 1 per 2 seconds", 60_000, 10, 2 * 5),
        ("token-bucket 1 per 2 seconds", 60_000, 10, 2 * 5),
    ] {
        let (cache, storage, clock) = cached();
        let (cache, policy) = (cache.ttl(Duration::from_millis(ttl)), policy(text));
        let first = hit(&cache, &policy, "mallory", 1).await;
        assert!(first.is_admitted() && storage.take_decisions() == 1);
        let mut refused = 0;
        for _ in 0..seconds * 1_000 {
            refused += u64::from(hit(&cache, &policy, "mallory", 1).await.is_refused());
            clock.advance(Duration::from_millis(1));
        }
        let misses = storage.take_decisions();
        assert!(misses <= most && refused > 9_900, "{text}: {refused} refused, {misses} misses");
        assert_eq!(cache.misses(), misses + 1);
        assert!(cache.local_decisions() >= refused - misses);
        assert_eq!(cache.len(), 1);
    }
}

#[tokio::test]
async fn cached_refusal_reports_the_remaining_wait() {
    let (cache, storage, clock) = cached();
    let cache = cache.ttl(Duration::from_secs(3_600));
    let policy = policy("fixed-window 2/minute; moving-window 5/second");
    assert!(hit(&cache, &policy, "a", 2).await.is_admitted());
    clock.advance(Duration::from_secs(10));
    let first = hit(&cache, &policy, "a", 1).await;
    clock.advance(Duration::from_secs(20));
    storage.take_decisions();
    let cached = hit(&cache, &policy, "a", 1).await;
    assert_eq!(storage.take_decisions(), 0);
    assert_eq!(first.retry_after(), Some(Duration::from_secs(50)));
    assert_eq!((cached.retry_after(), cached.reset_after()), (Some(Duration::from_secs(30)), Duration::from_secs(30)));
    assert_eq!(cached.at(), first.at().plus(20_000_000));
    assert_eq!(
        cached,
        storage.inner().decide(StorageRequest::new(&policy, &Key::from("a"), Op::Hit, 1)).await.unwrap()
    );
}

/// A clock that is an hour ahead of the wall clock.
#[derive(Debug)]
struct HourAhead(ManualClock);

impl Clock for HourAhead {
    fn now(&self) -> Timestamp {
        self.0.now().plus(3_600_000_000)
    }

    fn ahead_of_wall_clock(&self) -> u32 {
        3_600
    }
}

/// Guards against this defect: the reset of a cached refusal is an hour later than that of the
/// refusal by the storage.
#[tokio::test]
async fn reset_of_a_cached_refusal_is_in_wall_clock_time() {
    let wall = ManualClock::default();
    let memory = MemoryStorage::builder().clock(HourAhead(wall.clone())).build().unwrap();
    let cache = RefusalCache::new(memory).ttl(Duration::from_secs(3_600)).clock(wall.clone());
    let layer = RateLimitLayer::new(policy("fixed-window 2/minute"), Global::new())
        .storage(cache.clone(), OnError::Refuse)
        .headers(Headers::x_rate_limit());
    let service = layer.layer(Inner::default());
    for (seconds, status, by_cache) in [(0, 200, 0), (0, 200, 0), (10, 429, 0), (0, 429, 1), (10, 429, 2)] {
        wall.advance(Duration::from_secs(seconds));
        let response = ask(&service, get("/")).await;
        assert_eq!((response.status().as_u16(), cache.local_decisions()), (status, by_cache));
        assert_eq!(numbers(&response).unwrap()[2], T0 + 60, "{by_cache} refusals by the cache");
    }
}

/// A limit whose wait has ended admits, even while another limit refuses.
#[tokio::test]
async fn each_limit_of_a_cached_refusal_expires_on_its_own() {
    let (cache, storage, clock) = cached();
    let cache = cache.ttl(Duration::from_secs(3_600));
    let policy = policy("fixed-window 2/minute; fixed-window 2/second");
    assert!(hit(&cache, &policy, "a", 2).await.is_admitted());
    for (micros, admits) in [(0, false), (999_999, false), (1, true), (1, true)] {
        clock.advance(Duration::from_micros(micros));
        let decision = hit(&cache, &policy, "a", 1).await;
        let admit: Vec<bool> = decision.statuses().iter().map(tower_ratelimit::strategy::Status::is_admitted).collect();
        assert_eq!(admit, [false, admits]);
    }
    assert_eq!(storage.take_decisions(), 2);
}

/// One refusal of a window covers every cost above the remaining units. In other strategies a
/// larger cost may wait longer, and is a miss once.
#[tokio::test]
async fn costs_above_the_remaining_units_are_cache_hits() {
    // The refusal of the larger cost reports 3 remaining units, so it covers the smaller one.
    let (cache, storage, _) = cached();
    for (cost, admitted) in [(6, true), (8, false), (4, false), (8, false)] {
        assert_eq!(hit(&cache, &policy("9/minute"), "a", cost).await.is_admitted(), admitted);
    }
    assert_eq!(storage.take_decisions(), 2);
    for (text, trips) in [
        ("fixed-window 9/minute", 0),
        ("fixed-window-aligned 9/minute; fixed-window 11/hour", 0),
        ("9/minute", 1),
        ("token-bucket 9/minute", 1),
        // 6 units of the bucket remain, and its next unit makes 7 fit.
        ("fixed-window 9/minute; token-bucket 12/minute", 0),
    ] {
        let (cache, storage, _) = cached();
        let policy = policy(text);
        assert!(hit(&cache, &policy, "a", 6).await.is_admitted());
        assert!(hit(&cache, &policy, "a", 4).await.is_refused());
        storage.take_decisions();
        for _ in 0..3 {
            for cost in [4, 7, 13, u32::MAX] {
                let cached_decision = hit(&cache, &policy, "a", cost).await;
                let direct =
                    storage.inner().decide(StorageRequest::new(&policy, &Key::from("a"), Op::Hit, cost)).await.unwrap();
                assert_eq!(cached_decision, direct, "{text}");
            }
        }
        assert_eq!(storage.take_decisions(), trips, "{text}");
        assert!(hit(&cache, &policy, "a", 3).await.is_admitted(), "{text}: a cost that may fit is a miss");
        // Now fewer units remain than in the cached refusal.
        assert_eq!(hit(&cache, &policy, "a", 4).await.remaining(), 0, "{text}");
    }
}

/// Guards against this defect: a client with five costs reached the storage with
/// 19,999 of 20,000 hits.
#[tokio::test]
async fn client_that_varies_its_costs_reaches_the_storage_at_most_four_times() {
    for text in [
        "fixed-window 60/hour",
        "60/hour",
        "moving-window 60/hour",
        "token-bucket 60/hour",
        "token-bucket 60/hour; moving-window 100/day; fixed-window 90/minute",
    ] {
        for spent in [60, 57] {
            let (cache, storage, clock) = cached();
            let policy = policy(text);
            assert!(hit(&cache, &policy, "mallory", spent).await.is_admitted());
            storage.take_decisions();
            let mut numbers = Numbers(7);
            for _ in 0..20_000 {
                // All costs are above the remaining units. The flood takes one time to live.
                let cost = 61 - spent + u32::try_from(numbers.below(spent.into())).unwrap();
                assert!(hit(&cache, &policy, "mallory", cost).await.is_refused());
                clock.advance(Duration::from_micros(49));
            }
            let misses = storage.take_decisions();
            assert!((1..=4).contains(&misses), "{text}, {spent} spent: {misses} misses");
        }
    }
}

/// The cache admits and refuses exactly like the storage. Its wait is never longer than the
/// storage's, and equal for up to four costs.
#[tokio::test]
async fn random_costs_are_decided_like_the_plain_storage() {
    let policies = [
        "fixed-window 12/second",
        "12/second",
        "moving-window 12 per 2 seconds",
        "token-bucket 9/second burst 15",
        "fixed-window-aligned 9/second; token-bucket 12/second; moving-window 30 per 10 seconds",
        "sliding-window-counter 10/second; moving-window 11 per 3 seconds",
    ]
    .map(policy);
    let mut numbers = Numbers(20_261_122);
    let (mut estimated, mut answered) = (0, 0);
    for (ttl, costs) in [(1, 14), (300, 14), (60_000, 14), (60_000, 4)] {
        for script in 0..150 {
            let (memory, clock) = memory_with_manual_clock();
            let plain = MemoryStorage::builder().clock(clock.clone()).build().unwrap();
            let cache = RefusalCache::new(memory).clock(clock.clone()).ttl(Duration::from_millis(ttl));
            let policy = &policies[script % policies.len()];
            for _ in 0..120 {
                let cost = 1 + u32::try_from(numbers.below(costs)).unwrap();
                let cost = if costs == 4 { cost * 3 } else { cost };
                let key = Key::from("a");
                let expected = plain.decide(StorageRequest::new(policy, &key, Op::Hit, cost)).await.unwrap();
                let got = hit(&cache, policy, "a", cost).await;
                let context = || format!("{policy}, cost {cost}: {got:?}, {expected:?}");
                assert_eq!(got.is_admitted(), expected.is_admitted(), "{}", context());
                assert_eq!((got.at(), got.capacity()), (expected.at(), expected.capacity()));
                assert!(got.remaining() <= expected.remaining(), "{}", context());
                assert_ne!(got.retry_after(), Some(Duration::ZERO), "{}", context());
                if got.retry_after() != expected.retry_after() {
                    estimated += 1;
                    assert!(costs > 4 && got.retry_after() < expected.retry_after(), "{}", context());
                }
                if numbers.below(3) == 0 {
                    clock.advance(Duration::from_micros(numbers.below(300_000)));
                }
            }
            answered += cache.local_decisions();
        }
    }
    assert!(answered > 10_000, "{answered}");
    assert!((100..answered / 2).contains(&estimated), "{estimated} of {answered}");
}

#[tokio::test]
async fn refusals_that_may_change_are_not_cached() {
    for text in [
        "elastic-window 1/minute",
        "leaky-bucket 1/minute",
        "fixed-window 1/day; elastic-window 9/day",
        "fixed-window 1/day; lockout 9 refusals/day for 1h",
    ] {
        let (cache, storage, _) = cached();
        let policy = policy(text);
        for _ in 0..5 {
            let _ = hit(&cache, &policy, "a", 1).await;
        }
        assert_eq!((storage.take_decisions(), cache.len()), (5, 0), "{text}");
    }
    // A full storage refuses a new key.
    let memory = MemoryStorage::builder().max_keys(1).build().unwrap();
    let cache = RefusalCache::new(memory);
    let policy = policy("fixed-window 1/day");
    assert!(hit(&cache, &policy, "first", 1).await.is_admitted());
    for _ in 0..3 {
        assert!(hit(&cache, &policy, "newcomer", 1).await.is_storage_full());
    }
    assert_eq!((cache.local_decisions(), cache.len()), (0, 0));
    // Hits of cost 0 and peeks always reach the storage.
    let (cache, storage, _) = cached();
    for _ in 0..3 {
        let _ = hit(&cache, &policy, "a", 1).await;
    }
    storage.take_decisions();
    for (op, cost) in [(Op::Peek, 1), (Op::Peek, 2), (Op::Hit, 0), (Op::Peek, 0)] {
        let decision = cache.decide(StorageRequest::new(&policy, &Key::from("a"), op, cost)).await.unwrap();
        assert_eq!(decision.is_admitted(), cost == 0);
        assert_eq!(storage.take_decisions(), 1);
    }
}

/// Guards against this defect: the refusal that began a lock is cached without the lock, and hits
/// are admitted from the cache as soon as the other limit admits.
#[tokio::test]
async fn cached_refusal_that_began_a_lock_refuses_until_its_end() {
    let (cache, storage, clock) = cached();
    let cache = cache.ttl(60 * SECOND);
    let policy = policy("fixed-window 1 per 2 seconds; lockout 2 refusals/minute for 30s");
    for admitted in [true, false, false] {
        assert_eq!(hit(&cache, &policy, "a", 1).await.is_admitted(), admitted);
    }
    storage.take_decisions();
    for left in (1..=30).rev().map(|seconds: u32| seconds * SECOND) {
        let refused = hit(&cache, &policy, "a", 1).await;
        assert_eq!((refused.is_refused(), refused.remaining(), refused.retry_after()), (true, 0, Some(left)));
        let lock = refused.statuses()[1].lock().unwrap();
        assert_eq!((lock.is_new(), lock.ends_after()), (false, left));
        clock.advance(SECOND);
    }
    assert_eq!(storage.take_decisions(), 0);
    assert!(hit(&cache, &policy, "a", 1).await.is_admitted());
}

#[tokio::test]
async fn contended_refusals_are_not_cached() {
    let (contended, _) = FakeStorage::scripted(|request| {
        Some(Ok(request.policy.refusal(Timestamp::EPOCH, request.cost, 1_000_000).contended()))
    });
    let cache = RefusalCache::new(contended);
    for _ in 0..3 {
        assert!(hit(&cache, &policy("1/day"), "a", 1).await.is_contended());
    }
    assert_eq!((cache.local_decisions(), cache.len(), cache.misses()), (0, 0, 3));
}

#[tokio::test]
async fn clear_and_refund_invalidate_at_once_locally_and_after_the_ttl_on_other_nodes() {
    let (cache, storage, clock) = cached();
    let second_handle = RefusalCache::new(storage.clone()).clock(clock.clone());
    let policy = policy("moving-window 2/hour");
    let key = Key::from("a");
    let first = hit(&cache, &policy, "a", 2).await;
    for storage in [&cache, &second_handle] {
        assert!(hit(storage, &policy, "a", 1).await.is_refused());
        assert_eq!(storage.len(), 1);
    }
    cache.settle(&policy, &key, &first, 0).await.unwrap();
    assert_eq!(cache.len(), 0);
    assert!(hit(&cache, &policy, "a", 2).await.is_admitted());
    assert!(hit(&cache, &policy, "a", 1).await.is_refused());
    cache.clear(&policy, &key).await.unwrap();
    assert!(hit(&cache, &policy, "a", 1).await.is_admitted());
    clock.advance(Duration::from_micros(999_999));
    assert!(hit(&second_handle, &policy, "a", 1).await.is_refused());
    clock.advance(Duration::from_micros(1));
    assert!(hit(&second_handle, &policy, "a", 1).await.is_admitted());
    // A clear keeps the entries of other keys and policies.
    let other = policy.clone().with_name("other");
    for (policy, key) in [(&policy, "b"), (&other, "a")] {
        assert!(hit(&cache, policy, key, 2).await.is_admitted());
        assert!(hit(&cache, policy, key, 2).await.is_refused());
    }
    cache.clear(&policy, &key).await.unwrap();
    assert_eq!(cache.len(), 2);
}

/// A refusal that was decided before a clear or a refund and arrives after it is not cached.
#[tokio::test]
async fn refusal_from_before_a_change_is_not_cached() {
    for change in ["clear", "refund", "dropped clear", "admitted"] {
        let (cache, storage, _) = cached();
        let (policy, key) = (policy("fixed-window 3/hour"), Key::from("a"));
        let first = hit(&cache, &policy, "a", 2).await;
        storage.close();
        let mut late = start_hit(&cache, &policy, &key, 2);
        assert!(poll(&mut late).is_pending(), "decided, but not ready");
        match change {
            "clear" | "dropped clear" => {
                let mut clear = cache.clear(&policy, &key);
                assert!(poll(&mut clear).is_pending(), "done, but not ready");
                if change == "dropped clear" {
                    drop(clear);
                    storage.open();
                } else {
                    storage.open();
                    clear.await.unwrap();
                }
            }
            "refund" => {
                let mut refund = cache.settle(&policy, &key, &first, 0);
                assert!(poll(&mut refund).is_pending());
                storage.open();
                refund.await.unwrap();
            }
            _ => {
                storage.open();
                assert!(hit(&cache, &policy, "a", 1).await.is_admitted());
            }
        }
        assert!(late.await.unwrap().is_refused());
        assert_eq!(cache.len(), 0, "{change}");
        let again = hit(&cache, &policy, "a", 2).await;
        assert_eq!(again.is_admitted(), change != "admitted");
    }
}

/// Another refusal may be cached between the first poll of a clear and its end.
#[tokio::test]
async fn finished_change_invalidates_refusals_cached_meanwhile() {
    let (cache, storage, _) = cached();
    let (policy, key) = (policy("fixed-window 1/hour"), Key::from("a"));
    assert!(hit(&cache, &policy, "a", 1).await.is_admitted());
    storage.work_when_open(true);
    storage.close();
    let mut clear = cache.clear(&policy, &key);
    assert!(poll(&mut clear).is_pending(), "the clear is pending");
    let mut refused = start_hit(&cache, &policy, &key, 1);
    assert!(poll(&mut refused).is_pending());
    storage.open();
    assert!(refused.await.unwrap().is_refused());
    assert_eq!(cache.len(), 1);
    (&mut clear).await.unwrap();
    assert_eq!(cache.len(), 0, "the future still exists");
    assert!(hit(&cache, &policy, "a", 1).await.is_admitted());
}

/// The memory storage clears and refunds at the call, even if the future is not awaited.
#[tokio::test]
async fn immediate_changes_invalidate_without_being_awaited() {
    let cache = RefusalCache::new(memory_with_manual_clock().0);
    let (policy, key) = (policy("fixed-window 1/hour"), Key::from("a"));
    let first = hit(&cache, &policy, "a", 1).await;
    assert!(hit(&cache, &policy, "a", 1).await.is_refused());
    let clear = cache.clear(&policy, &key);
    let second = hit(&cache, &policy, "a", 1).await;
    assert!(first.is_admitted() && second.is_admitted());
    assert!(hit(&cache, &policy, "a", 1).await.is_refused());
    let refund = cache.settle(&policy, &key, &second, 0);
    assert!(hit(&cache, &policy, "a", 1).await.is_admitted());
    drop((clear, refund));
}

/// For any delay of the reply, the cache neither refuses after the wait has ended nor reports too
/// short a wait.
#[tokio::test]
async fn slow_refusal_is_not_cached_beyond_its_wait() {
    for (decides_late, arrives) in [(false, 0), (false, 400), (false, 1_200), (true, 0), (true, 400), (true, 1_200)] {
        let (cache, storage, clock) = cached();
        let cache = cache.ttl(Duration::from_secs(60));
        let (policy, key) = (policy("fixed-window 1/second"), Key::from("a"));
        assert!(hit(&cache, &policy, "a", 1).await.is_admitted());
        if decides_late && arrives == 1_200 {
            continue; // The hit is admitted.
        }
        storage.work_when_open(decides_late);
        storage.close();
        let mut slow = start_hit(&cache, &policy, &key, 1);
        assert!(poll(&mut slow).is_pending());
        clock.advance(Duration::from_millis(arrives));
        storage.open();
        assert!(slow.await.unwrap().is_refused());
        storage.work_when_open(false);
        storage.take_decisions();
        for millis in arrives..1_300 {
            let now = clock.now();
            let decision = hit(&cache, &policy, "a", 1).await;
            let truth = 1_000_u64.saturating_sub(millis);
            if millis >= 1_000 {
                assert!(decision.is_admitted(), "{decides_late} {arrives}: refused {millis} ms after the hit");
                break;
            }
            assert!(decision.is_refused());
            let reported = decision.retry_after().unwrap();
            assert!(reported >= Duration::from_millis(truth), "{reported:?} at {millis}");
            assert!(reported <= Duration::from_millis(truth + arrives), "{reported:?} at {millis}");
            assert_eq!(clock.now(), now);
            clock.advance(Duration::from_millis(1));
        }
        // The entry expires one round trip before the wait ends, which is one more miss.
        assert!((1..=3).contains(&storage.take_decisions()));
    }
}

#[tokio::test]
async fn dropped_hit_that_may_have_counted_invalidates_the_entry() {
    let (cache, storage, clock) = cached();
    let (policy, key) = (policy("fixed-window 5/hour"), Key::from("a"));
    assert!(hit(&cache, &policy, "a", 2).await.is_admitted());
    assert!(hit(&cache, &policy, "a", 4).await.is_refused());
    assert_eq!(cache.len(), 1);
    storage.close();
    drop(cache.decide(StorageRequest::new(&policy, &key, Op::Hit, 1)));
    assert_eq!(cache.len(), 0, "the hit may have been admitted");
    let mut spends = start_hit(&cache, &policy, &key, 1);
    let mut refused = start_hit(&cache, &policy, &key, 4);
    assert!(poll(&mut refused).is_pending() && poll(&mut spends).is_pending());
    drop(spends);
    storage.open();
    assert_eq!(refused.await.unwrap().remaining(), 3);
    assert_eq!(hit(&cache, &policy, "a", 4).await.remaining(), 2, "the late reply is older than the spent units");
    // A dropped hit of at least the refused cost has spent nothing.
    let cache = RefusalCache::new(storage.clone()).clock(clock.clone());
    storage.close();
    let mut same = start_hit(&cache, &policy, &key, 4);
    let mut refused = start_hit(&cache, &policy, &key, 4);
    assert!(poll(&mut refused).is_pending() && poll(&mut same).is_pending());
    storage.open();
    assert!(refused.await.unwrap().is_refused());
    drop(same);
    assert!(format!("{cache:?}").contains("len: "), "{cache:?}");
    assert!(hit(&cache, &policy, "a", 4).await.is_refused());
    assert_eq!((cache.len(), cache.local_decisions()), (1, 1));
    // A dropped hit under a larger quota of the same name may have been admitted.
    drop(cache.decide(StorageRequest::new(
        &common::policy("fixed-window 9/hour").with_name(policy.identity()),
        &key,
        Op::Hit,
        4,
    )));
    assert_eq!(cache.len(), 0);
}

#[tokio::test]
async fn failures_are_not_cached() {
    let (cache, storage, _) = cached();
    let policy = policy("fixed-window 1/hour");
    assert!(hit(&cache, &policy, "a", 1).await.is_admitted());
    storage.set(Behavior::FailsAfterCounting);
    let error = cache.decide(StorageRequest::new(&policy, &Key::from("a"), Op::Hit, 1)).await.unwrap_err();
    assert_eq!((message(error), cache.len()), (FAILURE.to_owned(), 0));
    storage.set(Behavior::Works);
    assert!(hit(&cache, &policy, "a", 1).await.is_refused());
    storage.set(Behavior::FailsAfterCounting);
    assert!(hit(&cache, &policy, "a", 1).await.is_refused(), "cached refusals stay");
}

/// Guards against defects seen in practice: unbounded maps, and a flood of keys that evicts refused
/// keys.
#[tokio::test]
async fn flood_of_keys_stays_within_max_keys() {
    for max_keys in [1, 3, 16, 100, 1_000] {
        let (cache, storage, clock) = cached();
        let (cache, policy) = (cache.max_keys(max_keys), policy("fixed-window 1/hour"));
        for round in 0..2 {
            for key in 0..5_000_u32 {
                let decision = hit(&cache, &policy, &key.to_string(), 1).await;
                assert_eq!(decision.is_admitted(), round == 0);
                assert!(cache.len() <= max_keys, "{} of {max_keys}", cache.len());
            }
        }
        assert!(cache.len() * 10 >= max_keys * 9, "{} of {max_keys}", cache.len());
        // Later hits sweep the entries that have expired and may no longer be served during a
        // refresh.
        clock.advance(2 * SECOND);
        for key in 0..20_000_u32 {
            let _ = hit(&cache, &policy, &format!("new {key}"), 1).await;
        }
        assert_eq!(cache.len(), 0, "of {max_keys}");
        let _ = storage.take_decisions();
    }
}

#[tokio::test]
async fn refusal_that_expires_first_is_evicted() {
    let (cache, storage, clock) = cached();
    let (cache, short, long) = (cache.max_keys(2), policy("fixed-window 1 per 300ms"), policy("fixed-window 1/hour"));
    for (policy, key) in [(&long, "a"), (&short, "b"), (&long, "c")] {
        assert!(hit(&cache, policy, key, 1).await.is_admitted());
        assert!(hit(&cache, policy, key, 1).await.is_refused());
        clock.advance(Duration::from_millis(1));
    }
    storage.take_decisions();
    for (policy, key) in [(&long, "a"), (&long, "c")] {
        assert!(hit(&cache, policy, key, 1).await.is_refused());
    }
    assert_eq!((storage.take_decisions(), cache.len()), (0, 2));
}

/// A changed quota under the same name is another entry. A clear of either drops both, because they
/// share states.
#[tokio::test]
async fn quotas_of_one_policy_name_are_cached_separately_and_cleared_together() {
    let (cache, storage, _) = cached();
    let [free, paid] = ["fixed-window 2/hour", "fixed-window 5/hour"].map(|text| policy(text).with_name("tier"));
    assert!(hit(&cache, &free, "a", 2).await.is_admitted());
    assert!(hit(&cache, &free, "a", 1).await.is_refused());
    assert!(hit(&cache, &paid, "a", 3).await.is_admitted(), "a refusal of one quota does not apply to the other");
    for policy in [&free, &paid] {
        assert!(hit(&cache, policy, "a", 1).await.is_refused());
    }
    storage.take_decisions();
    for policy in [&paid, &free, &paid] {
        assert!(hit(&cache, policy, "a", 1).await.is_refused());
    }
    assert_eq!((storage.take_decisions(), cache.len()), (0, 1));
    cache.clear(&free, &Key::from("a")).await.unwrap();
    assert!(hit(&cache, &paid, "a", 1).await.is_admitted());
}

/// Shadow limits have the digest of their policy, but their own states.
#[tokio::test]
async fn shadow_limits_have_separate_entries() {
    let (cache, _, _) = cached();
    let policy = policy("fixed-window 5/hour; shadow fixed-window 1/hour");
    let shadow = &policy.shadows()[0];
    for admitted in [true, false, false] {
        assert_eq!(hit(&cache, shadow, "a", 1).await.is_admitted(), admitted);
        assert!(hit(&cache, &policy, "a", 1).await.is_admitted());
    }
    assert_eq!(cache.local_decisions(), 1, "hits of the policy do not invalidate the entry of its shadow limit");
}

#[test]
fn invalid_options_suggest_valid_values() {
    let cache = || RefusalCache::new(MemoryStorage::new());
    let ttl = panic_message(|| cache().ttl(Duration::ZERO));
    assert!(ttl.contains("0ns") && ttl.contains("Duration::from_secs(1)"), "{ttl}");
    assert!(panic_message(|| cache().ttl(Duration::from_secs(86_401))).contains("at most 1 day"));
    for keys in [0, usize::MAX] {
        let keys = panic_message(|| cache().max_keys(keys));
        assert!(keys.contains("100_000"), "{keys}");
    }
}

/// When an entry has expired, one of the concurrent callers refreshes it for all.
#[tokio::test]
async fn expired_entry_is_refreshed_by_one_caller() {
    let (cache, storage, clock) = cached();
    let policy = policy("fixed-window 2/minute");
    assert!(hit(&cache, &policy, "a", 2).await.is_admitted());
    assert!(hit(&cache, &policy, "a", 1).await.is_refused());
    let key = Key::from("a");
    let start = |cost| start_hit(&cache, &policy, &key, cost);
    storage.take_decisions();
    for round in 1..=3 {
        clock.advance(SECOND);
        storage.close();
        let mut first = start(1);
        assert!(poll(&mut first).is_pending());
        for cost in [1, 1, 2, 3] {
            let refused = start(cost).await.unwrap();
            assert_eq!(refused.retry_after(), (cost < 3).then(|| Duration::from_secs(60 - round)));
        }
        assert_eq!(storage.take_decisions(), 1);
        match round {
            // The refreshing caller is dropped, and the next caller refreshes.
            1 => {
                drop(first);
                assert!(poll(&mut start(1)).is_pending());
                assert_eq!(storage.take_decisions(), 1);
                storage.open();
                assert!(start(1).await.unwrap().is_refused());
            }
            2 => {
                storage.open();
                assert!(first.await.unwrap().is_refused());
            }
            // An expired entry is served for at most one more time to live.
            _ => {
                clock.advance(SECOND);
                assert!(poll(&mut start(1)).is_pending());
                storage.open();
            }
        }
        storage.take_decisions();
    }
    // After a clear on another node, the refreshing caller sees it first, and then all callers do.
    clock.advance(2 * SECOND);
    assert!(start(1).await.unwrap().is_refused());
    storage.inner().clear(&policy, &key).await.unwrap();
    clock.advance(SECOND);
    for _ in 0..2 {
        assert!(start(1).await.unwrap().is_admitted());
    }
}

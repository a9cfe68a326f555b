//! What keeps failing is left alone, and another storage stands in for it.

use std::collections::HashMap;
use std::convert::Infallible;
use std::error::Error;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::flaky_storage::{Mood, Moody, counted};
use common::{EVERY_STRATEGY, Inner, ask, get, numbers, policy, poll, retry_after, standing, with};
use tokio::task::JoinSet;
use tokio::time::{Instant, advance, sleep};
use tower::Layer;
use tower_ratelimit::extract::Head;
use tower_ratelimit::storage::{Ask, Breaker, Cas, CasStorage, Circuit, Deadline, Loaded, Phase, Shown, Swapped};
use tower_ratelimit::strategy::{Share, Strategy};
use tower_ratelimit::{
    ConfigError, Decision, FixedWindow, Global, Headers, Key, LeakyBucket, MemoryStorage, OnError, Op, Policy, Quota,
    RateLimitLayer, RateLimiter, Storage, Timestamp, policy_by,
};

const MS: Duration = Duration::from_millis(1);
const SHORTEST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(1);

type Fallen = Breaker<Moody, MemoryStorage>;

/// A limiter whose fallback is one of so many, with its storages.
fn limiter(text: &str, mood: Mood, replicas: u32) -> (RateLimiter<Fallen>, Moody, MemoryStorage) {
    let ((moody, _), (fallback, _)) = (Moody::new(mood), standing());
    let breaker = Breaker::new(moody.clone()).fallback(fallback.clone(), replicas);
    (RateLimiter::with_storage(policy(text), breaker), moody, fallback)
}

fn circuit<F: Storage>(limiter: &RateLimiter<Breaker<Moody, F>>) -> &Circuit {
    limiter.storage().circuit()
}

async fn hit<F: Storage>(limiter: &RateLimiter<Breaker<Moody, F>>) -> Decision {
    limiter.hit(&Key::everybody()).await.unwrap()
}

/// Five hits that fail: now it is open.
async fn open<F: Storage>(limiter: &RateLimiter<Breaker<Moody, F>>) {
    for failures in 1..=5 {
        assert_eq!(circuit(limiter).state().phase, Phase::Closed);
        let _ = limiter.hit(&Key::from("somebody else")).await;
        assert_eq!(circuit(limiter).state().failures, failures);
    }
    assert_eq!(circuit(limiter).state().phase, Phase::Open);
}

/// Somebody hits until the primary decides.
async fn until_closed<F: Storage>(limiter: &RateLimiter<Breaker<Moody, F>>) {
    let started = Instant::now();
    while circuit(limiter).state().phase != Phase::Closed {
        assert!(started.elapsed() <= LONGEST + 10 * MS, "{:?}", circuit(limiter).state());
        sleep(MS).await;
        let _ = limiter.hit(&Key::from("somebody else")).await;
    }
}

#[tokio::test(start_paused = true)]
async fn after_five_failures_nobody_asks_and_nobody_notices() {
    let (limiter, primary, _) = limiter("fixed-window 1000/day", Mood::Fails, 2);
    for asked in 1..=5 {
        let decision = hit(&limiter).await;
        assert!(decision.is_admitted() && decision.is_from_fallback());
        assert_eq!(primary.decisions(), asked);
    }
    let state = circuit(&limiter).state();
    assert_eq!((state.phase, state.failures), (Phase::Open, 5));
    let probe_in = state.probe_in.unwrap();
    assert!((SHORTEST / 2..=SHORTEST).contains(&probe_in), "{probe_in:?}");
    for _ in 0..100 {
        assert!(hit(&limiter).await.is_from_fallback());
    }
    assert_eq!(primary.decisions(), 5);
    let state = circuit(&limiter).state();
    assert_eq!((state.by_primary, state.by_fallback, state.by_none), (0, 105, 0));
}

#[tokio::test(start_paused = true)]
async fn of_a_hundred_hits_at_once_one_is_the_probe() {
    let (limiter, primary, _) = limiter("fixed-window 1000/day", Mood::Fails, 2);
    open(&limiter).await;
    primary.set(Mood::FailsAfter(50 * MS));
    for round in 1..=5 {
        while !circuit(&limiter).state().probe_in.unwrap().is_zero() {
            advance(MS).await;
        }
        let (started, mut hits) = (Instant::now(), JoinSet::new());
        for _ in 0..100 {
            let limiter = limiter.clone();
            hits.spawn(async move {
                let decision = hit(&limiter).await;
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
async fn probes_come_ever_later_up_to_a_second() {
    let (limiter, primary, _) = limiter("fixed-window 100000/day", Mood::Fails, 2);
    open(&limiter).await;
    let (mut last, mut asked, mut gaps) = (Instant::now(), primary.decisions(), Vec::new());
    while gaps.len() < 12 {
        sleep(MS).await;
        assert!(hit(&limiter).await.is_from_fallback());
        if primary.decisions() > asked {
            asked += 1;
            assert_eq!(primary.decisions(), asked);
            gaps.push(last.elapsed());
            last = Instant::now();
        }
    }
    let most = [100, 200, 400, 800].map(Duration::from_millis).into_iter().chain(std::iter::repeat(LONGEST));
    for (gap, most) in gaps.iter().zip(most) {
        assert!((most / 2..=most + 2 * MS).contains(gap), "{gaps:?}");
    }
    assert!(gaps[4..].iter().any(|gap| *gap != gaps[4]), "no two replicas come at the same time: {gaps:?}");
}

#[tokio::test(start_paused = true)]
async fn one_good_probe_and_all_is_as_before() {
    let (limiter, primary, fallback) = limiter("fixed-window 100/day", Mood::Works, 2);
    assert!(!hit(&limiter).await.is_from_fallback());
    primary.set(Mood::Fails);
    open(&limiter).await;
    assert_eq!(hit(&limiter).await.remaining(), 49);
    primary.set(Mood::Works);
    let before = Instant::now();
    until_closed(&limiter).await;
    assert!(before.elapsed() <= SHORTEST + 2 * MS);
    assert_eq!(circuit(&limiter).state().failures, 0);
    let asked = primary.decisions();
    for spent in 2..=11 {
        let decision = hit(&limiter).await;
        assert!(!decision.is_from_fallback());
        assert_eq!(decision.remaining(), 100 - spent, "what the primary counted, and nothing of the fallback's");
    }
    assert_eq!(primary.decisions(), asked + 10);
    assert_eq!(counted(&fallback, &policy("fixed-window 100/day")), 1);
    // The next outage begins anew.
    primary.set(Mood::Fails);
    open(&limiter).await;
    assert!(circuit(&limiter).state().probe_in.unwrap() <= SHORTEST);
}

#[tokio::test(start_paused = true)]
async fn failures_are_counted_in_a_row() {
    let (limiter, primary, _) = limiter("fixed-window 100/day", Mood::Works, 2);
    for mood in [[Mood::Fails; 4].as_slice(), &[Mood::Works], &[Mood::Fails; 4]].concat() {
        primary.set(mood);
        let _ = hit(&limiter).await;
    }
    assert_eq!((circuit(&limiter).state().phase, circuit(&limiter).state().failures), (Phase::Closed, 4));
    // That something can be read says nothing of what can be written.
    primary.set(Mood::OnlyReads);
    let peek = limiter.peek(&Key::everybody()).await.unwrap();
    assert!(!peek.is_from_fallback());
    assert_eq!(circuit(&limiter).state().failures, 4);
    assert!(hit(&limiter).await.is_from_fallback());
    assert_eq!(circuit(&limiter).state().phase, Phase::Open);
    // And no peek is a probe.
    sleep(LONGEST).await;
    assert!(limiter.peek(&Key::everybody()).await.unwrap().is_from_fallback());
    assert!(limiter.hit_with_cost(&Key::everybody(), 0).await.unwrap().is_from_fallback());
    let asked = primary.decisions();
    let _ = hit(&limiter).await;
    assert_eq!(primary.decisions(), asked + 1);
}

#[tokio::test(start_paused = true)]
async fn a_hit_that_is_refused_or_outrun_is_no_failure() {
    #[derive(Clone, Debug)]
    struct Outrun;
    impl Storage for Outrun {
        type Error = &'static str;
        type Decided = std::future::Ready<Result<Decision, &'static str>>;
        type Done = std::future::Ready<Result<(), &'static str>>;
        fn decide(&self, ask: Ask<'_>) -> Self::Decided {
            std::future::ready(Ok(ask.policy.refuse(Timestamp::EPOCH, ask.cost, 7).contended()))
        }
        fn clear(&self, _: &Policy, _: &Key) -> Self::Done {
            std::future::ready(Ok(()))
        }
        fn refund(&self, _: &Policy, _: &Key, _: &Decision) -> Self::Done {
            std::future::ready(Ok(()))
        }
    }
    let breaker = Breaker::new(Outrun).failures(1).fallback(standing().0, 2);
    let limiter = RateLimiter::with_storage(policy("9/day"), breaker);
    for _ in 0..20 {
        let decision = limiter.hit(&Key::everybody()).await.unwrap();
        assert!(decision.is_contended() && !decision.is_from_fallback());
    }
    let state = limiter.storage().circuit().state();
    assert_eq!((state.phase, state.failures, state.by_primary), (Phase::Closed, 0, 20));

    let (limiter, ..) = self::limiter("fixed-window 1/day", Mood::Works, 2);
    for _ in 0..20 {
        let _ = hit(&limiter).await;
    }
    assert_eq!(circuit(&limiter).state().phase, Phase::Closed);
}

/// Texts that can be read while whoever writes hangs, or is told no.
#[derive(Clone, Debug, Default)]
struct Texts {
    texts: Arc<Mutex<HashMap<String, (String, u64)>>>,
    hangs: Arc<AtomicBool>,
}

impl CasStorage for Texts {
    type Error = Infallible;
    type Version = u64;

    async fn load(&self, key: &str) -> Result<Loaded<u64>, Infallible> {
        let (text, version) = self.texts.lock().unwrap().get(key).cloned().unwrap_or_default();
        Ok(Loaded { text, version, now: None })
    }

    async fn swap(&self, key: &str, _: &u64, text: &str, _: Duration) -> Result<Swapped<u64>, Infallible> {
        if self.hangs.load(Ordering::SeqCst) {
            std::future::pending::<()>().await;
        }
        let mut texts = self.texts.lock().unwrap();
        let version = texts.get(key).map_or(0, |(_, version)| *version);
        texts.insert(key.to_owned(), (text.to_owned(), version + 1));
        Ok(Swapped::Stored)
    }

    fn longest(&self) -> Option<usize> {
        Some(1_000)
    }
}

#[tokio::test(start_paused = true)]
async fn who_is_refused_by_what_is_only_read_keeps_nobody_waiting() {
    let texts = Texts::default();
    let breaker = Breaker::new(Cas::new(texts.clone())).fallback(standing().0, 2);
    let limiter = RateLimiter::with_storage(policy("fixed-window 1/day"), breaker.clone());
    let (hot, state) = (Key::from("hot"), || breaker.circuit().state());
    assert!(limiter.hit(&hot).await.unwrap().is_admitted());
    texts.hangs.store(true, Ordering::SeqCst);
    for failures in 1..=5 {
        let refused = limiter.hit(&hot).await.unwrap();
        assert!(refused.is_refused() && !refused.is_from_fallback());
        let newcomer = limiter.hit(&Key::from(format!("newcomer {failures}"))).await.unwrap();
        assert!(newcomer.is_admitted() && newcomer.is_from_fallback());
        assert_eq!(state().failures, failures);
    }
    assert_eq!(state().phase, Phase::Open);
    // It is a sign of life all the same: of a window that is spent nothing else would come.
    sleep(SHORTEST).await;
    assert!(!limiter.hit(&hot).await.unwrap().is_from_fallback());
    assert_eq!((state().phase, state().failures), (Phase::Closed, 0));
}

#[tokio::test(start_paused = true)]
async fn what_the_primary_can_never_keep_says_nothing_of_how_it_is() {
    let texts = Texts::default();
    let breaker = Breaker::new(Cas::new(texts.clone())).fallback(standing().0, 2);
    let (kept, too_long) = (policy("fixed-window 1000/day"), policy("moving-window 100000/day"));
    let (key, state) = (Key::everybody(), || breaker.circuit().state());
    let hit = async |policy: &Policy| breaker.decide(Ask::new(policy, &key, Op::Hit, 1)).await.unwrap();
    for _ in 0..10 {
        assert!(hit(&too_long).await.is_from_fallback());
        assert!(!hit(&kept).await.is_from_fallback());
        assert!(hit(&too_long).await.is_from_fallback());
    }
    for _ in 0..10 {
        assert!(hit(&too_long).await.is_from_fallback());
        assert_eq!((state().phase, state().failures), (Phase::Closed, 0));
    }
    texts.hangs.store(true, Ordering::SeqCst);
    for _ in 0..5 {
        assert!(hit(&kept).await.is_from_fallback());
    }
    texts.hangs.store(false, Ordering::SeqCst);
    // Nor is it a probe that failed.
    sleep(SHORTEST).await;
    assert!(hit(&too_long).await.is_from_fallback());
    assert_eq!((state().phase, state().failures), (Phase::Open, 5));
    assert!(state().probe_in.unwrap() <= SHORTEST);
    sleep(SHORTEST).await;
    assert!(!hit(&kept).await.is_from_fallback());
}

#[tokio::test(start_paused = true)]
async fn what_was_asked_before_says_nothing_afterwards() {
    let (limiter, primary, _) = limiter("fixed-window 1000/day", Mood::FailsAfter(300 * MS), 2);
    let mut late = JoinSet::new();
    for _ in 0..50 {
        let limiter = limiter.clone();
        late.spawn(async move { assert!(hit(&limiter).await.is_from_fallback()) });
    }
    tokio::task::yield_now().await;
    assert_eq!(primary.decisions(), 50);
    primary.set(Mood::Fails);
    open(&limiter).await;
    primary.set(Mood::Works);
    until_closed(&limiter).await;
    late.join_all().await;
    assert_eq!((circuit(&limiter).state().phase, circuit(&limiter).state().failures), (Phase::Closed, 0));

    // Nor does a success that is late end it.
    primary.set(Mood::WorksAfter(20 * MS));
    let good = tokio::spawn({
        let limiter = limiter.clone();
        async move { hit(&limiter).await }
    });
    tokio::task::yield_now().await;
    primary.set(Mood::Fails);
    open(&limiter).await;
    assert!(!good.await.unwrap().is_from_fallback());
    assert_eq!((circuit(&limiter).state().phase, circuit(&limiter).state().failures), (Phase::Open, 5));
}

#[tokio::test(start_paused = true)]
async fn a_probe_that_is_dropped_leaves_room_for_another() {
    for polled in [true, false] {
        let (limiter, primary, _) = limiter("fixed-window 1000/day", Mood::Fails, 2);
        open(&limiter).await;
        primary.set(Mood::Hangs);
        sleep(SHORTEST).await;
        let mut probe = Box::pin(limiter.hit(&Key::everybody()));
        assert!(!polled || poll(&mut probe).is_pending());
        assert_eq!(circuit(&limiter).state().phase, Phase::Probing);
        assert!(hit(&limiter).await.is_from_fallback(), "others do not wait for it");
        drop(probe);
        let state = circuit(&limiter).state();
        assert_eq!((state.phase, state.failures), (Phase::Open, 5));
        assert!(state.probe_in.unwrap() <= SHORTEST);
        primary.set(Mood::Works);
        until_closed(&limiter).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_probe_that_is_never_heard_of_is_not_waited_for() {
    let (limiter, primary, _) = limiter("fixed-window 1000/day", Mood::Fails, 2);
    open(&limiter).await;
    sleep(SHORTEST).await;
    primary.set(Mood::WorksAfter(10 * LONGEST));
    let lost = tokio::spawn({
        let limiter = limiter.clone();
        async move { hit(&limiter).await }
    });
    tokio::task::yield_now().await;
    assert_eq!(primary.decisions(), 6);
    sleep(999 * MS).await;
    assert!(hit(&limiter).await.is_from_fallback());
    assert_eq!(primary.decisions(), 6);
    sleep(MS).await;
    primary.set(Mood::Fails);
    assert!(hit(&limiter).await.is_from_fallback());
    assert_eq!(primary.decisions(), 7);
    assert_eq!(circuit(&limiter).state().failures, 6);
    // When it is heard of at last, that is as good as any.
    assert!(!lost.await.unwrap().is_from_fallback());
    assert_eq!(circuit(&limiter).state().phase, Phase::Closed);
}

#[tokio::test(start_paused = true)]
async fn one_that_is_not_waited_for_any_more_says_nothing_when_it_fails_or_is_dropped() {
    for (mood, left) in [(Mood::FailsAfter(LONGEST + 10 * MS), false), (Mood::Hangs, true)] {
        let (limiter, primary, _) = limiter("fixed-window 1000/day", Mood::Fails, 2);
        open(&limiter).await;
        sleep(SHORTEST).await;
        let probe = |mood| {
            primary.set(mood);
            let limiter = limiter.clone();
            tokio::spawn(async move { hit(&limiter).await })
        };
        let first = probe(mood);
        sleep(LONGEST).await;
        let second = probe(Mood::WorksAfter(50 * MS));
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
async fn what_only_the_whole_has_room_for_may_come_back_soon_while_the_primary_is_asked() {
    let (limiter, ..) = limiter("fixed-window 100/day", Mood::Fails, 2);
    let large = limiter.hit_with_cost(&Key::everybody(), 60).await.unwrap();
    assert_eq!((circuit(&limiter).state().phase, large.retry_after()), (Phase::Closed, Some(SHORTEST)));
}

#[tokio::test(start_paused = true)]
async fn what_may_have_counted_is_counted_once_on_the_primary() {
    let whole = policy("fixed-window 100/day");
    let (limiter, primary, fallback) = limiter("fixed-window 100/day", Mood::FailsAfterCounting, 2);
    let mut last = None;
    for hits in 1..=5 {
        last = Some(hit(&limiter).await);
        assert_eq!((counted(&primary.memory, &whole), counted(&fallback, &whole)), (hits, hits));
    }
    // And what the fallback spent is given back to the fallback.
    primary.set(Mood::Works);
    limiter.refund(&Key::everybody(), &last.unwrap()).await.unwrap();
    assert_eq!((counted(&primary.memory, &whole), counted(&fallback, &whole)), (5, 4));
    assert_eq!(primary.changes(), 0);
}

#[tokio::test(start_paused = true)]
async fn refunds_find_their_way_back_and_clears_go_both_ways() {
    let whole = policy("fixed-window 100/day");
    let (limiter, primary, fallback) = limiter("fixed-window 100/day", Mood::Works, 2);
    let (key, now) = (Key::everybody(), || (counted(&primary.memory, &whole), counted(&fallback, &whole)));
    let (of_primary, kept) = (hit(&limiter).await, hit(&limiter).await);
    primary.set(Mood::Fails);
    open(&limiter).await;
    let (of_fallback, last) = (hit(&limiter).await, hit(&limiter).await);
    assert_eq!(now(), (2, 2));
    limiter.refund(&key, &of_fallback).await.unwrap();
    assert_eq!(now(), (2, 1));
    let lost = limiter.refund(&key, &of_primary).await.unwrap_err();
    assert!(lost.is_left_alone() && primary.changes() == 0, "it is not asked: {lost}");
    assert_eq!(lost.source().unwrap().to_string(), "it fails");
    // A refusal and what was free have nothing to give back, and say nothing of the primary.
    let free = limiter.hit_with_cost(&key, 0).await.unwrap().back().1;
    limiter.refund(&key, &free).await.unwrap();
    let refused = limiter.hit_with_cost(&key, 60).await.unwrap();
    assert!(refused.is_refused());
    limiter.refund(&key, &refused).await.unwrap();
    primary.set(Mood::Works);
    until_closed(&limiter).await;
    limiter.refund(&key, &of_primary).await.unwrap();
    limiter.refund(&key, &last).await.unwrap();
    assert_eq!(now(), (1, 0));

    assert!(kept.is_admitted());
    primary.set(Mood::Fails);
    open(&limiter).await;
    let _ = hit(&limiter).await;
    assert!(limiter.clear(&key).await.unwrap_err().is_left_alone());
    assert_eq!(now(), (1, 0), "the fallback's is forgotten at once");
    primary.set(Mood::Works);
    // Clearing may be the probe.
    sleep(SHORTEST).await;
    limiter.clear(&key).await.unwrap();
    assert_eq!((now(), circuit(&limiter).state().phase), ((0, 0), Phase::Closed));
}

#[tokio::test(start_paused = true)]
async fn a_refund_may_be_the_probe_and_its_failure_counts() {
    let (limiter, primary, _) = limiter("fixed-window 100/day", Mood::Works, 2);
    let spent = hit(&limiter).await;
    primary.set(Mood::Fails);
    for failures in 1..=5 {
        assert!(!limiter.refund(&Key::everybody(), &spent).await.unwrap_err().is_left_alone());
        assert_eq!(circuit(&limiter).state().failures, failures);
    }
    sleep(SHORTEST).await;
    assert!(!limiter.refund(&Key::everybody(), &spent).await.unwrap_err().is_left_alone());
    assert_eq!(circuit(&limiter).state().failures, 6);
    sleep(2 * SHORTEST).await;
    primary.set(Mood::Works);
    limiter.refund(&Key::everybody(), &spent).await.unwrap();
    assert_eq!(circuit(&limiter).state().phase, Phase::Closed);
    assert_eq!(limiter.peek(&Key::everybody()).await.unwrap().remaining(), 100);
}

/// Field defect: fallback gives every replica the whole quota.
#[tokio::test(start_paused = true)]
async fn each_replica_admits_its_share_and_no_more() {
    let more = ["leaky-bucket 10/second queue 20", "token-bucket 10/second burst 50", "10/second; moving-window 7/day"];
    for text in EVERY_STRATEGY.into_iter().chain(more) {
        for replicas in [1, 2, 3, 100] {
            let whole = policy(text);
            let share = whole.share(NonZeroU32::new(replicas).unwrap()).unwrap();
            let most = share.limits().iter().map(tower_ratelimit::Limit::capacity).min().unwrap();
            let (limiter, ..) = limiter(text, Mood::Fails, replicas);
            let mut admitted = 0;
            let refused = loop {
                let decision = hit(&limiter).await;
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
            // Costs for which the share has no room, and the whole has; and for which neither has.
            let capacity = whole.limits().iter().map(tower_ratelimit::Limit::capacity).min().unwrap();
            let key = Key::from("a large one");
            let peek = limiter.peek_with_cost(&key, capacity).await.unwrap();
            let large = limiter.hit_with_cost(&key, capacity).await.unwrap();
            assert_eq!(large.is_admitted(), capacity <= most, "{text} by {replicas}");
            if capacity > most {
                for answer in [peek, large] {
                    let wait = answer.retry_after().expect("it may come back");
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
async fn three_replicas_together_admit_what_one_limit_does() {
    let (moody, _) = Moody::new(Mood::Fails);
    let mut admitted = 0;
    for _ in 0..3 {
        let breaker = Breaker::new(moody.clone()).fallback(standing().0, 3);
        let limiter = RateLimiter::with_storage(policy("moving-window 100/day"), breaker);
        while hit(&limiter).await.is_admitted() {
            admitted += 1;
        }
    }
    assert_eq!(admitted, 99);
}

#[tokio::test(start_paused = true)]
async fn a_fallback_counts_refusals_where_that_is_the_rule_and_makes_wait_where_that_is() {
    let ((moody, _), (fallback, clock)) = (Moody::new(Mood::Fails), standing());
    let breaker = Breaker::new(moody).fallback(fallback, 2);
    let elastic = RateLimiter::with_storage(policy("elastic-window 2 per 10 seconds"), breaker.clone());
    assert!(hit(&elastic).await.is_admitted());
    clock.advance(Duration::from_secs(9));
    assert_eq!(hit(&elastic).await.retry_after(), Some(Duration::from_secs(10)), "it has been pushed on");

    let queue = Policy::new(LeakyBucket::new().queue(4), Quota::per_second(4));
    let leaky = RateLimiter::with_storage(queue, breaker);
    let hits = [hit(&leaky).await, hit(&leaky).await, hit(&leaky).await];
    assert_eq!(hits.each_ref().map(Decision::delay), [0, 500, 1_000].map(Duration::from_millis));
    assert!(hit(&leaky).await.is_refused());
    leaky.refund(&Key::everybody(), &hits[2]).await.unwrap();
    assert_eq!(hit(&leaky).await.delay(), Duration::from_secs(1), "the last place was given back");
}

#[tokio::test(start_paused = true)]
async fn without_a_fallback_nobody_waits_for_the_next_failure() {
    let (moody, _) = Moody::new(Mood::Hangs);
    let within = 70 * MS;
    let breaker = Breaker::new(Deadline::new(moody.clone(), within));
    let limiter = RateLimiter::with_storage(policy("9/day"), breaker.clone());
    let key = Key::everybody();
    for _ in 0..5 {
        let started = Instant::now();
        let error = limiter.hit(&key).await.unwrap_err();
        assert!(!error.is_left_alone() && started.elapsed() == within);
        assert_eq!(error.to_string(), "the storage failed: the storage did not answer within 70ms");
    }
    let started = Instant::now();
    for _ in 0..50 {
        let error = limiter.hit(&key).await.unwrap_err();
        assert!(error.is_left_alone());
        let said = "the storage is left alone for now, since it kept failing: the storage did not answer within 70ms";
        assert_eq!(error.to_string(), said);
    }
    assert!(limiter.clear(&key).await.unwrap_err().is_left_alone());
    for (on_error, status) in [(OnError::Admit, 200), (OnError::Refuse, 503)] {
        let layer = RateLimitLayer::new(policy("9/day"), Global).storage(breaker.clone(), on_error);
        assert_eq!(ask(&layer.layer(Inner::default()), get("/")).await.status(), status);
    }
    assert!(started.elapsed().is_zero());
    assert_eq!(moody.decisions(), 5);
    let state = breaker.circuit().state();
    assert_eq!((state.by_primary, state.by_fallback, state.by_none), (0, 0, 57));
    moody.set(Mood::Works);
    sleep(SHORTEST).await;
    assert_eq!(limiter.hit(&key).await.unwrap().remaining(), 8);
    assert_eq!(breaker.circuit().state().by_primary, 1);
}

#[tokio::test(start_paused = true)]
async fn a_fallback_that_fails_too_is_an_error() {
    let ((moody, _), (other, _)) = (Moody::new(Mood::Fails), Moody::new(Mood::Works));
    let limiter = RateLimiter::with_storage(policy("9/day"), Breaker::new(moody).fallback(other.clone(), 2));
    let spent = hit(&limiter).await;
    other.set(Mood::Fails);
    let kept = limiter.refund(&Key::everybody(), &spent).await.unwrap_err();
    assert_eq!(kept.to_string(), "the storage did not decide, and its fallback failed: it fails");
    let error = limiter.hit(&Key::everybody()).await.unwrap_err();
    assert_eq!(error.to_string(), "the storage did not decide, and its fallback failed: it fails");
    assert_eq!(circuit(&limiter).state().by_none, 1);
}

#[tokio::test(start_paused = true)]
async fn breakers_may_stand_in_breakers() {
    let ((far, _), (near, _), (memory, _)) = (Moody::new(Mood::Fails), Moody::new(Mood::Works), standing());
    let inner = Breaker::new(far.clone()).fallback(near.clone(), 1);
    let limiter =
        RateLimiter::with_storage(policy("fixed-window 90/day"), Breaker::new(inner).fallback(memory.clone(), 1));
    let (key, whole) = (Key::everybody(), policy("fixed-window 90/day"));
    let now = || [&far.memory, &near.memory, &memory].map(|memory| counted(memory, &whole));
    let by_near = limiter.hit(&key).await.unwrap();
    near.set(Mood::Fails);
    let by_memory = limiter.hit(&key).await.unwrap();
    near.set(Mood::Works);
    far.set(Mood::Works);
    let by_far = limiter.hit(&key).await.unwrap();
    assert_eq!(now(), [1, 1, 1]);
    assert_eq!([&by_far, &by_near, &by_memory].map(Decision::is_from_fallback), [false, true, true]);
    limiter.refund(&key, &by_near).await.unwrap();
    assert_eq!(now(), [1, 0, 1]);
    limiter.refund(&key, &by_memory).await.unwrap();
    assert_eq!(now(), [1, 0, 0]);
    limiter.refund(&key, &by_far).await.unwrap();
    assert_eq!(now(), [0, 0, 0]);
}

#[tokio::test(start_paused = true)]
async fn what_is_known_at_once_is_told_at_once() {
    let (policy, key) = (policy("fixed-window 8/day"), Key::everybody());
    let ask = Ask::new(&policy, &key, Op::Hit, 1);
    let breaker = Breaker::new(standing().0);
    let mut shown = Shown::default();
    assert!(breaker.hit_at_once(ask, Some(&mut shown)));
    assert_eq!((shown.limit.remaining(), breaker.circuit().state().by_primary), (7, 1));

    let ((moody, _), (fallback, _)) = (Moody::new(Mood::Fails), standing());
    let breaker = Breaker::new(moody.clone()).fallback(fallback, 4);
    assert!(!breaker.hit_at_once(ask, None), "the primary is far away");
    let limiter = RateLimiter::with_storage(policy.clone(), breaker.clone());
    open(&limiter).await;
    assert!(breaker.hit_at_once(ask, Some(&mut shown)));
    assert_eq!((shown.limit.capacity(), shown.limit.remaining()), (2, 1));
    assert!(breaker.hit_at_once(ask, None));
    assert!(!breaker.hit_at_once(ask, None), "the share is spent");
    assert_eq!(breaker.circuit().state().by_fallback, 5 + 2);
    limiter.clear(&key).await.unwrap_err();
    sleep(SHORTEST).await;
    assert!(!breaker.hit_at_once(ask, None), "it is time for a probe");
    moody.set(Mood::Works);
    assert!(!hit(&limiter).await.is_from_fallback());
}

/// A fixed window that counts how often it is divided.
#[derive(Clone, Debug)]
struct Divided(Arc<AtomicUsize>);

impl Strategy for Divided {
    fn name(&self) -> &'static str {
        "divided"
    }

    common::decides_like_a_fixed_window!();

    fn share(&self, quota: &Quota, replicas: NonZeroU32) -> Option<Share> {
        self.0.fetch_add(1, Ordering::SeqCst);
        if quota.amount() == 13 {
            return Some(Share::new(FixedWindow::new(), Quota::per_second(1).burst(1)));
        }
        Some(Share::new(self.clone(), quota.share(replicas)))
    }
}

#[tokio::test(start_paused = true)]
async fn policies_are_divided_once_and_told_apart_by_more_than_their_names() {
    let divided = Divided(Arc::default());
    let breaker = Breaker::new(Moody::new(Mood::Fails).0).fallback(standing().0, 2);
    let tier = |amount| Policy::named("tier").limit(divided.clone(), Quota::per_minute(amount));
    for _ in 0..10 {
        for amount in [20, 40] {
            // Made anew for each request, too.
            for policy in [tier(amount), tier(amount)] {
                let hit = breaker.decide(Ask::new(&policy, &Key::everybody(), Op::Hit, 1)).await.unwrap();
                assert_eq!(hit.capacity(), amount / 2);
            }
        }
    }
    assert_eq!(divided.0.load(Ordering::SeqCst), 2);
}

#[tokio::test(start_paused = true)]
async fn what_either_storage_cannot_keep_is_refused_when_they_meet() {
    #[derive(Clone, Debug)]
    struct Small(Moody, u32);
    impl Storage for Small {
        type Error = &'static str;
        type Decided = <Moody as Storage>::Decided;
        type Done = <Moody as Storage>::Done;
        fn decide(&self, ask: Ask<'_>) -> Self::Decided {
            self.0.decide(ask)
        }
        fn clear(&self, policy: &Policy, key: &Key) -> Self::Done {
            self.0.clear(policy, key)
        }
        fn refund(&self, policy: &Policy, key: &Key, decision: &Decision) -> Self::Done {
            self.0.refund(policy, key, decision)
        }
        fn validate(&self, policy: &Policy) -> Result<(), ConfigError> {
            let fits = policy.limits()[0].capacity() <= self.1;
            if fits { Ok(()) } else { Err(ConfigError::new(format!("at most {}", self.1))) }
        }
    }
    let small = |most| Small(Moody::new(Mood::Fails).0, most);
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

    // What cannot be divided either; where policies are chosen for each request, when it is needed.
    let odd = Policy::new(Divided(Arc::default()), Quota::per_minute(13));
    let said = "fixed-window has no bursts";
    assert!(error(RateLimiter::try_with_storage(odd.clone(), breaker.clone())).unwrap().starts_with(said));
    let failed = breaker.decide(Ask::new(&odd, &Key::everybody(), Op::Hit, 1)).await.unwrap_err();
    assert!(failed.to_string().contains(said), "{failed}");
    assert_eq!(breaker.circuit().state().by_none, 1);
}

#[tokio::test(start_paused = true)]
async fn a_layer_shows_the_share_and_gives_back_where_it_took() {
    let ((moody, _), (fallback, _)) = (Moody::new(Mood::Works), standing());
    let breaker = Breaker::new(moody.clone()).fallback(fallback.clone(), 3);
    let tiers = |head: &Head<'_>| {
        let paid = head.headers.contains_key("x-paid");
        policy(if paid { "fixed-window 90/day" } else { "fixed-window 9/day; shadow fixed-window 6/day" })
    };
    let layer = RateLimitLayer::new(policy_by(tiers), Global)
        .storage(breaker.clone(), OnError::Refuse)
        .headers(Headers::x_rate_limit().and(Headers::ietf()))
        .charge_when(|response: &tower_ratelimit::ResponseHead<'_>| response.headers.get("free").is_none());
    let service = layer.layer(Inner::default());
    let limit = async |request| numbers(&ask(&service, request).await).map(|[limit, remaining, _]| [limit, remaining]);
    assert_eq!(limit(get("/")).await, Some([9, 8]));
    moody.set(Mood::Fails);
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
    // The shadow has a share as well, and its own states.
    let shadow = tiers(&Head::of(&get("/"))).shadows()[0].clone();
    assert_eq!(
        (counted(&fallback, &shadow.share(NonZeroU32::new(3).unwrap()).unwrap()), shadow.limits().len()),
        (2, 1)
    );
    moody.set(Mood::Works);
    sleep(SHORTEST).await;
    assert_eq!(limit(get("/")).await, Some([9, 7]));
}

#[tokio::test(start_paused = true)]
async fn a_layer_does_not_tell_a_share_the_time_of_the_whole() {
    for (text, own, of_share) in [
        ("token-bucket 1/minute burst 100", "q=100;w=6000", "q=1"),
        ("leaky-bucket 100/minute queue 59", "q=60;w=36", "q=2"),
        ("token-bucket 200/minute", "q=200;w=60", "q=2;w=60"),
        ("300/minute", "q=300;w=60", "q=3;w=60"),
    ] {
        let (moody, _) = Moody::new(Mood::Works);
        let breaker = Breaker::new(moody.clone()).fallback(standing().0, 100);
        let layer =
            RateLimitLayer::new(policy(text), Global).storage(breaker, OnError::Refuse).headers(Headers::ietf());
        let service = layer.layer(Inner::default());
        for (mood, said) in [(Mood::Works, own), (Mood::Fails, of_share)] {
            moody.set(mood);
            let response = ask(&service, get("/")).await;
            let field = response.headers()["ratelimit-policy"].to_str().unwrap();
            assert_eq!(field, format!("\"{text}\";{said}").replace("\"300/", "\"sliding-window-counter 300/"));
        }
    }
}

#[test]
fn options_that_cannot_be_say_what_can() {
    let breaker = || Breaker::new(MemoryStorage::new());
    let said = |error: Option<ConfigError>| error.unwrap().to_string();
    assert!(said(breaker().try_fallback(MemoryStorage::new(), 0).err()).contains("at least 1"));
    assert!(said(breaker().try_failures(0).err()).contains("for example 5"));
    for (shortest, longest) in [(Duration::ZERO, LONGEST), (LONGEST, SHORTEST), (LONGEST, Duration::from_secs(3_601))] {
        let example = "for example Duration::from_millis(100) and Duration::from_secs(1)";
        assert!(said(breaker().try_probe_after(shortest, longest).err()).contains(example));
    }
    assert!(std::panic::catch_unwind(|| Breaker::new(MemoryStorage::new()).failures(0)).is_err());
}

#[tokio::test(start_paused = true)]
async fn options_hold_in_any_order() {
    let ((moody, _), (fallback, _)) = (Moody::new(Mood::Fails), standing());
    let (soon, late) = (10 * MS, 15 * MS);
    let first = Breaker::new(moody.clone()).failures(2).probe_after(soon, late).fallback(fallback.clone(), 2);
    let last = Breaker::new(moody.clone()).fallback(fallback.clone(), 2).probe_after(soon, late).failures(2);
    for breaker in [first, last] {
        let limiter = RateLimiter::with_storage(policy("fixed-window 1000/day"), breaker);
        for phase in [Phase::Closed, Phase::Open] {
            assert!(hit(&limiter).await.is_from_fallback());
            assert_eq!(circuit(&limiter).state().phase, phase);
        }
        assert!((soon / 2..=soon).contains(&circuit(&limiter).state().probe_in.unwrap()));
        for _ in 0..5 {
            sleep(late).await;
            let _ = hit(&limiter).await;
            assert!(circuit(&limiter).state().probe_in.unwrap() <= late);
        }
        assert_eq!(circuit(&limiter).state().failures, 7);
    }
}

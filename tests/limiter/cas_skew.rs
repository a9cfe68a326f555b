//! Nodes whose clocks differ, on one compare-and-swap store: together they admit no more than one
//! node with one clock.

use std::time::Duration;

use common::fake_cas_store::FakeCasStore;
use common::random::Numbers;
use common::{memory_with_manual_clock, panic_message, policy};
use tower_ratelimit::storage::{Cas, Clock, ManualClock};
use tower_ratelimit::{Decision, Key, Policy, RateLimiter, Timestamp};

const SECOND: u64 = 1_000_000;
const YEAR: u64 = 365 * 86_400 * SECOND;

/// The period of all policies here.
const PERIOD: u64 = SECOND;
const AMOUNT: usize = 10;

/// The skews of the fastest node, in tenths of a period. All are within the default of 5 s.
const SKEWS: [u64; 5] = [0, 3, 9, 12, 30];

/// Each strategy, with the most units that it may admit in any period.
const POLICIES: [(&str, usize); 9] = [
    ("fixed-window 10/second", 2 * AMOUNT - 1),
    ("fixed-window-aligned 10/second", 2 * AMOUNT),
    ("elastic-window 10/second", AMOUNT),
    ("moving-window 10/second", AMOUNT),
    ("sliding-window-counter 10/second", 2 * AMOUNT),
    ("sliding-window-counter-aligned 10/second", 2 * AMOUNT),
    ("token-bucket 10/second", 2 * AMOUNT),
    ("token-bucket 10/second burst 3", 3 + AMOUNT),
    // A hit of 3 units starts all of them when the first is due.
    ("leaky-bucket 10/second queue 2", AMOUNT + 2),
];

fn key() -> Key {
    Key::from("k")
}

/// Nodes on one store. The clock of each node is ahead of `world` by a fixed time.
struct Nodes {
    world: ManualClock,
    clocks: Vec<(ManualClock, u64)>,
    limiters: Vec<RateLimiter<Cas<FakeCasStore>>>,
}

impl Nodes {
    fn new(policy: &Policy, ahead: &[u64]) -> Self {
        let world = ManualClock::default();
        let store = FakeCasStore::expiring_by(world.clone());
        let clocks: Vec<_> = ahead.iter().map(|&ahead| (ManualClock::new(world.now().plus(ahead)), ahead)).collect();
        let limiter = |(clock, _): &(ManualClock, u64)| {
            let storage = Cas::new(store.clone()).deadline(Duration::from_secs(20)).clock(clock.clone());
            RateLimiter::with_storage(policy.clone(), storage)
        };
        Self { limiters: clocks.iter().map(limiter).collect(), clocks, world }
    }

    fn advance(&self, micros: u64) {
        self.world.advance(Duration::from_micros(micros));
        for (clock, ahead) in &self.clocks {
            clock.set(self.world.now().plus(*ahead));
        }
    }

    async fn hit(&self, node: usize, cost: u32) -> Decision {
        self.limiters[node].hit_with_cost(&key(), cost).await.unwrap()
    }
}

/// The instant at which units start. A leaky bucket delays them.
fn starts(decision: &Decision) -> Timestamp {
    decision.at().plus(u64::try_from(decision.delay().as_micros()).unwrap())
}

/// Asserts that no period has more units than promised.
fn assert_promise(admitted: &[(Timestamp, usize)], most: usize, context: &str) {
    for (first, (start, _)) in admitted.iter().enumerate() {
        let within = admitted[first..].iter().take_while(|(at, _)| at.since(*start) < PERIOD);
        let units: usize = within.map(|(_, units)| units).sum();
        assert!(units <= most, "{context}: {units} units from {start:?} on, but at most {most} are promised");
    }
}

/// All nodes hit all the time, the fastest one first. This equals the traffic of one node with the
/// fastest clock, so the same hits are admitted at the same instants.
#[tokio::test]
async fn busy_nodes_decide_like_one_node_with_the_fastest_clock() {
    for (text, most) in POLICIES {
        for skew in SKEWS {
            let (policy, context) = (policy(text), format!("{text}, {skew} tenths ahead"));
            let nodes = Nodes::new(&policy, &[skew * PERIOD / 10, skew * PERIOD / 20, 0]);
            let (memory, clock) = memory_with_manual_clock();
            let single = RateLimiter::with_storage(policy, memory);
            clock.set(nodes.clocks[0].0.now());
            let mut admitted = Vec::new();
            for _ in 0..120 {
                for node in 0..3 {
                    let decision = nodes.hit(node, 1).await;
                    let expected = single.hit(&key()).await.unwrap();
                    assert_eq!(decision.is_admitted(), expected.is_admitted(), "{context}");
                    if decision.is_admitted() {
                        assert_eq!(decision.at(), expected.at(), "{context}");
                        admitted.push((starts(&decision), 1));
                    }
                }
                nodes.advance(PERIOD / 37);
                clock.set(nodes.clocks[0].0.now());
            }
            assert!(admitted.len() >= AMOUNT, "{context}: {} admitted", admitted.len());
            assert_promise(&admitted, most, &context);
        }
    }
}

/// The times of the decisions on one key never go back, and are never ahead of the fastest clock.
/// In these times, no period has more units than promised, with refunds and after pauses.
#[tokio::test]
async fn nodes_in_any_order_admit_no_more_than_promised_in_the_times_of_the_key() {
    for (number, (text, most)) in POLICIES.into_iter().enumerate() {
        for skew in SKEWS {
            let (policy, context) = (policy(text), format!("{text}, {skew} tenths ahead"));
            let ahead = [0, skew * PERIOD / 10, skew * PERIOD / 30];
            let nodes = Nodes::new(&policy, &ahead);
            let mut numbers = Numbers(1 + skew + 100 * number as u64);
            let (mut admitted, mut newest): (Vec<(Timestamp, usize)>, _) = (Vec::new(), Timestamp::EPOCH);
            for _ in 0..400 {
                nodes.advance(match numbers.below(60) {
                    0 => numbers.below(8 * PERIOD),
                    1..20 => 0,
                    _ => numbers.below(PERIOD / 10),
                });
                let (node, cost) = (usize::try_from(numbers.below(3)).unwrap(), numbers.one_of(&[1, 1, 1, 2, 3]));
                let decision = nodes.hit(node, cost).await;
                assert!(decision.at() <= nodes.world.now().plus(ahead[1]), "{context}");
                if decision.is_refused() {
                    continue;
                }
                assert!(decision.at() >= newest, "{context}: {:?} after {newest:?}", decision.at());
                newest = decision.at();
                if numbers.below(5) == 0 {
                    let node = usize::try_from(numbers.below(3)).unwrap();
                    nodes.limiters[node].refund(&key(), &decision).unwrap().await.unwrap();
                } else {
                    admitted.push((starts(&decision), cost as usize));
                }
            }
            assert!(admitted.len() >= 3 * AMOUNT, "{context}: {} admitted", admitted.len());
            admitted.sort();
            assert_promise(&admitted, most, &context);
        }
    }
}

#[tokio::test]
async fn clock_that_went_back_within_max_skew_decides_at_the_stored_instant() {
    let limits = policy("moving-window 10/second; token-bucket 10/second");
    for (back, is_kept) in [(1, true), (PERIOD, true), (5 * SECOND, true), (5 * SECOND + 1, false), (YEAR, false)] {
        let nodes = Nodes::new(&limits, &[YEAR]);
        let before = nodes.hit(0, 10).await;
        let own = before.at().minus(back);
        nodes.clocks[0].0.set(own);
        let (peek, after) = (nodes.limiters[0].peek(&key()).await.unwrap(), nodes.hit(0, 1).await);
        assert!(before.is_admitted() && after.is_refused(), "{back} us back");
        assert_eq!(after.at(), if is_kept { before.at() } else { own }, "{back} us back");
        assert_eq!((peek.at(), peek.remaining()), (after.at(), 0));
    }
}

/// The units that a node in the wrong year has spent count as spent now.
#[tokio::test]
async fn node_in_the_wrong_year_does_not_lock_out_clients() {
    for (text, _) in POLICIES {
        let nodes = Nodes::new(&policy(text), &[0, YEAR]);
        while nodes.hit(1, 1).await.is_admitted() {}
        let refused = nodes.hit(0, 1).await;
        assert_eq!(refused.at(), nodes.world.now(), "{text}: it decides by its own clock");
        assert!(refused.is_refused(), "{text}: nothing is admitted");
        let wait = refused.retry_after().expect("it fits later");
        assert!(wait <= Duration::from_micros(2 * PERIOD), "{text}: {wait:?}");
        nodes.advance(u64::try_from(wait.as_micros()).unwrap());
        assert!(nodes.hit(0, 1).await.is_admitted(), "{text}: not admitted after {wait:?}");
        // The other node continues in its own year.
        let ahead = nodes.hit(1, 1).await;
        assert_eq!(ahead.at(), nodes.world.now().plus(YEAR), "{text}");
    }
}

/// A hit in the correct year also moves the states of other policies with the same name.
#[tokio::test]
async fn states_of_all_policies_of_a_name_are_moved_from_the_wrong_year() {
    let [fixed, moving] =
        ["fixed-window 2/second", "moving-window 2/second"].map(|text| policy(text).with_name("tier"));
    let nodes = Nodes::new(&fixed, &[0, YEAR]);
    let storages = nodes.limiters.iter().map(|limiter| limiter.storage().clone());
    let moving: Vec<_> = storages.map(|storage| RateLimiter::with_storage(moving.clone(), storage)).collect();
    assert!(nodes.hit(1, 2).await.is_admitted());
    assert!(moving[1].hit_with_cost(&key(), 2).await.unwrap().is_admitted());
    assert!(nodes.hit(0, 1).await.is_refused());
    assert!(moving[0].hit(&key()).await.unwrap().is_refused());
    nodes.advance(PERIOD);
    assert!(nodes.hit(0, 1).await.is_admitted());
    assert!(moving[0].hit(&key()).await.unwrap().is_admitted());
}

#[test]
fn max_skew_above_one_day_panics() {
    let cas = || Cas::new(FakeCasStore::default());
    let error = panic_message(|| cas().max_skew(Duration::from_secs(86_401)));
    assert!(error.contains("use at most a day, for example Duration::from_secs(5)"), "{error}");
    drop([Duration::ZERO, Duration::from_secs(86_400)].map(|valid| cas().max_skew(valid)));
}

#[tokio::test]
async fn no_instant_is_stored_if_max_skew_is_zero() {
    let clock = ManualClock::default();
    let store = FakeCasStore::default();
    let storage = Cas::new(store.clone()).clock(clock.clone()).max_skew(Duration::ZERO);
    let limiter = RateLimiter::with_storage(policy("fixed-window 10/second").with_name("p"), storage);
    let decision = limiter.hit(&key()).await.unwrap();
    assert!(store.text("p|t:k").starts_with("[1.fixed-window/"));
    store.put("p|t:k", &format!("@{}{}", decision.at().plus(9).as_micros(), store.text("p|t:k")));
    assert_eq!(limiter.hit(&key()).await.unwrap().at(), decision.at());
    limiter.refund(&key(), &decision).unwrap().await.unwrap();
    limiter.refund(&key(), &decision).unwrap().await.unwrap();
    assert_eq!(store.text("p|t:k"), "");
}

/// A storage with a `max_skew` of zero writes such texts.
#[tokio::test]
async fn text_without_an_instant_is_parsed() {
    let clock = ManualClock::default();
    let store = FakeCasStore::expiring_by(clock.clone());
    let end = clock.now().plus(PERIOD).as_micros();
    store.put("p|t:k", &format!("[1.fixed-window/1000000 {end},9,7]"));
    let storage = Cas::new(store.clone()).clock(clock.clone());
    let limiter = RateLimiter::with_storage(policy("fixed-window 10/second").with_name("p"), storage);
    assert!(limiter.hit(&key()).await.unwrap().is_admitted());
    assert!(limiter.hit(&key()).await.unwrap().is_refused());
    let now = clock.now().as_micros();
    assert_eq!(store.text("p|t:k"), format!("@{now}[1.fixed-window/1000000 {end},10,7]"));
    limiter.clear(&key()).await.unwrap();
    assert_eq!(store.text("p|t:k"), "");
}

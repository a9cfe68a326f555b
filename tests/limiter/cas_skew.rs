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
const POLICIES: [(&str, usize); 10] = [
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
    ("lockout 10/second for 1 second", 2 * AMOUNT - 2),
];

fn key() -> Key {
    Key::from("k")
}

/// Nodes on one store. The clock of each node is ahead of `world` by a fixed time.
struct Nodes {
    world: ManualClock,
    store: FakeCasStore,
    clocks: Vec<(ManualClock, u64)>,
    limiters: Vec<RateLimiter>,
}

impl Nodes {
    fn new(policy: &Policy, ahead: &[u64]) -> Self {
        let world = ManualClock::default();
        let store = FakeCasStore::expiring_by(world.clone());
        Self::on(&store, world, policy, ahead)
    }

    fn on(store: &FakeCasStore, world: ManualClock, policy: &Policy, ahead: &[u64]) -> Self {
        let clocks: Vec<_> = ahead.iter().map(|&ahead| (ManualClock::new(world.now().plus(ahead)), ahead)).collect();
        let limiter = |(clock, _): &(ManualClock, u64)| {
            let storage = Cas::new(store.clone()).timeout(Duration::from_secs(20)).clock(clock.clone());
            RateLimiter::with_storage(policy.clone(), storage)
        };
        Self { limiters: clocks.iter().map(limiter).collect(), clocks, store: store.clone(), world }
    }

    /// Replaces a node by a new process on the same machine.
    fn restart(&mut self, node: usize) {
        let limiter = &self.limiters[node];
        let storage = Cas::new(self.store.clone()).timeout(Duration::from_secs(20)).clock(self.clocks[node].0.clone());
        self.limiters[node] = RateLimiter::with_storage(limiter.policy(), storage);
    }

    fn set_ahead(&mut self, node: usize, micros: u64) {
        self.clocks[node].1 = micros;
        self.advance(0);
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
                    common::settle(&nodes.limiters[node], &key(), &decision, 0).await.unwrap();
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

/// A node in the wrong year does not lock out clients of other policies with the same name either.
#[tokio::test]
async fn states_of_all_policies_of_a_name_are_decided_in_the_correct_year() {
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

/// Guards against this defect: a load that ends after its callers have left stores the text again, for
/// the time of `max_skew` only. The store then removes counts that are still needed.
#[tokio::test(start_paused = true)]
async fn load_that_ends_after_its_deadlines_stores_nothing() {
    let (store, start) = (FakeCasStore::default(), ManualClock::default().now());
    let node = |now| {
        let storage = Cas::new(store.clone()).timeout(Duration::from_millis(250)).clock(ManualClock::new(now));
        RateLimiter::with_storage(policy("fixed-window 10/day"), storage)
    };
    let (ahead, behind) = (node(start.plus(60 * SECOND)), node(start));
    assert!(ahead.hit(&key()).await.unwrap().is_admitted());
    store.trips();
    // The load of the first hit hangs. That of the second one begins after 250 ms, and ends after 350 ms.
    store.hang(true);
    let second = async {
        tokio::time::sleep(Duration::from_millis(20)).await;
        store.hang(false);
        store.answer_after(100);
        behind.hit(&key()).await
    };
    let (first, second) = tokio::join!(behind.hit(&key()), second);
    for error in [first.unwrap_err(), second.unwrap_err()] {
        assert!(error.is_timeout() && !error.may_have_counted(), "{error}");
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(store.trips(), (2, 0));
    assert!(store.keep() > Duration::from_secs(3_600), "{:?}", store.keep());
    // Checks that a hit of this node would store its offset.
    store.answer_after(0);
    assert!(behind.hit(&key()).await.unwrap().is_admitted());
    assert_eq!(store.trips(), (1, 1));
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
    let store = FakeCasStore::expiring_by(clock.clone());
    let storage =
        Cas::new(store.clone()).timeout(Duration::from_secs(60)).clock(clock.clone()).max_skew(Duration::ZERO);
    let limiter = RateLimiter::with_storage(policy("fixed-window 10/second").with_name("p"), storage);
    let decision = limiter.hit(&key()).await.unwrap();
    let states = store.text("p|t:k").replace("v1[", "[");
    assert!(states.starts_with("[1.fixed-window/"), "{states}");
    store.put("p|t:k", &format!("v1@{}{states}", decision.at().plus(9).as_micros()));
    assert_eq!(limiter.hit(&key()).await.unwrap().at(), decision.at());
    common::settle(&limiter, &key(), &decision, 0).await.unwrap();
    common::settle(&limiter, &key(), &decision, 0).await.unwrap();
    assert_eq!(store.text("p|t:k"), "");
}

/// A storage with a `max_skew` of zero writes such texts.
#[tokio::test]
async fn text_without_an_instant_is_parsed() {
    let clock = ManualClock::default();
    let store = FakeCasStore::expiring_by(clock.clone());
    let end = clock.now().plus(PERIOD).as_micros();
    store.put("p|t:k", &format!("v1[1.fixed-window/1000000 {end},9,7]"));
    let storage = Cas::new(store.clone()).timeout(Duration::from_secs(60)).clock(clock.clone());
    let limiter = RateLimiter::with_storage(policy("fixed-window 10/second").with_name("p"), storage);
    assert!(limiter.hit(&key()).await.unwrap().is_admitted());
    assert!(limiter.hit(&key()).await.unwrap().is_refused());
    let now = clock.now().as_micros();
    assert_eq!(store.text("p|t:k"), format!("v1@{now}[1.fixed-window/1000000 {end},10,7]"));
    limiter.clear(&key()).await.unwrap();
    assert_eq!(store.text("p|t:k"), "");
}

/// The skews of the fastest node, in seconds. All but the first two exceed the default of 5 s.
const LARGE_SKEWS: [u64; 6] = [0, 4, 7, 61, 600, YEAR / SECOND];

/// Returns the most units that the strategy promises in a real time of `micros`, both ends
/// included, and the quota that one change of a clock may add.
fn promise(text: &str, micros: u64) -> (usize, usize) {
    let (windows, refilled) = (micros / PERIOD, AMOUNT as u64 * micros / PERIOD);
    let [windows, refilled] = [windows, refilled].map(|number| usize::try_from(number).unwrap());
    match text.split(' ').next().unwrap() {
        "moving-window" | "elastic-window" => (AMOUNT * (windows + 1), AMOUNT),
        "token-bucket" if text.ends_with("burst 3") => (3 + refilled, 3),
        "token-bucket" => (AMOUNT + refilled, AMOUNT),
        "leaky-bucket" => (3 + refilled, 3),
        _ => (AMOUNT * (windows + 2), AMOUNT),
    }
}

/// Asserts that no real time has more units than promised, plus a quota per change of a clock.
fn assert_real_promise(text: &str, admitted: &[(Timestamp, usize)], changes: usize, context: &str) {
    for (first, (start, _)) in admitted.iter().enumerate() {
        let mut sum = 0;
        for (at, units) in &admitted[first..] {
            sum += units;
            let (most, quota) = promise(text, at.since(*start));
            let most = most + quota * changes;
            assert!(sum <= most, "{context}: {sum} units in {} us, at most {most} are promised", at.since(*start));
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Order {
    SlowestFirst,
    FastestFirst,
    Random,
}

/// Hits from all nodes for four periods. Returns the admitted units with their real times.
async fn traffic(nodes: &mut Nodes, order: Order, corrected: Option<usize>, seed: u64) -> Vec<(Timestamp, usize)> {
    let (mut numbers, mut admitted, count) = (Numbers(1 + seed), Vec::new(), nodes.limiters.len());
    let ahead = corrected.map(|node| (node, nodes.clocks[node].1));
    for step in 0..60 {
        match ahead {
            Some((node, _)) if step == 20 => nodes.set_ahead(node, 0),
            Some((node, ahead)) if step == 40 => nodes.set_ahead(node, ahead),
            _ => {}
        }
        let (node, pause) = match order {
            Order::SlowestFirst => (step % count, PERIOD / 15),
            Order::FastestFirst => (count - 1 - step % count, PERIOD / 15),
            // The store does not expire a text that was written 5 seconds ago.
            Order::Random if numbers.below(20) == 0 => {
                (usize::try_from(numbers.below(count as u64)).unwrap(), 4 * PERIOD)
            }
            Order::Random => (usize::try_from(numbers.below(count as u64)).unwrap(), numbers.below(PERIOD / 8)),
        };
        for _ in 0..2 + step % 3 {
            if nodes.hit(node, 1).await.is_admitted() {
                admitted.push((nodes.world.now(), 1));
            }
        }
        nodes.advance(pause);
    }
    admitted
}

/// The clocks of `count` nodes, the slowest one first.
fn clocks(count: u64, skew: u64) -> Vec<u64> {
    let uneven = [0, 9, 21, 30, 60];
    let places = if count == 2 { &[0, 60][..] } else { &uneven };
    places.iter().map(|place| skew * SECOND * place / 60).collect()
}

#[tokio::test]
async fn nodes_with_any_skew_admit_at_most_one_more_quota_per_clock() {
    for (text, _) in POLICIES {
        for skew in LARGE_SKEWS {
            for (count, order) in [2, 5]
                .into_iter()
                .flat_map(|n| [Order::SlowestFirst, Order::FastestFirst, Order::Random].map(|o| (n, o)))
            {
                let context = format!("{text}, {count} nodes, {skew} s, {order:?}");
                let mut nodes = Nodes::new(&policy(text), &clocks(count, skew));
                let admitted = traffic(&mut nodes, order, None, skew).await;
                let changes = if skew == 0 { 0 } else { usize::try_from(count).unwrap() - 1 };
                assert_real_promise(text, &admitted, changes, &context);
                if order != Order::Random {
                    continue;
                }
                // The nodes do not slow each other down, except that a new clock brings no time.
                let mut single = Nodes::new(&policy(text), &vec![0; usize::try_from(count).unwrap()]);
                let least = traffic(&mut single, order, None, skew).await.len();
                let lost = changes * 2 * promise(text, 0).1;
                assert!(admitted.len() + lost >= least, "{context}: {} admitted, one node {least}", admitted.len());
            }
        }
    }
}

#[tokio::test]
async fn correction_of_a_clock_admits_at_most_one_more_quota() {
    for (text, _) in POLICIES {
        for skew in LARGE_SKEWS {
            for (count, order) in [2, 5]
                .into_iter()
                .flat_map(|n| [Order::SlowestFirst, Order::FastestFirst, Order::Random].map(|o| (n, o)))
            {
                let node = usize::try_from(count).unwrap() - 1;
                let mut nodes = Nodes::new(&policy(text), &clocks(count, skew));
                let admitted = traffic(&mut nodes, order, Some(node), skew).await;
                let changes = if skew == 0 { 0 } else { node + 2 };
                assert_real_promise(text, &admitted, changes, &format!("{text}, {count} nodes, {skew} s, {order:?}"));
            }
        }
    }
}

/// `token-bucket 100/minute` admitted 6,098 hits here in 6 seconds.
#[tokio::test]
async fn alternating_nodes_do_not_refill_a_bucket() {
    for (text, most) in [("token-bucket 100/minute", 210), ("fixed-window 100/minute", 200)] {
        for ahead in [7 * SECOND, 61 * SECOND] {
            let nodes = Nodes::new(&policy(text), &[0, ahead]);
            let mut admitted = 0;
            for hit in 0..6_000 {
                admitted += usize::from(nodes.hit(hit % 2, 1).await.is_admitted());
                nodes.advance(1_000);
            }
            assert!((100..=most).contains(&admitted), "{text}, {ahead} us: {admitted} admitted");
        }
    }
}

/// A clock in the year 3000 would store instants that no node can parse.
#[tokio::test]
async fn node_in_a_distant_year_does_not_lift_limits() {
    for (text, _) in POLICIES {
        let mut nodes = Nodes::new(&policy(text), &[0, 1_000 * YEAR]);
        let admitted = traffic(&mut nodes, Order::SlowestFirst, None, 0).await;
        assert_real_promise(text, &admitted, 1, text);
        assert!(admitted.len() >= AMOUNT, "{text}: {}", admitted.len());
    }
}

/// A process that was restarted continues in the time of its machine's clock.
#[tokio::test]
async fn restarted_process_whose_clock_is_behind_waits_no_longer_than_announced() {
    for (text, _) in POLICIES {
        for ahead in [7 * SECOND, 600 * SECOND, YEAR] {
            let nodes = Nodes::new(&policy(text), &[0, ahead]);
            assert_restarted_process_waits_as_announced(nodes, &format!("{text}, {ahead} us ahead")).await;
        }
    }
}

/// Guards against this defect: a store recalls a missing text, and the process forgets the
/// difference of its clock to the time of the key, which stands still then.
#[tokio::test]
async fn recalled_text_that_is_outdated_does_not_stop_the_time_of_a_key() {
    for (text, _) in POLICIES {
        for ahead in [7 * SECOND, 600 * SECOND, YEAR] {
            let world = ManualClock::default();
            let nodes = Nodes::on(&FakeCasStore::forgetful(world.clone()), world, &policy(text), &[0, ahead]);
            let context = format!("{text}, {ahead} us ahead");
            let _ = nodes.hit(1, 1).await;
            for _ in 0..2 {
                while nodes.hit(0, 1).await.is_admitted() {}
                let wait = nodes.hit(0, 1).await.retry_after().unwrap();
                nodes.advance(u64::try_from(wait.as_micros()).unwrap());
                assert!(nodes.hit(0, 1).await.is_admitted(), "{context}");
                let _ = nodes.hit(1, 1).await;
            }
            assert_restarted_process_waits_as_announced(nodes, &context).await;
        }
    }
}

async fn assert_restarted_process_waits_as_announced(mut nodes: Nodes, context: &str) {
    while nodes.hit(1, 1).await.is_admitted() {}
    let refused = nodes.hit(0, 1).await;
    nodes.restart(0);
    assert_eq!(nodes.limiters[0].peek(&key()).await.unwrap().remaining(), 0, "{context}");
    nodes.advance(u64::try_from(refused.retry_after().unwrap().as_micros()).unwrap());
    nodes.restart(0);
    let decision = nodes.hit(0, 1).await;
    assert!(decision.is_admitted(), "{context}: {decision:?}");
    assert_eq!(decision.at(), nodes.world.now(), "{context}");
}

/// A refund on any node returns at most what the hit has spent, also if the clock of another node
/// was met in between.
#[tokio::test]
async fn refund_of_a_hit_never_returns_more_than_it_has_spent() {
    for (text, _) in POLICIES {
        for ahead in [7 * SECOND, 600 * SECOND, YEAR] {
            for (first, met, refunding) in
                [(0, None, 0), (1, Some(0), 1), (1, Some(0), 0), (0, Some(1), 0), (0, Some(1), 1)]
            {
                let context = format!("{text}, {ahead} us ahead, {first} {met:?} {refunding}");
                let nodes = Nodes::new(&policy(text), &[0, ahead]);
                let _ = (nodes.hit(1, 1).await, nodes.hit(0, 1).await);
                let spent = nodes.hit(first, 1).await;
                assert!(spent.is_admitted(), "{context}");
                if let Some(met) = met {
                    let _ = nodes.hit(met, 1).await;
                }
                let remaining = async || nodes.limiters[refunding].peek(&key()).await.unwrap().remaining();
                let before = remaining().await;
                common::settle(&nodes.limiters[refunding], &key(), &spent, 0).await.unwrap();
                let after = remaining().await;
                assert!((before..=before + 1).contains(&after), "{context}: {before}, then {after}");
                // The bucket of a queue only gives back its last place.
                if first == refunding && (met.is_none() || !text.starts_with("leaky")) {
                    assert_eq!(after, before + 1, "{context}");
                }
            }
        }
    }
}

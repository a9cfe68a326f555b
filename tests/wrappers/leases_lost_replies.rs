//! Leases on a storage that counts units and loses the reply: the bound on the units lost.

use std::mem::take;
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use common::random::Numbers;
use common::{Behavior, FakeStorage, decide, hit, memory_with_manual_clock, policy, poll, start_hit};
use tokio::task::yield_now;
use tower_ratelimit::storage::{Breaker, Leases, ManualClock, StorageError, StorageFuture, StorageRequest};
use tower_ratelimit::{Decision, Key, MemoryStorage, Op, Policy, Storage, Timestamp};

/// The slice of all tests with one node.
const SLICE: u32 = 10;

/// Records the requests to a storage, which fails for selected keys.
#[derive(Clone, Default)]
struct Requests(Arc<Mutex<Vec<(Key, u32)>>>, Arc<Mutex<Vec<Key>>>);

impl Requests {
    fn storage(&self) -> (FakeStorage, ManualClock) {
        let Self(recorded, failing) = self.clone();
        FakeStorage::scripted(move |request| {
            if request.op == Op::Hit {
                recorded.lock().unwrap().push((request.key.clone(), request.cost));
            }
            failing.lock().unwrap().contains(request.key).then(|| Err(StorageError::from_boxed("reply lost")))
        })
    }

    fn fail(&self, keys: &[&str]) {
        *self.1.lock().unwrap() = keys.iter().map(|key| Key::from(*key)).collect();
    }

    /// Returns the units of each request for this key, and resets them.
    fn take(&self, key: &str) -> Vec<u32> {
        let (of_key, others) =
            self.0.lock().unwrap().drain(..).partition::<Vec<_>, _>(|(requested, _)| *requested == Key::from(key));
        *self.0.lock().unwrap() = others;
        of_key.into_iter().map(|(_, units)| units).collect()
    }
}

/// Leases on a storage that records its requests.
fn recorded() -> (Leases, FakeStorage, Requests) {
    let requests = Requests::default();
    let (storage, clock) = requests.storage();
    (Leases::new(storage.clone(), SLICE).clock(clock), storage, requests)
}

async fn fails(storage: &impl Storage, policy: &Policy, key: &str, cost: u32) {
    assert!(storage.decide(StorageRequest::new(policy, &Key::from(key), Op::Hit, cost)).await.is_err());
}

#[tokio::test]
async fn requests_are_for_one_hit_from_a_lost_reply_to_the_next_success() {
    let (leases, _, requests) = recorded();
    let policy = policy("fixed-window 1000/minute");
    requests.fail(&["a"]);
    for cost in [1, 3, 1] {
        fails(&leases, &policy, "a", cost).await;
    }
    assert_eq!(requests.take("a"), [SLICE, 3, 1]);
    requests.fail(&[]);
    for cost in [2, 1] {
        assert!(hit(&leases, &policy, "a", cost).await.is_admitted());
    }
    assert_eq!(requests.take("a"), [2, SLICE]);
    // Nine leased units are left. A hit of eleven needs two more.
    requests.fail(&["a"]);
    for _ in 0..2 {
        fails(&leases, &policy, "a", 11).await;
    }
    assert_eq!(requests.take("a"), [SLICE, 2]);
    assert!(hit(&leases, &policy, "a", 9).await.is_admitted(), "leased units are spent during the outage");
}

/// A lost request for all waiting hits loses the units of all. The next request is for one hit.
#[tokio::test]
async fn request_is_for_one_waiting_hit_after_a_failure() {
    let (leases, storage, requests) = recorded();
    let (policy, key) = (policy("fixed-window 1000/minute"), Key::from("a"));
    requests.fail(&["a"]);
    for _ in 0..2 {
        storage.close();
        let mut hits: Vec<_> = (0..30).map(|_| start_hit(&leases, &policy, &key, 1)).collect();
        assert!(hits.iter_mut().all(|hit| poll(hit).is_pending()));
        storage.open();
        for hit in hits {
            hit.await.unwrap_err();
        }
    }
    assert_eq!(requests.take("a"), [SLICE, 1]);
    requests.fail(&[]);
    assert!(hit(&leases, &policy, "a", 1).await.is_admitted());
}

/// An outage affects all keys, so one failure stops the slices of all keys. Another key's success
/// does not prove that this key's server works.
#[tokio::test]
async fn one_failure_stops_the_slices_of_all_keys() {
    let (leases, _, requests) = recorded();
    let policy = policy("fixed-window 1000/minute");
    requests.fail(&["a"]);
    fails(&leases, &policy, "a", 1).await;
    for units in [1, SLICE] {
        assert!(hit(&leases, &policy, "b", 1).await.is_admitted());
        assert_eq!(requests.take("b"), [units]);
    }
    fails(&leases, &policy, "a", 1).await;
    requests.fail(&[]);
    for _ in 0..2 {
        assert!(hit(&leases, &policy, "a", 1).await.is_admitted());
    }
    assert_eq!(requests.take("a"), [SLICE, 1, 1, SLICE]);
}

#[tokio::test]
async fn success_of_a_request_sent_before_the_failure_does_not_end_the_outage() {
    let (leases, storage, requests) = recorded();
    let policy = policy("fixed-window 1000/minute");
    storage.close();
    let mut older = start_hit(&leases, &policy, &Key::from("b"), 1);
    assert!(poll(&mut older).is_pending());
    storage.set(Behavior::Fails);
    fails(&leases, &policy, "a", 1).await;
    storage.set(Behavior::Works);
    storage.open();
    assert!(older.await.unwrap().is_admitted());
    for _ in 0..2 {
        assert!(hit(&leases, &policy, "c", 1).await.is_admitted());
    }
    assert_eq!((requests.take("b"), requests.take("c")), (vec![SLICE], vec![1, SLICE]));
}

/// A contended refusal counts nothing. It neither begins an outage nor ends one.
#[tokio::test]
async fn contended_refusal_does_not_end_the_outage() {
    let units = Arc::new(Mutex::new(Vec::new()));
    let requested = Arc::clone(&units);
    let (storage, clock) = FakeStorage::scripted(move |request| {
        let mut requested = requested.lock().unwrap();
        requested.push(request.cost);
        match requested.len() {
            1 | 3 => Some(Ok(request.policy.refuse(Timestamp::EPOCH, request.cost, 9).contended())),
            2 => Some(Err(StorageError::from_boxed("reply lost"))),
            _ => None,
        }
    });
    let leases = Leases::new(storage, SLICE).clock(clock);
    let policy = policy("fixed-window 1000/minute");
    assert!(hit(&leases, &policy, "a", 1).await.is_contended());
    fails(&leases, &policy, "a", 1).await;
    assert!(hit(&leases, &policy, "a", 1).await.is_contended());
    for _ in 0..2 {
        assert!(hit(&leases, &policy, "a", 1).await.is_admitted());
    }
    assert_eq!(*units.lock().unwrap(), [SLICE, SLICE, 1, 1, SLICE]);
}

/// The breaker hides the lost reply behind the fallback's decision.
#[tokio::test]
async fn decision_of_a_fallback_counts_as_a_lost_reply() {
    let (primary, clock) = FakeStorage::in_memory(Behavior::FailsAfterCounting);
    let breaker = Breaker::new(primary.clone()).failures(1_000).fallback(memory_with_manual_clock().0, 1);
    let leases = Leases::new(breaker, SLICE).clock(clock);
    let policy = policy("fixed-window 1000/minute");
    for _ in 0..5 {
        let decision = hit(&leases, &policy, "a", 1).await;
        assert!(decision.is_admitted() && decision.is_from_fallback());
    }
    assert_eq!(counted(primary.inner(), &policy, "a").await, SLICE + 4);
}

/// The runtime stops while a request for a slice is in flight.
#[test]
fn cancelled_request_counts_as_a_lost_reply() {
    let (leases, storage, requests) = recorded();
    let policy = policy("fixed-window 1000/minute");
    let [one, two] = [(); 2].map(|()| tokio::runtime::Builder::new_current_thread().build().unwrap());
    storage.close();
    let inside = one.enter();
    let mut asking = start_hit(&leases, &policy, &Key::from("a"), 1);
    assert!(poll(&mut asking).is_pending());
    drop(inside);
    drop(one);
    storage.open();
    two.block_on(async {
        asking.await.unwrap_err();
        for _ in 0..2 {
            assert!(hit(&leases, &policy, "a", 1).await.is_admitted());
        }
    });
    assert_eq!(requests.take("a"), [SLICE, 1, SLICE]);
}

/// The table has room for two keys. During an outage, a lease is more useful than the record of a
/// key that failed.
#[tokio::test]
async fn keys_that_failed_are_evicted_before_leases() {
    let (leases, storage, _) = recorded();
    let (leases, policy) = (leases.max_keys(2), policy("fixed-window 1000/minute"));
    assert!(hit(&leases, &policy, "a", 1).await.is_admitted());
    storage.set(Behavior::Fails);
    for key in ["b", "c", "d"] {
        fails(&leases, &policy, key, 1).await;
    }
    for _ in 1..SLICE {
        assert!(hit(&leases, &policy, "a", 1).await.is_admitted());
    }
    fails(&leases, &policy, "a", 1).await;
}

/// Returns the units that the storage has counted for a key.
async fn counted(storage: &impl Storage, policy: &Policy, key: &str) -> u32 {
    let peek = decide(storage, policy, key, Op::Peek, 1).await;
    peek.capacity() - peek.remaining()
}

/// The keys of the simulations.
const KEYS: [&str; 3] = ["a", "b", "c"];

/// One of several nodes over one memory storage. Its link to the storage can lose replies.
struct Node {
    leases: Leases,
    link: FakeStorage,
    waiting: Vec<WaitingHit>,
    /// For each key, the cost of all admitted hits and of all hits that failed.
    admitted: [u32; KEYS.len()],
    failed: [u32; KEYS.len()],
}

struct WaitingHit {
    key: usize,
    cost: u32,
    decided: StorageFuture<Decision>,
}

impl Node {
    fn new(memory: &MemoryStorage, slice: u32, clock: &ManualClock) -> Self {
        let link = FakeStorage::around(memory.clone());
        let leases = Leases::new(link.clone(), slice).clock(clock.clone());
        Self { leases, link, waiting: Vec::new(), admitted: [0; KEYS.len()], failed: [0; KEYS.len()] }
    }

    fn start(&mut self, policy: &Policy, key: usize, cost: u32) {
        let mut decided = start_hit(&self.leases, policy, &Key::from(KEYS[key]), cost);
        match poll(&mut decided) {
            Poll::Pending => self.waiting.push(WaitingHit { key, cost, decided }),
            Poll::Ready(decision) => self.note(key, cost, decision.ok().as_ref()),
        }
    }

    /// Counts a hit that was decided, or failed.
    fn note(&mut self, key: usize, cost: u32, decision: Option<&Decision>) {
        match decision {
            Some(decision) if decision.is_admitted() => self.admitted[key] += cost,
            Some(_) => {}
            None => self.failed[key] += cost,
        }
    }

    /// Collects the decisions that have arrived.
    fn collect(&mut self) {
        for mut hit in take(&mut self.waiting) {
            match poll(&mut hit.decided) {
                Poll::Pending => self.waiting.push(hit),
                Poll::Ready(decision) => self.note(hit.key, hit.cost, decision.ok().as_ref()),
            }
        }
    }

    /// Replies to all requests, until every hit has its decision.
    async fn reply(&mut self) {
        self.link.open();
        for _ in 0..1_000 {
            if self.waiting.is_empty() {
                return;
            }
            for _ in 0..10 {
                yield_now().await;
            }
            self.collect();
        }
        panic!("{} hits got no decision", self.waiting.len());
    }
}

/// Eight nodes share `10000/hour` in slices of 100. For the first six seconds of the window, the
/// storage counts every request but replies too late, and each request times out after 500 ms.
/// Every node gets a hit each 10 ms.
#[tokio::test]
async fn outage_of_six_seconds_costs_one_slice_per_node_plus_hits_in_doubt() {
    const NODES: u32 = 8;
    const SLICE: u32 = 100;
    let (memory, clock) = memory_with_manual_clock();
    let policy = policy("fixed-window 10000/hour");
    let mut nodes: Vec<_> = (0..NODES).map(|_| Node::new(&memory, SLICE, &clock)).collect();
    for node in &nodes {
        node.link.set(Behavior::FailsAfterCounting);
    }
    for timeouts in 1..=12 {
        for node in &nodes {
            node.link.close();
        }
        for _ in 0..50 {
            for node in &mut nodes {
                node.start(&policy, 0, 1);
            }
            clock.advance(Duration::from_millis(10));
        }
        for node in &mut nodes {
            node.reply().await;
            assert_eq!(node.failed[0], 50 * timeouts);
        }
    }
    // Of the twelve requests of each node, the first was for a slice and eleven were for one hit.
    let lost = counted(&memory, &policy, "a").await;
    assert_eq!(lost, NODES * (SLICE + 11));

    // The storage is fast again. Every node admits, and all other units can be spent.
    let mut admitted = 0;
    for node in &nodes {
        node.link.set(Behavior::Works);
        assert!(hit(&node.leases, &policy, "a", 1).await.is_admitted());
        admitted += 1;
    }
    for node in &nodes {
        while hit(&node.leases, &policy, "a", 1).await.is_admitted() {
            admitted += 1;
        }
    }
    assert_eq!(admitted, 10_000 - lost);
}

/// Links fail at random times, and hits of random costs wait together. The documented bound holds
/// for each key.
#[tokio::test]
async fn lost_units_stay_below_the_documented_bound_in_random_outages() {
    const SLICE: u32 = 100;
    let mut numbers = Numbers(2_026);
    let (mut lost_slices, mut lost_hits) = (0, 0);
    for _ in 0..40 {
        let (memory, clock) = memory_with_manual_clock();
        let policy = policy("fixed-window 1000000/day");
        let mut nodes: Vec<_> = (0..=numbers.below(5)).map(|_| Node::new(&memory, SLICE, &clock)).collect();
        // The number of outages of all nodes.
        let mut outages = 0;
        let mut is_down = vec![false; nodes.len()];
        for _ in 0..200 {
            let at = usize::try_from(numbers.below(nodes.len() as u64)).unwrap();
            let node = &mut nodes[at];
            if numbers.below(10) == 0 {
                is_down[at] = !is_down[at];
                outages += u32::from(is_down[at]);
                node.link.set(if is_down[at] { Behavior::FailsAfterCounting } else { Behavior::Works });
            }
            node.link.close();
            for _ in 0..numbers.one_of(&[1, 1, 2, 5, 30, 200]) {
                let key = usize::try_from(numbers.below(KEYS.len() as u64)).unwrap();
                node.start(&policy, key, numbers.one_of(&[1, 1, 1, 2, 5]));
            }
            node.reply().await;
        }
        for node in &nodes {
            node.link.set(Behavior::Works);
            node.leases.close().await.unwrap();
        }
        for (number, key) in KEYS.into_iter().enumerate() {
            let of_nodes = |of: fn(&Node) -> &[u32; KEYS.len()]| nodes.iter().map(|node| of(node)[number]).sum::<u32>();
            let (admitted, in_doubt) = (of_nodes(|node| &node.admitted), of_nodes(|node| &node.failed));
            let lost = counted(&memory, &policy, key).await - admitted;
            assert!(lost <= outages * SLICE + in_doubt, "{lost} lost, {outages} outages, {in_doubt} in doubt");
            lost_slices += u32::from(lost > SLICE);
            lost_hits += u32::from(in_doubt > 0);
        }
    }
    assert!(lost_slices > 50 && lost_hits > 100, "the links lost replies: {lost_slices}, {lost_hits}");
}

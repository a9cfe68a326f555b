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
async fn hits_are_sent_alone_from_a_lost_reply_to_the_next_success() {
    let (leases, _, requests) = recorded();
    let policy = policy("fixed-window 1000/minute");
    assert!(hit(&leases, &policy, "a", 1).await.is_admitted());
    requests.fail(&["a"]);
    for cost in [1, 3, 1] {
        fails(&leases, &policy, "a", cost).await;
    }
    assert_eq!(requests.take("a"), [1, 1 + SLICE, 3, 1]);
    // Other keys are leased.
    for _ in 0..2 {
        assert!(hit(&leases, &policy, "b", 1).await.is_admitted());
    }
    assert_eq!(requests.take("b"), [1, 1 + SLICE]);
    requests.fail(&[]);
    for cost in [2, 1] {
        assert!(hit(&leases, &policy, "a", cost).await.is_admitted());
    }
    assert_eq!(requests.take("a"), [2, 1 + SLICE]);
    requests.fail(&["a"]);
    assert!(hit(&leases, &policy, "a", SLICE).await.is_admitted(), "leased units are spent during the outage");
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
            2 | 3 | 5 => Some(Ok(request.policy.refusal(Timestamp::EPOCH, request.cost, 9).contended())),
            4 => Some(Err(StorageError::from_boxed("reply lost"))),
            _ => None,
        }
    });
    let leases = Leases::new(storage, SLICE).clock(clock);
    let policy = policy("fixed-window 1000/minute");
    assert!(hit(&leases, &policy, "a", 1).await.is_admitted());
    // The slice is contended, and then the hit alone.
    assert!(hit(&leases, &policy, "a", 1).await.is_contended());
    fails(&leases, &policy, "a", 1).await;
    assert!(hit(&leases, &policy, "a", 1).await.is_contended());
    for _ in 0..2 {
        assert!(hit(&leases, &policy, "a", 1).await.is_admitted());
    }
    assert_eq!(*units.lock().unwrap(), [1, 1 + SLICE, 1, 1, 1, 1, 1 + SLICE]);
}

/// The breaker hides the lost reply behind the fallback's decision.
#[tokio::test]
async fn decision_of_a_fallback_counts_as_a_lost_reply() {
    let (primary, clock) = FakeStorage::in_memory(Behavior::Works);
    let breaker = Breaker::new(primary.clone()).failures(1_000).fallback(memory_with_manual_clock().0, 1);
    let leases = Leases::new(breaker, SLICE).clock(clock);
    let policy = policy("fixed-window 1000/minute");
    let _ = hit(&leases, &policy, "a", 1).await;
    primary.set(Behavior::FailsAfterCounting);
    for _ in 0..5 {
        let decision = hit(&leases, &policy, "a", 1).await;
        assert!(decision.is_admitted() && decision.is_from_fallback());
    }
    assert_eq!(counted(primary.inner(), &policy, "a").await, 1 + (1 + SLICE) + 4);
}

/// The runtime stops while a request for a slice is in flight.
#[test]
fn cancelled_request_counts_as_a_lost_reply() {
    let (leases, storage, requests) = recorded();
    let policy = policy("fixed-window 1000/minute");
    let [one, two] = [(); 2].map(|()| tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap());
    assert!(one.block_on(hit(&leases, &policy, "a", 1)).is_admitted());
    storage.close();
    let inside = one.enter();
    let mut asking = start_hit(&leases, &policy, &Key::from("a"), 1);
    assert!(poll(&mut asking).is_pending());
    drop(inside);
    one.block_on(yield_now());
    drop(one);
    storage.open();
    two.block_on(async {
        asking.await.unwrap_err();
        for _ in 0..2 {
            assert!(hit(&leases, &policy, "a", 1).await.is_admitted());
        }
    });
    assert_eq!(requests.take("a"), [1, 1 + SLICE, 1, 1 + SLICE]);
}

/// The rest of a lease may be lost with the refund, so no slice is taken before a hit succeeds.
#[tokio::test]
async fn failed_refund_counts_as_a_lost_reply() {
    let (leases, storage, requests) = recorded();
    let policy = policy("fixed-window 1000/minute");
    for _ in 0..2 {
        assert!(hit(&leases, &policy, "a", 1).await.is_admitted());
    }
    storage.set_changes(Behavior::Fails);
    for cost in [SLICE + 1, 1] {
        assert!(hit(&leases, &policy, "a", cost).await.is_admitted());
    }
    assert_eq!(requests.take("a"), [1, 1 + SLICE, SLICE + 1, 1 + SLICE]);
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
            clock.advance(Duration::from_millis(1));
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

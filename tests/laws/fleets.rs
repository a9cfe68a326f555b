//! Law 17: random fleets of processes with leases spend at most what the strategy promises.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use common::random::Numbers;
use common::{memory, policy};
use tokio::runtime::Builder;
use tower_ratelimit::storage::{Clock, Leases, ManualClock, StorageError, StorageFuture, StorageRequest};
use tower_ratelimit::{Decision, Key, MemoryStorage, Op, Policy, Storage};

/// Promises of the strategies: the most units that are admitted in a span of microseconds.
type Promise = fn(u64) -> u64;

/// The period of all limits, in microseconds.
const PERIOD: u64 = 2_000_000;

/// The time of a lease: a twentieth of the period.
const TTL: u64 = PERIOD / 20;

/// Windows of N units promise 2N in a period, and a moving window N. So many periods fit into a span.
fn periods(span: u64) -> u64 {
    span / PERIOD + 1
}

const FLEETS: [(&str, Promise); 8] = [
    ("fixed-window 200/2s", |span| (periods(span) + 1) * 200),
    ("fixed-window-aligned 200/2s", |span| (periods(span) + 1) * 200),
    ("moving-window 200/2s", |span| periods(span) * 200),
    ("sliding-window-counter 200/2s", |span| periods(span) * 400),
    ("sliding-window-counter-aligned 200/2s", |span| periods(span) * 400),
    ("token-bucket 200/2s", |span| 200 + (200 * span).div_ceil(PERIOD)),
    ("token-bucket 200/2s burst 500", |span| 500 + (200 * span).div_ceil(PERIOD)),
    ("token-bucket 400/2s burst 100; moving-window 200/2s", |span| {
        (100 + (400 * span).div_ceil(PERIOD)).min(periods(span) * 200)
    }),
];

/// The link of a process to the storage. It delays requests and replies, and loses some of them.
#[derive(Clone, Debug)]
struct Link {
    storage: MemoryStorage,
    numbers: Arc<std::sync::Mutex<Numbers>>,
    /// The number of losses in 100 messages.
    losses: u64,
    is_up: Arc<AtomicBool>,
}

impl Link {
    fn below(&self, limit: u64) -> u64 {
        self.numbers.lock().unwrap().below(limit)
    }

    async fn pass(&self) {
        // The task is polled once per step of the fleet.
        for _ in 0..self.below(4) {
            tokio::task::yield_now().await;
        }
    }

    fn call<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T, StorageError>> + Send + 'static,
    ) -> StorageFuture<T> {
        let link = self.clone();
        StorageFuture::new(async move {
            let lost = || link.below(100) < link.losses || !link.is_up.load(Ordering::SeqCst);
            link.pass().await;
            if lost() {
                return Err(StorageError::from_boxed("the request was lost"));
            }
            let result = work.await;
            link.pass().await;
            if lost() { Err(StorageError::from_boxed("the reply was lost")) } else { result }
        })
    }
}

impl Storage for Link {
    fn decide(&self, request: StorageRequest<'_>) -> StorageFuture<Decision> {
        let (storage, policy, key) = (self.storage.clone(), request.policy.clone(), request.key.clone());
        let (op, cost) = (request.op, request.cost);
        self.call(async move { storage.decide(StorageRequest::new(&policy, &key, op, cost)).await })
    }

    fn clear(&self, policy: &Policy, key: &Key) -> StorageFuture<()> {
        self.storage.clear(policy, key)
    }

    fn settle(&self, policy: &Policy, key: &Key, decision: &Decision, actual: u32) -> StorageFuture<()> {
        let (storage, policy, key, decision) = (self.storage.clone(), policy.clone(), key.clone(), decision.clone());
        self.call(async move { storage.settle(&policy, &key, &decision, actual).await })
    }
}

/// A process of the fleet. Its clock differs from that of the storage.
struct Process {
    leases: Leases,
    clock: ManualClock,
    is_up: Arc<AtomicBool>,
    waiting: Vec<StorageFuture<Decision>>,
}

impl Process {
    fn start(link: &Link, numbers: &mut Numbers, slice: u32) -> Self {
        let clock = ManualClock::new(link_time(link).minus(numbers.below(7_200_000_000)));
        let is_up = Arc::new(AtomicBool::new(true));
        let link = Link { is_up: Arc::clone(&is_up), ..link.clone() };
        Self { leases: Leases::new(link, slice).clock(clock.clone()), clock, is_up, waiting: Vec::new() }
    }
}

fn link_time(_: &Link) -> tower_ratelimit::Timestamp {
    ManualClock::default().now()
}

/// A spent unit: its time in microseconds, and how many were spent.
type Spent = (u64, u32);

/// Runs a fleet for some periods. Returns what its processes have spent.
async fn run(text: &str, numbers: &mut Numbers) -> Vec<Spent> {
    let clock = ManualClock::default();
    let (policy, key, start) = (policy(text), Key::global(), clock.now());
    let losses = numbers.one_of(&[0, 0, 2, 20]);
    let link = Link {
        storage: memory(clock.clone()),
        numbers: Arc::new(std::sync::Mutex::new(Numbers(numbers.below(u64::MAX) + 1))),
        losses,
        is_up: Arc::new(AtomicBool::new(true)),
    };
    let slice = numbers.one_of(&[3, 20, 1_000]);
    let mut processes: Vec<_> = (0..=numbers.below(6)).map(|_| Process::start(&link, numbers, slice)).collect();
    let mut spent: Vec<Spent> = Vec::new();
    // The hits per step, and the mean time of a step.
    let (load, step) = (numbers.one_of(&[1, 3, 10]), numbers.one_of(&[2_000, 10_000, 40_000]));
    for _ in 0..numbers.one_of(&[100, 300]) {
        let passed = numbers.below(2 * step) + if numbers.below(40) == 0 { TTL * numbers.below(40) } else { 0 };
        clock.advance(Duration::from_micros(passed));
        for process in &processes {
            process.clock.advance(Duration::from_micros(passed));
        }
        for process in &mut processes {
            // A stopped process does nothing in this step, and its clock goes on.
            if numbers.below(8) == 0 {
                continue;
            }
            for _ in 0..numbers.below(load + 1) {
                let cost = numbers.one_of(&[1, 1, 1, 2, 5]);
                let request = StorageRequest::new(&policy, &key, Op::Hit, cost);
                if process.leases.try_admit(request, None) {
                    spent.push((clock.now().since(start), cost));
                } else {
                    process.waiting.push(process.leases.decide(request));
                }
            }
            process.waiting.retain_mut(|hit| match Pin::new(hit).poll(&mut Context::from_waker(Waker::noop())) {
                Poll::Pending => true,
                Poll::Ready(decision) => {
                    // The storage has decided the hits of a request at the time that it reports.
                    if let Ok(decision) = decision
                        && decision.is_admitted()
                    {
                        spent.push((decision.at().since(start), decision.cost()));
                    }
                    false
                }
            });
            match numbers.below(300) {
                // A crash. The replacement starts without leases.
                0 => {
                    process.is_up.store(false, Ordering::SeqCst);
                    *process = Process::start(&link, numbers, slice);
                }
                1 => {
                    let _ = process.leases.close().await;
                    *process = Process::start(&link, numbers, slice);
                }
                _ => {}
            }
        }
        tokio::time::advance(Duration::from_micros(passed)).await;
    }
    spent.sort_unstable();
    spent
}

/// Checks each span that begins and ends with a spent unit.
fn assert_promised(text: &str, seed: u64, spent: &[Spent], promise: Promise) {
    for (first, (begin, _)) in spent.iter().enumerate() {
        let mut sum = 0;
        for (end, units) in &spent[first..] {
            sum += u64::from(*units);
            let span = end - begin;
            assert!(
                sum <= promise(span + TTL),
                "law 17: the fleet {seed} of {text} spent {sum} units in {span} us, but {} are promised",
                promise(span + TTL)
            );
        }
    }
}

/// Runs fleets with seeds from this range. `FLEETS` sets their number.
#[test]
fn fleets_spend_at_most_what_the_strategy_promises_for_the_time_of_a_lease_more() {
    let count: u64 = std::env::var("FLEETS").map_or(160, |count| count.parse().expect("FLEETS is a number"));
    let runtime = Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    let mut leased = 0_u64;
    for seed in 0..count {
        let (text, promise) = FLEETS[usize::try_from(seed).unwrap() % FLEETS.len()];
        let mut numbers = Numbers((seed + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let spent = runtime.block_on(run(text, &mut numbers));
        leased += spent.len() as u64;
        assert_promised(text, seed, &spent, promise);
    }
    assert!(leased > count * 50, "{leased} hits were admitted");
}

//! A process of a fleet: its hits, charges and settlements.

use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};
use tokio::task::unconstrained;
use tower_ratelimit::storage::{
    AnyStorage, Breaker, Leases, ManualClock, RefusalCache, StorageError, StorageFuture, StorageRequest,
};
use tower_ratelimit::{Decision, MemoryStorage, Op, Policy, Storage, Timestamp};

use super::link::Link;
use super::spending::{Spending, Spent};
use super::{Fleet, LATE, ROUND, Rhythm, key};
use crate::random::Numbers;

/// A process of the fleet. Its clock differs from that of the storage. It has one runtime or two,
/// which run only in its steps.
pub(super) struct Process {
    leases: Leases,
    clock: ManualClock,
    link: Link,
    waiting: Vec<WaitingHit>,
    charge: Option<PendingCharge>,
    refunds: Vec<StorageFuture<()>>,
    /// Admitted hits that may be settled, and the positions of their units.
    held: Vec<(Decision, usize)>,
    /// `true` if a breaker decides by another storage what the link has lost.
    has_fallback: bool,
    /// In a fleet with a rhythm, `true` if this process spends its leases late.
    is_late: bool,
    /// The steps for which the process is stopped.
    stopped: u64,
    /// The steps without new hits after a refusal.
    rests: u64,
    runtimes: Vec<Timed>,
}

/// A runtime with a paused clock, and the time by which that clock is behind.
struct Timed(Runtime, Duration);

struct WaitingHit {
    key: usize,
    since: Timestamp,
    decided: StorageFuture<Decision>,
}

/// A charge that is in flight. Its process has no other one, so that the units that the storage
/// charges belong to it.
struct PendingCharge {
    key: usize,
    since: Timestamp,
    units: u64,
    /// Returns `true` if the lease and the storage of the fleet have paid for it.
    charged: StorageFuture<bool>,
}

impl Process {
    pub(super) fn start(fleet: &Fleet, link: Link, now: Timestamp, numbers: &mut Numbers) -> Self {
        let clock = ManualClock::new(now.minus(numbers.below(7_200_000_000)));
        let fallback = MemoryStorage::builder().clock(clock.clone()).build().unwrap();
        let wrapper = numbers.below(4);
        let storage = match wrapper {
            // Its circuit never opens, because the time to the next probe is random.
            0 => AnyStorage::new(Breaker::new(link.clone()).failures(u32::MAX).fallback(fallback, 1)),
            1 => AnyStorage::new(RefusalCache::new(link.clone()).clock(clock.clone())),
            _ => AnyStorage::new(link.clone()),
        };
        let mut leases = Leases::new(storage, fleet.slice).clock(clock.clone());
        if let Some(ttl) = fleet.ttl {
            leases = leases.ttl(Duration::from_micros(ttl));
        }
        if fleet.keys > 1 {
            leases = leases.max_keys(1);
        }
        let runtime = |_| Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        let runtimes = (0..=numbers.below(2)).map(|it| Timed(runtime(it), Duration::ZERO)).collect();
        Self {
            leases,
            clock,
            link,
            waiting: Vec::new(),
            charge: None,
            refunds: Vec::new(),
            held: Vec::new(),
            has_fallback: wrapper == 0,
            is_late: numbers.below(2) == 0,
            stopped: 0,
            rests: 0,
            runtimes,
        }
    }

    pub(super) fn leases(&self) -> &Leases {
        &self.leases
    }

    /// Lets time pass, also while the process is stopped.
    pub(super) fn pass(&mut self, time: Duration) {
        self.clock.advance(time);
        self.runtimes.iter_mut().for_each(|Timed(_, behind)| *behind += time);
    }

    /// Runs the tasks of the process, and then new hits.
    pub(super) fn step(
        &mut self,
        fleet: &Fleet,
        step: u64,
        now: Timestamp,
        spending: &mut Spending,
        numbers: &mut Numbers,
    ) {
        if self.stopped > 0 {
            self.stopped -= 1;
            return;
        }
        if fleet.is_troubled {
            match numbers.below(100) {
                0 => self.link.toggle(),
                1 => self.stopped = 1 + numbers.below(30),
                // A caller that leaves.
                2..6 => drop(self.waiting.pop()),
                _ => {}
            }
        }
        self.rests = self.rests.saturating_sub(1);
        let load = self.load(fleet, step % ROUND);
        for mut runtime in std::mem::take(&mut self.runtimes) {
            let behind = std::mem::take(&mut runtime.1);
            runtime.0.block_on(async {
                tokio::time::advance(behind).await;
                self.collect(now, spending);
                for _ in 0..numbers.below(load + 1) {
                    self.hit(fleet, now, spending, numbers);
                }
                if fleet.is_troubled && numbers.below(8) == 0 {
                    self.settle(fleet, now, spending, numbers);
                }
                self.collect(now, spending);
            });
            self.runtimes.push(runtime);
        }
    }

    /// Returns the most hits in a step of a round.
    fn load(&self, fleet: &Fleet, step: u64) -> u64 {
        let are_late = step >= LATE;
        match fleet.rhythm {
            _ if self.rests > 0 => 0,
            Rhythm::None => fleet.load,
            // Takes a slice.
            _ if self.is_late && !are_late => 2 * u64::from(step < 6),
            Rhythm::Early if self.is_late != are_late => 0,
            Rhythm::Late if !are_late => 0,
            Rhythm::Early | Rhythm::Late => fleet.load,
        }
    }

    fn hit(&mut self, fleet: &Fleet, now: Timestamp, spending: &mut Spending, numbers: &mut Numbers) {
        let (number, cost) = (usize::from(numbers.below(fleet.keys) > 0), numbers.one_of(&[1, 1, 1, 2, 5]));
        let key = key(number);
        let request = StorageRequest::new(&fleet.policy, &key, Op::Hit, cost);
        if numbers.below(2) == 0 && self.leases.try_admit(request, None) {
            spending.spent.push(Spent { at: now, key: number, units: u64::from(cost) });
        } else {
            let decided = self.leases.decide(request);
            self.waiting.push(WaitingHit { key: number, since: now, decided });
        }
    }

    /// Collects the decisions on hits and the results of charges that have arrived.
    fn collect(&mut self, now: Timestamp, spending: &mut Spending) {
        let spent = &mut spending.spent;
        let (held, rests) = (&mut self.held, &mut self.rests);
        self.waiting.retain_mut(|hit| {
            let Poll::Ready(decision) = poll(&mut hit.decided) else { return true };
            let Ok(decision) = decision else { return false };
            if decision.is_refused() {
                *rests = 8;
            } else if !decision.is_from_fallback() {
                // The storage has decided the hit while it waited, or it was spent from a lease.
                let at = if decision.at() >= hit.since { decision.at() } else { now };
                spent.push(Spent { at, key: hit.key, units: u64::from(decision.cost()) });
                held.push((decision, spent.len() - 1));
            }
            false
        });
        self.refunds.retain_mut(|refund| poll(refund).is_pending());
        if let Some(charge) = &mut self.charge
            && let Poll::Ready(result) = poll(&mut charge.charged)
        {
            // The lease has paid the other units.
            let units = charge.units - self.link.take_charged();
            if result.unwrap_or(false) {
                spent.push(Spent { at: charge.since, key: charge.key, units });
            }
            self.charge = None;
        }
    }

    /// Charges units, or settles a hit.
    fn settle(&mut self, fleet: &Fleet, now: Timestamp, spending: &mut Spending, numbers: &mut Numbers) {
        let more = numbers.one_of(&[1, 3, 40]);
        if self.held.is_empty() || numbers.below(4) == 0 {
            let number = usize::from(numbers.below(fleet.keys) > 0);
            if self.charge.is_none() {
                let key = key(number);
                let charged = self.leases.decide(StorageRequest::new(&fleet.policy, &key, Op::Charge, more));
                let charged = StorageFuture::new(async move { Ok(!charged.await?.is_from_fallback()) });
                self.begin_charge(now, number, more, charged);
            }
            return;
        }
        let recent = numbers.below(self.held.len().min(20) as u64);
        let (hit, position) = self.held.swap_remove(self.held.len() - 1 - usize::try_from(recent).unwrap());
        let number = spending.spent[position].key;
        if numbers.below(2) == 0 {
            if self.charge.is_none() && !self.has_fallback {
                let settled = self.leases.settle(&fleet.policy, &key(number), &hit, hit.cost() + more);
                let charged = StorageFuture::new(async move { settled.await.map(|()| true) });
                self.begin_charge(now, number, more, charged);
            }
        } else if !refills(&fleet.policy) {
            let actual = u32::try_from(numbers.below(u64::from(hit.cost()))).unwrap();
            spending.spent[position].units = u64::from(actual);
            self.refunds.push(self.leases.settle(&fleet.policy, &key(number), &hit, actual));
        }
    }

    fn begin_charge(&mut self, now: Timestamp, key: usize, units: u32, charged: StorageFuture<bool>) {
        self.link.take_charged();
        self.charge = Some(PendingCharge { key, since: now, units: u64::from(units), charged });
    }

    /// Refunds all leases. Those of a second runtime are refunded when they end.
    pub(super) fn close(&mut self) {
        // A refund that was lost is one more fault of the fleet.
        drop(self.runtimes[0].0.block_on(self.leases.close()));
    }
}

/// Returns `true` if a bucket may have refilled units of a hit that are refunded. It gives them
/// back once more if another hit was refunded meanwhile, also without leases.
fn refills(policy: &Policy) -> bool {
    policy.limits().iter().any(|limit| limit.strategy().name() == "token-bucket")
}

/// Polls a future without tokio's budget, because a step polls more than a task may.
fn poll<T>(future: &mut StorageFuture<T>) -> Poll<Result<T, StorageError>> {
    pin!(unconstrained(future)).poll(&mut Context::from_waker(Waker::noop()))
}

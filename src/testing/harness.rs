//! The storage under test, its clock, and the runtime that sends requests one at a time.

use std::thread;
use std::time::{Duration, Instant};

use tokio::runtime::{Builder, Runtime};

use crate::decision::Decision;
use crate::error::BoxError;
use crate::key::Key;
use crate::policy::{Op, Policy};
use crate::quota::Quota;
use crate::storage::{
    AnyStorage, Claim, Granted, ManualClock, SlotStore, Storage, StorageErrorKind, StorageFuture, StorageRequest,
};

/// The maximum number of attempts at a request that is contended each time, although no other
/// request is in flight.
const MAX_ATTEMPTS: u32 = 100;

/// The longest time until a storage on a server is connected. On a busy machine, the first attempts
/// can take longer than the storage allows.
const CONNECTED_WITHIN: Duration = Duration::from_secs(30);

/// The maximum number of rounds of a check in real time. A round is repeated if the machine paused
/// for so long that it could not find a fault.
pub(super) const ROUNDS: u32 = 20;

/// Creates an empty storage that uses the given clock.
pub(super) type MakeStorage<'a> = dyn Fn(ManualClock) -> AnyStorage + 'a;

/// The inputs of the laws that are checked without concurrency.
pub(super) struct Inputs<'a> {
    /// Policies with one limit each.
    pub(super) policies: Vec<Policy>,
    /// A policy with several limits, or none if the storage does not support it.
    pub(super) several: Vec<Policy>,
    /// The number of random scripts of laws 8 and 10. Some laws do less if it is small, because the
    /// storage is slow.
    pub(super) scripts: u32,
    pub(super) runtime: &'a Runtime,
    pub(super) make: &'a MakeStorage<'a>,
}

/// A law that is checked without concurrency: its name, and the function that checks it on an empty
/// storage.
pub(super) type Law = (&'static str, fn(&Inputs<'_>, &Harness<'_>));

impl Inputs<'_> {
    pub(super) fn check(&self, (name, law): Law) {
        law(self, &Harness::new(name, self.runtime, self.make));
    }

    /// Returns the policies with one limit and with several.
    pub(super) fn all_policies(&self) -> impl Iterator<Item = &Policy> {
        self.policies.iter().chain(&self.several)
    }
}

/// A storage under test with its clock. Messages of failed checks start with the law.
pub(super) struct Harness<'a> {
    law: &'static str,
    runtime: &'a Runtime,
    pub(super) storage: AnyStorage,
    pub(super) clock: ManualClock,
}

/// Returns a runtime with time and I/O on the current thread.
pub(super) fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().expect("a runtime")
}

/// Returns a runtime with several threads.
pub(super) fn runtime_of_threads() -> Runtime {
    Builder::new_multi_thread().worker_threads(4).enable_all().build().expect("a runtime")
}

/// Returns a policy of one unit that the storage supports, for example "1/day" if `per` is "/day".
pub(super) fn of_one_unit(storage: &AnyStorage, per: &str) -> Option<Policy> {
    let policies = ["fixed-window", "token-bucket", "moving-window"].map(|name| parsed(&format!("{name} 1{per}")));
    policies.into_iter().find(|policy| storage.validate(policy).is_ok())
}

/// Repeats a change while it is contended, up to `attempts` times.
pub(super) async fn changed(attempts: u32, change: impl Fn() -> StorageFuture<()>) -> Result<(), String> {
    for _ in 0..attempts {
        match change().await {
            Err(error) if error.kind() == StorageErrorKind::Contended => {}
            changed => return changed.map_err(failed),
        }
    }
    Err(format!("the change was contended {attempts} times"))
}

fn is_not_connected(kind: StorageErrorKind) -> bool {
    matches!(kind, StorageErrorKind::Unreachable | StorageErrorKind::Timeout)
}

/// Waits until a storage is connected to all of its servers. If that takes too long, the next law reports
/// the error.
pub(super) fn wait_until_connected(runtime: &Runtime, storage: &AnyStorage) {
    let (policy, key, started) = (Policy::from(Quota::per_second(1)), Key::from("connected"), Instant::now());
    let connected = || {
        runtime.block_on(async {
            let _ = storage.decide(StorageRequest::new(&policy, &key, Op::Peek, 1)).await?;
            storage.check().await
        })
    };
    while started.elapsed() < CONNECTED_WITHIN && connected().is_err_and(|error| is_not_connected(error.kind())) {
        thread::sleep(Duration::from_millis(20));
    }
}

impl<'a> Harness<'a> {
    /// Creates a harness with an empty storage. The messages of failed checks start with `law`.
    pub(super) fn new(law: &'static str, runtime: &'a Runtime, make: &MakeStorage<'_>) -> Self {
        let clock = ManualClock::default();
        let storage = {
            let _guard = runtime.enter();
            make(clock.clone())
        };
        wait_until_connected(runtime, &storage);
        Self { law, runtime, storage, clock }
    }

    /// Decides a request. Repeats it while it is contended.
    pub(super) fn try_decide(&self, policy: &Policy, key: &Key, op: Op, cost: u32) -> Result<Decision, String> {
        for _ in 0..MAX_ATTEMPTS {
            let decided = self.storage.decide(StorageRequest::new(policy, key, op, cost));
            let decision = self.runtime.block_on(decided).map_err(failed)?;
            if !decision.is_contended() {
                return Ok(decision);
            }
        }
        Err(format!("the request was contended {MAX_ATTEMPTS} times, without concurrent requests"))
    }

    /// Decides on several keys together. Repeats the request while it is contended.
    pub(super) fn try_decide_all(&self, members: &[StorageRequest<'_>]) -> Result<Vec<Decision>, String> {
        for _ in 0..MAX_ATTEMPTS {
            let decisions = self.runtime.block_on(self.storage.decide_all(members)).map_err(failed)?;
            if decisions.len() != members.len() {
                return Err(format!("{} members have {} decisions", members.len(), decisions.len()));
            }
            if !decisions.iter().any(Decision::is_contended) {
                return Ok(decisions);
            }
        }
        Err(format!("the request was contended {MAX_ATTEMPTS} times, without concurrent requests"))
    }

    pub(super) fn try_settle(
        &self,
        policy: &Policy,
        key: &Key,
        decision: &Decision,
        actual: u32,
    ) -> Result<(), String> {
        self.runtime.block_on(changed(MAX_ATTEMPTS, || self.storage.settle(policy, key, decision, actual)))
    }

    pub(super) fn try_clear(&self, policy: &Policy, key: &Key) -> Result<(), String> {
        self.runtime.block_on(changed(MAX_ATTEMPTS, || self.storage.clear(policy, key)))
    }

    /// Claims slots in `store`. Repeats the claim while it is contended.
    pub(super) fn claim(&self, store: &dyn SlotStore, policy: &Policy, key: &Key, claim: Claim) -> Granted {
        let claims = (0..MAX_ATTEMPTS).map(|_| self.runtime.block_on(store.claim(policy, key, claim)));
        let mut claims = claims
            .skip_while(|claimed| claimed.as_ref().is_err_and(|error| error.kind() == StorageErrorKind::Contended));
        let claimed = claims.next().ok_or_else(|| "every claim was contended".to_owned());
        self.unwrap_or_panic(claimed.and_then(|claimed| claimed.map_err(failed)))
    }

    pub(super) fn hit(&self, policy: &Policy, key: &Key, cost: u32) -> Decision {
        self.unwrap_or_panic(self.try_decide(policy, key, Op::Hit, cost))
    }

    pub(super) fn peek(&self, policy: &Policy, key: &Key, cost: u32) -> Decision {
        self.unwrap_or_panic(self.try_decide(policy, key, Op::Peek, cost))
    }

    pub(super) fn charge(&self, policy: &Policy, key: &Key, units: u32) -> Decision {
        self.unwrap_or_panic(self.try_decide(policy, key, Op::Charge, units))
    }

    pub(super) fn clear(&self, policy: &Policy, key: &Key) {
        self.unwrap_or_panic(self.try_clear(policy, key));
    }

    /// Parses policies. Leaves out those that the storage does not support.
    pub(super) fn supported<'t>(&self, texts: impl IntoIterator<Item = &'t str>) -> Vec<Policy> {
        let policies = texts.into_iter().map(parsed);
        policies.filter(|policy| self.supports(policy)).collect()
    }

    pub(super) fn supports(&self, policy: &Policy) -> bool {
        self.storage.validate(policy).is_ok()
    }

    /// Returns the units that remain for a hit of one unit.
    pub(super) fn remaining(&self, policy: &Policy, key: &Key) -> u32 {
        self.peek(policy, key, 1).remaining()
    }

    /// Waits for a future of the storage.
    pub(super) fn block_on<T>(&self, future: impl Future<Output = T>) -> T {
        self.runtime.block_on(future)
    }

    /// Removes all keys. Returns `false` if the storage does not support it.
    pub(super) fn clear_all(&self) -> bool {
        match self.runtime.block_on(self.storage.clear_all()) {
            Err(error) if error.kind() == StorageErrorKind::Unsupported => false,
            cleared => self.unwrap_or_panic(cleared.map(|_| true).map_err(failed)),
        }
    }

    /// Sends hits until one is refused. Returns the refusal. Panics after 10,000 admitted hits.
    pub(super) fn exhaust(&self, policy: &Policy, key: &Key) -> Decision {
        for _ in 0..10_000 {
            let decision = self.hit(policy, key, 1);
            if decision.is_refused() {
                return decision;
            }
        }
        panic!("law {}: {policy} has admitted 10,000 hits", self.law)
    }

    pub(super) fn check(&self, holds: bool, message: impl FnOnce() -> String) {
        assert!(holds, "law {}: {}", self.law, message());
    }

    pub(super) fn unwrap_or_panic<T>(&self, answer: Result<T, String>) -> T {
        answer.unwrap_or_else(|error| panic!("law {}: {error}", self.law))
    }
}

pub(super) fn failed(error: impl Into<BoxError>) -> String {
    format!("the storage failed: {:#}", error.into())
}

pub(super) fn parsed(text: &str) -> Policy {
    text.parse().expect("a policy")
}

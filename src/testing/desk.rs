//! A storage under test with its clock, asked by one caller.

use tokio::runtime::{Builder, Runtime};

use crate::storage::{ManualClock, StorageRequest};
use crate::{BoxError, Decision, Key, Op, Policy, Storage};

/// How often somebody who is alone comes back before that is no excuse any more.
const PATIENCE: u32 = 100;

pub(super) struct Desk<'a, St> {
    law: &'static str,
    runtime: &'a Runtime,
    pub(super) storage: St,
    pub(super) clock: ManualClock,
}

/// Time and I/O, on this thread.
pub(super) fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().expect("a runtime")
}

/// The same on several threads, so that what is not done in one step comes apart.
pub(super) fn runtime_of_threads() -> Runtime {
    Builder::new_multi_thread().worker_threads(4).enable_all().build().expect("a runtime")
}

impl<'a, St: Storage> Desk<'a, St> {
    /// An empty storage, for this law.
    pub(super) fn new(law: &'static str, runtime: &'a Runtime, make: impl Fn(ManualClock) -> St) -> Self {
        let clock = ManualClock::default();
        let _inside = runtime.enter();
        Self { law, runtime, storage: make(clock.clone()), clock }
    }

    /// A storage may refuse as contended now and then; who is alone gets an answer when it comes back.
    pub(super) fn try_decide(&self, policy: &Policy, key: &Key, op: Op, cost: u32) -> Result<Decision, String> {
        for _ in 0..PATIENCE {
            let ask = self.storage.decide(StorageRequest::new(policy, key, op, cost));
            let decision = self.runtime.block_on(ask).map_err(failed)?;
            if !decision.is_contended() {
                return Ok(decision);
            }
        }
        Err(format!("told {PATIENCE} times that others are faster, and nobody else is there"))
    }

    pub(super) fn try_refund(&self, policy: &Policy, key: &Key, decision: &Decision) -> Result<(), String> {
        self.runtime.block_on(self.storage.refund(policy, key, decision)).map_err(failed)
    }

    pub(super) fn try_clear(&self, policy: &Policy, key: &Key) -> Result<(), String> {
        self.runtime.block_on(self.storage.clear(policy, key)).map_err(failed)
    }

    pub(super) fn hit(&self, policy: &Policy, key: &Key, cost: u32) -> Decision {
        self.sure(self.try_decide(policy, key, Op::Hit, cost))
    }

    pub(super) fn peek(&self, policy: &Policy, key: &Key, cost: u32) -> Decision {
        self.sure(self.try_decide(policy, key, Op::Peek, cost))
    }

    pub(super) fn refund(&self, policy: &Policy, key: &Key, decision: &Decision) {
        self.sure(self.try_refund(policy, key, decision));
    }

    pub(super) fn clear(&self, policy: &Policy, key: &Key) {
        self.sure(self.try_clear(policy, key));
    }

    /// Spends all there is; the refusal that ends it.
    pub(super) fn exhaust(&self, policy: &Policy, key: &Key) -> Decision {
        for _ in 0..10_000 {
            let decision = self.hit(policy, key, 1);
            if decision.is_refused() {
                return decision;
            }
        }
        panic!("law {}: {policy} has admitted ten thousand hits", self.law)
    }

    pub(super) fn must(&self, holds: bool, else_told: impl FnOnce() -> String) {
        assert!(holds, "law {}: {}", self.law, else_told());
    }

    fn sure<T>(&self, answer: Result<T, String>) -> T {
        answer.unwrap_or_else(|error| panic!("law {}: {error}", self.law))
    }
}

pub(super) fn failed<E: Into<BoxError>>(error: E) -> String {
    format!("the storage failed: {}", error.into())
}

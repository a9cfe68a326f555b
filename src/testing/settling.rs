//! Laws of hits whose cost is settled on a storage.

use std::time::Duration;

use tokio::runtime::Runtime;
use tokio::task::JoinSet;

use super::concurrency::{TASKS, answer, answer_of_cost};
use super::harness::{failed, runtime_of_threads};
use super::model::Model;
use super::sequential::Inputs;
use crate::key::Key;
use crate::policy::{Op, Policy};
use crate::storage::{AnyStorage, Clock, Storage};

/// Checks law 9 of [`StorageLaws`](super::StorageLaws) for settled hits: concurrent hits spend
/// exactly the sum of their actual costs.
///
/// Several tasks hit one key at the same time, and settle each hit with a varying actual cost. The
/// policy must have at least 1,000 units. Units must not refill during the check, so use a storage
/// with a [`ManualClock`](crate::storage::ManualClock), or a policy with a long period.
///
/// # Panics
///
/// Panics if a hit is refused, if the spent units are not the sum of the actual costs, or if the
/// storage fails. Also panics if it is called inside a tokio runtime, because it starts its own.
pub fn concurrent_settlements_are_exact(policy: &Policy, storage: &(impl Storage + Clone)) {
    settlements_are_exact(&runtime_of_threads(), policy, &AnyStorage::new(storage.clone()));
}

pub(super) fn settlements_are_exact(runtime: &Runtime, policy: &Policy, storage: &AnyStorage) {
    let key = Key::from("concurrent settlements");
    let (missing, spent) = runtime.block_on(async {
        let before = answer(storage, policy, &key, Op::Peek).await.remaining();
        let mut all = JoinSet::new();
        for task in 0..TASKS {
            let (storage, policy, key) = (storage.clone(), policy.clone(), key.clone());
            all.spawn(async move {
                let mut sum = 0;
                for round in 0..20 {
                    let hit = answer_of_cost(&storage, &policy, &key, Op::Hit, 3).await;
                    assert!(hit.is_admitted(), "law 9: the test policy {policy} has too few units");
                    let actual = (5 * round + 3 * task) % 8;
                    let settled = storage.settle(&policy, &key, &hit, actual).await.map_err(failed);
                    settled.unwrap_or_else(|error| panic!("law 9: {error}"));
                    sum += actual;
                }
                sum
            });
        }
        let spent: u32 = all.join_all().await.into_iter().sum();
        (before - answer(storage, policy, &key, Op::Peek).await.remaining(), spent)
    });
    assert!(missing == spent, "law 9: hits of {policy} have cost {spent} units, but {missing} units are missing");
}

impl Inputs<'_> {
    pub(super) fn settled_hits_have_their_actual_cost(&self) {
        let harness = self.harness("of settling: a settled hit has its actual cost");
        let mut model = Model::default();
        for policy in self.policies.iter().chain(self.several) {
            let key = Key::from(policy.identity());
            let capacity = policy.limits()[0].capacity();
            for (cost, actual) in [(2, 1), (2, 3), (1, capacity + 2), (3, 0)] {
                harness.clear(policy, &key);
                model.clear(policy, &key);
                harness.clock.advance(Duration::from_millis(1));
                let now = harness.clock.now();
                let _ = model.decide(policy, &key, Op::Hit, cost, now);
                let hit = harness.hit(policy, &key, cost);
                harness.settle(policy, &key, &hit, actual);
                model.settle(policy, &key, &hit, actual, now);
                let (got, expected) = (harness.peek(policy, &key, 1), model.decide(policy, &key, Op::Peek, 1, now));
                harness.check(got == expected, || {
                    format!("a hit of {cost} on {policy} was settled as {actual}: {got:?} instead of {expected:?}")
                });
            }
            let now = harness.clock.now();
            let (charged, expected) =
                (harness.charge(policy, &key, capacity), model.decide(policy, &key, Op::Charge, capacity, now));
            harness.check(charged == expected, || format!("{charged:?} instead of {expected:?} after a charge"));
            let (peek, expected) = (harness.peek(policy, &key, 1), model.decide(policy, &key, Op::Peek, 1, now));
            harness.check(peek == expected, || format!("{peek:?} instead of {expected:?} after a charge"));
        }
    }
}

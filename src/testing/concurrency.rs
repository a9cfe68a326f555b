//! Laws of concurrent requests.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::Poll;

use tokio::runtime::Runtime;
use tokio::task::{JoinSet, yield_now};

use super::harness::{changed, failed, of_one_unit, runtime, runtime_of_threads};
use crate::decision::Decision;
use crate::key::Key;
use crate::policy::{Op, Policy};
use crate::storage::{AnyStorage, Storage, StorageRequest};

const TASKS: u32 = 8;

/// The maximum number of attempts at a request that is contended each time.
pub(super) const MAX_ATTEMPTS: u32 = 100_000;

/// Checks law 9 of [`StorageLaws`](super::StorageLaws): concurrent hits on one key admit exactly as
/// many units as the policy has.
///
/// The hits come from several tasks, first on one thread and then on several. Units must not refill
/// during the check, so use a storage with a [`ManualClock`](crate::storage::ManualClock), or a
/// policy with a long period. A [contended](Decision::is_contended) hit is repeated, up to 100,000
/// times.
///
/// # Panics
///
/// Panics if more or fewer units are admitted, if a hit stays contended, or if the storage fails.
/// Also panics if it is called inside a tokio runtime, because it starts its own.
pub fn concurrent_hits_are_exact(policy: &Policy, storage: &(impl Storage + Clone)) {
    for (runtime, threads) in [(runtime(), "one thread"), (runtime_of_threads(), "several threads")] {
        hits_are_exact(&runtime, policy, &[AnyStorage::new(storage.clone())], threads);
    }
}

/// Checks law 9 with several handles to the same states.
pub(super) fn hits_are_exact(runtime: &Runtime, policy: &Policy, handles: &[AnyStorage], threads: &str) {
    let key = Key::from(format!("concurrent hits, {threads}"));
    let (room, admitted) = runtime.block_on(async {
        let room = answer(&handles[0], policy, &key, Op::Peek).await.remaining();
        let mut all = JoinSet::new();
        for (task, storage) in (0..TASKS).zip(handles.iter().cycle()) {
            all.spawn(hit_until_refused(storage.clone(), policy.clone(), key.clone(), room, task % 2 == 0));
        }
        (room, all.join_all().await.into_iter().sum::<u32>())
    });
    assert!(
        admitted == room,
        "law 9: {policy} has {room} units, but {TASKS} tasks on {threads} were admitted {admitted} times"
    );
}

/// Checks law 9 for settled hits: concurrent hits spend exactly the sum of their actual costs. Each
/// hit is of `cost` units, and is settled with the `actual` cost of its task and round. The handles have
/// the same states.
pub(super) fn settlements_are_exact(
    runtime: &Runtime,
    policy: &Policy,
    handles: &[AnyStorage],
    cost: u32,
    actual: fn(task: u32, round: u32) -> u32,
) {
    const ROUNDS: u32 = 20;
    let key = Key::from("concurrent settlements");
    let missing = runtime.block_on(async {
        let before = answer(&handles[0], policy, &key, Op::Peek).await.remaining();
        let mut all = JoinSet::new();
        for (task, storage) in (0..TASKS).zip(handles.iter().cycle()) {
            let (storage, policy, key) = (storage.clone(), policy.clone(), key.clone());
            all.spawn(async move {
                for round in 0..ROUNDS {
                    let hit = answer_of_cost(&storage, &policy, &key, Op::Hit, cost).await;
                    assert!(hit.is_admitted(), "law 9: the test policy {policy} has too few units");
                    let settle = || storage.settle(&policy, &key, &hit, actual(task, round));
                    changed(MAX_ATTEMPTS, settle).await.unwrap_or_else(|error| panic!("law 9: {error}"));
                }
            });
        }
        all.join_all().await;
        before - answer(&handles[0], policy, &key, Op::Peek).await.remaining()
    });
    let spent: u32 = (0..TASKS).flat_map(|task| (0..ROUNDS).map(move |round| actual(task, round))).sum();
    assert!(missing == spent, "law 9: hits of {policy} have cost {spent} units, but {missing} units are missing");
}

/// Checks the law of cancellation: a request that is dropped before it completes does not affect
/// the decisions of other keys.
pub(super) fn cancellation_is_isolated(runtime: &Runtime, policy: &Policy, storage: &AnyStorage) {
    const HITS: u32 = 30;
    runtime.block_on(async {
        let mut all = JoinSet::new();
        for task in 0..TASKS {
            let (storage, policy, key) = (storage.clone(), policy.clone(), Key::from(format!("task {task}")));
            all.spawn(async move {
                let room = answer(&storage, &policy, &key, Op::Peek).await.remaining();
                for hits in 1..=HITS {
                    cancel(storage.decide(StorageRequest::new(&policy, &Key::from("cancelled"), Op::Hit, room))).await;
                    let hit = answer(&storage, &policy, &key, Op::Hit).await;
                    let expected = (room.saturating_sub(hits), 1, true);
                    let actual = (hit.remaining(), hit.cost(), hit.is_admitted());
                    assert!(
                        actual == expected,
                        "law of cancellation: (remaining, cost, admitted) of {policy} is {actual:?}, but {expected:?} is expected"
                    );
                }
            });
        }
        all.join_all().await;
    });
}

/// Checks law 10 with many keys. If a storage identifies keys by a hash of 32 bits, some of these
/// keys collide.
pub(super) fn many_keys_are_independent(runtime: &Runtime, scripts: u32, storage: &AnyStorage) {
    let keys = u64::from(scripts.min(256)).pow(4) / 25_600;
    let each = u32::try_from(keys).unwrap_or(0) / TASKS;
    let Some(policy) = of_one_unit(storage, "/day") else { return };
    runtime.block_on(async {
        let mut all = JoinSet::new();
        for task in 0..TASKS {
            let (storage, policy) = (storage.clone(), policy.clone());
            all.spawn(async move {
                for number in 0..each {
                    let key = Key::from(format!("client {task}-{number}"));
                    let hit = storage.decide(StorageRequest::new(&policy, &key, Op::Hit, 1)).await.map_err(failed);
                    let hit = hit.unwrap_or_else(|error| panic!("law 10: {error}"));
                    let is_first = hit.is_admitted() || hit.is_storage_full() || hit.is_contended();
                    assert!(is_first, "law 10: keys are independent: {key} has never been hit, but its unit is spent");
                }
            });
        }
        all.join_all().await;
    });
}

/// Polls a future once and drops it.
async fn cancel(mut decided: impl Future + Unpin) {
    poll_fn(|cx| {
        let _ = Pin::new(&mut decided).poll(cx);
        Poll::Ready(())
    })
    .await;
    drop(decided);
    yield_now().await;
}

/// Sends hits until one is refused. Returns the number of admitted hits.
async fn hit_until_refused(storage: AnyStorage, policy: Policy, key: Key, room: u32, use_try_admit: bool) -> u32 {
    let mut admitted = 0;
    // The bound ends the loop on a storage that admits everything.
    while admitted <= room {
        let use_try_admit = use_try_admit && storage.try_admit(StorageRequest::new(&policy, &key, Op::Hit, 1), None);
        if !use_try_admit && answer(&storage, &policy, &key, Op::Hit).await.is_refused() {
            break;
        }
        admitted += 1;
    }
    admitted
}

/// Returns the decision on one unit. Repeats the request while it is contended.
pub(super) async fn answer(storage: &AnyStorage, policy: &Policy, key: &Key, op: Op) -> Decision {
    answer_of_cost(storage, policy, key, op, 1).await
}

/// Returns the decision on `cost` units. Repeats the request while it is contended.
async fn answer_of_cost(storage: &AnyStorage, policy: &Policy, key: &Key, op: Op, cost: u32) -> Decision {
    for _ in 0..MAX_ATTEMPTS {
        let decided = storage.decide(StorageRequest::new(policy, key, op, cost)).await.map_err(failed);
        let decision = decided.unwrap_or_else(|error| panic!("law 9: {error}"));
        if !decision.is_contended() {
            return decision;
        }
    }
    panic!("law 9: the request was contended {MAX_ATTEMPTS} times")
}

//! Law 9: many at once.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::Poll;

use tokio::runtime::Runtime;
use tokio::task::{JoinSet, yield_now};

use super::desk::{failed, runtime, runtime_of_threads};
use crate::storage::StorageRequest;
use crate::{Decision, Key, Op, Policy, Storage};

const TASKS: u32 = 8;

/// Who is told that others were faster comes back, this often.
const PATIENCE: u32 = 100_000;

/// Law 9: hits on one key, from several tasks on one thread and then on several, admit exactly what the policy has room for.
/// Whoever is told that it is [contended](Decision::is_contended) comes back. The storage's time must stand still, or the policy's
/// period be long.
///
/// # Panics
///
/// When more or fewer are admitted, or the storage fails.
pub fn concurrent_hits_are_exact<St: Storage>(policy: &Policy, storage: &St) {
    for (runtime, threads) in [(runtime(), "one thread"), (runtime_of_threads(), "several threads")] {
        hits_are_exact(&runtime, policy, std::slice::from_ref(storage), threads);
    }
}

/// The same by several handles, in turn.
pub(super) fn hits_are_exact<St: Storage>(runtime: &Runtime, policy: &Policy, handles: &[St], threads: &str) {
    let key = Key::from(format!("everybody at once, on {threads}"));
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
        "law 9: {policy} has room for {room}, and {TASKS} tasks on {threads} were admitted {admitted} times"
    );
}

/// Law 9, of refunds: what is given back while others hit is neither lost nor given twice.
///
/// The policy has to have room for 500 hits, and the storage's time is as in [`concurrent_hits_are_exact`].
///
/// # Panics
///
/// When what remains is not what was there, less the hits that were not given back; or the storage fails.
pub fn concurrent_refunds_are_exact<St: Storage>(policy: &Policy, storage: &St) {
    refunds_are_exact(&runtime_of_threads(), policy, storage);
}

pub(super) fn refunds_are_exact<St: Storage>(runtime: &Runtime, policy: &Policy, storage: &St) {
    const KEPT: u32 = 15;
    let key = Key::from("some change their mind");
    let missing = runtime.block_on(async {
        let before = answer(storage, policy, &key, Op::Peek).await.remaining();
        let mut all = JoinSet::new();
        for _ in 0..TASKS {
            let (storage, policy, key) = (storage.clone(), policy.clone(), key.clone());
            all.spawn(async move {
                for round in 0..2 * KEPT {
                    let hit = answer(&storage, &policy, &key, Op::Hit).await;
                    assert!(hit.is_admitted(), "law 9: {policy} has no room for what this law needs");
                    if round % 2 == 1 {
                        let done = storage.refund(&policy, &key, &hit).await.map_err(failed);
                        done.unwrap_or_else(|error| panic!("law 9: {error}"));
                    }
                }
            });
        }
        all.join_all().await;
        before - answer(storage, policy, &key, Op::Peek).await.remaining()
    });
    let kept = TASKS * KEPT;
    assert!(missing == kept, "law 9: {kept} hits of {policy} were not given back, and {missing} units are missing");
}

/// Law of leaving: each of those who stay has a key to itself, and is told of that and of nothing else, whoever else has left before
/// the answer was there.
pub(super) fn leaving_disturbs_nobody<St: Storage>(runtime: &Runtime, policy: &Policy, storage: &St) {
    const HITS: u32 = 30;
    runtime.block_on(async {
        let mut all = JoinSet::new();
        for task in 0..TASKS {
            let (storage, policy, key) = (storage.clone(), policy.clone(), Key::from(format!("stays {task}")));
            all.spawn(async move {
                let room = answer(&storage, &policy, &key, Op::Peek).await.remaining();
                for hits in 1..=HITS {
                    leave(storage.decide(StorageRequest::new(&policy, &Key::from("leaves"), Op::Hit, room))).await;
                    let hit = answer(&storage, &policy, &key, Op::Hit).await;
                    let expected = (room.saturating_sub(hits), 1, true);
                    let told = (hit.remaining(), hit.cost(), hit.is_admitted());
                    assert!(
                        told == expected,
                        "law of leaving: {policy} has {expected:?} for a key, which is told {told:?}"
                    );
                }
            });
        }
        while let Some(ended) = all.join_next().await {
            ended.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()));
        }
    });
}

/// Asks, and does not wait for the answer.
async fn leave(mut decided: impl Future + Unpin) {
    poll_fn(|cx| {
        let _ = Pin::new(&mut decided).poll(cx);
        Poll::Ready(())
    })
    .await;
    drop(decided);
    yield_now().await;
}

/// How many hits are admitted, if it goes on until one is refused.
async fn hit_until_refused<St: Storage>(storage: St, policy: Policy, key: Key, room: u32, at_once: bool) -> u32 {
    let mut admitted = 0;
    // One that admits without end is found out, too.
    while admitted <= room {
        let at_once = at_once && storage.try_admit(StorageRequest::new(&policy, &key, Op::Hit, 1), None);
        if !at_once && answer(&storage, &policy, &key, Op::Hit).await.is_refused() {
            break;
        }
        admitted += 1;
    }
    admitted
}

/// What one unit is answered in the end.
async fn answer<St: Storage>(storage: &St, policy: &Policy, key: &Key, op: Op) -> Decision {
    for _ in 0..PATIENCE {
        let decided = storage.decide(StorageRequest::new(policy, key, op, 1)).await.map_err(failed);
        let decision = decided.unwrap_or_else(|error| panic!("law 9: {error}"));
        if !decision.is_contended() {
            return decision;
        }
    }
    panic!("law 9: told {PATIENCE} times that others are faster")
}

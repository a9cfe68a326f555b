//! Law 9: many at once.

use tokio::runtime::Runtime;
use tokio::task::JoinSet;

use super::desk::{failed, runtime};
use crate::storage::Ask;
use crate::{Decision, Key, Op, Policy, Storage};

const THREADS: u32 = 4;
const TASKS: u32 = 8;

/// Who is told that others were faster comes back, this often.
const PATIENCE: u32 = 100_000;

/// Law 9: hits on one key, from several tasks and then from several threads with a runtime each, admit exactly what the policy
/// has room for. Whoever is told that it is [contended](Decision::is_contended) comes back. The storage's time must stand still, or
/// the policy's period be long.
///
/// # Panics
///
/// When more or fewer are admitted, or the storage fails.
pub fn concurrent_hits_are_exact<St: Storage>(policy: &Policy, storage: &St) {
    hits_are_exact(policy, std::slice::from_ref(storage));
}

/// The same by several handles, in turn.
pub(super) fn hits_are_exact<St: Storage>(policy: &Policy, handles: &[St]) {
    let runtime = runtime();
    for (threads, tasks) in [(1, TASKS), (THREADS, 2)] {
        let key = Key::from(format!("everybody at once, {threads} threads").as_str());
        let room = runtime.block_on(answer(&handles[0], policy, &key, Op::Peek)).remaining();
        let hit = |runtime: &Runtime| runtime.block_on(hit_in_tasks(handles, policy, &key, tasks, room));
        let admitted: u32 = on_threads(threads, hit).into_iter().sum();
        assert!(
            admitted == room,
            "law 9: {policy} has room for {room}, and {admitted} were admitted of {threads} threads with {tasks} tasks each"
        );
    }
}

/// Law 9, of refunds: what is given back while others hit is neither lost nor given twice.
///
/// The policy has to have more room than 500 hits take, and time as in [`concurrent_hits_are_exact`].
///
/// # Panics
///
/// When what remains is not what was there, less the hits that were not given back; or the storage fails.
pub fn concurrent_refunds_are_exact<St: Storage>(policy: &Policy, storage: &St) {
    const ROUNDS: u32 = 30;
    let (runtime, key) = (runtime(), Key::from("some change their mind"));
    let peek = || runtime.block_on(answer(storage, policy, &key, Op::Peek)).remaining();
    let before = peek();
    let kept: u32 = on_threads(THREADS, |runtime: &Runtime| {
        runtime.block_on(async {
            let mut kept = 0;
            for round in 0..ROUNDS {
                let hit = answer(storage, policy, &key, Op::Hit).await;
                assert!(hit.is_admitted(), "law 9: {policy} has no room for what this law needs");
                if round % 2 == 0 {
                    kept += 1;
                } else {
                    let done = storage.refund(policy, &key, &hit).await.map_err(failed);
                    done.unwrap_or_else(|error| panic!("law 9: {error}"));
                }
            }
            kept
        })
    })
    .into_iter()
    .sum();
    let missing = before - peek();
    assert!(missing == kept, "law 9: {kept} hits of {policy} were not given back, and {missing} units are missing");
}

/// How many hits are admitted in all, if each task goes on until it is refused.
async fn hit_in_tasks<St: Storage>(handles: &[St], policy: &Policy, key: &Key, tasks: u32, room: u32) -> u32 {
    let mut all = JoinSet::new();
    for (task, storage) in (0..tasks).zip(handles.iter().cycle()) {
        let (storage, policy, key) = (storage.clone(), policy.clone(), key.clone());
        all.spawn(async move {
            let mut admitted = 0;
            // One that admits without end is found out, too.
            while admitted <= room {
                let at_once = task % 2 == 0 && storage.hit_at_once(Ask::new(&policy, &key, Op::Hit, 1), None);
                if !at_once && answer(&storage, &policy, &key, Op::Hit).await.is_refused() {
                    break;
                }
                admitted += 1;
            }
            admitted
        });
    }
    all.join_all().await.into_iter().sum()
}

/// What one unit is answered in the end.
async fn answer<St: Storage>(storage: &St, policy: &Policy, key: &Key, op: Op) -> Decision {
    for _ in 0..PATIENCE {
        let decided = storage.decide(Ask::new(policy, key, op, 1)).await.map_err(failed);
        let decision = decided.unwrap_or_else(|error| panic!("law 9: {error}"));
        if !decision.is_contended() {
            return decision;
        }
    }
    panic!("law 9: told {PATIENCE} times that others are faster")
}

/// Each on a thread and a runtime of its own.
fn on_threads<T: Send>(threads: u32, work: impl Fn(&Runtime) -> T + Sync) -> Vec<T> {
    let work = &work;
    std::thread::scope(|scope| {
        let all: Vec<_> = (0..threads).map(|_| scope.spawn(move || work(&runtime()))).collect();
        all.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    })
}

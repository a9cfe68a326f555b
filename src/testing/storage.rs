use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::{Just, Strategy as Generator};
use proptest::{prop_assert, prop_assert_eq, prop_oneof};

use super::Model;
use super::laws::run;
use crate::storage::{Ask, Clock, ManualClock, Shown};
use crate::{Decision, Key, Op, Policy, Storage};

#[derive(Clone, Copy, Debug)]
enum Action {
    Decide(Op, u32),
    HitAtOnce(u32),
    RefundLast,
    Clear,
}

/// Law 8: a storage with this clock decides like the model, on random scripts of hits, peeks, refunds and clears over
/// several keys and policies, which do not mix.
///
/// `make` is called for each script, and returns an empty storage that reads the clock it is given.
///
/// # Panics
///
/// When they differ; the message has the smallest script.
pub fn decides_like_the_model<St: Storage>(policies: &[Policy], make: impl Fn(ManualClock) -> St) {
    let runtime = runtime();
    let actions = prop_oneof![
        12 => (1..=3_u32).prop_map(|cost| Action::Decide(Op::Hit, cost)),
        6 => (0..=3_u32).prop_map(Action::HitAtOnce),
        3 => (0..=3_u32).prop_map(|cost| Action::Decide(Op::Peek, cost)),
        2 => Just(Action::RefundLast),
        1 => Just(Action::Clear),
    ];
    let waits = prop_oneof![3 => Just(0_u64), 3 => 1..=1_000_000_u64, 1 => 1..=100_000_000_u64];
    let steps = vec((waits, 0..policies.len(), 0..3_u64, actions), 1..80);
    run("8: it decides like the model", &steps, |steps| {
        let clock = ManualClock::default();
        let storage = make(clock.clone());
        let mut model = Model::default();
        let mut last: Option<(&Policy, Key, Decision)> = None;
        for (wait, policy, key, action) in steps {
            clock.advance(Duration::from_micros(wait));
            let (policy, key, now) = (&policies[policy], Key::from(key), clock.now());
            match action {
                Action::Decide(op, cost) => {
                    let decided = runtime.block_on(storage.decide(Ask::new(policy, &key, op, cost)));
                    let decision = decided.map_err(failed)?;
                    prop_assert_eq!(&decision, &model.decide(policy, &key, op, cost, now));
                    last = Some((policy, key, decision));
                }
                Action::HitAtOnce(cost) => {
                    let ask = Ask::new(policy, &key, Op::Hit, cost);
                    let mut shown = Shown::default();
                    let admitted = storage.hit_at_once(ask, Some(&mut shown));
                    let expected = model.decide(policy, &key, Op::Hit, cost, now);
                    if admitted {
                        prop_assert!(expected.is_admitted() && expected.delay().is_zero());
                        prop_assert_eq!(shown, Shown { at: expected.at(), limit: *expected.shown() });
                    } else {
                        // It has taken nothing.
                        prop_assert_eq!(&runtime.block_on(storage.decide(ask)).map_err(failed)?, &expected);
                    }
                    last = Some((policy, key, expected));
                }
                Action::RefundLast => {
                    if let Some((policy, key, decision)) = last.take() {
                        runtime.block_on(storage.refund(policy, &key, &decision)).map_err(failed)?;
                        model.refund(policy, &key, &decision, now);
                    }
                }
                Action::Clear => {
                    runtime.block_on(storage.clear(policy, &key)).map_err(failed)?;
                    model.clear(policy, &key);
                }
            }
        }
        Ok(())
    });
}

/// Law 9: hits from several threads on one key admit exactly what the policy has room for. The storage's time must stand
/// still, or the policy's period be long.
///
/// # Panics
///
/// When more or fewer are admitted.
pub fn concurrent_hits_are_exact<St: Storage>(policy: &Policy, storage: &St) {
    const THREADS: u32 = 4;
    let key = Key::from("everybody at once");
    let fresh = runtime().block_on(storage.decide(Ask::new(policy, &key, Op::Peek, 1)));
    let room = fresh.ok().map(|decision| decision.remaining()).expect("a storage that answers");
    let hit_all = |thread: u32| {
        let (runtime, key) = (runtime(), &key);
        let ask = || Ask::new(policy, key, Op::Hit, 1);
        let decide = || runtime.block_on(storage.decide(ask())).is_ok_and(|decision| decision.is_admitted());
        let hit = || thread.is_multiple_of(2) && storage.hit_at_once(ask(), None) || decide();
        let admitted = (0..room).filter(|_| hit()).count();
        u32::try_from(admitted).unwrap_or(u32::MAX)
    };
    let hit_all = &hit_all;
    let admitted: u32 = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS).map(|thread| scope.spawn(move || hit_all(thread))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a thread that hits")).sum()
    });
    assert_eq!(admitted, room, "law 9: {THREADS} threads hit {room} times each");
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime")
}

fn failed<E: Into<crate::BoxError>>(error: E) -> proptest::test_runner::TestCaseError {
    proptest::test_runner::TestCaseError::fail(format!("the storage failed: {}", error.into()))
}

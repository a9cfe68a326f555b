//! The law of several keys: all hits spend, or none does.

use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::{Just, Strategy as Generator};
use proptest::prop_oneof;
use proptest::test_runner::{Config, TestCaseError};
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

use super::concurrency::{MAX_ATTEMPTS, answer};
use super::harness::{Harness, Inputs, MakeStorage, failed, parsed, runtime};
use super::model::Compared;
use super::strategy::run_some;
use crate::decision::Decision;
use crate::key::Key;
use crate::policy::{Op, Policy};
use crate::storage::{AnyStorage, ManualClock, Storage, StorageRequest};

const LAW: &str = "15: all hits of several keys spend, or none does";

/// Policies of a user, a tenant and all clients: each strategy, several limits, and limits that refusals
/// change.
const MEMBERS: [[&str; 3]; 4] = [
    ["fixed-window 3 per 7 seconds", "token-bucket 4 per 7 seconds burst 5", "moving-window 5 per 9 seconds"],
    [
        "elastic-window 3 per 7 seconds",
        "6 per 7 seconds; fixed-window-aligned 9/minute",
        "leaky-bucket 9/second queue 9",
    ],
    [
        "fixed-window 2/second; lockout 4 refusals/5 seconds for 3 seconds x2 up to 6 seconds forget 4 seconds",
        "lockout 5 per 7 seconds for 4 seconds",
        "sliding-window-counter-aligned 7 per 7 seconds",
    ],
    [
        "moving-window 4/second; moving-window 6 per 3 seconds",
        "elastic-window 5 per 2 seconds",
        "token-bucket 7/second keep 2",
    ],
];

/// The names of the members.
const NAMES: [&str; 3] = ["user", "tenant", "all"];

fn members_of(policies: [&str; 3]) -> [Policy; 3] {
    let mut names = NAMES.into_iter();
    policies.map(|text| parsed(text).with_name(names.next().unwrap_or_default()))
}

/// Returns the members of a hit of a user: the user, the tenant, and all clients.
fn requests<'a>(policies: &'a [Policy; 3], keys: &'a [Key; 3], costs: [u32; 3]) -> [StorageRequest<'a>; 3] {
    [0, 1, 2].map(|at| StorageRequest::new(&policies[at], &keys[at], Op::Hit, costs[at]))
}

/// Returns the keys of a user, its tenant, and all clients. If the storage needs it, they are
/// within one key.
fn keys_of(storage: &AnyStorage, user: u64) -> [Key; 3] {
    let (outer, keys) = (Key::from("outer"), [Key::from(user), Key::from(user % 2), Key::global()]);
    [0, 1, 2].map(|at| {
        let key: &Key = &keys[at];
        if storage.needs_outer_key(Some(NAMES[at])) { key.within(&outer) } else { key.clone() }
    })
}

fn is_supported(storage: &AnyStorage, policies: &[Policy]) -> bool {
    storage.validate_members(policies).is_ok() && policies.iter().all(|policy| storage.validate(policy).is_ok())
}

/// Checks the law on a storage that supports several keys, without the model: each member's peek is
/// the same before and after a refusal, unless the member refuses.
pub(super) fn all_spend_or_none(_: &Inputs<'_>, harness: &Harness<'_>) {
    for policies in MEMBERS.map(members_of).iter().filter(|policies| is_supported(&harness.storage, *policies)) {
        let mut refused = 0;
        for (step, cost) in (0..120_u64).zip([1, 1, 2, 1, 0, 3].into_iter().cycle()) {
            harness.clock.advance(Duration::from_millis(step % 7 * 31));
            let (keys, costs) = (keys_of(&harness.storage, step % 3), [cost, 1, cost]);
            let peeks = || [0, 1, 2].map(|at| harness.peek(&policies[at], &keys[at], costs[at]));
            let before = peeks();
            let decided = harness.unwrap_or_panic(harness.try_decide_all(&requests(policies, &keys, costs)));
            let is_admitted = decided.iter().all(Decision::is_admitted);
            harness.check(is_admitted == before.iter().all(Decision::is_admitted), || {
                format!("the peeks are {before:?}, but the decisions {decided:?}")
            });
            let after = peeks().map(|peek| peek.remaining());
            for at in 0..3 {
                let (was, name, is_spent) = (before[at].remaining(), NAMES[at], decided[at].has_spent());
                harness.check(is_spent == (is_admitted && costs[at] > 0), || {
                    format!("the hit is admitted: {is_admitted}, but the decision on {name:?} is {:?}", decided[at])
                });
                let expected = if is_admitted { was.saturating_sub(costs[at]) } else { was };
                // A refusal may lock its own member.
                harness.check(after[at] == expected || !is_admitted && before[at].is_refused(), || {
                    format!("{name:?} had {was} units before {decided:?}, and has {} after it", after[at])
                });
            }
            refused += u32::from(!is_admitted);
        }
        harness.check(refused > 0, || "no hit of the script is refused".to_owned());
    }
}

/// Checks that members with the same states are an error.
pub(super) fn equal_members_are_an_error(_: &Inputs<'_>, harness: &Harness<'_>) {
    let (policy, key) = (parsed("fixed-window 9/day").with_name("twice"), Key::from("k"));
    if !is_supported(&harness.storage, std::slice::from_ref(&policy)) {
        return;
    }
    let request = StorageRequest::new(&policy, &key, Op::Hit, 1);
    let decided = harness.try_decide_all(&[request, request]);
    harness.check(decided.as_ref().is_err_and(|error| error.contains("\"twice\"")), || {
        format!("two members with the same states need an error that names their policy, but the result is {decided:?}")
    });
    let left = harness.remaining(&policy, &key);
    harness.check(left == 9, || format!("two members with the same states have spent: {left} of 9 units are left"));
}

/// Checks the law with concurrent hits of four users of two tenants: each member has spent exactly
/// the units of the admitted hits, and the members together admit as many as the tightest one.
pub(super) fn concurrent_members_are_exact(runtime: &Runtime, handles: &[AnyStorage], threads: &str) {
    let policies = members_of(["fixed-window 60/day", "fixed-window 90/day", "fixed-window 150/day"]);
    if !is_supported(&handles[0], &policies) {
        return;
    }
    runtime.block_on(async {
        let mut all = JoinSet::new();
        for (task, storage) in (0..8).zip(handles.iter().cycle()) {
            all.spawn(hit_until_refused(storage.clone(), policies.clone(), task % 4));
        }
        let mut admitted: u32 = all.join_all().await.into_iter().sum();
        // A storage that refunds may have refused hits whose units were free again soon after.
        for user in 0..4 {
            admitted += hit_until_refused(handles[0].clone(), policies.clone(), user).await;
        }
        let mut spent = [0; 3];
        for (at, keys) in [(0, 4), (1, 2), (2, 1)] {
            for number in 0..keys {
                let peek = answer(&handles[0], &policies[at], &keys_of(&handles[0], number)[at], Op::Peek).await;
                spent[at] += peek.capacity() - peek.remaining();
            }
        }
        assert!(
            admitted == 150 && spent == [150; 3],
            "law {LAW}: 150 hits fit, but concurrent tasks on {threads} were admitted {admitted} times, \
             and users, tenants and all have spent {spent:?} units"
        );
    });
}

async fn hit_until_refused(storage: AnyStorage, policies: [Policy; 3], user: u64) -> u32 {
    let keys = keys_of(&storage, user);
    for admitted in 0..=150 {
        if all_answers(&storage, &requests(&policies, &keys, [1; 3])).await.iter().any(Decision::is_refused) {
            return admitted;
        }
    }
    151
}

/// Returns the decisions on several keys. Repeats the request while it is contended.
async fn all_answers(storage: &AnyStorage, members: &[StorageRequest<'_>]) -> Vec<Decision> {
    for _ in 0..MAX_ATTEMPTS {
        let decided = storage.decide_all(members).await.map_err(failed);
        let decisions = decided.unwrap_or_else(|error| panic!("law {LAW}: {error}"));
        if !decisions.iter().any(Decision::is_contended) {
            return decisions;
        }
    }
    panic!("law {LAW}: the request was contended {MAX_ATTEMPTS} times")
}

/// Checks law 15 of [`StorageLaws`](super::StorageLaws) on random scripts: a storage decides on
/// several keys like the [`Model`](super::Model), to each number and each wait.
///
/// A storage that decides on one key after the other, as [`InOrder`](crate::storage::InOrder) does,
/// refunds instead, and can differ in its numbers. `make` and the number of random scripts are as
/// in [`decides_like_the_model`](super::decides_like_the_model).
///
/// # Panics
///
/// Panics if a decision differs, if the storage fails, or if it does not support several keys. The
/// message contains the smallest script that fails. Also panics if it is called inside a tokio
/// runtime, because it starts its own.
pub fn members_decide_like_the_model<St: Storage>(make: impl Fn(ManualClock) -> St) {
    members_like_the_model(Config::default().cases, &|clock| AnyStorage::new(make(clock)));
}

#[derive(Clone, Copy, Debug)]
enum Action {
    Hit([u32; 3]),
    HitOne(usize, u32),
    /// Settles the last hit of several keys at this cost.
    Settle(u32),
    Clear(usize),
}

fn members_like_the_model(scripts: u32, make: &MakeStorage<'_>) {
    let runtime = runtime();
    let all = MEMBERS.map(members_of);
    let costs = || (0..=3_u32, 0..=3_u32, 1..=3_u32).prop_map(<[u32; 3]>::from);
    let actions = prop_oneof![
        12 => costs().prop_map(Action::Hit),
        3 => (0..3_usize, 1..=3_u32).prop_map(|(at, cost)| Action::HitOne(at, cost)),
        3 => (0..=4_u32).prop_map(Action::Settle),
        1 => (0..3_usize).prop_map(Action::Clear),
    ];
    let waits = prop_oneof![3 => Just(0_u64), 3 => 1..=1_000_000_u64, 1 => 1..=10_000_000_u64];
    let scripts_of = (0..all.len(), vec((waits, 0..4_u64, actions), 1..60));
    run_some(LAW, scripts, &scripts_of, |(policies, steps)| {
        let (policies, harness) = (&all[policies], Harness::new(LAW, &runtime, make));
        let mut compared = Compared::new(&harness);
        let mut last = None;
        for (wait, user, action) in steps {
            harness.clock.advance(Duration::from_micros(wait));
            let keys = keys_of(&harness.storage, user);
            let done = match action {
                Action::Hit(costs) => compared.decide_all(&requests(policies, &keys, costs)).map(|decisions| {
                    last = Some((keys, decisions));
                }),
                Action::HitOne(at, cost) => compared.decide(&policies[at], &keys[at], Op::Hit, cost).map(drop),
                Action::Settle(actual) => last.take().map_or(Ok(()), |(keys, decisions)| {
                    (0..3).try_for_each(|at| compared.settle(&policies[at], &keys[at], &decisions[at], actual))
                }),
                Action::Clear(at) => compared.clear(&policies[at], &keys[at]),
            };
            done.map_err(TestCaseError::fail)?;
        }
        Ok(())
    });
}

//! Long logs: of several chunks, with entries that are given back.

use std::time::Duration;

use common::policy;
use common::random::Numbers;
use common::servers::Server;
use common::servers::storage::{RUNTIME, on};
use tower_ratelimit::storage::{Ask, Clock, ManualClock, RedisStorage};
use tower_ratelimit::strategy::State;
use tower_ratelimit::{Decision, Key, Op, Policy, Storage};

fn hit(storage: &RedisStorage, policy: &Policy) -> Decision {
    RUNTIME.block_on(storage.decide(Ask::new(policy, &Key::from("k"), Op::Hit, 1))).unwrap()
}

fn refund(storage: &RedisStorage, policy: &Policy, hit: &Decision) {
    RUNTIME.block_on(storage.refund(policy, &Key::from("k"), hit)).unwrap();
}

/// Chunks are emptied, joined and reused; the ring grows where it begins, in its middle and while entries leave it.
#[test]
fn long_logs_decide_like_the_functions() {
    let server = Server::start(&[]);
    let mut numbers = Numbers(0x0dd_ba11_5eed_1234);
    for amount in [700, 1_500, 4_000_000_000_u32] {
        let policy = policy(&format!("moving-window {amount}/hour"));
        let (clock, key) = (ManualClock::default(), Key::from("k"));
        let storage = on(&server, clock.clone());
        let (mut states, mut hits) = (vec![State::Fresh], Vec::new());
        RUNTIME.block_on(async {
            for step in 0..6_000 {
                // Fills the log, then lets old entries leave, with a clock that is put back once in a while.
                let wait = if step < 1_400 { 1 + numbers.below(1_000) } else { numbers.below(6_000_000) };
                clock.advance(Duration::from_micros(wait));
                if numbers.below(400) == 0 {
                    clock.set(clock.now().minus(numbers.below(9_000_000)));
                }
                let now = clock.now();
                if step > 700 && numbers.below(3) == 0 && !hits.is_empty() {
                    let latest = u64::try_from(hits.len()).unwrap();
                    let at = usize::try_from(numbers.below(latest)).unwrap();
                    let hit: Decision = hits.swap_remove(at);
                    storage.refund(&policy, &key, &hit).await.unwrap();
                    policy.refund(&mut states, now, &hit);
                    continue;
                }
                let cost = u32::try_from(1 + if numbers.below(9) == 0 { numbers.below(40) } else { 0 }).unwrap();
                let op = if numbers.below(9) == 0 { Op::Peek } else { Op::Hit };
                let answer = storage.decide(Ask::new(&policy, &key, op, cost)).await.unwrap();
                assert_eq!(answer, policy.decide(&mut states, now, op, cost), "{policy}, step {step}");
                hits.extend((op == Op::Hit && answer.is_admitted()).then_some(answer));
            }
        });
    }
}

/// What is given back makes room: a log never has many more places than units.
#[test]
fn log_does_not_grow_by_hits_that_are_given_back() {
    let server = Server::start(&[]);
    let policy = policy("moving-window 2000/day").with_name("p");
    let clock = ManualClock::default();
    let storage = on(&server, clock.clone()).prefix("bounded");
    let next = || {
        clock.advance(Duration::from_millis(1));
        hit(&storage, &policy)
    };
    let mut hits: Vec<Decision> = (0..1_000).map(|_| next()).collect();
    let mut numbers = Numbers(0x5eed_0dd_ba11);
    for _ in 0..5_000 {
        hits.push(next());
        let at = usize::try_from(numbers.below(hits.len() as u64)).unwrap();
        refund(&storage, &policy, &hits.swap_remove(at));
    }
    let length = server.ask(&["STRLEN", "bounded:{p|t:k}:1.moving-window/86400000000"]).to_string();
    let entries = length.parse::<usize>().unwrap() / 9;
    assert!(entries <= 3_000, "{entries} places for 1,000 hits");
    assert_eq!(next().remaining(), 2_000 - 1_001);
}

/// Field defect: a refund rewrote all later entries, 50 milliseconds for ten thousand.
#[test]
fn refund_moves_a_bounded_part_of_the_log() {
    let server = Server::start(&[]);
    let policy = policy("moving-window 20000/day").with_name("p");
    let clock = ManualClock::default();
    let storage = on(&server, clock.clone()).prefix("part");
    let hits: Vec<Decision> = (0..6_000)
        .map(|_| {
            clock.advance(Duration::from_millis(1));
            hit(&storage, &policy)
        })
        .collect();
    for at in [1, 2, 700, 3_000, 5_998, 5_999, 0] {
        let before = ["getrange", "setrange"].map(|command| server.calls(command));
        refund(&storage, &policy, &hits[at]);
        let after = ["getrange", "setrange"].map(|command| server.calls(command));
        let calls = after[0] - before[0] + after[1] - before[1];
        assert!(calls < 40, "{calls} commands for entry {at}");
    }
}

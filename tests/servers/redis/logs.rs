//! Logs of several chunks, with refunds.

use std::time::Duration;

use common::policy;
use common::random::Numbers;
use common::servers::Server;
use common::servers::storage::{RUNTIME, on_prefix};
use tower_ratelimit::storage::{Clock, ManualClock, RedisStorage, StorageRequest};
use tower_ratelimit::strategy::State;
use tower_ratelimit::{Decision, Key, Op, Policy, Storage};

use super::decisions::{found, stored};

fn hit(storage: &RedisStorage, policy: &Policy) -> Decision {
    RUNTIME.block_on(storage.decide(StorageRequest::new(policy, &Key::from("k"), Op::Hit, 1))).unwrap()
}

fn refund(storage: &RedisStorage, policy: &Policy, hit: &Decision) {
    RUNTIME.block_on(storage.settle(policy, &Key::from("k"), hit, 0)).unwrap();
}

/// Covers logs that grow, entries that expire, chunks that are emptied and joined, and a clock that
/// goes back.
#[test]
fn long_logs_in_redis_decide_like_the_rust_strategy() {
    let server = Server::start(&[]);
    let mut numbers = Numbers(0x0dd_ba11_5eed_1234);
    for (amount, fill, steps, entries) in
        [(1_500, 1_400, 3_000, 500), (6_000, 5_000, 8_000, 2_000), (4_000_000_000_u32, 3_000, 5_000, 2_000)]
    {
        let policy = policy(&format!("moving-window {amount}/hour")).with_name("p");
        let (clock, key, prefix) = (ManualClock::default(), Key::from("k"), format!("long{amount}"));
        let storage = on_prefix(&server, &prefix, clock.clone());
        let (mut states, mut hits) = (vec![State::Fresh], Vec::new());
        let mut longest = 0;
        RUNTIME.block_on(async {
            for step in 0..steps {
                // Fills the log, then lets old entries expire.
                let wait = if step < fill { 1 + numbers.below(1_000) } else { numbers.below(2_000_000) };
                clock.advance(Duration::from_micros(wait));
                let back = match numbers.below(2_000) {
                    0 => numbers.below(1_800_000_000),
                    1..6 => numbers.below(9_000_000),
                    _ => 0,
                };
                clock.set(clock.now().minus(if step < fill { back / 20_000 } else { back }));
                let now = clock.now();
                // In every second thousand of steps, two thirds are refunds.
                let refunds = match step {
                    _ if step < fill => 1,
                    _ if step / 1_000 % 2 == 0 => 2,
                    _ => 10,
                };
                if numbers.below(15) < refunds && !hits.is_empty() {
                    let latest = numbers.one_of(&[hits.len(), hits.len().min(4_000), hits.len().min(300)]);
                    let at = hits.len() - 1 - usize::try_from(numbers.below(latest as u64)).unwrap();
                    let hit: Decision = hits.remove(at);
                    storage.settle(&policy, &key, &hit, 0).await.unwrap();
                    policy.settle(&mut states, now, &hit, 0);
                } else {
                    let cost = u32::try_from(1 + if numbers.below(9) == 0 { numbers.below(40) } else { 0 }).unwrap();
                    let op = if numbers.below(9) == 0 { Op::Peek } else { Op::Hit };
                    let answer = storage.decide(StorageRequest::new(&policy, &key, op, cost)).await.unwrap();
                    assert_eq!(answer, policy.decide(&mut states, now, op, cost), "{policy}, step {step}");
                    let is_hit = op == Op::Hit && answer.is_admitted();
                    hits.extend(is_hit.then_some(answer));
                    if is_hit && step % 100 == 0 {
                        let found = found(&server, &policy, &format!("{prefix}:{{p|t:k}}v1"), now);
                        assert_eq!(found, stored(&policy, &states, now), "{policy}, step {step}");
                        longest = longest.max(found[0].split(',').count() - 1);
                    }
                }
            }
        });
        assert!(longest > entries, "{longest} entries");
    }
}

/// Places of refunded hits are reused.
#[test]
fn log_does_not_grow_with_refunded_hits() {
    let server = Server::start(&[]);
    let policy = policy("moving-window 2000/day").with_name("p");
    let clock = ManualClock::default();
    let storage = on_prefix(&server, "bounded", clock.clone());
    let next = || {
        clock.advance(Duration::from_millis(1));
        hit(&storage, &policy)
    };
    let mut hits: Vec<Decision> = (0..1_000).map(|_| next()).collect();
    let mut numbers = Numbers(0x5eed_0ddb_a115);
    for _ in 0..5_000 {
        hits.push(next());
        let at = usize::try_from(numbers.below(hits.len() as u64)).unwrap();
        refund(&storage, &policy, &hits.swap_remove(at));
    }
    let length = server.ask(&["STRLEN", "bounded:{p|t:k}v1:1.moving-window/86400000000"]).to_string();
    let entries = length.parse::<usize>().unwrap() / 9;
    assert!(entries <= 3_000, "{entries} places for 1,000 hits");
    assert_eq!(next().remaining(), 2_000 - 1_001);
}

/// Guards against this defect: a refund rewrites all later entries, which takes 50 ms
/// for 10,000 entries.
#[test]
fn refund_moves_a_bounded_part_of_the_log() {
    let server = Server::start(&[]);
    let policy = policy("moving-window 20000/day").with_name("p");
    let clock = ManualClock::default();
    let storage = on_prefix(&server, "part", clock.clone());
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

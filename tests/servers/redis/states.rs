//! States that changed since the storage wrote them: lost logs, writes of other programs, clocks
//! that go back, and different releases of a program.

use std::time::Duration;

use common::random::{Numbers, actual_cost, random_amount};
use common::servers::storage::{RUNTIME, on, on_prefix};
use common::servers::{Reply, Server, with_option};
use common::{EVERY_STRATEGY, message, policy};
use tower_ratelimit::storage::{Clock, ManualClock, RedisStorage, StorageRequest};
use tower_ratelimit::strategy::State;
use tower_ratelimit::testing::Model;
use tower_ratelimit::{
    Decision, FixedWindow, Key, Limit, MovingWindow, Op, Policy, Quota, RateLimiter, SlidingWindowCounter, Storage,
};

use super::decisions::tags;
use super::{compare_in_time, ready, records};

const DAY: u64 = 86_400_000_000;
const LOG: &str = "1.moving-window/86400000000";

fn hit(storage: &RedisStorage, policy: &Policy) -> Decision {
    RUNTIME.block_on(storage.decide(StorageRequest::new(policy, &Key::from("k"), Op::Hit, 1))).unwrap()
}

#[test]
fn lost_log_admits_no_more_than_the_limit() {
    let server = Server::start(&[]);
    for amount in [5, 8, 10, 20] {
        let clock = ManualClock::default();
        let storage = on_prefix(&server, "lost", clock.clone());
        let [before, after] = [10, amount].map(|amount| policy(&format!("moving-window {amount}/day")).with_name("p"));
        server.ask(&["FLUSHALL"]);
        for _ in 0..8 {
            assert!(hit(&storage, &before).is_admitted());
            clock.advance(Duration::from_secs(1));
        }
        server.ask(&["DEL", &format!("lost:{{p|t:k}}v1:{LOG}")]);
        let admitted = (0..100).filter(|_| hit(&storage, &after).is_admitted()).count();
        assert!(admitted <= amount, "{admitted} of {amount}");
        clock.advance(Duration::from_micros(DAY));
        assert_eq!((0..100).filter(|_| hit(&storage, &after).is_admitted()).count(), amount, "a period later");
    }
}

#[test]
fn damaged_log_is_valid_again_after_a_period() {
    let server = Server::start(&[]);
    let mut numbers = Numbers(0x1357_9bdf_2468_ace1);
    let policy = policy("moving-window 5/day").with_name("p");
    for round in 0..250 {
        let clock = ManualClock::default();
        let now = clock.now().as_micros();
        let storage = on_prefix(&server, "odd", clock.clone());
        let small: Vec<u64> = (0..8)
            .map(|place| match (numbers.below(8), place) {
                (0, 0 | 2) => u64::MAX >> 1,
                (1, _) => 4_294_967_295,
                (2 | 3, 1) | (_, 0) => now + numbers.below(DAY),
                (4, 1) | (_, 2) => now - numbers.below(DAY),
                _ => numbers.below(9),
            })
            .collect();
        let text = format!("{small:?}");
        records::write(&server, "odd:{p|t:k}v1", LOG, &small);
        let log = format!("odd:{{p|t:k}}v1:{LOG}");
        server.ask(&["DEL", &log]);
        match numbers.below(4) {
            0 => {}
            1 => drop(server.ask(&["RPUSH", &log, "a"])),
            kind => {
                let byte = if kind == 2 { "x" } else { "\0" };
                let length = usize::try_from(9 * numbers.below(9) + numbers.below(2)).unwrap();
                server.ask(&["SET", &log, &byte.repeat(length)]);
            }
        }
        let mut last = None;
        for step in 0..14 {
            let op = if step % 4 == 3 { Op::Peek } else { Op::Hit };
            let decided =
                RUNTIME.block_on(storage.decide(StorageRequest::new(&policy, &Key::from("k"), op, 1 + step % 2)));
            let decision = decided.unwrap_or_else(|error| panic!("{text}, round {round}, step {step}: {error}"));
            if op == Op::Hit && decision.is_admitted() {
                last = Some(decision);
            }
            if let Some(hit) = last.as_ref().filter(|_| step == 6) {
                RUNTIME.block_on(storage.settle(&policy, &Key::from("k"), hit, 0)).unwrap();
            }
        }
        clock.advance(Duration::from_micros(3 * DAY));
        let admitted = (0..7).filter(|_| hit(&storage, &policy).is_admitted()).count();
        assert_eq!(admitted, 5, "{text}: the log is valid again");
    }
}

/// Overwrites bytes of the log's rows and entries, and numbers in its record.
#[test]
fn damaged_log_of_several_chunks_is_valid_again_after_a_period() {
    let server = Server::start(&[]);
    let mut numbers = Numbers(0x2468_ace1_1357_9bdf);
    let policy = policy("moving-window 5000/day").with_name("p");
    let states = "chunks:{p|t:k}v1";
    let log = format!("{states}:{LOG}");
    let clock = ManualClock::default();
    let storage = on_prefix(&server, "chunks", clock.clone());
    let mut last = None;
    for _ in 0..1_500 {
        clock.advance(Duration::from_millis(1));
        last = Some(hit(&storage, &policy));
    }
    let (start, last) = (clock.now(), last.unwrap());
    server.ask(&["COPY", states, "states"]);
    server.ask(&["COPY", &log, "log"]);
    let room = server.ask(&["STRLEN", "log"]).to_string().parse::<u64>().unwrap();
    for round in 0..400 {
        server.ask(&["COPY", "states", states, "REPLACE"]);
        server.ask(&["COPY", "log", &log, "REPLACE"]);
        clock.set(start.plus(numbers.one_of(&[1, 1, DAY - 1_000_000])));
        // The table of rows is at the end.
        let from = numbers.one_of(&[room - 90, room - 20, 0]);
        for _ in 0..=numbers.below(9) {
            let at = (from + numbers.below(80)).min(room - 1).to_string();
            server.ask(&["SETRANGE", &log, &at, numbers.one_of(&["\x7f", "\0", "\x01", "x"])]);
        }
        if round % 4 == 0 {
            let (_, mut small) = records::read(&server, states, &[LOG.to_owned()]).remove(0);
            let at = usize::try_from(1 + numbers.below(small.len() as u64 - 1)).unwrap();
            small[at] = numbers.one_of(&[0, 1, 3, 300, 512, 1_500, 4_294_967_295_u64]);
            records::write(&server, states, LOG, &small);
        }
        for step in 0..12 {
            let op = if step % 4 == 3 { Op::Peek } else { Op::Hit };
            let cost = numbers.one_of(&[1, 2, 4_000, 5_000]);
            let decided = RUNTIME.block_on(storage.decide(StorageRequest::new(&policy, &Key::from("k"), op, cost)));
            assert!(decided.is_ok(), "round {round}, step {step}: {decided:?}");
            if step == 6 {
                RUNTIME.block_on(storage.settle(&policy, &Key::from("k"), &last, 0)).unwrap();
            }
            clock.advance(Duration::from_micros(numbers.one_of(&[0, 1_000, 300_000])));
        }
        clock.advance(Duration::from_micros(3 * DAY));
        assert_eq!(hit(&storage, &policy).remaining(), 4_999, "round {round}: the log is valid again");
    }
}

/// Three releases decide in turn, as in a rolling deployment.
#[test]
fn releases_with_different_limits_decide_like_the_model() {
    let server = Server::start(&[]);
    let mut numbers = Numbers(0x1234_5678_9abc_def1);
    for _ in 0..150 {
        compare_in_time(&mut numbers, |numbers| compare_releases(&server, numbers));
    }
}

/// Applies random operations to one key under three releases of a policy. Returns the first
/// difference from the model.
fn compare_releases(server: &Server, numbers: &mut Numbers) -> Result<(), String> {
    let (clock, mut model, key) = (ManualClock::default(), Model::default(), Key::from("k"));
    let storage = on(server, clock.clone());
    let periods = [1, 7, 50_000, 1 << 31, 1 << 39, DAY, 1 << 46];
    let random = |numbers: &mut Numbers| (numbers.below(8), numbers.one_of(&periods));
    let places: Vec<_> = (0..=numbers.below(3)).map(|_| random(numbers)).collect();
    let longest = places.iter().map(|(_, period)| *period).max().unwrap();
    let releases: Vec<Policy> = (0..3)
        .map(|release| {
            let limits: Vec<Limit> = places
                .iter()
                .map(|&place| {
                    let (kind, period) = if release == 2 && numbers.below(3) == 0 { random(numbers) } else { place };
                    random_amount(numbers, kind, period)
                })
                .collect();
            limits[1..].iter().cloned().fold(Policy::from(limits[0].clone()), Policy::with).with_name("p")
        })
        .collect();
    let mut hits: Vec<Decision> = Vec::new();
    RUNTIME.block_on(async {
        for step in 0..60 {
            let policy = &releases[usize::try_from(numbers.below(3)).unwrap()];
            let capacity = u64::from(policy.limits().iter().map(Limit::capacity).min().unwrap());
            let wait = [0, numbers.below(1_000), numbers.below(longest / capacity + 2), numbers.below(longest / 8 + 1)];
            clock.advance(Duration::from_micros(numbers.one_of(&wait)));
            let now = clock.now();
            match numbers.below(20) {
                0..3 if !hits.is_empty() => {
                    let hit = hits.swap_remove(usize::try_from(numbers.below(hits.len() as u64)).unwrap());
                    let actual = actual_cost(numbers, &hit, capacity);
                    storage.settle(policy, &key, &hit, actual).await.unwrap();
                    model.settle(policy, &key, &hit, actual, now);
                }
                3 => {
                    storage.clear(policy, &key).await.unwrap();
                    model.clear(policy, &key);
                }
                choice => {
                    let op = match choice {
                        ..8 => Op::Peek,
                        8..10 => Op::Charge,
                        _ => Op::Hit,
                    };
                    let most = numbers.one_of(&[1, 1, capacity / 3 + 1, capacity + 1]);
                    let cost = u32::try_from(1 + numbers.below(most)).unwrap_or(u32::MAX);
                    let answer = storage.decide(StorageRequest::new(policy, &key, op, cost)).await.unwrap();
                    let expected = model.decide(policy, &key, op, cost, now);
                    if answer != expected {
                        return Err(format!(
                            "step {step}: {answer:?} instead of {expected:?}: {policy}, of {releases:?}"
                        ));
                    }
                    hits.extend((op == Op::Hit && answer.is_admitted()).then_some(answer));
                }
            }
        }
        Ok(())
    })
}

#[test]
fn decisions_on_a_clock_that_goes_back_equal_those_of_the_strategies() {
    let server = Server::start(&[]);
    for (policy, back) in [
        (policy("moving-window 10/second"), 10 * DAY),
        (Policy::new(MovingWindow::new(), Quota::per(5, Duration::from_micros(1 << 46))), 1),
    ] {
        let clock = ManualClock::default();
        let start = clock.now();
        clock.set(start.plus(back));
        let (storage, mut states, key) = (on(&server, clock.clone()), vec![State::Fresh], Key::from("k"));
        let mut first = None;
        for step in 0..40 {
            let decision = hit(&storage, &policy);
            assert_eq!(decision, policy.decide(&mut states, clock.now(), Op::Hit, 1), "{policy}, step {step}");
            if step == 0 {
                clock.set(start);
                first = Some(decision);
            } else if let Some(first) = first.take() {
                RUNTIME.block_on(storage.settle(&policy, &key, &first, 0)).unwrap();
                policy.settle(&mut states, clock.now(), &first, 0);
            }
            clock.advance(Duration::from_millis(200));
        }
    }
}

#[test]
fn period_that_is_not_exact_in_a_script_is_rejected_by_the_limiter() {
    let server = Server::start(&[]);
    let storage = on(&server, ManualClock::default());
    let longest = Quota::per(2, Duration::from_micros(1 << 52));
    let counter = Policy::from(longest);
    let error = RateLimiter::try_with_storage(counter.clone(), storage.clone()).unwrap_err();
    assert!(format!("{error:#}").contains("use a period of at most 71 years"), "{error}");
    let key = Key::from("k");
    let decided = RUNTIME.block_on(storage.decide(StorageRequest::new(&counter, &key, Op::Hit, 1)));
    assert!(message(decided.unwrap_err()).contains("71 years"), "the storage rejects the policy too");
    let half = Policy::new(SlidingWindowCounter::aligned(), Quota::per(2, Duration::from_micros(1 << 51)));
    for policy in [half, Policy::new(FixedWindow::new(), longest), Policy::new(MovingWindow::new(), longest)] {
        RateLimiter::try_with_storage(policy.clone(), storage.clone()).unwrap();
        assert_eq!((0..9).filter(|_| hit(&storage, &policy).is_admitted()).count(), 2, "{policy}");
    }
}

/// The tolerance in microseconds: the maximum time by which a key outlives its state, and the time
/// between two reads of the clock.
const MARGIN: i64 = 500_000 + 500_000 + 100_000;

/// Compares the expiry of keys and states on the server's clock.
#[test]
fn keys_live_as_long_as_their_state() {
    let server = Server::start(&[]);
    let mut numbers = Numbers(0x0abc_def1_2345);
    let _guard = RUNTIME.enter();
    let storage = super::storage(&with_option(&server.url(), "prefix", "live"));
    RUNTIME.block_on(ready(&storage));
    let script = "local time, answer = redis.call('TIME'), {}
        answer[1] = string.format('%d%06d', time[1], time[2])
        for _, key in ipairs(redis.call('KEYS', 'live:*')) do
            answer[#answer + 1] = tostring(redis.call('PTTL', key))
            answer[#answer + 1] = key
        end
        return answer";
    for round in 0..20 {
        server.ask(&["FLUSHALL"]);
        let limits: Vec<Limit> = (0..3)
            .map(|_| {
                let kind = numbers.below(8);
                random_amount(&mut numbers, kind, 100_000 + round * 50_000)
            })
            .collect();
        let policy = limits[1..].iter().cloned().fold(Policy::from(limits[0].clone()), Policy::with);
        for _ in 0..30 {
            let _ = hit(&storage, &policy);
            let Reply::List(all) = server.ask(&["EVAL", script, "0"]) else { panic!("no list") };
            let all: Vec<String> = all.iter().map(ToString::to_string).collect();
            let now: i64 = all[0].parse().unwrap();
            for pair in all[1..].chunks(2) {
                let lives: i64 = pair[0].parse::<i64>().unwrap() * 1_000;
                if pair[1].ends_with("}v1") {
                    let records = records::read(&server, &pair[1], &tags(&policy));
                    // The key may have expired since the script.
                    let Some(end) = records.iter().map(|(_, numbers)| numbers[0]).max() else { continue };
                    let matters = i64::try_from(end).unwrap() - now;
                    assert!((matters..matters + MARGIN).contains(&lives), "{lives} instead of {matters}: {policy}");
                } else {
                    let period: i64 = pair[1].rsplit('/').next().unwrap().parse().unwrap();
                    assert!((0..period * 9 / 8 + MARGIN).contains(&lives), "{lives}: {policy}");
                }
            }
        }
    }
}

/// Guards against this defect: states of one second were removed while a test with a clock of its
/// own was paused.
#[test]
fn states_of_another_clock_live_a_minute_longer() {
    let server = Server::start(&[]);
    for text in EVERY_STRATEGY {
        server.ask(&["FLUSHALL"]);
        let policy = policy(&text.replace("7 seconds", "second"));
        let storage = on(&server, ManualClock::default());
        assert!(hit(&storage, &policy).is_admitted(), "{text}");
        let Reply::List(keys) = server.ask(&["KEYS", "*"]) else { panic!("no list") };
        assert!(!keys.is_empty(), "{text}");
        for key in keys {
            let lives: u64 = server.ask(&["PTTL", &key.to_string()]).to_string().parse().unwrap();
            assert!(lives > 55_000, "{text}: {key} lives {lives} ms");
        }
    }
}

/// Guards against this defect: 61 consecutive refusals each had a `retry_after` of 60
/// s, and the client was admitted after 3,660 s.
#[test]
fn refusals_after_a_clock_went_back_report_the_same_end() {
    let server = Server::start(&[]);
    for text in EVERY_STRATEGY {
        let (clock, policy) = (ManualClock::default(), policy(&text.replace("7 seconds", "minute")));
        let (storage, start) = (on(&server, clock.clone()), clock.now());
        while hit(&storage, &policy).is_admitted() {}
        clock.set(start.minus(3_600_000_000));
        let first = hit(&storage, &policy);
        let wait = first.retry_after().unwrap();
        assert!(wait <= Duration::from_secs(180), "{text}: {wait:?}");
        let later = Duration::from_secs(1);
        clock.advance(later);
        let second = hit(&storage, &policy);
        if !text.starts_with("elastic") {
            assert_eq!(second.retry_after(), Some(wait.saturating_sub(later)), "{text}");
        }
        clock.set(second.at().plus(u64::try_from(second.retry_after().unwrap().as_micros()).unwrap()));
        assert!(hit(&storage, &policy).is_admitted(), "{text}");
    }
}

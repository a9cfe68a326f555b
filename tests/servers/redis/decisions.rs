//! Decisions on a real server: the storage laws, the golden vectors and exact totals.

use std::collections::HashMap;
use std::time::Duration;

use common::random::{Numbers, actual_cost, random_limit};
use common::servers::storage::{RUNTIME, on, on_prefix};
use common::servers::{Reply, Server};
use common::{EVERY_STRATEGY, Foreign, KEEPING, policy};
use futures_util::future::join_all;
use tower_ratelimit::storage::{Clock, ManualClock, StorageRequest};
use tower_ratelimit::strategy::State;
use tower_ratelimit::testing::{StorageLaws, concurrent_hits_are_exact};
use tower_ratelimit::{ElasticWindow, Key, Limit, MovingWindow, Op, Policy, Quota, RateLimiter, Storage, Timestamp};

use super::{compare_in_time, ready, records};

#[test]
fn storage_obeys_the_laws() {
    let server = Server::start(&[]);
    let mut mixed = vec![
        policy("fixed-window 3/second; elastic-window 4 per 3 seconds; moving-window 9/minute; token-bucket 10/hour"),
        policy("moving-window 7 per 20 seconds; moving-window 9/minute; leaky-bucket 11/day; 12/day"),
        policy(
            "moving-window 7 per 20 seconds keep 2; token-bucket 10/hour keep 1; leaky-bucket 11/day; 12/day keep 3",
        ),
        Policy::new(Foreign, Quota::per_second(2)).limit(MovingWindow::new(), Quota::per_minute(5)),
        Policy::new(Foreign, Quota::per_second(3)).limit(ElasticWindow::new(), Quota::per_minute(5)),
    ];
    // With up to eight limits, the script has local variables. With more, it has tables.
    for limits in [5, 8, 9, 17] {
        for strategies in [&EVERY_STRATEGY[..], &KEEPING] {
            mixed.push(policy(&strategies.iter().cycle().take(limits).copied().collect::<Vec<_>>().join("; ")));
        }
    }
    StorageLaws::new(|clock| on(&server, clock)).and_policies(mixed).scripts(128).check();
}

#[test]
fn concurrent_hits_are_admitted_exactly_up_to_the_limit() {
    let server = Server::start(&[]);
    let storage = on(&server, ManualClock::default());
    for text in ["fixed-window 200/day", "moving-window 200/day; 300/day", "200/day", "token-bucket 200/day"] {
        concurrent_hits_are_exact(&policy(text), &storage);
    }
}

#[test]
fn concurrent_hits_leave_exactly_the_kept_units() {
    let server = Server::start(&[]);
    let storage = on(&server, ManualClock::default());
    for text in
        ["fixed-window 100/day", "moving-window 100/day", "100/day", "token-bucket 100/day", "elastic-window 100/day"]
    {
        let [people, batch] =
            ["", " keep 20"].map(|kept| RateLimiter::with_storage(policy(&format!("{text}{kept}")), storage.clone()));
        let key = Key::from(text);
        let admitted = RUNTIME.block_on(join_all((0..200).map(|_| batch.hit(&key))));
        let admitted = admitted.into_iter().filter(|hit| hit.as_ref().unwrap().is_admitted()).count();
        assert_eq!((admitted, RUNTIME.block_on(people.peek(&key)).unwrap().remaining()), (80, 20), "{text}");
    }
}

/// Returns the expected text of the stored states, with the entries of logs as `instant*units`.
pub(super) fn stored(policy: &Policy, states: &[State], now: Timestamp) -> Vec<String> {
    let texts = policy.limits().iter().zip(tags(policy)).zip(states).map(|((limit, tag), state)| {
        let until = state.until().as_micros();
        match state {
            State::Counts { amounts: [first, second], .. } => format!("{tag} {until},{first},{second}"),
            State::Log(log) => {
                let live = log.entries().filter(|(at, _)| now.since(*at) < limit.quota().period_micros());
                let entries: Vec<String> = live.map(|(at, units)| format!("{}*{units}", at.as_micros())).collect();
                format!("{tag} {until},{}", entries.join(","))
            }
            State::Fresh => String::new(),
        }
    });
    texts.zip(states).filter(|(_, state)| state.until() > now).map(|(text, _)| text).collect()
}

/// Returns the tag of each limit.
pub(super) fn tags(policy: &Policy) -> Vec<String> {
    let tag = |(position, limit): (usize, &Limit)| {
        format!("{}.{}/{}", position + 1, limit.strategy().name(), limit.quota().period_micros())
    };
    policy.limits().iter().enumerate().map(tag).collect()
}

/// Returns the text of the states that the server has stored and that have not expired, in the
/// format of [`stored`]. A script decodes the logs.
pub(super) fn found(server: &Server, policy: &Policy, states: &str, now: Timestamp) -> Vec<String> {
    let records = records::read(server, states, &tags(policy)).into_iter();
    let live = records.filter(|(_, numbers)| numbers[0] > now.as_micros());
    let text = |(tag, numbers): (String, Vec<u64>)| match &numbers[..] {
        [until, first, second] => format!("{tag} {until},{first},{second}"),
        _ => decoded_log(server, states, &tag, &numbers),
    };
    live.map(text).collect()
}

fn decoded_log(server: &Server, states: &str, tag: &str, numbers: &[u64]) -> String {
    let script = "local first, length, room, answer = ARGV[1], ARGV[2], ARGV[3], {}
        local rows = tonumber(room) > 256 and room / 256 * 10 or 0
        local width = (redis.call('STRLEN', KEYS[1]) - rows) / room
        for index = 0, length - 1 do
            local place = (first + index) % room
            if rows > 0 then
                local row = room * width + math.floor(place / 256) * 10
                local _, _, chunk = struct.unpack('>I4I2I4', redis.call('GETRANGE', KEYS[1], row, row + 9))
                place = chunk * 256 + place % 256
            end
            local entry = redis.call('GETRANGE', KEYS[1], place * width, place * width + width - 1)
            local instant, units = struct.unpack('>I' .. width - 4 .. 'I4', entry)
            answer[#answer + 1] = string.format('%.0f %.0f %.0f', instant, 256 ^ (width - 4), units)
        end
        return answer";
    let &[until, units, oldest, first, length, room, _, _] = numbers else { panic!("{numbers:?}") };
    let [first, length, room] = [first, length, room].map(|number| number.to_string());
    let log = format!("{states}:{tag}");
    let Reply::List(entries) = server.ask(&["EVAL", script, "1", &log, &first, &length, &room]) else {
        panic!("{log}")
    };
    let (mut sum, mut texts) = (0, Vec::new());
    for (index, entry) in entries.iter().enumerate() {
        let Reply::Text(text) = entry else { panic!("{entry:?}") };
        let parts: Vec<u64> = text.split(' ').map(|number| number.parse().unwrap()).collect();
        let &[instant, modulus, units] = &parts[..] else { panic!("{text}") };
        // The entry holds the low bytes of the instant, and the log ends at `until`.
        let at = until - (until % modulus + modulus - instant) % modulus;
        assert!(index > 0 || at == oldest, "{at} {oldest}");
        sum += units;
        if units > 0 {
            texts.push(format!("{at}*{units}"));
        }
    }
    assert_eq!(sum, units);
    format!("{tag} {until},{}", texts.join(","))
}

#[test]
fn decisions_and_stored_states_equal_those_of_the_strategies() {
    let server = Server::start(&[]);
    let mut numbers = Numbers(0x1234_5678_9abc_def1);
    let (mut calls, mut texts) = (0, 0);
    while calls < 8_000 {
        let (more_calls, more_texts) = compare_in_time(&mut numbers, |numbers| compare_states(&server, numbers));
        calls += more_calls;
        texts += more_texts;
    }
    assert!(texts > 400, "{texts}");
}

/// Applies random operations to one key, and compares decisions and stored states with those of the
/// strategies. Returns the number of decisions and of stored states, or the first difference.
fn compare_states(server: &Server, numbers: &mut Numbers) -> Result<(u32, usize), String> {
    server.ask(&["FLUSHALL"]);
    let clock = ManualClock::default();
    let storage = on_prefix(server, "states", clock.clone());
    let others = (0..numbers.below(3)).map(|_| random_limit(numbers)).collect::<Vec<_>>();
    let policy = others.into_iter().fold(Policy::named("p").with(random_limit(numbers)), Policy::with);
    let mut states = vec![State::Fresh; policy.limits().len()];
    let key = Key::from("k");
    let longest = policy.limits().iter().map(|limit| limit.quota().period_micros()).max().unwrap();
    let capacity = u64::from(policy.limits().iter().map(Limit::capacity).min().unwrap());
    let (mut hits, mut calls, mut texts) = (Vec::new(), 0, 0);
    RUNTIME.block_on(async {
        for step in 0..75 {
            let wait = match numbers.below(6) {
                0 => numbers.below(1_000),
                1 => numbers.below(longest / capacity + 2),
                2 => numbers.below(longest / 8 + 1),
                3 => 1,
                4 if numbers.below(4) == 0 => numbers.below(2 * longest),
                _ => 0,
            };
            // Later instants are not exact in Lua, whose numbers are doubles.
            let most = (1_u64 << 52).saturating_sub(clock.now().as_micros());
            clock.advance(Duration::from_micros(wait.min(most)));
            let now = clock.now();
            if numbers.below(5) == 0 && !hits.is_empty() {
                let hit = hits.swap_remove(usize::try_from(numbers.below(hits.len() as u64)).unwrap());
                let actual = actual_cost(numbers, &hit, capacity);
                storage.settle(&policy, &key, &hit, actual).await.unwrap();
                policy.settle(&mut states, now, &hit, actual);
                continue;
            }
            let most = match numbers.below(5) {
                0..3 => 1,
                3 => capacity / 3 + 1,
                _ => capacity + 1,
            };
            let cost = u32::try_from(1 + numbers.below(most)).unwrap_or(u32::MAX);
            let op = numbers.one_of(&[Op::Peek, Op::Peek, Op::Hit, Op::Hit, Op::Hit, Op::Hit, Op::Hit, Op::Charge]);
            let answer = storage.decide(StorageRequest::new(&policy, &key, op, cost)).await.unwrap();
            let expected = policy.decide(&mut states, now, op, cost);
            if answer != expected {
                return Err(format!("{policy}, step {step}: {answer:?}, but expected {expected:?}"));
            }
            calls += 1;
            if op == Op::Hit && answer.is_admitted() {
                hits.push(answer);
                if step % 8 == 0 {
                    let expected = stored(&policy, &states, now);
                    let found = found(server, &policy, "states:{p|t:k}v1", now);
                    if found != expected {
                        return Err(format!("{policy}, {states:?}: {found:?}, but expected {expected:?}"));
                    }
                    texts += expected.len();
                }
            }
        }
        Ok((calls, texts))
    })
}

#[test]
fn clients_have_different_keys_and_each_client_has_one_slot() {
    let server = Server::start(&[]);
    let storage = on_prefix(&server, "names", ManualClock::default());
    RUNTIME.block_on(async {
        let keys = [
            Key::from("a|b"),
            Key::from("a}b"),
            Key::from("1.2.3.4"),
            Key::from(std::net::Ipv4Addr::new(1, 2, 3, 4)),
            Key::global(),
            Key::from("*"),
            Key::from(7),
        ];
        for key in &keys {
            let two = policy("moving-window 1/day; fixed-window 9/day").with_name("a {b} | c");
            assert!(RateLimiter::with_storage(two, storage.clone()).hit(key).await.unwrap().is_admitted());
        }
        let Reply::List(found) = server.ask(&["KEYS", "names:*"]) else { panic!("no list") };
        let mut names: Vec<String> = found.iter().map(|name| format!("{name:?}")).collect();
        names.sort();
        assert_eq!(names.len(), 2 * keys.len(), "{names:?}");
        let mut tags = HashMap::new();
        for name in &names {
            let tag = name.split('{').nth(1).unwrap().split('}').next().unwrap().to_owned();
            *tags.entry(tag).or_insert(0) += 1;
        }
        assert!(tags.len() == keys.len() && tags.values().all(|count| *count == 2), "{tags:?}");
    });
}

/// Guards against defects seen in practice: keys never expire, or a set of all keys grows forever.
#[test]
fn keys_expire_with_their_state() {
    let server = Server::start(&[]);
    let _guard = RUNTIME.enter();
    let storage = super::storage(&server.url());
    RUNTIME.block_on(ready(&storage));
    for text in EVERY_STRATEGY {
        let short = policy(&text.replace("7 seconds", "200ms"));
        let limiter = RateLimiter::with_storage(short, storage.clone());
        for client in 0..20_u64 {
            for _ in 0..4 {
                let _ = RUNTIME.block_on(limiter.hit(&Key::from(client))).unwrap();
            }
        }
    }
    assert_ne!(server.ask(&["DBSIZE"]), Reply::Text("0".to_owned()));
    common::servers::wait_until("all keys have expired", || server.ask(&["DBSIZE"]) == Reply::Text("0".to_owned()));
}

/// Guards against this defect: two strategies on one key fail with `WRONGTYPE`.
#[test]
fn unreadable_state_is_treated_as_fresh() {
    let server = Server::start(&[]);
    let storage = on_prefix(&server, "odd", ManualClock::default());
    let policy = policy("fixed-window 2/day; moving-window 2/day").with_name("p");
    let limiter = RateLimiter::with_storage(policy, storage);
    let (key, name) = (Key::from("k"), "odd:{p|t:k}v1");
    let log = format!("{name}:2.moving-window/86400000000");
    for spoil in [
        // The instants of the records are too late.
        &["SETRANGE", name, "4", "\x7f\x7f"][..],
        &["SETRANGE", name, "24", "\x7f\x7f"],
        &["SETRANGE", name, "0", "\0"],
        &["RPUSH", name, "a"],
        &["HSET", &log, "a", "b"],
        &["SET", &log, "short"],
    ] {
        server.ask(&["FLUSHALL"]);
        RUNTIME.block_on(async {
            assert!(limiter.hit(&key).await.unwrap().is_admitted());
            if spoil[0] != "SETRANGE" {
                server.ask(&["DEL", spoil[1]]);
            }
            server.ask(spoil);
            assert!(limiter.hit(&key).await.unwrap().is_admitted(), "{spoil:?}");
            assert!(limiter.peek(&key).await.unwrap().remaining() <= 1);
            let _ = limiter.hit(&key).await.unwrap();
            assert!(limiter.hit(&key).await.unwrap().is_refused(), "{spoil:?}: the state is valid again");
        });
    }
}

#[test]
fn unreadable_state_is_swapped_for_a_fresh_one() {
    let server = Server::start(&[]);
    let storage = on_prefix(&server, "odd", ManualClock::default());
    let policy = common::foreign(2).with_name("p");
    let limiter = RateLimiter::with_storage(policy, storage);
    RUNTIME.block_on(async {
        for spoil in [
            &["SET", "odd:{p|t:k}:all", "garbage"][..],
            &["SETBIT", "odd:{p|t:k}:all", "0", "1"],
            &["RPUSH", "odd:{p|t:k}:all", "a"],
        ] {
            server.ask(&["FLUSHALL"]);
            server.ask(spoil);
            for expected in [true, true, false] {
                let decision = limiter.hit(&Key::from("k")).await.unwrap();
                assert_eq!((decision.is_admitted(), decision.is_contended()), (expected, false), "{spoil:?}");
            }
        }
    });
}

/// Guards against this defect: scripts are not loaded again after `SCRIPT FLUSH`.
#[test]
fn flushed_scripts_are_loaded_again() {
    let server = Server::start(&[]);
    let storage = on(&server, ManualClock::default());
    let limiter = RateLimiter::with_storage(policy("fixed-window 3/day"), storage);
    RUNTIME.block_on(async {
        for left in [2, 1, 0] {
            server.ask(&["SCRIPT", "FLUSH"]);
            assert_eq!(limiter.hit(&Key::from("a")).await.unwrap().remaining(), left);
        }
        assert!(limiter.hit(&Key::from("a")).await.unwrap().is_refused());
    });
}

#[test]
fn every_vector_agrees() {
    let server = Server::start(&[]);
    common::vectors::assert_all_agree(&server.url());
}

/// Guards against this defect: the check and the increment are two commands, so
/// processes admit more than the limit.
#[test]
fn eight_processes_admit_exactly_the_limit() {
    let store = Server::start(&[]);
    for policy in ["fixed-window 100/day", "token-bucket 100/day", "moving-window 100/day; 200/day"] {
        let servers: Vec<common::example_process::Server> = (0..8)
            .map(|_| {
                let flags = ["--policy", policy, "--storage", &store.url(), "--on-error", "refuse", "--timeout", "60s"];
                common::example_process::Server::start(&flags)
            })
            .collect();
        let ask = |server: &common::example_process::Server| (0..25).filter(|_| server.status("/", "") == 200).count();
        let admitted: usize = std::thread::scope(|scope| {
            let threads: Vec<_> = servers.iter().map(|server| scope.spawn(|| ask(server))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert_eq!(admitted, 100, "{policy}");
    }
}

#[test]
fn clear_all_removes_the_keys_of_one_prefix() {
    let server = Server::start(&[]);
    let [ours, theirs] = ["ours", "ours2"].map(|prefix| on_prefix(&server, prefix, ManualClock::default()));
    RUNTIME.block_on(async {
        for client in 0..3_000_u64 {
            for storage in [&ours, &theirs] {
                let limiter = RateLimiter::with_storage(policy("moving-window 3/day"), storage.clone());
                assert!(limiter.hit(&Key::from(client)).await.unwrap().is_admitted());
            }
        }
        assert_eq!(ours.clear_all().await.unwrap(), 6_000);
        assert_eq!(server.ask(&["DBSIZE"]), Reply::Text("6000".to_owned()));
        assert_eq!(ours.clear_all().await.unwrap(), 0);
    });
}

#[test]
fn processes_with_leases_and_caches_admit_exactly_the_limit() {
    let store = Server::start(&[]);
    let flags =
        ["--policy", "fixed-window 100/day", "--storage", &store.url(), "--on-error", "refuse", "--timeout", "60s"];
    for more in [&["--lease", "10"][..], &["--deny-cache"], &["--deny-cache", "--lease", "3"]] {
        store.ask(&["FLUSHALL"]);
        let servers: Vec<common::example_process::Server> =
            (0..3).map(|_| common::example_process::Server::start(&[&flags[..], more].concat())).collect();
        let ask = |server: &common::example_process::Server| (0..120).filter(|_| server.status("/", "") == 200).count();
        let admitted: usize = std::thread::scope(|scope| {
            let threads: Vec<_> = servers.iter().map(|server| scope.spawn(|| ask(server))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert_eq!(admitted, 100, "{more:?}");
    }
}

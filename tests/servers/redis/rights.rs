//! The command rights of the server's user. A missing right is an error and never resets a state.

use std::iter;
use std::time::Duration;

use common::servers::storage::{RUNTIME, failed_check, failure};
use common::servers::{Cluster, Server};
use common::{EVERY_STRATEGY, foreign, message, policy};
use tower_ratelimit::storage::{Clock, ManualClock, RedisStorage, StorageError, StorageRequest};
use tower_ratelimit::strategy::State;
use tower_ratelimit::{Decision, Key, Op, Policy, RateLimiter, Storage};

use super::{LONG, ready, storage};

/// The page with the `ACL SETUSER` line.
const DOCS: &str = include_str!("../../../src/storage/redis/server.md");

/// Commands that only other databases, sentinels or clusters need.
const NOT_ON_ONE_SERVER: [&str; 4] = ["select", "role", "cluster|slots", "asking"];

/// Returns the words of the documented command.
fn documented() -> Vec<&'static str> {
    let line = DOCS.lines().find_map(|line| line.strip_prefix("ACL SETUSER ")).unwrap();
    iter::once("ACL").chain(["SETUSER"]).chain(line.split(' ')).collect()
}

/// Returns the commands that the documented user may run.
fn commands() -> Vec<&'static str> {
    documented().into_iter().filter_map(|word| word.strip_prefix('+')).collect()
}

fn storage_of_the_user(server: &Server) -> RedisStorage {
    storage(&server.url().replace("redis://", "redis://ratelimit:password@"))
}

/// The results of several calls.
#[derive(Default)]
struct Outcome {
    admitted: usize,
    errors: Vec<StorageError>,
}

impl Outcome {
    /// Returns the value, or collects the error.
    fn note<T>(&mut self, result: Result<T, StorageError>) -> Option<T> {
        result.map_err(|error| self.errors.push(error)).ok()
    }
}

/// Makes forty hits, a peek and a refund of one hit.
async fn hits(storage: &RedisStorage, policy: &Policy, key: &Key) -> Outcome {
    let limiter = RateLimiter::with_storage(policy.clone(), storage.clone());
    let mut outcome = Outcome::default();
    let mut first: Option<Decision> = None;
    for step in 0..40 {
        let hit = outcome.note(limiter.hit(key).await).filter(Decision::is_admitted);
        outcome.admitted += usize::from(hit.is_some());
        first = first.or(hit);
        if step == 2 {
            let _ = outcome.note(limiter.peek(key).await);
            if let Some(hit) = &first {
                let _ = outcome.note(common::settle(&limiter, key, hit, 0).await);
            }
        }
    }
    outcome
}

/// The maximum number of admitted hits: the limit of each policy in this file, and the refunded
/// hit.
const MOST: usize = 6 + 1;

/// Returns a policy with a limit of six for each strategy, one with several limits, and one whose
/// strategy has no script.
fn policies() -> Vec<Policy> {
    // A boundary of an aligned window at midnight could admit more.
    let six = |text: &str| text.replace("3 per 7 seconds", "6 per 1000 days").replace("queue 0", "queue 5");
    let without_burst = EVERY_STRATEGY.iter().filter(|text| !text.contains("burst"));
    let mut policies: Vec<Policy> = without_burst.map(|text| policy(&six(text))).collect();
    policies.push(policy("moving-window 6/day; moving-window 7 per 2 days; fixed-window 6/day"));
    policies.push(foreign(6));
    policies
}

#[tokio::test]
async fn documented_rights_suffice_for_every_call() {
    let server = Server::start(&[]);
    server.ask(&documented());
    let storage = storage_of_the_user(&server);
    ready(&storage).await;
    assert_eq!(server.ask(&["DBSIZE"]).to_string(), "0", "the key of the check is removed");
    for policy in policies() {
        let outcome = hits(&storage, &policy, &Key::from("k")).await;
        // A leaky bucket refunds only its last slot.
        assert!((6..=MOST).contains(&outcome.admitted) && outcome.errors.is_empty(), "{policy}: {:?}", outcome.errors);
        let limiter = RateLimiter::with_storage(policy.clone(), storage.clone());
        limiter.clear(&Key::from("k")).await.unwrap();
        assert!(limiter.hit(&Key::from("k")).await.unwrap().is_admitted(), "{policy}");
    }
    assert!(storage.clear_all().await.unwrap() > 0);
    assert_eq!(server.ask(&["DBSIZE"]).to_string(), "0");
}

/// Guards against this defect: without the right to run `SETRANGE`, clients are not
/// limited, and the storage returns no error.
#[tokio::test]
async fn missing_right_is_an_error_and_never_exceeds_the_limit() {
    let server = Server::start(&[]);
    for command in commands().into_iter().filter(|command| !NOT_ON_ONE_SERVER.contains(command)) {
        // The key has no states, or existing ones.
        for has_states in [false, true] {
            server.ask(&["FLUSHALL"]);
            server.ask(&["SCRIPT", "FLUSH"]);
            server.ask(&documented());
            let storage = storage_of_the_user(&server);
            ready(&storage).await;
            let mut before = Vec::new();
            for policy in policies() {
                let key = Key::from("k");
                let limiter = RateLimiter::with_storage(policy, storage.clone());
                let admitted = if has_states { limiter.hit(&key).await.unwrap().is_admitted() } else { false };
                before.push(usize::from(admitted));
            }
            server.ask(&["ACL", "SETUSER", "ratelimit", &format!("-{command}")]);
            if command == "eval" {
                server.ask(&["SCRIPT", "FLUSH"]);
            }
            let mut errors = Vec::new();
            for (policy, before) in policies().into_iter().zip(before) {
                let outcome = hits(&storage, &policy, &Key::from("k")).await;
                assert!(outcome.admitted + before <= MOST, "{command}, {policy}: {} admitted", outcome.admitted);
                let limiter = RateLimiter::with_storage(policy, storage.clone());
                errors.extend(outcome.errors);
                errors.extend(limiter.clear(&Key::from("k")).await.err());
            }
            errors.extend(storage.clear_all().await.err());
            // The expiry of a log is renewed only once in an eighth of its period.
            assert!(command == "pexpire" || !errors.is_empty(), "{command}");
            assert!(errors.iter().all(|error| !error.may_have_counted()), "{command}: {errors:?}");
            if has_states {
                continue;
            }
            let checked = storage.check().await;
            if command == "scan" {
                checked.unwrap();
            } else {
                let error = message(checked.unwrap_err());
                assert!(error.to_lowercase().contains(command), "{command}: {error}");
            }
        }
    }
}

#[tokio::test]
async fn renamed_command_is_an_error() {
    for command in ["SETRANGE", "STRLEN", "GET", "GETRANGE", "EVALSHA"] {
        let server = Server::start(&["--rename-command", command, ""]);
        let storage = storage(&server.url());
        let outcome = hits(&storage, &policy("moving-window 6/day"), &Key::from("k")).await;
        assert!(outcome.admitted <= MOST && !outcome.errors.is_empty(), "{command}");
        let error = message(failed_check(&storage).await);
        assert!(error.contains(command), "{error}");
    }
}

/// The user lacks the right to one command of the script.
#[tokio::test]
async fn script_that_fails_halfway_counts_nothing() {
    let server = Server::start(&[]);
    let key = Key::from("k");
    for command in ["set", "setrange", "pexpire", "strlen", "getrange"] {
        for policy in policies() {
            server.ask(&["FLUSHALL"]);
            server.ask(&documented());
            let storage = storage_of_the_user(&server);
            ready(&storage).await;
            let limiter = RateLimiter::with_storage(policy.clone(), storage.clone());
            assert!(limiter.hit(&key).await.unwrap().is_admitted());
            server.ask(&["ACL", "SETUSER", "ratelimit", &format!("-{command}")]);
            let without = hits(&storage, &policy, &key).await;
            server.ask(&["ACL", "SETUSER", "ratelimit", &format!("+{command}")]);
            let with = hits(&storage, &policy, &key).await;
            // Each of the two runs may refund a hit.
            let all = 1 + without.admitted + with.admitted;
            assert!((6..=8).contains(&all), "{command}, {policy}: {all}");
        }
    }
}

/// Covers logs of different lengths that are about to grow, alone and beside another log.
#[test]
fn failed_hit_or_refund_changes_no_log() {
    let server = Server::start(&[]);
    let key = Key::from("k");
    for entries in [4, 8, 255, 256, 511, 512, 513] {
        for text in ["moving-window 600/day", "moving-window 600/day; moving-window 700 per 2 days"] {
            let policy = policy(text);
            server.ask(&["FLUSHALL"]);
            server.ask(&documented());
            let (clock, url) =
                (ManualClock::default(), server.url().replace("redis://", "redis://ratelimit:password@"));
            let storage = storage(&url).clock(clock.clone());
            let (mut states, mut hits) = (vec![State::Fresh; policy.limits().len()], Vec::new());
            RUNTIME.block_on(async {
                let decide = async |op| storage.decide(StorageRequest::new(&policy, &key, op, 1)).await;
                ready(&storage).await;
                for _ in 0..entries {
                    clock.advance(Duration::from_millis(1));
                    let _ = policy.decide(&mut states, clock.now(), Op::Hit, 1);
                    hits.push(decide(Op::Hit).await.unwrap());
                }
                for (step, command) in
                    ["set", "setrange", "pexpire", "strlen", "getrange", "get"].into_iter().enumerate()
                {
                    let old = &hits[step % hits.len()];
                    server.ask(&["ACL", "SETUSER", "ratelimit", &format!("-{command}")]);
                    let mut failed = 0;
                    for at_once in [true, false] {
                        // A hit at the instant of the newest entry changes that entry. A later hit
                        // adds an entry.
                        if !at_once {
                            clock.advance(Duration::from_millis(1));
                        }
                        let hit = decide(Op::Hit).await;
                        failed += usize::from(hit.is_err());
                        if hit.is_ok() {
                            let _ = policy.decide(&mut states, clock.now(), Op::Hit, 1);
                        }
                    }
                    match storage.settle(&policy, &key, old, 0).await {
                        Ok(()) => policy.settle(&mut states, clock.now(), old, 0),
                        Err(_) => failed += 1,
                    }
                    assert!(failed > 0, "{command}, {entries} entries of {text}");
                    server.ask(&["ACL", "SETUSER", "ratelimit", &format!("+{command}")]);
                    let found = decide(Op::Peek).await.unwrap();
                    let expected = policy.decide(&mut states, clock.now(), Op::Peek, 1);
                    assert_eq!(found, expected, "{command}, {entries} entries of {text}");
                }
                // All admitted entries expire on time.
                clock.advance(Duration::from_millis(86_400_000 - entries / 2));
                for _ in 0..4 {
                    let found = decide(Op::Hit).await.unwrap();
                    let expected = policy.decide(&mut states, clock.now(), Op::Hit, 1);
                    assert_eq!(found, expected, "{entries} entries of {text}");
                }
            });
        }
    }
}

#[tokio::test]
async fn ready_detects_a_missing_right_on_one_node() {
    let cluster = Cluster::start();
    for node in &cluster.nodes {
        node.ask(&documented());
    }
    let storage = storage(&cluster.url().replace("redis+cluster://", "redis+cluster://ratelimit:password@"));
    ready(&storage).await;
    for node in &cluster.nodes {
        assert_eq!(node.ask(&["DBSIZE"]).to_string(), "0");
        node.ask(&["ACL", "SETUSER", "ratelimit", "-setrange"]);
        let error = message(failed_check(&storage).await);
        assert!(error.contains("SETRANGE") && error.contains(&node.port().to_string()), "{error}");
        node.ask(&["ACL", "SETUSER", "ratelimit", "+setrange"]);
    }
    storage.ready(LONG).await.unwrap();
}

/// A server quotes the arguments of an unknown command.
#[tokio::test]
async fn no_error_contains_a_key() {
    let server = Server::start(&["--rename-command", "EVALSHA", ""]);
    server.ask(&["ACL", "SETUSER", "ratelimit", "on", ">password", "~other", "+@all"]);
    for storage in [storage(&server.url()), storage_of_the_user(&server)] {
        let limiter = RateLimiter::with_storage(policy("fixed-window 6/day"), storage);
        let error = failure(async || limiter.hit(&Key::from("hunter2")).await).await;
        let causes = iter::successors(Some(&error as &dyn std::error::Error), |cause| cause.source());
        let texts: Vec<String> = causes.map(|cause| format!("{cause} {cause:?}")).collect();
        assert!(texts.len() > 1 && !texts.concat().contains("hunter2"), "{texts:?}");
        assert!(texts[0].contains("EVALSHA"), "{texts:?}");
    }
}

/// Guards against this defect: the error says that nothing was cleared.
#[test]
fn clear_all_that_fails_in_between_may_have_cleared() {
    let server = Server::start(&[]);
    for number in 0..63 {
        server.ask(&["SET", &format!("rl:{{yes|t:{number}}}v1"), "x"]);
    }
    server.ask(&["SET", "rl:{no|t:k}v1", "x"]);
    server.ask(&["ACL", "SETUSER", "ratelimit", "on", ">password", "+@all", "~rl:{yes*"]);
    let storage = storage_of_the_user(&server);
    let error = RUNTIME.block_on(storage.clear_all()).unwrap_err();
    let left = server.ask(&["DBSIZE"]).to_string();
    assert_eq!(error.may_have_counted(), left != "64", "{left}: {error:#}");
}

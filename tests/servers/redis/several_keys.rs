//! Several keys that are decided together, in one call of a script.

use std::thread;

use common::example_process::Server as ExampleServer;
use common::members::random_members_decide_like_the_model;
use common::random::Numbers;
use common::servers::storage::{RUNTIME, failure, on};
use common::servers::{Sentinels, Server, ShardingProxy, wait_until, with_option};
use common::{EVERY_STRATEGY, KEEPING, foreign, policy};
use futures_util::future::join_all;
use tower_ratelimit::storage::{RedisStorage, StorageErrorKind, StorageRequest};
use tower_ratelimit::strategy::Status;
use tower_ratelimit::testing::members_decide_like_the_model;
use tower_ratelimit::{Decision, Key, Op, Policy, Storage};

use super::{ready, storage};

/// The policies `m0`, `m1` and so on, from their texts.
fn named<'a>(texts: impl IntoIterator<Item = &'a str>) -> Vec<Policy> {
    texts.into_iter().enumerate().map(|(at, text)| policy(text).with_name(format!("m{at}"))).collect()
}

fn hits<'a>(policies: &'a [Policy], keys: &'a [Key]) -> Vec<StorageRequest<'a>> {
    policies.iter().zip(keys).map(|(policy, key)| StorageRequest::new(policy, key, Op::Hit, 1)).collect()
}

fn are_admitted(decisions: &[Decision]) -> bool {
    decisions.iter().all(Decision::is_admitted)
}

#[test]
fn several_keys_are_decided_like_by_the_model() {
    let server = Server::start(&[]);
    members_decide_like_the_model(|clock| on(&server, clock));
}

/// Up to eight members, whose limits are in local variables or in tables of the script.
#[tokio::test]
async fn members_of_every_strategy_are_decided_like_by_the_model() {
    let server = Server::start(&[]);
    let limits = [&EVERY_STRATEGY[..], &KEEPING].concat();
    random_members_decide_like_the_model(40, &limits, |clock| on(&server, clock)).await;
}

/// Hits for eight users of two tenants at the same time, of which 150 are admitted. Each member has
/// spent exactly their units.
async fn concurrent_hits_are_exact(storage: &RedisStorage) {
    let policies = named(["fixed-window 40/day", "token-bucket 90/day", "fixed-window 150/day"]);
    let all = (0..400_u64).map(|number| {
        let (keys, policies) = ([Key::from(number % 8), Key::from(number % 2), Key::global()], &policies);
        async move { are_admitted(&storage.decide_all(&hits(policies, &keys)).await.unwrap()) }
    });
    let admitted = join_all(all).await.into_iter().filter(|admitted| *admitted).count();
    assert_eq!(admitted, 150);
    let mut spent = [0; 3];
    for (at, keys) in [(0, 8), (1, 2)] {
        for number in 0..keys {
            spent[at] += units_spent(storage, &policies[at], &Key::from(number)).await;
        }
    }
    spent[2] = units_spent(storage, &policies[2], &Key::global()).await;
    assert_eq!(spent, [150; 3]);
}

async fn units_spent(storage: &RedisStorage, policy: &Policy, key: &Key) -> u32 {
    let peek = storage.decide(StorageRequest::new(policy, key, Op::Peek, 0)).await.unwrap();
    peek.capacity() - peek.remaining()
}

/// Hits of several keys share calls with others of the same policies.
#[tokio::test]
async fn combined_hits_of_several_keys_are_exact() {
    let server = Server::start(&[]);
    let storage = storage(&server.url());
    ready(&storage).await;
    let before = server.calls("evalsha");
    concurrent_hits_are_exact(&storage).await;
    assert!(server.calls("evalsha") - before < 111, "{} calls", server.calls("evalsha") - before);
}

#[tokio::test]
async fn hits_of_several_keys_are_exact_on_the_primary_of_sentinels() {
    let all = Sentinels::start();
    let storage = storage(&all.url());
    ready(&storage).await;
    concurrent_hits_are_exact(&storage).await;
}

/// Two processes of the example server, and random users of 100 tenants. The requests suffice to spend the
/// tightest policy.
#[test]
fn two_processes_admit_exactly_the_minimum_over_users_tenants_and_all() {
    const USERS: u64 = 10_000;
    const TENANTS: u64 = 100;
    const THREADS: u64 = 8;
    const REQUESTS: u64 = 12_000;
    let server = Server::start(&[]);
    for (tenant, all, expected) in [(30, 2_500, 2_500), (20, 100_000, 20 * TENANTS)] {
        let file = std::env::temp_dir().join(format!("tenants-{all}-{}.toml", std::process::id()));
        let also = |name, limit: u32, key| {
            format!("[[also]]\npolicy = \"\\\"{name}\\\": fixed-window {limit}/day\"\nkey = \"{key}\"\n")
        };
        let members = [also("tenant", tenant, "header:x-tenant"), also("all", all, "global")].concat();
        std::fs::write(&file, format!("default = \"fixed-window 2/day\"\n{members}")).unwrap();
        let url = with_option(&server.url(), "prefix", format!("of-{all}"));
        let flags = ["--policies", file.to_str().unwrap(), "--key", "header:x-user", "--storage", &url];
        let flags = [&flags[..], &["--on-error", "refuse", "--timeout", "60s"]].concat();
        let processes = [ExampleServer::start(&flags), ExampleServer::start(&flags)];
        // A request whose connection takes too long gets 503, and counts nothing.
        let connect = |process: &ExampleServer| {
            let mut status = 503;
            wait_until("the process has connected", || {
                status = process.status("/", "x-user: u0\r\nx-tenant: t0\r\n");
                status != 503
            });
            assert_eq!(status, 200);
            0
        };
        let first = processes.each_ref().map(connect);
        let ask = |thread: u64| {
            let (mut numbers, mut admitted) = (Numbers(0x9abc_def0 + thread), Vec::new());
            for request in 0..REQUESTS / THREADS {
                let user = numbers.below(USERS);
                let fields = format!("x-user: u{user}\r\nx-tenant: t{}\r\n", user % TENANTS);
                match processes[usize::try_from((thread + request) % 2).unwrap()].status("/", &fields) {
                    200 => admitted.push(user),
                    status => assert_eq!(status, 429),
                }
            }
            admitted
        };
        let admitted: Vec<u64> = thread::scope(|scope| {
            let threads: Vec<_> = (0..THREADS).map(|thread| scope.spawn(move || ask(thread))).collect();
            first.into_iter().chain(threads.into_iter().flat_map(|thread| thread.join().unwrap())).collect()
        });
        assert_eq!(admitted.len() as u64, expected);
        let storage = storage(&url);
        RUNTIME.block_on(async {
            let named = |name, limit| policy(&format!("fixed-window {limit}/day")).with_name(name);
            assert_eq!(u64::from(units_spent(&storage, &named("all", all), &Key::global()).await), expected);
            for number in 0..TENANTS {
                let of_tenant = admitted.iter().filter(|user| **user % TENANTS == number).count();
                let key = Key::from(format!("t{number}").as_bytes());
                let spent = units_spent(&storage, &named("tenant", tenant), &key).await;
                assert!(spent <= tenant && spent as usize == of_tenant, "{number}: {spent}, {of_tenant} admitted");
            }
            for user in admitted.iter().step_by(10) {
                let of_user = admitted.iter().filter(|other| *other == user).count();
                let spent =
                    units_spent(&storage, &named("default", 2), &Key::from(format!("u{user}").as_bytes())).await;
                assert!(spent <= 2 && spent as usize == of_user, "{user}: {spent}, {of_user} admitted");
            }
        });
        std::fs::remove_file(file).unwrap();
    }
}

/// Refused hits of a user leave the counts of its tenant and of all as they were.
#[tokio::test]
async fn refused_hits_leave_every_count_as_it_was() {
    let server = Server::start(&[]);
    let storage = storage(&server.url());
    ready(&storage).await;
    let policies =
        named(["fixed-window 3/day", "moving-window 1000/day; fixed-window 2000/day", "lockout 100000/day for 1 day"]);
    let keys = [Key::from("user"), Key::from("tenant"), Key::global()];
    for _ in 0..3 {
        assert!(are_admitted(&storage.decide_all(&hits(&policies, &keys)).await.unwrap()));
    }
    let peeks = async || {
        let peeks = policies.iter().zip(&keys).map(|(policy, key)| StorageRequest::new(policy, key, Op::Peek, 0));
        let decided = join_all(peeks.map(|peek| storage.decide(peek))).await.into_iter().map(Result::unwrap);
        decided
            .map(|decision| decision.statuses().iter().map(Status::remaining).collect::<Vec<_>>())
            .collect::<Vec<_>>()
    };
    let before = peeks().await;
    let calls = server.calls("evalsha");
    for _ in 0..100 {
        let members = hits(&policies, &keys);
        for decided in join_all((0..100).map(|_| storage.decide_all(&members))).await {
            let decided = decided.unwrap();
            assert!(decided[0].is_refused() && decided.iter().all(|decision| !decision.has_spent()), "{decided:?}");
        }
    }
    assert_eq!(server.calls("evalsha") - calls, 10_000, "hits with a log are not combined");
    assert_eq!(peeks().await, before);
}

/// The proof is made by the first decisions, which wait for it, also on a storage that combines none.
#[tokio::test]
async fn several_keys_need_the_proof_of_one_server() {
    let server = [Server::start(&[]), Server::start(&[])];
    let policies = named(["5/day", "5/day"]);
    let keys = [Key::from("user"), Key::global()];
    let members = hits(&policies, &keys);
    for (option, evals) in [("", 66), ("?combine=false", 65), ("?combine=always", 0)] {
        server[0].ask(&["SCRIPT", "FLUSH"]);
        let (before, proxy) = (server[0].calls("eval"), ShardingProxy::start(&[server[0].port()]));
        let storage = storage(&format!("{}{option}", proxy.url()));
        let decided = join_all((0..3).map(|_| storage.decide_all(&members))).await;
        for decisions in decided {
            assert!(are_admitted(&decisions.unwrap()));
        }
        let sent = server[0].calls("eval") - before;
        assert!(sent >= evals && sent <= evals + 3, "{option}: {sent} scripts");
        storage.clear(&policies[0], &keys[0]).await.unwrap();
        storage.clear(&policies[1], &keys[1]).await.unwrap();
    }
    let proxy = ShardingProxy::start(&[server[0].port(), server[1].port()]);
    let storage = storage(&proxy.url());
    let error = failure(async || storage.decide_all(&members).await).await;
    assert!(error.kind() == StorageErrorKind::Unsupported && !error.may_have_counted(), "{error:?}");
    assert!(error.to_string().contains("InOrder::new(storage)"), "{error}");
    assert_eq!(server[0].ask(&["KEYS", "*m?|*"]).to_string(), "", "nothing was counted");
}

/// The errors say what to write instead, when the layer is built and at run time.
#[tokio::test]
async fn members_that_one_script_cannot_decide_are_rejected() {
    let server = Server::start(&[]);
    let scripted = policy("5/day").with_name("scripted");
    let without_script = foreign(5).with_name("foreign");
    let (storage_of_one, policies) = (RedisStorage::new(&server.url()).unwrap(), [scripted, without_script]);
    let error = storage_of_one.validate_members(&policies).unwrap_err().to_string();
    assert!(error.contains("has a strategy without a script") && error.contains("InOrder::new(storage)"), "{error}");
    let keys = [Key::from("user"), Key::global()];
    let failed = storage_of_one.decide_all(&hits(&policies, &keys)).await.unwrap_err();
    assert!(failed.kind() == StorageErrorKind::Unsupported && format!("{failed:#}").contains(&error), "{failed:#}");
    let (policies, keys) = (named(["5/day", "5/day"]), [Key::from("user"), Key::global()]);
    let mut members = hits(&policies, &keys);
    members[0].op = Op::Charge;
    let failed = storage(&server.url()).decide_all(&members).await.unwrap_err();
    assert!(
        failed.kind() == StorageErrorKind::Unsupported && failed.to_string().contains("charge each key"),
        "{failed}"
    );
    assert_eq!(server.ask(&["DBSIZE"]).to_string(), "0");
}

/// A missing right or an unreadable value of one key changes no other key.
#[tokio::test]
async fn hits_that_fail_on_one_key_count_on_none() {
    let server = Server::start(&[]);
    let policies = named(["moving-window 5/day", "5/day", "moving-window 7/day"]);
    let keys = [Key::from("user"), Key::from("tenant"), Key::global()];
    let members = hits(&policies, &keys);
    let all = storage(&server.url());
    ready(&all).await;
    assert!(are_admitted(&all.decide_all(&members).await.unwrap()));
    let peeks = async || {
        let peek =
            |member: &StorageRequest<'_>| all.decide(StorageRequest::new(member.policy, member.key, Op::Peek, 1));
        join_all(members.iter().map(peek)).await
    };
    let remaining = async || peeks().await.into_iter().map(|peek| peek.unwrap().remaining()).collect::<Vec<_>>();
    assert_eq!(remaining().await, [4, 4, 6]);
    for right in ["set", "setrange", "getrange", "strlen", "pexpire"] {
        let without = format!("-{right}");
        server.ask(&["ACL", "SETUSER", "some", "reset", "on", ">password", "~*", "+@all", &without]);
        let storage = storage(&server.url().replace("redis://", "redis://some:password@"));
        for _ in 0..3 {
            let before = remaining().await;
            let result = storage.decide_all(&members).await;
            let expected: Vec<_> = before.iter().map(|left| left - u32::from(result.is_ok())).collect();
            assert_eq!(remaining().await, expected, "{right}: {result:?}");
        }
        all.clear_all().await.unwrap();
        assert!(are_admitted(&all.decide_all(&members).await.unwrap()));
    }
    for (at, (policy, key)) in policies.iter().zip(&keys).enumerate() {
        let (before, name) = (remaining().await, format!("rl:{{{}|{key}}}v1", policy.identity()));
        server.ask(&["RENAME", &name, "kept"]);
        server.ask(&["SET", &name, "a value of another format"]);
        let error = all.decide_all(&members).await.unwrap_err();
        assert!(error.kind() == StorageErrorKind::Unsupported, "{at}: {error:?}");
        server.ask(&["RENAME", "kept", &name]);
        assert_eq!(remaining().await, before, "{at}");
    }
}

/// Some keys keep their expiry, and others get one, which needs other rights if a key is written alone.
#[tokio::test]
async fn missing_rights_to_write_count_on_no_key() {
    let server = Server::start(&[]);
    let all = storage(&server.url());
    ready(&all).await;
    let policies = named(["5000/day", "token-bucket 5000/day", "5000/day"]);
    let [old, new, global] = [Key::from("old"), Key::from("new"), Key::global()];
    for right in ["set", "setrange", "unlink"] {
        all.clear_all().await.unwrap();
        assert!(are_admitted(
            &all.decide_all(&hits(&policies, &[old.clone(), old.clone(), global.clone()])).await.unwrap()
        ));
        server.ask(&["ACL", "SETUSER", "some", "reset", "on", ">password", "~*", "+@all", &format!("-{right}")]);
        let some = storage(&server.url().replace("redis://", "redis://some:password@"));
        for keys in [[&old, &new, &global], [&new, &old, &global], [&old, &old, &global], [&new, &new, &global]] {
            let keys = keys.map(Key::clone);
            let spent = async || {
                let peek = |(policy, key)| all.decide(StorageRequest::new(policy, key, Op::Peek, 0));
                let peeks = join_all(policies.iter().zip(&keys).map(peek)).await.into_iter().map(Result::unwrap);
                peeks.map(|peek| peek.capacity() - peek.remaining()).collect::<Vec<_>>()
            };
            let before = spent().await;
            let mut members = hits(&policies, &keys);
            // The states of a fresh key that spends nothing would be removed.
            members[1].cost = u32::from(right != "unlink");
            let result = some.decide_all(&members).await;
            assert_eq!(result.is_ok(), right != "set", "{right}: {result:?}");
            let expected =
                before.iter().zip(&members).map(|(spent, member)| spent + u32::from(result.is_ok()) * member.cost);
            assert_eq!(spent().await, expected.collect::<Vec<_>>(), "{right}: {result:?}");
        }
    }
}

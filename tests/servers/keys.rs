//! Pages of the keys of a policy, on each server.

use std::collections::BTreeSet;
use std::time::Duration;

use common::servers::storage::{RUNTIME, on_prefix};
use common::servers::{Cluster, Etcd, Memcached, Postgres, Server, with_option, with_timeout};
use common::time::eventually;
use common::{foreign, message, policy};
use futures_util::future::join_all;
use tower_ratelimit::storage::{AnyStorage, ManualClock, StorageErrorKind};
use tower_ratelimit::{Key, Policy, RateLimiter, Storage};

/// A timeout that only a hanging test reaches.
const LONG: Duration = Duration::from_secs(60);

const KEYS: u64 = 250;

async fn open(url: &str, prefix: &str) -> AnyStorage {
    let storage: AnyStorage = with_option(&with_timeout(url, LONG), "prefix", prefix).parse().unwrap();
    storage.ready(LONG).await.unwrap();
    storage
}

/// Returns the texts of the keys of all pages, and the number of keys on each page.
async fn all(limiter: &RateLimiter, prefix: &str, limit: usize) -> (BTreeSet<String>, Vec<usize>) {
    let (mut texts, mut after, mut sizes) = (BTreeSet::new(), None, Vec::new());
    loop {
        let page = limiter.keys(prefix, after.as_deref(), limit).await.unwrap();
        sizes.push(page.keys.len());
        texts.extend(page.keys.iter().map(|(key, _)| key.to_string()));
        after = page.next;
        if after.is_none() {
            return (texts, sizes);
        }
    }
}

/// Checks that each key of a policy is listed, and none of another policy or another prefix.
async fn lists_every_key(url: &str, policy: Policy) {
    let [shop, others] = [open(url, "shop").await, open(url, "shop:staging").await];
    let ours = RateLimiter::with_storage(policy.clone().with_name("free*"), shop.clone());
    let limiters = [
        ours.clone(),
        RateLimiter::with_storage(policy.clone().with_name("free*|t"), shop),
        RateLimiter::with_storage(policy.with_name("free*"), others),
    ];
    let (alice, acme) = (Key::from("alice|}{\u{e9}"), Key::from("acme"));
    let mut keys: Vec<Key> = (0..KEYS).map(Key::from).collect();
    keys.extend([alice.clone(), alice.within(&acme), Key::join([&acme, &alice]), Key::global()]);
    for (limiter, number) in limiters.iter().zip(0..) {
        for keys in keys.chunks(50) {
            let other = Key::from(format!("in {number}"));
            let hits = keys.iter().chain([&other]).map(|key| limiter.hit(key));
            assert!(join_all(hits).await.into_iter().all(|hit| hit.unwrap().is_admitted()));
        }
    }
    let long = Key::from("x".repeat(300));
    let _ = ours.hit(&long).await.unwrap();
    let mut expected: BTreeSet<_> = keys.iter().map(ToString::to_string).chain(["t:in%200".to_owned()]).collect();
    for limit in [37, 1_000] {
        let (found, sizes) = all(&ours, "", limit).await;
        assert_eq!(found, expected, "{url}, {limit}");
        assert!(limit > 37 || sizes.len() > 3 && sizes.iter().all(|size| *size < 100), "{url}: {sizes:?}");
    }
    expected.retain(|text| text.starts_with("n:24"));
    assert_eq!(all(&ours, "n:24", 5).await.0, expected, "{url}");
    assert_eq!(all(&ours, "@:(t:acme,", 5).await.0.len(), 1, "{url}");
    let (mut seen, mut after) = (Vec::new(), None);
    loop {
        let page = ours.keys("t:alice", after.as_deref(), 10).await.unwrap();
        seen.extend(page.keys.iter().map(|(key, seen)| (key.clone(), seen.remaining(), seen.is_admitted())));
        after = page.next;
        if after.is_none() {
            break;
        }
    }
    // Redis may list a key twice.
    seen.dedup();
    let peek = ours.peek(&alice).await.unwrap();
    assert_eq!(seen, [(alice, peek.remaining(), true)], "{url}");
    let unknown = ours.keys("", Some("\u{e9}"), 10).await.unwrap_err();
    assert_eq!(unknown.kind(), StorageErrorKind::Unsupported, "{url}");
}

fn each_policy() -> [Policy; 2] {
    [policy("fixed-window 9/day; moving-window 9/day"), foreign(9)]
}

/// Guards against this defect: a key of another version of this crate fails its whole page.
#[test]
fn keys_of_an_unknown_version_are_not_listed() {
    let (redis, postgres) = (Server::start(&[]), Postgres::start(&[]));
    let limiter = |url: &str| {
        let storage = RUNTIME.block_on(open(url, "rl"));
        RateLimiter::with_storage(policy("fixed-window 9/day").with_name("p"), storage)
    };
    let limiters = [limiter(&redis.url()), limiter(&postgres.url())];
    redis.ask(&["SET", "rl:{p|t:new}v1", "a value of another format"]);
    postgres.ask("INSERT INTO tower_ratelimit VALUES ('rl:p|t:new', 'v2;new', 'infinity')");
    for limiter in limiters {
        RUNTIME.block_on(async {
            let _ = limiter.hit(&Key::from("old")).await.unwrap();
            let error = limiter.hit(&Key::from("new")).await.unwrap_err();
            assert_eq!(error.kind(), StorageErrorKind::Unsupported);
            assert_eq!(all(&limiter, "", 10).await.0, BTreeSet::from(["t:old".to_owned()]));
        });
    }
}

#[test]
fn redis_lists_every_key() {
    for policy in each_policy() {
        let server = Server::start(&[]);
        // The keys of other programs, also of other types, are passed over.
        server.ask(&["EVAL", "for i = 1, 3000 do redis.call('RPUSH', 'rl:list' .. i, i) end", "0"]);
        RUNTIME.block_on(lists_every_key(&server.url(), policy));
        assert_eq!(server.calls("keys"), 0);
    }
}

#[test]
fn cluster_lists_the_keys_of_each_node() {
    let cluster = Cluster::start();
    RUNTIME.block_on(lists_every_key(&cluster.url(), policy("fixed-window 9/day")));
}

#[test]
fn postgres_lists_every_key() {
    let server = Postgres::start(&[]);
    RUNTIME.block_on(lists_every_key(&server.url(), policy("fixed-window 9/day; moving-window 9/day")));
}

#[test]
fn etcd_lists_every_key() {
    let etcd = Etcd::start(1);
    RUNTIME.block_on(lists_every_key(&etcd.url(), policy("fixed-window 9/day")));
}

#[test]
fn sqlite_lists_every_key() {
    let file = std::env::temp_dir().join(format!("tower-ratelimit-keys-{}.db", std::process::id()));
    RUNTIME.block_on(lists_every_key(&format!("sqlite:{}", file.display()), policy("fixed-window 9/day")));
    for end in ["", "-wal", "-shm", "-reserve"] {
        let _ = std::fs::remove_file(format!("{}{end}", file.display()));
    }
}

#[test]
fn memcached_cannot_list_its_keys() {
    let server = Memcached::start(&[]);
    RUNTIME.block_on(async {
        let limiter = RateLimiter::with_storage(policy("9/day"), open(&server.url(), "rl").await);
        let error = limiter.keys("", None, 10).await.unwrap_err();
        assert_eq!(error.kind(), StorageErrorKind::Unsupported);
        assert_eq!(message(error), "this storage cannot list its keys");
    });
}

/// Keys of Redis live up to a second longer than their states.
#[test]
fn expired_keys_of_redis_are_not_listed() {
    let server = Server::start(&[]);
    let clock = ManualClock::default();
    let limiter = RateLimiter::with_storage(policy("fixed-window 9/day"), on_prefix(&server, "rl", clock.clone()));
    RUNTIME.block_on(async {
        for client in 0..20_u64 {
            let _ = limiter.hit(&Key::from(client)).await.unwrap();
        }
        assert_eq!(all(&limiter, "", 3).await.0.len(), 20);
        clock.advance(Duration::from_secs(86_400));
        assert!(all(&limiter, "", 3).await.0.is_empty());
    });
    assert_eq!(server.ask(&["DBSIZE"]), common::servers::Reply::Text("20".to_owned()));
}

/// A page of a server that is down is an error, and the next attempt works.
#[test]
fn page_of_a_killed_server_is_an_error() {
    let mut server = Server::start(&[]);
    RUNTIME.block_on(async {
        let storage: AnyStorage = with_timeout(&server.url(), Duration::from_secs(5)).parse().unwrap();
        storage.ready(LONG).await.unwrap();
        let limiter = RateLimiter::with_storage(policy("9/day"), storage);
        let _ = limiter.hit(&Key::from("a")).await.unwrap();
        server.kill();
        let error = limiter.keys("", None, 10).await.unwrap_err();
        assert!(!error.may_have_counted(), "{error:?}");
        tokio::task::block_in_place(|| server.restart());
        eventually("the server lists no keys", async || {
            limiter.keys("", None, 10).await.is_ok_and(|page| page.keys.is_empty() && page.next.is_none())
        })
        .await;
    });
}

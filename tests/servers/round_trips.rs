//! The round trips of a decision: each cell of the documented table.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use common::servers::storage::RUNTIME;
use common::servers::{Etcd, Memcached, Postgres, Server, with_timeout};
use common::{EVERY_STRATEGY, foreign, policy};
use tower_ratelimit::storage::{EtcdStorage, MemcachedStorage, PostgresStorage, RedisStorage, StorageRequest};
use tower_ratelimit::{Key, Op, Policy, Storage};

const LONG: Duration = Duration::from_secs(60);

/// The round trips of the first hit of a key, of the next ones, of one that is refused, and of a peek.
type Trips = [u64; 4];

/// Hits a new key until a hit is refused, peeks, and compares the round trips. `count` returns the number
/// of round trips so far.
fn assert_trips(storage: &impl Storage, policy: &Policy, count: impl Fn() -> u64, expected: Trips) {
    let key = Key::from("k");
    let ask = |op| {
        let before = count();
        let decision = RUNTIME.block_on(storage.decide(StorageRequest::new(policy, &key, op, 1))).unwrap();
        (decision.is_admitted(), count() - before)
    };
    let [first, next, refused, peek] = expected;
    assert_eq!(ask(Op::Hit), (true, first), "first hit, {policy}");
    // Some strategies admit one hit.
    let last = (0..10).map(|_| ask(Op::Hit)).find(|hit| *hit != (true, next));
    assert_eq!(last, Some((false, refused)), "refusal, {policy}");
    assert_eq!(ask(Op::Peek).1, peek, "peek, {policy}");
}

/// The round trips of a hit of three keys that are new, of the next hit, of one that is refused, and of a
/// hit of which one key is new.
fn trips_of_several_keys(storage: &impl Storage, count: impl Fn() -> u64) -> [u64; 4] {
    let policies = [("user", 2), ("tenant", 9), ("all", 9)]
        .map(|(name, limit)| policy(&format!("fixed-window {limit}/day")).with_name(name));
    let ask = |user| {
        let keys = [Key::from(user), Key::from("tenant"), Key::global()];
        let members = [0, 1, 2].map(|at| StorageRequest::new(&policies[at], &keys[at], Op::Hit, 1));
        let before = count();
        let decisions = RUNTIME.block_on(storage.decide_all(&members)).unwrap();
        assert!(decisions[1].is_admitted() && decisions[2].is_admitted(), "{decisions:?}");
        (decisions[0].is_admitted(), count() - before)
    };
    let (new, next, refused, other) = (ask("alice"), ask("alice"), ask("alice"), ask("bob"));
    assert_eq!([new.0, next.0, refused.0, other.0], [true, true, false, true]);
    [new.1, next.1, refused.1, other.1]
}

fn shared() -> Policy {
    policy("fixed-window 99/day").with_name("shared")
}

/// Hits the key that two processes use. Returns the round trips.
fn trips_of_hit(storage: &impl Storage, count: impl Fn() -> u64) -> u64 {
    let (policy, key) = (shared(), Key::from("k"));
    let before = count();
    let decision = RUNTIME.block_on(storage.decide(StorageRequest::new(&policy, &key, Op::Hit, 1)));
    assert!(decision.unwrap().is_admitted());
    count() - before
}

/// After a hit of another process, the next hit takes `lost` round trips. Later ones load the key, because
/// the other process is likely to hit it again.
fn assert_key_of_two_processes_is_loaded<S: Storage>(storage: &S, other: &S, count: impl Fn() -> u64, lost: u64) {
    let hit = |storage: &S| trips_of_hit(storage, &count);
    assert_eq!([storage, storage, other, storage].map(hit), [2, 1, 2, lost]);
    assert_eq!([storage; 8].map(hit), [2; 8]);
    assert_eq!([storage, storage].map(hit), [1, 1]);
}

/// Returns a policy for each strategy, and one with three limits.
fn policies() -> impl Iterator<Item = Policy> {
    let several = "fixed-window 3/day; moving-window 5/day; token-bucket 9/day";
    EVERY_STRATEGY
        .into_iter()
        .map(|text| text.replace("7 seconds", "7 days"))
        .chain([several.to_owned()])
        .map(|text| policy(&text))
}

#[test]
fn redis_hit_takes_one_round_trip_or_two_if_the_strategy_has_no_script() {
    let server = Server::start(&[]);
    let storage = RedisStorage::new(&with_timeout(&server.url(), LONG)).unwrap();
    RUNTIME.block_on(storage.ready(LONG)).unwrap();
    let count = || server.calls("evalsha") + server.calls("eval");
    for policy in policies() {
        // The first hit loads the script.
        assert_trips(&storage, &policy.clone().with_name("first"), || 0, [0; 4]);
        assert_trips(&storage, &policy, count, [1, 1, 1, 1]);
    }
    assert_trips(&storage, &foreign(3), count, [2, 2, 1, 1]);
}

#[test]
fn memcached_hit_takes_one_round_trip_or_two_if_the_key_is_not_known() {
    let server = Memcached::start(&[]);
    let storage = MemcachedStorage::new(&with_timeout(&server.url(), LONG)).unwrap();
    RUNTIME.block_on(storage.ready(LONG)).unwrap();
    let count = || server.stat("cmd_get") + server.stat("cmd_set");
    for policy in policies().chain([foreign(3)]) {
        assert_trips(&storage, &policy, count, [2, 1, 1, 1]);
    }
    let other = MemcachedStorage::new(&with_timeout(&server.url(), LONG)).unwrap();
    RUNTIME.block_on(other.ready(LONG)).unwrap();
    assert_key_of_two_processes_is_loaded(&storage, &other, count, 3);
    // An item that has expired is not a sign of another process.
    server.ask("md rl:shared|t:k");
    assert_eq!([(); 3].map(|()| trips_of_hit(&storage, count)), [2, 1, 1]);
}

#[test]
fn etcd_hit_takes_one_round_trip_or_two_if_the_key_is_not_known() {
    let etcd = Etcd::start(1);
    let storage = EtcdStorage::new(&with_timeout(&etcd.url(), LONG)).unwrap();
    RUNTIME.block_on(storage.ready(LONG)).unwrap();
    let count = || {
        let mut stream = TcpStream::connect(etcd.hosts()).unwrap();
        write!(stream, "GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        let started =
            text.lines().filter(|line| line.starts_with("grpc_server_started_total{") && line.contains(".KV\""));
        let counts: Vec<u64> = started.map(|line| line.rsplit(' ').next().unwrap().parse().unwrap()).collect();
        assert!(!counts.is_empty(), "{text}");
        counts.into_iter().sum()
    };
    for policy in policies().chain([foreign(3)]) {
        assert_trips(&storage, &policy, count, [2, 1, 1, 1]);
    }
    assert_eq!(trips_of_several_keys(&storage, count), [2, 1, 1, 2]);
    let other = EtcdStorage::new(&with_timeout(&etcd.url(), LONG)).unwrap();
    RUNTIME.block_on(other.ready(LONG)).unwrap();
    assert_key_of_two_processes_is_loaded(&storage, &other, count, 2);
    RUNTIME.block_on(other.clear(&shared(), &Key::from("k"))).unwrap();
    assert_eq!([(); 3].map(|()| trips_of_hit(&storage, count)), [2, 1, 1]);
}

#[test]
fn postgres_decision_after_the_first_hit_takes_one_round_trip() {
    let server = Postgres::start(&["shared_preload_libraries=pg_stat_statements"]);
    server.ask("CREATE EXTENSION pg_stat_statements");
    // Another connection could look for the table at any time.
    let storage = PostgresStorage::new(&with_timeout(&format!("{}?connections=1", server.url()), LONG)).unwrap();
    RUNTIME.block_on(storage.ready(LONG)).unwrap();
    // The first hit loads the server's time.
    let _ = RUNTIME.block_on(storage.decide(StorageRequest::new(&foreign(3), &Key::from("first"), Op::Hit, 1)));
    // Sweeps run in the background, so they do not count.
    let count = || {
        let calls = "SELECT coalesce(sum(calls), 0) FROM pg_stat_statements \
                     WHERE query LIKE '%tower_ratelimit%' AND query NOT LIKE '%SKIP LOCKED%' AND query NOT LIKE '%pg_stat%'";
        server.ask(calls).parse().unwrap()
    };
    for policy in policies().chain([foreign(3)]) {
        assert_trips(&storage, &policy, count, [1, 1, 1, 1]);
    }
    assert_eq!(trips_of_several_keys(&storage, count), [2, 1, 1, 1]);
}

//! Prints the bytes that a client takes on each storage, and the decisions per second of one Redis
//! node and of a cluster of three.
//!
//! `scripts/capacity` runs it. It runs without the test harness, because it prints tables. It fails
//! if a client takes a tenth more bytes than the guide `sizing` documents. Without an argument, as
//! `scripts/test` runs it, it does not measure rates.

use std::fmt::Write;
use std::time::{Duration, Instant};

use common::policy;
use common::servers::{Cluster, Etcd, Memcached, Reply, Server, wait_until};
use serde_json::json;
use tower_ratelimit::storage::{AnyStorage, ManualClock, Storage, StorageRequest};
use tower_ratelimit::{Key, MemoryStorage, Op, Policy};

const POLICIES: [&str; 4] =
    ["fixed-window 10/day", "token-bucket 10/day", "10/day; 20/day; 30/day", "moving-window 10/day"];

/// The number of hits that use up the smallest quota.
const HITS: u32 = 10;
/// The period of the policies.
const DAY: Duration = Duration::from_secs(86_400);

const DOCS: &str = include_str!("../../src/guide/sizing.md");

/// The number of clients in each measurement.
const CLIENTS: u64 = 5_000;
/// The number of clients on etcd, which syncs each write to the disk. The first argument of the
/// program replaces it.
const CLIENTS_OF_ETCD: u64 = 200;

/// The number of calls in flight.
const IN_FLIGHT: u64 = 64;
/// The duration of a measurement of the rate.
const SPAN: Duration = Duration::from_secs(2);

async fn hit(storage: &impl Storage, policy: &Policy, client: u64) {
    let key = Key::from(client);
    let decided = storage.decide(StorageRequest::new(policy, &key, Op::Hit, 1)).await;
    let decision = decided.unwrap_or_else(|error| panic!("{policy}: {error:#}"));
    assert!(decision.is_admitted());
}

/// Spends the whole quota of each client.
async fn fill(storage: &AnyStorage, policy: &Policy, clients: u64) {
    let callers = (0..IN_FLIGHT).map(|caller| {
        let (storage, policy) = (storage.clone(), policy.clone());
        tokio::spawn(async move {
            for client in (0..clients).filter(|client| client % IN_FLIGHT == caller) {
                for _ in 0..HITS {
                    hit(&storage, &policy, client).await;
                }
            }
        })
    });
    for caller in callers.collect::<Vec<_>>() {
        caller.await.unwrap();
    }
}

fn any(url: &str) -> AnyStorage {
    let timeout = if url.contains('?') { "&timeout=10s" } else { "?timeout=10s" };
    format!("{url}{timeout}").parse().unwrap()
}

/// Spreads the hits of each client over the day, because the size of a log depends on the time
/// between them.
async fn on_memory(policy: &Policy) -> u64 {
    let clock = ManualClock::default();
    let storage = MemoryStorage::builder().max_bytes(1 << 30).clock(clock.clone()).build().unwrap();
    for _ in 0..HITS {
        for client in 0..CLIENTS {
            hit(&storage, policy, client).await;
        }
        clock.advance(DAY / HITS);
    }
    storage.stats().bytes as u64 / CLIENTS
}

/// Bytes on a Redis server.
struct OnRedis {
    /// `MEMORY USAGE` of all keys of a client.
    usage: u64,
    /// The growth of the server's memory per client.
    growth: u64,
    received_per_decision: u64,
    sent_per_decision: u64,
}

async fn on_redis(policy: &Policy) -> OnRedis {
    let server = Server::start(&[]);
    let info = |name: &str| {
        let info = server.ask(&["INFO", "all"]).to_string();
        let value = info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        value.unwrap().parse::<u64>().unwrap()
    };
    // The buffers of a connection are part of the server's memory. Their size depends on the load.
    let fill_and_disconnect = async |clients| {
        fill(&any(&server.url()), policy, clients).await;
        wait_until("the storage has disconnected", || info("connected_clients") == 1);
    };
    // Loads the script before the measurement starts.
    fill_and_disconnect(1).await;
    server.ask(&["FLUSHALL"]);
    let names = ["used_memory", "total_net_input_bytes", "total_net_output_bytes"];
    let before = names.map(info);
    fill_and_disconnect(CLIENTS).await;
    let [growth, received, sent] = [0, 1, 2].map(|index| info(names[index]).saturating_sub(before[index]));
    let Reply::List(keys) = server.ask(&["KEYS", "*|n:4321}*"]) else { panic!("no list") };
    let usage = |key: &Reply| server.ask(&["MEMORY", "USAGE", &key.to_string()]).to_string().parse::<u64>().unwrap();
    OnRedis {
        usage: keys.iter().map(usage).sum(),
        growth: growth / CLIENTS,
        received_per_decision: received / CLIENTS / u64::from(HITS),
        sent_per_decision: sent / CLIENTS / u64::from(HITS),
    }
}

/// Returns the bytes of the items per client, including the header of each item.
async fn on_memcached(policy: &Policy) -> u64 {
    let server = Memcached::start(&[]);
    fill(&any(&server.url()), policy, CLIENTS).await;
    server.stat("bytes") / CLIENTS
}

/// Returns the number of clients on etcd that the command line names.
fn argument() -> Option<u64> {
    std::env::args().nth(1)?.parse().ok()
}

/// Returns the growth of the database after a compaction.
async fn on_etcd(policy: &Policy) -> u64 {
    let server = Etcd::calm();
    let status = || server.ask("maintenance/status", &json!({}));
    let number = |status: &serde_json::Value, name: &str| status[name].as_str().unwrap().parse::<u64>().unwrap();
    let before = number(&status(), "dbSizeInUse");
    let clients = argument().unwrap_or(CLIENTS_OF_ETCD);
    fill(&any(&server.url()), policy, clients).await;
    let revision = status()["header"]["revision"].clone();
    server.ask("kv/compaction", &json!({ "revision": revision, "physical": true }));
    (number(&status(), "dbSizeInUse") - before) / clients
}

/// Returns the decisions per second of a storage, on many keys.
async fn rate(url: &str) -> u64 {
    let (storage, start) = (any(url), Instant::now());
    let callers = (0..IN_FLIGHT).map(|caller| {
        let storage = storage.clone();
        tokio::spawn(async move {
            let (policy, mut calls) = (policy("fixed-window 1000000/day"), 0_u64);
            while start.elapsed() < SPAN {
                let key = Key::from(caller * 1_000 + calls % 1_000);
                assert!(storage.decide(StorageRequest::new(&policy, &key, Op::Hit, 1)).await.unwrap().is_admitted());
                calls += 1;
            }
            calls
        })
    });
    let mut calls = 0;
    for caller in callers.collect::<Vec<_>>() {
        calls += caller.await.unwrap();
    }
    calls / SPAN.as_secs()
}

/// Returns the documented bytes of a client: the cells after the policy.
fn documented(policy: &str) -> Vec<u64> {
    let row = DOCS.lines().find_map(|line| line.strip_prefix(&format!("| `{policy}` |"))).expect("the guide has a row");
    row.split('|').filter_map(|cell| cell.trim().replace(',', "").parse().ok()).collect()
}

#[tokio::main]
async fn main() {
    println!("| bytes of a client | memory | Redis, `MEMORY USAGE` | Redis, of the server | memcached | etcd |");
    println!("|---|---|---|---|---|---|");
    let (mut wrong, mut network) = (Vec::new(), String::new());
    for text in POLICIES {
        let policy = policy(text).with_name("free");
        let redis = on_redis(&policy).await;
        writeln!(network, "| `{text}` | {} | {} |", redis.received_per_decision, redis.sent_per_decision).unwrap();
        let found =
            [on_memory(&policy).await, redis.usage, redis.growth, on_memcached(&policy).await, on_etcd(&policy).await];
        println!("| `{text}` | {} |", found.map(|bytes| bytes.to_string()).join(" | "));
        let documented = documented(text);
        // The pages of etcd's database are filled differently in each run.
        let exceeds = |(found, documented): (&u64, &u64)| *found * 10 > *documented * 11;
        if documented.len() != found.len() || found[..4].iter().zip(&documented).any(exceeds) {
            wrong.push(format!("{text}: {found:?} instead of {documented:?}"));
        }
    }
    println!("\n| bytes of a decision on Redis | received | sent |\n|---|---|---|\n{network}");
    if argument().is_some() {
        let (server, cluster) = (Server::start(&[]), Cluster::start());
        println!("| Redis, {IN_FLIGHT} calls in flight | decisions per second |\n|---|---|");
        println!("| one node | {} |", rate(&server.url()).await);
        println!("| a cluster of three nodes | {} |", rate(&cluster.url()).await);
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

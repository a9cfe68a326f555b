//! The storage on connections that a program has already.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::servers::storage::RUNTIME;
use common::servers::{Cluster, Reply, Server, with_timeout};
use common::time::eventually;
use common::{message, policy};
use futures_util::future::join_all;
use redis_client::aio::{ConnectionManager, ConnectionManagerConfig};
use redis_client::cluster::ClusterClient;
use redis_client::cluster_async::ClusterConnection;
use redis_client::{Client, Cmd, Value, cmd};
use tokio::task::{JoinSet, block_in_place};
use tower_ratelimit::storage::{Credentials, ManualClock, RedisStorage, StorageErrorKind, TlsConfig};
use tower_ratelimit::testing::StorageLaws;
use tower_ratelimit::{Key, RateLimiter, Storage};

use super::LONG;

/// Manages a connection without timeouts of its own.
async fn manager(server: &Server) -> ConnectionManager {
    let config = ConnectionManagerConfig::new().set_response_timeout(None).set_max_delay(Duration::from_millis(20));
    ConnectionManager::new_with_config(Client::open(server.url()).unwrap(), config).await.unwrap()
}

fn on(manager: &ConnectionManager, options: &str) -> RedisStorage {
    RedisStorage::from_connection_manager(manager.clone(), options).unwrap()
}

fn long() -> String {
    format!("timeout={LONG:?}")
}

/// A limit of a storage on a manager.
fn limiter(storage: RedisStorage) -> RateLimiter {
    RateLimiter::with_storage(policy("fixed-window 100/day; moving-window 120/day"), storage)
}

async fn send(manager: &mut ConnectionManager, command: &Cmd) -> Value {
    manager.send_packed_command(command).await.unwrap().extract_error().unwrap()
}

#[test]
fn storage_on_a_manager_obeys_the_laws() {
    let server = Server::start(&[]);
    let manager = RUNTIME.block_on(manager(&server));
    let number = std::sync::atomic::AtomicU32::new(0);
    // The connection belongs to another runtime, which runs meanwhile.
    let empty = |clock: ManualClock| {
        let prefix = number.fetch_add(1, Ordering::SeqCst);
        on(&manager, &format!("{}&prefix=t{prefix}", long())).clock(clock)
    };
    StorageLaws::new(empty).scripts(8).check();
}

#[test]
fn storages_on_managers_and_on_urls_count_together() {
    let server = Server::start(&[]);
    RUNTIME.block_on(async {
        let url = RedisStorage::new(&with_timeout(&server.url(), LONG)).unwrap();
        let storages = [on(&manager(&server).await, &long()), on(&manager(&server).await, &long()), url];
        let mut tasks = JoinSet::new();
        for task in 0..30 {
            let limiter = limiter(storages[task % 3].clone());
            tasks.spawn(async move {
                let hits = (0..10).map(|_| limiter.hit(&Key::global()));
                join_all(hits).await.into_iter().filter(|hit| hit.as_ref().unwrap().is_admitted()).count()
            });
        }
        assert_eq!(tasks.join_all().await.into_iter().sum::<usize>(), 100);
        storages[0].check().await.unwrap();
        assert_eq!(limiter(storages[0].clone()).keys("", None, 10).await.unwrap().keys.len(), 1);
        assert!(storages[0].clear_all().await.unwrap() > 0);
        assert!(limiter(storages[2].clone()).hit(&Key::global()).await.unwrap().is_admitted());
    });
}

/// Calls of the storage that are given up must not take the replies of others, or hold them up.
#[test]
fn other_users_of_the_connection_are_not_disturbed() {
    let server = Server::start(&[]);
    RUNTIME.block_on(async {
        let manager = manager(&server).await;
        let is_over = Arc::new(AtomicBool::new(false));
        let users = (0..4).map(|user| {
            let (mut manager, is_over) = (manager.clone(), Arc::clone(&is_over));
            tokio::spawn(async move {
                let (mut rounds, key) = (0_u64, format!("user {user}"));
                while !is_over.load(Ordering::SeqCst) || rounds == 0 {
                    let value = format!("{user} {rounds}");
                    assert_eq!(send(&mut manager, cmd("SET").arg(&key).arg(&value)).await, Value::Okay);
                    let stored = send(&mut manager, cmd("GET").arg(&key)).await;
                    assert_eq!(stored, Value::BulkString(value.into_bytes()));
                    rounds += 1;
                }
                rounds
            })
        });
        let users: Vec<_> = users.collect();
        let (patient, hasty) = (limiter(on(&manager, &long())), limiter(on(&manager, "timeout=1ms&prefix=hasty")));
        let mut late = 0;
        for round in 0..200_u64 {
            let key = Key::from(round);
            let hits = (0..20).map(|_| hasty.hit(&key));
            late += join_all(hits).await.into_iter().filter(Result::is_err).count();
            // Dropped after the first poll.
            let _ = futures_util::FutureExt::now_or_never(patient.hit(&Key::from("dropped")));
            assert!(patient.hit(&key).await.unwrap().is_admitted());
        }
        // A server that hangs makes all calls of the storage late.
        server.stop();
        let hits: Vec<_> = (0..20_u64).map(|key| hasty.hit(&Key::from(key))).collect();
        assert!(join_all(hits).await.into_iter().all(|hit| hit.is_err()));
        server.resume();
        assert!(patient.hit(&Key::from("after")).await.unwrap().is_admitted());
        is_over.store(true, Ordering::SeqCst);
        for rounds in join_all(users).await {
            assert!(rounds.unwrap() > 0);
        }
        println!("{late} hits were late");
    });
    // No command has changed the session, or blocked it.
    for command in ["multi", "watch", "select", "subscribe", "blpop", "wait", "client|reply"] {
        assert_eq!(server.calls(command), 0, "{command}");
    }
}

#[test]
fn manager_of_a_killed_server_fails_in_time_and_recovers() {
    let mut server = Server::start(&[]);
    RUNTIME.block_on(async {
        let manager = manager(&server).await;
        let limiter = limiter(on(&manager, "timeout=2s"));
        assert!(limiter.hit(&Key::from("a")).await.unwrap().is_admitted());
        block_in_place(|| server.kill());
        let errors: Vec<_> = join_all((0..10_u64).map(|key| limiter.hit(&Key::from(key)))).await;
        for error in errors {
            let kind = error.unwrap_err().kind();
            let expected = [StorageErrorKind::Unreachable, StorageErrorKind::ConnectionLost, StorageErrorKind::Timeout];
            assert!(expected.contains(&kind), "{kind:?}");
        }
        block_in_place(|| server.restart());
        eventually("the manager connects again", async || limiter.hit(&Key::from("b")).await.is_ok()).await;
        // Others can use the connection, too.
        let mut manager = manager.clone();
        assert_eq!(send(&mut manager, &cmd("PING")).await, Value::SimpleString("PONG".to_owned()));
    });
}

#[test]
fn cluster_connection_counts_exactly_with_keys_on_all_nodes() {
    let cluster = Cluster::start();
    let urls: Vec<String> = cluster.nodes.iter().map(Server::url).collect();
    RUNTIME.block_on(async {
        let client = ClusterClient::builder(urls).response_timeout(LONG).build().unwrap();
        let connection: ClusterConnection = client.get_async_connection().await.unwrap();
        let shared = RedisStorage::from_cluster_connection(connection, &long()).unwrap();
        let own = RedisStorage::new(&with_timeout(&cluster.url(), LONG)).unwrap();
        own.ready(LONG).await.unwrap();
        let keys: Vec<Key> = (0..30_u64).map(Key::from).collect();
        let limiters = [shared.clone(), own.clone()].map(|storage| {
            RateLimiter::with_storage(policy("fixed-window 5/day; moving-window 6/day").with_name("p"), storage)
        });
        for key in &keys {
            let hits = (0..8).map(|number| limiters[number % 2].hit(key));
            let admitted = join_all(hits).await.into_iter().filter(|hit| hit.as_ref().unwrap().is_admitted()).count();
            assert_eq!(admitted, 5, "{key}");
        }
        for node in &cluster.nodes {
            assert_ne!(node.ask(&["DBSIZE"]), Reply::Text("0".to_owned()), "keys are on all nodes");
        }
        shared.check().await.unwrap();
        for error in [shared.clear_all().await.unwrap_err(), limiters[0].keys("", None, 10).await.unwrap_err()] {
            assert_eq!(error.kind(), StorageErrorKind::Unsupported);
            assert!(message(error).contains("redis+cluster://"));
        }
        assert!(shared.needs_outer_key(None));
        let (user, tenant) = (Key::from("u"), Key::from("t"));
        let pair = |outer: &Key| [user.within(outer), tenant.within(outer)];
        let [user, tenant] = pair(&Key::from("acme"));
        let hit = RateLimiter::reserve_all(&[(&limiters[0], &user), (&limiters[0], &tenant)], 1).await.unwrap();
        assert!(hit.is_admitted());
    });
}

#[test]
fn options_of_a_manager_that_is_not_connected_are_checked() {
    RUNTIME.block_on(async {
        let client = Client::open("redis://127.0.0.1:1").unwrap();
        let manager = ConnectionManager::new_lazy_with_config(client, ConnectionManagerConfig::new()).unwrap();
        for (options, part) in [("combine=true", "combine"), ("timeout=0s", "invalid timeout"), ("prefx=a", "prefix")] {
            let error = RedisStorage::from_connection_manager(manager.clone(), options).unwrap_err().to_string();
            assert!(error.contains(part), "{options}: {error}");
        }
        let storage = on(&manager, "timeout=5s");
        assert!(storage.clone().try_tls(&TlsConfig::default()).is_err());
        let limiter = limiter(storage);
        eventually("the server refuses the connection", async || {
            let error = limiter.hit(&Key::from("a")).await.unwrap_err();
            error.kind() == StorageErrorKind::Unreachable && !error.may_have_counted()
        })
        .await;
    });
}

#[test]
#[should_panic(expected = "a connection of the program has its own login")]
fn login_of_a_connection_of_the_program_cannot_be_set() {
    let _guard = RUNTIME.enter();
    let client = Client::open("redis://127.0.0.1:1").unwrap();
    let manager = ConnectionManager::new_lazy_with_config(client, ConnectionManagerConfig::new()).unwrap();
    let _ = on(&manager, "").credentials(|| async { Ok(Credentials::new("user", "password")) });
}

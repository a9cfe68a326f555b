//! Several keys on a Redis Cluster: keys within one key are in one slot, and others are rejected.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use common::servers::{Cluster, Reply, Server, with_option, with_timeout};
use common::{Inner, foreign, policy, status};
use futures_util::future::join_all;
use http::Request;
use tower::Layer;
use tower_ratelimit::storage::{
    AnyStorage, Breaker, InOrder, Leases, RedisStorage, RefusalCache, StorageErrorKind, StorageRequest,
};
use tower_ratelimit::testing::members_decide_like_the_model;
use tower_ratelimit::{
    Decision, Global, Header, Key, MemoryStorage, OnError, Op, Policy, RateLimitLayer, RateLimiter, Storage,
};

use super::{LONG, ready, storage, storage_within};

fn named(text: &str, name: &str) -> Policy {
    policy(text).with_name(name)
}

/// The policies of a user and its tenant.
fn two([user, tenant]: [&str; 2]) -> [Policy; 2] {
    [named(user, "user"), named(tenant, "tenant")]
}

/// The keys of a user and its tenant, within the tenant.
fn keys(user: u64, tenant: u64) -> [Key; 2] {
    let tenant = Key::from(tenant);
    [Key::from(user), tenant.clone()].map(|key| key.within(&tenant))
}

fn hits<'a>(policies: &'a [Policy], keys: &'a [Key]) -> Vec<StorageRequest<'a>> {
    policies.iter().zip(keys).map(|(policy, key)| StorageRequest::new(policy, key, Op::Hit, 1)).collect()
}

fn are_admitted(decisions: &[Decision]) -> bool {
    decisions.iter().all(Decision::is_admitted)
}

async fn spent(storage: &RedisStorage, policies: &[Policy], keys: &[Key]) -> Vec<u32> {
    let peeks = policies.iter().zip(keys).map(|(policy, key)| StorageRequest::new(policy, key, Op::Peek, 0));
    let peeks = join_all(peeks.map(|peek| storage.decide(peek))).await.into_iter().map(Result::unwrap);
    peeks.map(|peek| peek.capacity() - peek.remaining()).collect()
}

#[test]
fn keys_within_one_key_are_decided_like_by_the_model() {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let cluster = Cluster::start();
    members_decide_like_the_model(|clock| {
        let url = with_option(&cluster.url(), "prefix", format!("t{}", NUMBER.fetch_add(1, Ordering::SeqCst)));
        RedisStorage::new(&with_timeout(&url, LONG)).unwrap().clock(clock)
    });
}

/// Hits for eight users of each of 30 tenants, by two storages at the same time.
#[tokio::test]
async fn concurrent_hits_within_tenants_are_exact() {
    const TENANTS: u64 = 30;
    let cluster = Cluster::start();
    for tenant_limit in ["fixed-window 20/day", "moving-window 20/day; token-bucket 30/day"] {
        let storages = [storage(&cluster.url()), storage(&cluster.url())];
        for storage in &storages {
            ready(storage).await;
        }
        let policies = two(["moving-window 4/day; fixed-window 5/day", tenant_limit]);
        let all = (0..TENANTS * 64).map(|number| {
            let (keys, policies) = (keys(number / TENANTS % 8, number % TENANTS), &policies);
            let storage = &storages[usize::try_from(number / 7 % 2).unwrap()];
            async move { are_admitted(&storage.decide_all(&hits(policies, &keys)).await.unwrap()) }
        });
        let admitted = join_all(all).await.into_iter().filter(|admitted| *admitted).count();
        assert_eq!(admitted as u64, TENANTS * 20, "{tenant_limit}");
        for tenant in 0..TENANTS {
            let mut users = 0;
            for user in 0..8 {
                let spent = spent(&storages[0], &policies, &keys(user, tenant)).await;
                assert!(spent[0] <= 4 && spent[1] == 20, "{spent:?}");
                users += spent[0];
            }
            assert_eq!(users, 20, "tenant {tenant}");
        }
        for node in &cluster.nodes {
            assert_ne!(node.ask(&["DBSIZE"]), Reply::Text("0".to_owned()), "keys are on all nodes");
        }
        assert!(storages[0].clear_all().await.unwrap() > 0);
    }
}

#[tokio::test]
async fn refused_hits_on_a_cluster_leave_every_count_as_it_was() {
    let cluster = Cluster::start();
    let storage = storage(&cluster.url());
    ready(&storage).await;
    let policies = two(["fixed-window 3/day", "moving-window 1000/day; fixed-window 2000/day"]);
    for tenant in 0..10 {
        let keys = keys(7, tenant);
        for _ in 0..3 {
            assert!(are_admitted(&storage.decide_all(&hits(&policies, &keys)).await.unwrap()));
        }
        let before = spent(&storage, &policies, &keys).await;
        assert_eq!(before, [3, 3]);
        let members = hits(&policies, &keys);
        for _ in 0..10 {
            for decided in join_all((0..100).map(|_| storage.decide_all(&members))).await {
                let decided = decided.unwrap();
                assert!(decided[0].is_refused() && decided.iter().all(|decision| !decision.has_spent()), "{decided:?}");
            }
        }
        assert_eq!(spent(&storage, &policies, &keys).await, before);
    }
}

/// One who moves from one server to a cluster keeps the names of the keys.
#[tokio::test]
async fn layer_within_the_tenant_decides_on_a_cluster_and_on_one_server() {
    let (cluster, server) = (Cluster::start(), Server::start(&[]));
    let named_key = "rl:{t:acme}{user|t:alice}v1";
    let slot = cluster.slot(named_key);
    for (url, node) in [(cluster.url(), &cluster.nodes[Cluster::home(slot)]), (server.url(), &server)] {
        let [user, tenant] = two(["fixed-window 2/day", "fixed-window 3/day"]);
        let storage = storage(&url);
        ready(&storage).await;
        let service = RateLimitLayer::new(user, Header::new("x-user"))
            .within(Header::new("x-tenant"))
            .and(tenant, Header::new("x-tenant"))
            .storage(storage, OnError::Refuse)
            .layer(Inner::default());
        let from = |user: &str, tenant: &str| {
            Request::get("/").header("x-user", user).header("x-tenant", tenant).body(()).unwrap()
        };
        for (user, tenant, expected) in [
            ("alice", "acme", 200),
            ("alice", "acme", 200),
            ("alice", "acme", 429),
            ("bob", "acme", 200),
            ("bob", "acme", 429),
            ("alice", "umbrella", 200),
        ] {
            assert_eq!(status(&service, from(user, tenant)).await, expected, "{user} of {tenant} on {url}");
        }
        for key in [named_key, "rl:{t:acme}{tenant|t:acme}v1"] {
            assert_eq!(node.ask(&["EXISTS", key]).to_string(), "1", "{key} on {url}");
        }
    }
}

/// The errors say what to write instead, when the layer is built and at run time.
#[tokio::test]
async fn keys_that_cannot_share_a_slot_are_rejected() {
    let cluster = Cluster::start();
    let storage = storage(&cluster.url());
    ready(&storage).await;
    let [user, tenant] = two(["9/day", "9/day"]);
    let layer = || RateLimitLayer::new(user.clone(), Header::new("x-user"));
    let with_tenant = |layer: RateLimitLayer| layer.and(tenant.clone(), Header::new("x-tenant"));
    let is_rejected = |result: Result<RateLimitLayer, tower_ratelimit::ConfigError>, reason: &str| {
        let error = result.unwrap_err().to_string();
        assert!(error.contains(reason) && error.contains("InOrder::new(storage)"), "{error}");
    };
    let breaker = Breaker::new(storage.clone()).fallback(MemoryStorage::new(), 1);
    for storage in [
        AnyStorage::new(storage.clone()),
        AnyStorage::new(RefusalCache::new(storage.clone())),
        AnyStorage::new(breaker),
    ] {
        is_rejected(with_tenant(layer()).try_storage(storage.clone(), OnError::Admit), "call `within`");
        let within = || layer().within(Header::new("x-tenant"));
        let for_all = with_tenant(within()).and(named("9/day", "all"), Global::new());
        is_rejected(for_all.try_storage(storage.clone(), OnError::Admit), "the key of all clients");
        let built = with_tenant(within()).try_storage(storage.clone(), OnError::Admit).unwrap();
        is_rejected(built.try_and(named("9/day", "all"), Global::new()), "the key of all clients");
        assert!(with_tenant(layer()).try_storage(InOrder::new(storage), OnError::Admit).is_ok());
    }

    let (alice, acme, umbrella) = (Key::from("alice"), Key::from("acme"), Key::from("umbrella"));
    let policies = [user.clone(), tenant.clone()];
    for keys in [
        [alice.clone(), acme.clone()],
        [alice.within(&acme), acme.clone()],
        [alice.within(&acme), acme.within(&umbrella)],
        [alice.within(&acme), Key::global()],
    ] {
        let error = storage.decide_all(&hits(&policies, &keys)).await.unwrap_err();
        assert!(error.kind() == StorageErrorKind::Unsupported && !error.may_have_counted(), "{error:?}");
        assert!(error.to_string().contains("user.within(&tenant)"), "{error}");
        assert_eq!(spent(&storage, &policies, &keys).await, [0, 0]);
    }
    let foreign = [user.clone(), foreign(5).with_name("foreign")];
    let error = storage.decide_all(&hits(&foreign, &keys(1, 1))).await.unwrap_err();
    assert!(format!("{error:#}").contains("has a strategy without a script"), "{error:#}");
    let [user, tenant] = policies.map(|policy| RateLimiter::with_storage(policy, storage.clone()));
    let hit = [(&user, &alice.within(&acme)), (&tenant, &acme.within(&acme))];
    assert!(RateLimiter::reserve_all(&hit, 1).await.unwrap().is_admitted());
}

/// A node that has not all keys of a call replies with `TRYAGAIN` while their slot moves.
#[tokio::test]
async fn hits_within_a_tenant_follow_its_slot_to_another_node() {
    let cluster = Cluster::start();
    let storage = storage(&cluster.url());
    ready(&storage).await;
    let policies = two(["fixed-window 9/day", "fixed-window 9/day"]);
    let tenant = Key::from("acme");
    let of = |user: &str| [Key::from(user), tenant.clone()].map(|key| key.within(&tenant));
    let (alice, bob) = (of("alice"), of("bob"));
    let hit = async |keys: &[Key]| storage.decide_all(&hits(&policies, keys)).await;
    assert!(are_admitted(&hit(&alice).await.unwrap()));

    let names = ["rl:{t:acme}{user|t:alice}v1", "rl:{t:acme}{tenant|t:acme}v1"];
    let moving = cluster.begin_move(names[0]);
    assert!(are_admitted(&hit(&alice).await.unwrap()), "the old node has both keys");
    let error = hit(&bob).await.unwrap_err();
    assert!(format!("{error:#}").contains("TRYAGAIN") && !error.may_have_counted(), "{error:#}");
    for name in names {
        moving.migrate(name);
    }
    assert!(are_admitted(&hit(&alice).await.unwrap()), "the new node has both keys");
    moving.end();
    assert!(are_admitted(&hit(&bob).await.unwrap()));
    assert_eq!(spent(&storage, &policies, &alice).await, [3, 4]);
    assert_eq!(spent(&storage, &policies, &bob).await, [1, 4]);
}

#[tokio::test]
async fn hits_within_the_tenants_of_other_nodes_survive_a_dead_node() {
    let mut cluster = Cluster::start();
    let storage = storage_within(&cluster.url(), Duration::from_secs(2));
    ready(&storage).await;
    let policies = two(["fixed-window 1000/day", "fixed-window 1000/day"]);
    let home = |tenant: u64| Cluster::home(cluster.slot(&format!("rl:{{n:{tenant}}}")));
    let homes: Vec<usize> = (0..12).map(home).collect();
    assert!((0..3).all(|node| homes.contains(&node)), "{homes:?}");
    cluster.nodes[1].kill();
    for (tenant, home) in (0..).zip(&homes) {
        let decided = storage.decide_all(&hits(&policies, &keys(1, tenant))).await;
        match (home, decided) {
            (1, Err(_)) => {}
            (0 | 2, Ok(decisions)) if are_admitted(&decisions) => {}
            (_, decided) => panic!("tenant {tenant} of node {home}: {decided:?}"),
        }
    }
    cluster.nodes[1].restart();
    cluster.wait_until_complete();
    storage.ready(LONG).await.unwrap();
}

/// The user and the tenant are exact within the tenant, and the units of all clients are leased
/// from another node.
#[tokio::test]
async fn leased_policy_of_all_clients_needs_no_outer_key() {
    let cluster = Cluster::start();
    let (plain, all) = (storage(&cluster.url()), named("fixed-window 100000/day", "all"));
    ready(&plain).await;
    let leases = Leases::new(plain.clone(), 50).only("all");
    let policies = two(["fixed-window 2/day", "fixed-window 5/day"]);
    let [user, tenant] = policies.clone();
    let service = RateLimitLayer::new(user, Header::new("x-user"))
        .within(Header::new("x-tenant"))
        .and(tenant, Header::new("x-tenant"))
        .and(all.clone(), Global::new())
        .storage(leases.clone(), OnError::Refuse)
        .layer(Inner::default());
    let (begun, mut admitted) = (Instant::now(), 0);
    for number in 0..20 * 4 * 4 {
        let (tenant, user) = (number % 20, number / 20 % 4);
        let request = Request::get("/").header("x-user", format!("u{user}")).header("x-tenant", format!("t{tenant}"));
        admitted += u32::from(status(&service, request.body(()).unwrap()).await == 200);
    }
    assert_eq!(admitted, 20 * 5);
    leases.close().await.unwrap();
    assert_eq!(spent(&plain, &[all], &[Key::global()]).await, [admitted]);
    for tenant in 0..20 {
        let tenant = Key::from(format!("t{tenant}"));
        assert_eq!(spent(&plain, &policies[1..], &[tenant.within(&tenant)]).await, [5]);
    }
    // A lease of units ends after a second.
    assert!(leases.misses() < 20 + begun.elapsed().as_secs(), "{leases:?}");
}

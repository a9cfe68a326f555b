//! Redis Cluster: nodes that die, hang or lose slots.

use std::time::{Duration, Instant};

use common::harness::{AGAIN, Answer, DEADLINE, EntryPoints, SECOND};
use common::servers::{Cluster, Reply, Server, wait_until, wait_until_replicated};
use common::time::{Stopwatch, eventually};
use common::{foreign, policy, with};
use tokio::task::JoinSet;
use tokio::time::sleep;
use tower_ratelimit::{Header, Key, RateLimiter, Storage};

use super::{LONG, PLENTY, not_ready, ready, storage, storage_within};

/// Guards against this defect: scripts with several keys fail with `CROSSSLOT` on a
/// cluster.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cluster_counts_exactly_with_keys_on_all_nodes() {
    let cluster = Cluster::start();
    let two = policy("moving-window 5/day; moving-window 7 per 2 days; fixed-window 6/day").with_name("two");
    for policy in [two, foreign(5).with_name("foreign")] {
        let storage = storage(&cluster.url());
        ready(&storage).await;
        let limiter = RateLimiter::with_storage(policy, storage);
        let keys: Vec<Key> = (0..60_u64).map(Key::from).collect();
        let mut tasks = JoinSet::new();
        for _ in 0..6 {
            let (limiter, keys) = (limiter.clone(), keys.clone());
            tasks.spawn(async move {
                let mut admitted = vec![0; keys.len()];
                for _ in 0..3 {
                    for (key, admitted) in keys.iter().zip(&mut admitted) {
                        loop {
                            let decision = limiter.hit(key).await.unwrap();
                            *admitted += u32::from(decision.is_admitted());
                            if !decision.is_contended() {
                                break;
                            }
                        }
                    }
                }
                admitted
            });
        }
        let all = tasks.join_all().await;
        for (at, key) in keys.iter().enumerate() {
            let admitted: u32 = all.iter().map(|admitted| admitted[at]).sum();
            assert_eq!(admitted, 5, "{key}");
        }
        for node in &cluster.nodes {
            assert_ne!(node.ask(&["DBSIZE"]), Reply::Text("0".to_owned()), "keys are on all nodes");
        }
        for key in &keys {
            limiter.clear(key).await.unwrap();
            let decision = limiter.hit(key).await.unwrap();
            assert_eq!(decision.remaining(), 4);
            common::settle(&limiter, key, &decision, 0).await.unwrap();
            assert_eq!(limiter.peek(key).await.unwrap().remaining(), 5);
        }
    }
}

/// Returns a client's key for each node.
fn homes(cluster: &Cluster, policy: &str) -> [String; 3] {
    let mut homes = [const { None }; 3];
    for number in 0.. {
        let key = format!("k{number}");
        let slot = cluster.slot(&format!("rl:{{{policy}|t:{key}}}"));
        homes[Cluster::home(slot)].get_or_insert(key);
        if homes.iter().all(Option::is_some) {
            break;
        }
    }
    homes.map(Option::unwrap)
}

#[tokio::test]
async fn node_that_dies_or_hangs_fails_only_its_own_keys() {
    let mut cluster = Cluster::start();
    let policy = policy(PLENTY).with_name("p");
    let entry_points = EntryPoints::new(&policy, storage_within(&cluster.url(), DEADLINE), || Header::new("k"));
    let homes = homes(&cluster, "p");
    let answers = async |node: usize| entry_points.hit_as(&Key::from(&*homes[node]), || with("k", &homes[node])).await;
    let until_all_decide = async || {
        let watch = Stopwatch::start();
        for node in 0..3 {
            while answers(node).await != [Answer::Admitted; 3] {
                watch.assert_below(SECOND, &format!("node {node} decides"));
                sleep(AGAIN).await;
            }
        }
        watch.wall()
    };
    until_all_decide().await;
    for (node, name) in homes.iter().enumerate() {
        let found = cluster.nodes[node].ask(&["EXISTS", &format!("rl:{{p|t:{name}}}v1")]).to_string();
        assert_eq!(found, "1", "{name} is on its home node");
    }
    for (dead, hangs) in [(1, false), (0, false), (2, true)] {
        let (id, killed) = (cluster.id(dead), Instant::now());
        if hangs {
            cluster.nodes[dead].stop();
        } else {
            cluster.nodes[dead].kill();
        }
        let (mut slowest, mut slowest_dead, mut rounds) = (Duration::ZERO, Duration::ZERO, 0);
        let alive: Vec<usize> = (0..3).filter(|node| *node != dead).collect();
        // Continues until the other nodes have marked the dead one as failed, and for three more
        // rounds.
        let mut known_for = 0;
        while known_for < 3 {
            for &node in &alive {
                let watch = Stopwatch::start();
                let answers = answers(node).await;
                let is_admitted = answers == [Answer::Admitted; 3];
                // A node that pauses for a second counts as dead, and then the majority is lost.
                let is_down = !watch.excess().is_zero()
                    && cluster.nodes[node].ask(&["CLUSTER", "INFO"]).to_string().contains("cluster_state:fail");
                assert!(is_admitted || watch.excuses(DEADLINE) || is_down, "{answers:?} after {:?}", killed.elapsed());
                slowest = slowest.max(watch.wall() / 3);
            }
            let started = Instant::now();
            assert_eq!(answers(dead).await, [Answer::Failed; 3]);
            slowest_dead = slowest_dead.max(started.elapsed() / 3);
            rounds += 1;
            let nodes = cluster.nodes[alive[0]].ask(&["CLUSTER", "NODES"]).to_string();
            let line = nodes.lines().find(|line| line.starts_with(&id)).unwrap();
            known_for += u32::from(line.split(' ').nth(2).unwrap().split(',').any(|flag| flag == "fail"));
            assert!(killed.elapsed() < LONG, "{nodes}");
            sleep(AGAIN).await;
        }
        let away = killed.elapsed();
        if hangs {
            cluster.nodes[dead].resume();
        } else {
            cluster.nodes[dead].restart();
        }
        cluster.wait_until_complete();
        let took = until_all_decide().await;
        eprintln!(
            "node {dead} was down (hanging: {hangs}) for {away:?}, {rounds} rounds: keys of other nodes took at most {slowest:?}, its own failed \
             after at most {slowest_dead:?}; all decided {took:?} after the cluster was complete"
        );
    }
}

/// A primary that hung and was replaced by its replica still considers itself the primary until
/// another node contacts it.
#[tokio::test]
async fn returned_primary_is_not_used_after_the_cluster_has_demoted_it() {
    let cluster = Cluster::start();
    let replica = cluster.start_replica(0);
    let policy = policy("fixed-window 20/day; moving-window 20 per 2 days").with_name("p");
    let key = Key::from(&*homes(&cluster, "p")[0]);
    // The hits on the primary that hangs have to fail.
    let process = || {
        let storage = storage_within(&cluster.url(), 2 * SECOND);
        (RateLimiter::with_storage(policy.clone(), storage.clone()), storage)
    };
    // The second process is idle during the failover, so its map of the slots is outdated.
    let (active, idle) = (process(), process());
    for (limiter, storage) in [&active, &idle] {
        ready(storage).await;
        for _ in 0..5 {
            assert!(limiter.hit(&key).await.unwrap().is_admitted());
        }
    }
    wait_until_replicated(&cluster.nodes[0], &replica);
    cluster.nodes[0].stop();
    let (mut admitted, started) = (10, Instant::now());
    loop {
        match active.0.hit(&key).await {
            Ok(decision) if decision.is_refused() => break,
            Ok(_) => admitted += 1,
            Err(_) => sleep(AGAIN).await,
        }
        assert!(started.elapsed() < LONG * 2, "the replica does not decide: {admitted} admitted");
    }
    assert_eq!(admitted, 20, "the replica has the counts of its primary");
    cluster.nodes[0].resume();
    wait_until("the old primary is a replica", || cluster.nodes[0].ask(&["ROLE"]).list()[0].to_string() == "slave");
    for (name, (limiter, storage)) in [("active", active), ("idle", idle), ("new", process())] {
        storage.ready(LONG).await.unwrap();
        assert!(limiter.hit(&key).await.unwrap().is_refused(), "{name}");
    }
}

#[tokio::test]
async fn cluster_is_ready_when_all_of_its_nodes_are() {
    let mut cluster = Cluster::start();
    let storage = storage(&cluster.url());
    ready(&storage).await;
    cluster.nodes[1].kill();
    not_ready(&storage).await;
    cluster.nodes[1].restart();
    cluster.wait_until_complete();
    assert!(ready(&storage).await < SECOND);
    cluster.nodes[2].stop();
    not_ready(&storage).await;
    cluster.nodes[2].resume();
    assert!(ready(&storage).await < SECOND);

    let one = self::storage(&format!("redis+cluster://127.0.0.1:{}", cluster.nodes[0].port()));
    ready(&one).await;
    cluster.nodes.iter_mut().for_each(Server::kill);
    eventually("the nodes refuse", async || !not_ready(&one).await.is_timeout()).await;
}

#[tokio::test]
async fn hits_follow_a_slot_that_moves_to_another_node() {
    let cluster = Cluster::start();
    let storage = storage(&cluster.url());
    ready(&storage).await;
    let limit = || policy("fixed-window 9/day").with_name("p");
    let limiter = RateLimiter::with_storage(limit(), storage.clone());
    // The same policy and key under another prefix: a key in the same slot.
    let other = RateLimiter::with_storage(limit(), self::storage(&(cluster.url() + "?prefix=other")));
    let with_log = RateLimiter::with_storage(
        policy("moving-window 9/day").with_name("p"),
        self::storage(&(cluster.url() + "?prefix=log")),
    );
    for limiter in [&other, &with_log] {
        limiter.storage().ready(LONG).await.unwrap();
    }
    let hit = async |limiter: &RateLimiter| limiter.hit(&Key::from("k")).await.unwrap().remaining();
    assert_eq!(hit(&limiter).await, 8);

    let key = "rl:{p|t:k}v1";
    let moving = cluster.begin_move(key);
    // Neither node has this key, so the old one redirects with `ASK`.
    assert_eq!(hit(&other).await, 8);
    assert_eq!(cluster.nodes[moving.to].ask(&["DBSIZE"]).to_string(), "1", "the new node counts");
    // The new node has neither key of this script. They could still be on the old node, so it
    // replies with `TRYAGAIN`.
    let error = with_log.hit(&Key::from("k")).await.unwrap_err();
    assert!(format!("{error:#}").contains("TRYAGAIN") && !error.may_have_counted(), "{error}");
    moving.migrate(key);
    assert_eq!(hit(&limiter).await, 7);
    moving.end();
    assert_eq!([hit(&limiter).await, hit(&other).await, hit(&with_log).await], [6, 7, 8]);
}

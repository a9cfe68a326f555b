//! Refusal caches and leases around a real Redis.

use std::time::Duration;

use common::example_process::Server as ExampleServer;
use common::policy;
use common::servers::storage::{RUNTIME, on};
use common::servers::{Server, wait_until};
use tokio::task::JoinSet;
use tower_ratelimit::storage::{Leases, ManualClock, RefusalCache, StorageRequest};
use tower_ratelimit::{Key, Op, RateLimiter, Storage};

/// Each node has leases around a refusal cache.
#[test]
fn nodes_with_leases_on_redis_admit_exactly_the_limit() {
    let server = Server::start(&[]);
    let redis = on(&server, ManualClock::default());
    let policy = policy("fixed-window 500/day");
    let caches: Vec<_> = (0..3).map(|_| RefusalCache::new(redis.clone())).collect();
    let nodes: Vec<_> = caches.iter().map(|cache| Leases::new(cache.clone(), 20)).collect();
    let admitted = RUNTIME.block_on(async {
        let mut all = JoinSet::new();
        for task in 0..24 {
            let (node, policy) = (nodes[task % 3].clone(), policy.clone());
            all.spawn(async move {
                let mut admitted = 0;
                for _ in 0..200 {
                    admitted += u32::from(
                        node.decide(StorageRequest::new(&policy, &Key::from("a"), Op::Hit, 1))
                            .await
                            .unwrap()
                            .is_admitted(),
                    );
                }
                admitted
            });
        }
        all.join_all().await.into_iter().sum::<u32>()
    });
    assert_eq!(admitted, 500);
    let trips: u64 = caches.iter().map(RefusalCache::misses).sum();
    assert!(trips < 400, "{trips} commands for 4,800 hits");
}

/// The example server refunds its leased units at SIGTERM.
#[test]
fn example_server_refunds_its_lease_when_it_is_terminated() {
    let redis = Server::start(&[]);
    let url = redis.url();
    // A request whose connection takes too long gets 503, and counts nothing.
    let storage = ["--storage", &url, "--timeout", "60s", "--on-error", "refuse"];
    let flags = [&storage[..], &["--policy", "fixed-window 1000/day", "--key", "global"]].concat();
    let mut leasing = ExampleServer::start(&[&flags[..], &["--lease", "100"]].concat());
    for _ in 0..3 {
        wait_until("the request is admitted", || leasing.status("/", "") == 200);
    }
    let plain = ExampleServer::start(&flags);
    assert!(leasing.terminate().success());
    let mut remaining = None;
    wait_until("the request is admitted", || {
        let (status, head) = plain.get("/", "");
        remaining = head.lines().find_map(|line| line.strip_prefix("x-ratelimit-remaining: ")?.parse::<u32>().ok());
        status == 200
    });
    assert_eq!(remaining, Some(1_000 - 3 - 1));
}

/// One refusal of a key is cached until its time to live ends.
#[test]
fn one_refused_hit_per_key_and_ttl_reaches_redis() {
    let server = Server::start(&[]);
    let clock = ManualClock::default();
    let cache = RefusalCache::new(on(&server, clock.clone())).clock(clock.clone());
    RUNTIME.block_on(async {
        let limiter = RateLimiter::with_storage(policy("fixed-window 1/hour"), cache.clone());
        for key in 0..20_u64 {
            assert!(limiter.hit(&key.into()).await.unwrap().is_admitted());
        }
        let before = server.calls("evalsha");
        // The first refusal of each key comes from the server.
        for key in 0..20_u64 {
            assert!(limiter.hit(&key.into()).await.unwrap().is_refused());
        }
        for _ in 0..5 {
            let mut all = JoinSet::new();
            for task in 0..8_u64 {
                let limiter = limiter.clone();
                all.spawn(async move {
                    for hit in 0..500_u64 {
                        assert!(limiter.hit(&((hit + task) % 20).into()).await.unwrap().is_refused());
                    }
                });
            }
            while let Some(done) = all.join_next().await {
                done.unwrap();
            }
            clock.advance(Duration::from_secs(1));
        }
        // Hits that wait at the same time share a call.
        assert!(server.calls("evalsha") - before <= 5 * 20);
        assert_eq!(cache.local_decisions(), 20 + 5 * 8 * 500 - 5 * 20);
        limiter.clear(&3_u64.into()).await.unwrap();
        assert!(limiter.hit(&3_u64.into()).await.unwrap().is_admitted());
    });
}

//! The leases of etcd, which delete expired keys.

use common::servers::{Etcd, wait_until};
use serde_json::json;
use tower_ratelimit::{Key, Policy, RateLimiter, Storage};

use super::{LONG, entry_points, storage};

/// A lease can disappear: an operator revokes it, or restores etcd from a backup.
#[tokio::test]
async fn revoked_lease_is_replaced() {
    let etcd = Etcd::start(1);
    let entry_points = entry_points(&etcd.url());
    entry_points.recover().await;
    for lease in etcd.leases() {
        etcd.ask("lease/revoke", &json!({ "ID": lease }));
    }
    assert_eq!(entry_points.used().await, 0, "the keys of the lease are removed");
    let hits = entry_points.admit().await;
    let used = entry_points.used().await;
    assert!((hits.admitted..=hits.admitted + hits.failed).contains(&used), "{hits:?}: {used}");
}

/// Guards against defects seen in practice: keys never expire, and an index set grows forever.
#[tokio::test]
async fn keys_and_leases_expire_with_their_state() {
    let etcd = Etcd::start(1);
    let storage = storage(&etcd.url());
    storage.ready(LONG).await.unwrap();
    let mut most = 0;
    for text in ["fixed-window 3 per 200ms", "moving-window 3 per 200ms", "token-bucket 3 per 200ms"] {
        let limiter = RateLimiter::with_storage(text.parse::<Policy>().unwrap(), storage.clone());
        for client in 0..20_u64 {
            assert!(limiter.hit(&Key::from(client)).await.unwrap().is_admitted());
        }
        most = most.max(etcd.leases().len());
    }
    assert!((1..=4).contains(&most), "{most} leases for 60 keys");
    assert_eq!(etcd.all().len(), 60);
    wait_until("all keys have expired", || etcd.all().is_empty() && etcd.leases().is_empty());
}

//! memcached and etcd reject policies with long logs, unless long logs are allowed.

use common::{message, policy};
use tower_ratelimit::storage::{AnyStorage, EtcdStorage, MemcachedStorage, StorageRequest};
use tower_ratelimit::{Global, Key, OnError, Op, RateLimitLayer, RateLimiter, Storage};

const MEMCACHED: &str = "memcached://127.0.0.1:1";
const ETCD: &str = "etcd://127.0.0.1:1";

fn any(url: &str) -> AnyStorage {
    url.parse().unwrap()
}

#[test]
fn long_log_is_rejected_with_advice_when_the_limiter_is_built() {
    for url in [MEMCACHED, ETCD] {
        let build = |text: &str| RateLimiter::try_with_storage(policy(text), any(url)).map(drop);
        assert_eq!(build("moving-window 1000/day; fixed-window 1000000/day; 5000/day"), Ok(()));
        let error = build("moving-window 5000/day").unwrap_err().to_string();
        assert_eq!(
            error,
            "\"moving-window 5000/day\" can keep 5000 log entries per key, and each hit would load and store all \
             of them, up to 95000 bytes in each direction: use \"sliding-window-counter 5000/day\", or allow logs of more than \
             1000 entries with long-logs=allow in the storage's URL"
        );
        // The logs of all limits are under one key.
        let two = "moving-window 400/hour; moving-window 700/day";
        let error = build(two).unwrap_err().to_string();
        assert!(error.contains("can keep 1100 log") && error.contains("\"sliding-window-counter 700/day\""), "{error}");
        let layer = RateLimitLayer::new(policy("5/day; shadow moving-window 1001/day"), Global::new());
        assert!(layer.try_storage(any(url), OnError::Admit).is_err());
    }
}

#[test]
fn long_logs_are_accepted_if_allowed() {
    let long = policy("moving-window 5000/day");
    let memcached = MemcachedStorage::new(MEMCACHED).unwrap();
    let etcd = EtcdStorage::new(ETCD).unwrap();
    assert!(memcached.validate(&long).is_err() && etcd.validate(&long).is_err());
    for url in [MEMCACHED, ETCD] {
        assert_eq!(any(&format!("{url}?long-logs=allow")).validate(&long), Ok(()));
        assert!(any(&format!("{url}?long-logs=refuse")).validate(&long).is_err());
        let error = format!("{url}?long-logs=yes").parse::<AnyStorage>().unwrap_err().to_string();
        assert!(error.contains("write long-logs=allow or long-logs=refuse"), "{error}");
        // The maximum size of the server still applies.
        let longest = policy("moving-window 100000/day");
        assert!(any(&format!("{url}?long-logs=allow")).validate(&longest).is_err());
    }
}

#[tokio::test]
async fn long_log_of_a_policy_chosen_per_request_is_rejected_without_a_call() {
    let long = policy("moving-window 5000/day");
    let key = Key::from("k");
    for url in [MEMCACHED, ETCD] {
        let error = message(any(url).decide(StorageRequest::new(&long, &key, Op::Hit, 1)).await.unwrap_err());
        assert!(error.contains("long-logs=allow") && !error.contains("cannot reach"), "{error}");
    }
}

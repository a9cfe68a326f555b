//! etcd without space.

use common::policy;
use common::servers::Etcd;
use tower_ratelimit::storage::{StorageError, StorageErrorKind};
use tower_ratelimit::{Key, RateLimiter, Storage};

use super::{LONG, storage};

fn assert_refused(error: &StorageError, may_have_counted: bool) {
    assert_eq!((error.kind(), error.may_have_counted()), (StorageErrorKind::Refused, may_have_counted), "{error:?}");
    let text = format!("{error:#}");
    assert!(text.contains("space exceeded") && text.contains("etcdctl alarm disarm"), "{text}");
}

#[tokio::test]
async fn full_server_refuses_hits_and_counts_none_that_it_has_not_reported() {
    let etcd = Etcd::start_with(1, &["--quota-backend-bytes", "1048576"]);
    let storage = storage(&etcd.url());
    storage.ready(LONG).await.unwrap();
    // Each hit stores a longer log.
    let limiter = RateLimiter::with_storage(policy("moving-window 1000/day"), storage.clone());
    let key = Key::from("k");
    let mut admitted = 0;
    let error = loop {
        match limiter.hit(&key).await {
            Ok(decision) => assert!(decision.is_admitted(), "the server is full before the log"),
            Err(error) => break error,
        }
        admitted += 1;
    };
    assert_refused(&error, true);
    let counted = async || 1_000 - limiter.peek(&key).await.unwrap().remaining();
    assert!((admitted..=admitted + 1).contains(&counted().await), "{admitted} admitted");
    admitted = counted().await;
    // The alarm is on, so nothing is executed.
    assert_refused(&limiter.hit(&key).await.unwrap_err(), true);
    assert_eq!(counted().await, admitted);
    // A key that needs a new lease was not sent.
    let other = RateLimiter::with_storage(policy("fixed-window 9 per 90 days"), storage);
    assert_refused(&other.hit(&key).await.unwrap_err(), false);
}

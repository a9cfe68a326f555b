//! Refusals that the memory storage must store before a layer may repeat them.

use std::time::Duration;

use common::{Inner, ask, get, memory_with_manual_clock, policy, retry_after, status, with};
use tower::Layer;
use tower_ratelimit::storage::{Clock, ManualClock};
use tower_ratelimit::{Global, Header, Key, LivePolicy, LocalLimiter, MemoryStorage, OnError, RateLimitLayer};

/// Guards against this defect: no refusal is stored, so each one counts the state as written at its
/// own time, and the wait never ends before the clock catches up.
#[tokio::test]
async fn client_is_admitted_after_its_wait_when_the_clock_has_gone_back() {
    for strategy in ["fixed-window", "sliding-window-counter", "token-bucket", "moving-window"] {
        let (storage, clock) = memory_with_manual_clock();
        let layer = RateLimitLayer::new(policy(&format!("{strategy} 1/minute")), Global::new());
        let service = layer.storage(storage, OnError::Refuse).layer(Inner::default());
        assert_eq!(status(&service, get("/")).await, 200, "{strategy}");
        clock.set(clock.now().minus(3_600_000_000));
        let wait = retry_after(&ask(&service, get("/")).await).expect("a refusal has a wait");
        assert!((60..=61).contains(&wait), "{strategy}: {wait} s");
        clock.advance(Duration::from_secs(30));
        assert_eq!(retry_after(&ask(&service, get("/")).await), Some(wait - 30), "{strategy}");
        clock.advance(Duration::from_secs(wait - 30));
        assert_eq!(status(&service, get("/")).await, 200, "{strategy}");
    }
}

/// Guards against this defect: the storage still takes the key for one that has units left.
#[tokio::test]
async fn client_that_a_lowered_limit_refuses_is_not_evicted() {
    for strategy in ["fixed-window", "moving-window"] {
        let storage = MemoryStorage::builder().max_keys(8).clock(ManualClock::default()).build().unwrap();
        let api = |amount: u32| policy(&format!("{strategy} {amount}/minute")).with_name("api");
        let live = LivePolicy::new(api(100));
        let layer = RateLimitLayer::new(live.clone(), Header::new("x-client"));
        let service = layer.storage(storage.clone(), OnError::Refuse).layer(Inner::default());
        for _ in 0..50 {
            assert_eq!(status(&service, with("x-client", "a")).await, 200, "{strategy}");
        }
        live.set(api(10)).unwrap();
        for _ in 0..3 {
            assert_eq!(status(&service, with("x-client", "a")).await, 429, "{strategy}");
        }
        let others = LocalLimiter::with_storage(policy("5/day"), storage.clone());
        assert!((0..20_u64).all(|client| others.admit(&Key::from(client))), "{strategy}");
        assert_eq!((storage.stats().keys, storage.stats().evicted), (8, 13), "{strategy}");
        assert_eq!(status(&service, with("x-client", "a")).await, 429, "{strategy}");
    }
}

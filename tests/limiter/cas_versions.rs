//! Texts in a format that another version of the crate has written.

use std::time::Duration;

use common::fake_cas_store::FakeCasStore;
use common::policy;
use tower_ratelimit::storage::{Cas, StorageError, StorageErrorKind};
use tower_ratelimit::{Key, RateLimiter};

const NEXT: [&str; 4] =
    ["v2@1728000000000000[1.fixed-window/60000000 1728000060000000,9,7]", "v2", "v10;x", "v2\u{fffd}"];

fn limiter(store: &FakeCasStore) -> RateLimiter {
    RateLimiter::with_storage(
        policy("fixed-window 3/minute").with_name("p"),
        Cas::new(store.clone()).timeout(Duration::from_secs(20)),
    )
}

fn assert_unknown(error: &StorageError, text: &str) {
    assert_eq!((error.kind(), error.may_have_counted()), (StorageErrorKind::Unsupported, false), "{error:?}");
    let version = if text.starts_with("v10") { "v10" } else { "v2" };
    let message = error.to_string();
    assert!(message.contains(&format!("format {version},")) && message.contains("another prefix"), "{message}");
}

#[tokio::test]
async fn state_of_an_unknown_version_is_never_overwritten() {
    let key = Key::from("k");
    for text in NEXT {
        let store = FakeCasStore::default();
        let limiter = limiter(&store);
        let spent = limiter.hit(&key).await.unwrap();
        store.put("p|t:k", text);
        store.trips();
        assert_unknown(&limiter.hit(&key).await.unwrap_err(), text);
        assert_unknown(&limiter.hit_with_cost(&key, 9).await.unwrap_err(), text);
        assert_unknown(&limiter.peek(&key).await.unwrap_err(), text);
        assert_unknown(&limiter.charge(&key, 5).await.unwrap_err(), text);
        assert_unknown(&common::settle(&limiter, &key, &spent, 0).await.unwrap_err(), text);
        assert_unknown(&common::settle(&limiter, &key, &spent, 7).await.unwrap_err(), text);
        assert_eq!((store.trips().1, store.text("p|t:k").as_str()), (0, text));
    }
}

#[tokio::test]
async fn clear_deletes_a_state_of_an_unknown_version() {
    let key = Key::from("k");
    for text in NEXT {
        let store = FakeCasStore::default();
        store.put("p|t:k", text);
        limiter(&store).clear(&key).await.unwrap();
        assert_eq!(store.text("p|t:k"), "");
        assert_eq!(limiter(&store).hit(&key).await.unwrap().remaining(), 2);
    }
}

#[tokio::test]
async fn hits_after_a_clear_in_the_same_batch_are_counted() {
    let (store, key) = (FakeCasStore::default(), Key::from("k"));
    store.put("p|t:k", NEXT[0]);
    let limiter = limiter(&store);
    let (before, cleared, after) = tokio::join!(limiter.hit(&key), limiter.clear(&key), limiter.hit(&key));
    assert_unknown(&before.unwrap_err(), NEXT[0]);
    cleared.unwrap();
    assert_eq!(after.unwrap().remaining(), 2);
    assert_eq!(store.trips(), (1, 1));
    assert!(store.text("p|t:k").starts_with("v1@"));
}

/// Another process has upgraded the state between a load and its swap.
#[tokio::test]
async fn lost_swap_against_an_unknown_version_is_an_error() {
    let (store, key) = (FakeCasStore::default(), Key::from("k"));
    let limiter = limiter(&store);
    let _ = limiter.hit(&key).await.unwrap();
    store.trips();
    store.hang_from_swap(1);
    let (hit, ()) = tokio::join!(limiter.hit(&key), async {
        while store.trips().1 == 0 {
            tokio::task::yield_now().await;
        }
        store.put("p|t:k", "v2");
        store.hang_from_swap(0);
    });
    assert_unknown(&hit.unwrap_err(), "v2");
    assert_eq!(store.text("p|t:k"), "v2");
}

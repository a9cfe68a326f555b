//! Shared slots when a process ends. Tokio's time is paused.

use std::time::Duration;

use common::fake_cas_store::FakeCasStore;
use common::{ask, status};
use futures_util::FutureExt;
use tokio::time::{Instant, sleep};
use tower::ServiceExt;
use tower_ratelimit::OnError;

use super::shared::{TIME_TO_LIVE, cas, process};
use super::{layer, of, streams};

#[tokio::test(start_paused = true)]
async fn close_gives_the_slots_of_all_keys_back_at_once() {
    let store = FakeCasStore::default();
    let (one, two) = (process(&store, 1), process(&store, 1));
    let mut held = Vec::new();
    for user in 0..200 {
        held.push(ask(&streams(&one), of(&user.to_string())).await);
    }
    assert_eq!(status(&streams(&two), of("7")).await, 429);
    // The streams go on, for example as WebSockets.
    one.close().await.unwrap();
    assert_eq!(one.in_use(), 0);
    let mut others = Vec::new();
    for user in 0..200 {
        others.push(ask(&streams(&two), of(&user.to_string())).await);
    }
    assert!(others.iter().all(|response| response.status() == 200));
    store.trips();
    drop(held);
    one.close().await.unwrap();
    sleep(TIME_TO_LIVE / 6).await;
    assert_eq!((store.trips(), one.in_use(), two.in_use()), ((0, 0), 0, 200), "nothing is given back twice");
}

#[tokio::test(start_paused = true)]
async fn close_waits_for_claims_in_flight() {
    let store = FakeCasStore::default();
    store.answer_after(100);
    let (one, two) = (process(&store, 1), process(&store, 1));
    let mut begun = Box::pin(streams(&one).oneshot(of("a")));
    assert!(common::poll(&mut begun).is_pending());
    sleep(Duration::from_millis(50)).await;
    let begin = Instant::now();
    one.close().await.unwrap();
    assert_eq!(begin.elapsed().as_millis() / 10, 35, "the rest of the claim, and another one");
    assert_eq!(begun.await.unwrap().status(), 503);
    assert_eq!(status(&streams(&two), of("a")).await, 200);
}

#[tokio::test(start_paused = true)]
async fn requests_after_close_are_treated_as_if_the_storage_had_failed() {
    for (on_error, expected) in [(OnError::Admit, 200), (OnError::Refuse, 503)] {
        let store = FakeCasStore::default();
        let one = layer(1).storage(cas(&store), on_error).wait(TIME_TO_LIVE, 10);
        let _held = ask(&streams(&one), of("a")).await;
        let waits = tokio::spawn(streams(&one).oneshot(of("a")));
        sleep(Duration::from_secs(1)).await;
        one.clone().close().await.unwrap();
        assert_eq!(waits.await.unwrap().unwrap().status(), expected, "{on_error}");
        store.trips();
        assert_eq!(status(&streams(&one), of("b")).await, expected, "{on_error}");
        assert_eq!((store.trips(), one.in_use()), ((0, 0), 0), "{on_error}");
    }
}

#[tokio::test(start_paused = true)]
async fn close_returns_the_error_of_the_storage() {
    let store = FakeCasStore::default();
    let (one, two) = (process(&store, 1), process(&store, 1));
    let _held = ask(&streams(&one), of("a")).await;
    store.fail(true);
    assert_eq!(format!("{:#}", one.close().await.unwrap_err()), "storage failed: the disk is full");
    store.fail(false);
    assert_eq!(status(&streams(&two), of("a")).await, 429);
    sleep(TIME_TO_LIVE).await;
    assert_eq!(status(&streams(&two), of("a")).await, 200);
}

#[tokio::test]
async fn close_does_nothing_without_a_storage() {
    let layer = layer(1);
    let _held = ask(&streams(&layer), of("a")).await;
    layer.close().await.unwrap();
    assert_eq!((layer.in_use(), status(&streams(&layer), of("a")).await), (1, 429));
    assert_eq!(status(&streams(&layer), of("b")).await, 200);
}

#[test]
fn close_outside_of_a_runtime_is_an_error_if_slots_are_held() {
    let store = FakeCasStore::default();
    let one = process(&store, 1);
    one.close().now_or_never().unwrap().unwrap();
    let one = process(&store, 1);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    let _held = runtime.block_on(ask(&streams(&one), of("a")));
    drop(runtime);
    let error = one.close().now_or_never().unwrap().unwrap_err();
    assert!(error.to_string().contains("await the call inside a tokio runtime"), "{error}");
}

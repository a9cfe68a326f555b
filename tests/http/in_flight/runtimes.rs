//! Shared slots of a layer that is used in several runtimes, some of which end. Tokio's time is paused.

use common::fake_cas_store::FakeCasStore;
use common::{ask, status};
use futures_util::FutureExt;
use tokio::runtime::{Builder, Runtime};
use tokio::time::{Instant, sleep, timeout};
use tower::ServiceExt;
use tower_ratelimit::InFlightLayer;

use super::shared::{Answer, TIME_TO_LIVE, process};
use super::{of, streams};

/// A runtime in which a request of this user is in flight.
fn with_stream(layer: &InFlightLayer, user: &str) -> (Runtime, Answer) {
    let runtime = Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    let held = runtime.block_on(ask(&streams(layer), of(user)));
    assert_eq!(held.status(), 200);
    (runtime, held)
}

#[test]
fn renewals_go_on_in_another_runtime_without_a_new_request() {
    let store = FakeCasStore::default();
    let layer = process(&store, 4);
    let (first, _held) = with_stream(&layer, "a");
    let (second, _more) = with_stream(&layer, "b");
    let (third, _most) = with_stream(&layer, "c");
    // The last runtime cannot go on with the renewals of the first one.
    drop(third);
    drop(first);
    store.trips();
    second.block_on(async {
        sleep(TIME_TO_LIVE / 6).await;
        assert_eq!(store.trips(), (3, 3), "the slots of the runtimes that have ended are renewed at once");
        sleep(TIME_TO_LIVE * 10).await;
    });
    assert_eq!((store.trips(), layer.in_use()), ((90, 90), 3));
}

#[test]
fn renewals_go_on_in_the_runtime_of_a_request_that_asks_no_store() {
    let store = FakeCasStore::default();
    let layer = process(&store, 1);
    let (first, held) = with_stream(&layer, "a");
    // The runtime does not run, so the slot is free in this process, but not in the store.
    drop(held);
    store.trips();
    let (second, _held) = with_stream(&layer, "a");
    assert_eq!(store.trips(), (0, 0));
    drop(first);
    second.block_on(async { sleep(TIME_TO_LIVE * 10 + TIME_TO_LIVE / 6).await });
    assert_eq!(store.trips(), (31, 31));
}

#[test]
fn renewals_begin_again_with_the_next_request_if_all_runtimes_have_ended() {
    let store = FakeCasStore::default();
    let layer = process(&store, 4);
    let (first, _held) = with_stream(&layer, "a");
    drop(first);
    store.trips();
    let (second, _more) = with_stream(&layer, "b");
    second.block_on(async { sleep(TIME_TO_LIVE / 6).await });
    assert_eq!(store.trips(), (2, 2), "a claim, and a renewal at once");
    second.block_on(async { sleep(TIME_TO_LIVE * 10).await });
    assert_eq!(store.trips(), (60, 60));
}

/// The store counts the slot of a response that was dropped where nothing could give it back.
#[test]
fn renewals_begin_again_with_a_request_that_asks_no_store() {
    let store = FakeCasStore::default();
    let layer = process(&store, 1);
    let (first, held) = with_stream(&layer, "a");
    drop(first);
    drop(held);
    store.trips();
    let (second, _held) = with_stream(&layer, "a");
    assert_eq!(store.trips(), (0, 0));
    second.block_on(async {
        sleep(TIME_TO_LIVE * 10 + TIME_TO_LIVE / 6).await;
        assert_eq!(store.trips(), (31, 31));
        assert_eq!(status(&streams(&process(&store, 1)), of("a")).await, 429);
    });
}

/// A claim is made in the runtime of the request that has begun it.
#[test]
fn request_waits_for_a_runtime_that_nothing_polls_until_the_time_to_live() {
    let store = FakeCasStore::default();
    let layer = process(&store, 4);
    let first = Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    let mut begun = Box::pin(streams(&layer).oneshot(of("a")));
    first.block_on(async { assert!(common::poll(&mut begun).is_pending()) });
    let second = Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    second.block_on(async {
        let begin = Instant::now();
        let failed = timeout(TIME_TO_LIVE * 2, status(&streams(&layer), of("a"))).await;
        assert_eq!((failed, begin.elapsed().as_secs()), (Ok(503), TIME_TO_LIVE.as_secs()));
    });
    first.block_on(async { assert_eq!(begun.await.unwrap().status(), 200) });
}

#[test]
fn request_outside_of_a_runtime_is_treated_as_if_the_storage_had_failed() {
    let layer = process(&FakeCasStore::default(), 4);
    let response = streams(&layer).oneshot(of("a")).now_or_never().unwrap().unwrap();
    assert_eq!(response.status(), 503);
}

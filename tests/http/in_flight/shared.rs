//! Slots that several processes share. Each process is a layer of its own on the same store. Tokio's time
//! is paused.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use common::fake_cas_store::FakeCasStore;
use common::{ask, status};
use http::{Request, Response};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, sleep_until};
use tower::{Layer, ServiceExt, service_fn};
use tower_ratelimit::storage::{Breaker, Cas, TokioClock};
use tower_ratelimit::{Event, Global, InFlightBody, InFlightLayer, LiveSlots, MemoryStorage, OnError, Permit};

use super::{Script, layer, of, streams, user};

pub(crate) type Answer = Response<InFlightBody<Script>>;

pub(crate) const TIME_TO_LIVE: Duration = Duration::from_secs(30);

/// A process that shares the slots in `store`.
pub(crate) fn process(store: &FakeCasStore, slots: u32) -> InFlightLayer {
    layer(slots).storage(cas(store), OnError::Refuse)
}

pub(crate) fn cas(store: &FakeCasStore) -> Cas<FakeCasStore> {
    Cas::new(store.clone()).clock(TokioClock::new()).timeout(Duration::from_secs(1))
}

/// Waits until slots that were given back are free for other processes.
pub(crate) async fn settle() {
    sleep(Duration::from_millis(200)).await;
}

async fn start(layer: &InFlightLayer, request: Request<()>) -> JoinHandle<Answer> {
    let service = streams(layer);
    let task = tokio::spawn(async move { service.oneshot(request).await.unwrap() });
    settle().await;
    task
}

#[tokio::test(start_paused = true)]
async fn processes_share_the_slots_of_a_key() {
    let store = FakeCasStore::default();
    let (one, two) = (process(&store, 3), process(&store, 3));
    let held = [ask(&streams(&one), of("a")).await, ask(&streams(&one), of("a")).await];
    let last = ask(&streams(&two), of("a")).await;
    assert_eq!(last.headers()["x-ratelimit-remaining"], "0");
    for layer in [&one, &two] {
        let refused = ask(&streams(layer), of("a")).await;
        assert_eq!(
            (refused.status().as_u16(), &refused.headers()["x-ratelimit-remaining"]),
            (429, &"0".parse().unwrap())
        );
    }
    assert_eq!(status(&streams(&two), of("b")).await, 200);
    assert_eq!((one.in_use(), two.in_use()), (2, 1));
    drop(held);
    settle().await;
    let more = [ask(&streams(&two), of("a")).await, ask(&streams(&two), of("a")).await];
    assert!(more.iter().all(|response| response.status() == 200));
    assert_eq!(status(&streams(&one), of("a")).await, 429);
    drop((more, last));
    settle().await;
    assert_eq!((one.in_use(), two.in_use()), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn stream_of_ten_hours_keeps_its_slot() {
    let store = FakeCasStore::default();
    let (one, two) = (process(&store, 1), process(&store, 1));
    let held = ask(&streams(&one), of("a")).await;
    for _ in 0..600 {
        sleep(Duration::from_secs(60)).await;
        assert_eq!(status(&streams(&two), of("a")).await, 429);
    }
    drop(held);
    settle().await;
    assert_eq!(status(&streams(&two), of("a")).await, 200);
}

#[tokio::test(start_paused = true)]
async fn slots_of_a_process_that_is_killed_are_free_after_the_time_to_live() {
    let store = FakeCasStore::default();
    // The runtime of the killed process is dropped with its tasks.
    let killed = process(&store, 2);
    let two = process(&store, 2);
    let held = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let held =
            runtime.block_on(async { [ask(&streams(&killed), of("a")).await, ask(&streams(&killed), of("a")).await] });
        assert!(held.iter().all(|response| response.status() == 200));
        drop(runtime);
        // A killed process gives nothing back.
        held.map(std::mem::forget)
    });
    held.join().unwrap();
    let begin = Instant::now();
    assert_eq!(status(&streams(&two), of("a")).await, 429);
    sleep(TIME_TO_LIVE * 9 / 10).await;
    assert_eq!(status(&streams(&two), of("a")).await, 429);
    sleep(Duration::from_secs(4)).await;
    let free = [ask(&streams(&two), of("a")).await, ask(&streams(&two), of("a")).await];
    assert!(free.iter().all(|response| response.status() == 200), "after {:?}", begin.elapsed());
}

#[tokio::test(start_paused = true)]
async fn process_that_could_not_renew_its_slots_claims_them_again() {
    let store = FakeCasStore::default();
    let (one, two) = (process(&store, 2), process(&store, 2));
    let mut held = vec![ask(&streams(&one), of("a")).await, ask(&streams(&one), of("a")).await];
    // No claim reaches the store for longer than the time to live.
    store.fail(true);
    sleep(TIME_TO_LIVE + Duration::from_secs(1)).await;
    store.fail(false);
    let taken = ask(&streams(&two), of("a")).await;
    assert_eq!(taken.status(), 200, "the slots were free");
    // The first process renews its own.
    sleep(TIME_TO_LIVE / 3).await;
    assert_eq!([status(&streams(&one), of("a")).await, status(&streams(&two), of("a")).await], [429, 429]);
    drop(taken);
    settle().await;
    assert_eq!(status(&streams(&two), of("a")).await, 429, "two streams are in flight");
    held.pop();
    settle().await;
    assert_eq!(status(&streams(&two), of("a")).await, 200);
}

#[tokio::test(start_paused = true)]
async fn failed_store_admits_or_refuses_and_its_requests_hold_no_slot() {
    let outcomes = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    for (on_error, expected) in [(OnError::Admit, 200), (OnError::Refuse, 503)] {
        let store = FakeCasStore::default();
        let events = std::sync::Arc::clone(&outcomes);
        let layer = layer(1)
            .storage(cas(&store), on_error)
            .observer(move |event: &Event<'_>| events.lock().unwrap().push(event.outcome()));
        store.fail(true);
        let with_permit = layer.layer(service_fn(|request: Request<()>| {
            assert!(request.extensions().get::<Permit>().is_some());
            std::future::ready(Ok::<_, std::convert::Infallible>(Response::new(Script::new(&[super::Step::Hang]))))
        }));
        let responses = [ask(&with_permit, of("a")).await, ask(&with_permit, of("a")).await];
        assert!(responses.iter().all(|response| response.status().as_u16() == expected), "{on_error}");
        assert_eq!(layer.in_use(), 0, "{on_error}");
        store.fail(false);
        let held = ask(&with_permit, of("a")).await;
        drop(responses);
        settle().await;
        assert_eq!((held.status().as_u16(), layer.in_use()), (200, 1), "{on_error}");
        assert_eq!(ask(&with_permit, of("a")).await.status(), 429, "{on_error}");
    }
    let expected = [
        ["failed_open", "failed_open", "admitted", "refused"],
        ["failed_closed", "failed_closed", "admitted", "refused"],
    ];
    assert_eq!(*outcomes.lock().unwrap(), expected.concat());
}

#[tokio::test(start_paused = true)]
async fn lost_races_and_lost_replies_leak_no_slot() {
    let store = FakeCasStore::default();
    let (one, two) = (process(&store, 1), process(&store, 1));
    store.lose(3);
    let held = ask(&streams(&one), of("a")).await;
    assert_eq!(held.status(), 200);
    store.lose(1_000_000);
    assert_eq!(status(&streams(&two), of("a")).await, 429, "it lost every race");
    store.lose(0);
    drop(held);
    settle().await;
    // The store executes a claim, and its reply is lost.
    store.hang_from_swap(1);
    let hangs = ask(&streams(&two), of("a")).await;
    assert_eq!(hangs.status(), 503);
    store.hang_from_swap(0);
    sleep(TIME_TO_LIVE / 2).await;
    assert_eq!(status(&streams(&one), of("a")).await, 200, "the next renewal has corrected the count");
}

#[tokio::test(start_paused = true)]
async fn client_that_leaves_during_the_claim_leaks_no_slot() {
    let store = FakeCasStore::default();
    let (one, two) = (process(&store, 1), process(&store, 1));
    store.answer_after(10);
    for _ in 0..20 {
        let mut left = Box::pin(streams(&one).oneshot(of("a")));
        // A slot that the request before it has left may be free already.
        drop(common::poll(&mut left));
        sleep(Duration::from_millis(5)).await;
        drop(left);
    }
    sleep(Duration::from_millis(200)).await;
    assert_eq!((one.in_use(), status(&streams(&two), of("a")).await), (0, 200));
}

#[tokio::test(start_paused = true)]
async fn request_waits_for_a_slot_of_another_process() {
    let store = FakeCasStore::default();
    let (one, two) = (process(&store, 1), process(&store, 1).wait(Duration::from_secs(60), 10));
    let held = ask(&streams(&one), of("a")).await;
    let waits = [start(&two, of("a")).await, start(&two, of("a")).await];
    sleep(Duration::from_secs(20)).await;
    assert!(waits.iter().all(|task| !task.is_finished()));
    drop(held);
    let [first, second] = waits;
    let first = first.await.unwrap();
    assert_eq!((first.status().as_u16(), second.is_finished()), (200, false));
    drop(first);
    assert_eq!(second.await.unwrap().status(), 200);
    settle().await;
    assert_eq!(status(&streams(&one), of("a")).await, 200);
}

/// Each of the two processes needs three of four slots. Neither keeps a part of them.
#[tokio::test(start_paused = true)]
async fn processes_do_not_keep_slots_that_their_next_request_cannot_use() {
    let store = FakeCasStore::default();
    let cost = |head: &tower_ratelimit::extract::Head<'_>| head.uri().path()[1..].parse::<u32>().unwrap();
    let process = || {
        let layer = InFlightLayer::new(4, Global::new()).cost(cost).wait(Duration::from_secs(60), 10);
        layer.storage(cas(&store), OnError::Refuse)
    };
    let (one, two) = (process(), process());
    let held = [ask(&streams(&one), common::get("/2")).await, ask(&streams(&two), common::get("/2")).await];
    let waits = [&one, &two].map(|layer| {
        let service = streams(layer);
        // The response is dropped in the task, so it gives its slots back.
        tokio::spawn(async move { status(&service, common::get("/3")).await })
    });
    settle().await;
    drop(held);
    for task in waits {
        assert_eq!(task.await.unwrap(), 200);
    }
}

#[tokio::test(start_paused = true)]
async fn unknown_format_is_never_overwritten() {
    let store = FakeCasStore::default();
    let layer = process(&store, 1);
    drop(ask(&streams(&layer), of("a")).await);
    settle().await;
    let name = "*in-flight|t:a";
    assert!(store.text(name).starts_with("slots1 "), "{}", store.text(name));
    for unknown in ["slots2 anything", "slots10 1,1,1,99999999999999999"] {
        store.put(name, unknown);
        assert_eq!(status(&streams(&layer), of("a")).await, 503);
        assert_eq!(store.text(name), unknown);
    }
}

#[test]
fn storage_that_shares_no_slots_is_rejected() {
    for rejected in [
        layer(1).try_storage(MemoryStorage::new(), OnError::Refuse),
        layer(1).try_storage(Breaker::new(Cas::new(FakeCasStore::default())), OnError::Refuse),
    ] {
        let error = rejected.unwrap_err().to_string();
        assert!(error.contains("use Redis, memcached, etcd or PostgreSQL"), "{error}");
    }
}

#[test]
fn time_to_live_is_at_least_a_second_and_at_most_an_hour() {
    let set = |millis| {
        let set = || layer(1).time_to_live(Duration::from_millis(millis));
        catch_unwind(AssertUnwindSafe(set)).map_err(|panic| *panic.downcast::<&str>().unwrap())
    };
    assert!(set(1_000).is_ok() && set(3_600_000).is_ok());
    for millis in [0, 999, 3_600_001] {
        let message = set(millis).unwrap_err();
        assert!(message.contains("at least a second and at most an hour, for example 30 seconds"), "{message}");
    }
}

#[tokio::test(start_paused = true)]
async fn lowered_shared_slots_are_kept_by_requests_in_flight_and_refuse_new_ones() {
    let store = FakeCasStore::default();
    let live = LiveSlots::new(3);
    let one = InFlightLayer::new(live.clone(), user()).storage(cas(&store), OnError::Refuse);
    let two = process(&store, 3);
    let mut held = vec![ask(&streams(&one), of("a")).await, ask(&streams(&one), of("a")).await];
    live.set(1);
    assert_eq!(status(&streams(&one), of("a")).await, 429);
    sleep(TIME_TO_LIVE * 2).await;
    assert_eq!(one.in_use(), 2);
    // The other process has three slots, and two are in use.
    let last = ask(&streams(&two), of("a")).await;
    assert_eq!((last.status().as_u16(), status(&streams(&two), of("a")).await), (200, 429));
    for _ in 0..2 {
        held.pop();
        settle().await;
        assert_eq!(status(&streams(&one), of("a")).await, 429);
    }
    drop(last);
    settle().await;
    assert_eq!(status(&streams(&one), of("a")).await, 200);
}

#[tokio::test(start_paused = true)]
async fn slots_that_the_storage_has_lost_count_again_after_the_next_renewal() {
    let store = FakeCasStore::default();
    let (one, two) = (process(&store, 1), process(&store, 1));
    let _held = ask(&streams(&one), of("a")).await;
    store.put("*in-flight|t:a", "");
    assert_eq!(status(&streams(&two), of("a")).await, 200);
    store.put("*in-flight|t:a", "");
    sleep(TIME_TO_LIVE / 3).await;
    assert_eq!(status(&streams(&two), of("a")).await, 429);
}

#[tokio::test(start_paused = true)]
async fn claim_admits_until_its_time_to_live_has_passed_since_it_was_sent() {
    let store = FakeCasStore::default();
    let layer = process(&store, 3);
    store.answer_after(400);
    let (begin, service) = (Instant::now(), streams(&layer));
    let (_held, second, third) = tokio::join!(ask(&service, of("a")), ask(&service, of("a")), ask(&service, of("a")));
    assert_eq!((begin.elapsed().as_millis(), layer.in_use()), (800, 3), "a load and a swap");
    // The slots cannot be given back, so the process can use them again.
    store.fail(true);
    drop((second, third));
    sleep_until(begin + TIME_TO_LIVE - Duration::from_millis(100)).await;
    let last = ask(&service, of("a")).await;
    assert_eq!(last.status(), 200);
    // The renewal that began meanwhile has failed.
    sleep_until(begin + TIME_TO_LIVE + Duration::from_millis(500)).await;
    assert_eq!((status(&service, of("a")).await, layer.in_use()), (503, 2));
}

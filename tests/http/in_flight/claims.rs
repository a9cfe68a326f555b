//! The claims of slots that several processes share: what they ask, when they are repeated, and how long a
//! request waits for one. Tokio's time is paused.

use std::convert::Infallible;
use std::time::Duration;

use common::fake_cas_store::FakeCasStore;
use common::{ask, status};
use http::{Request, Response};
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};
use tower::limit::ConcurrencyLimit;
use tower::{Layer, ServiceExt, service_fn};
use tower_ratelimit::extract::Head;
use tower_ratelimit::storage::Cas;
use tower_ratelimit::{InFlightLayer, LiveSlots, OnError, Slots, slots_by};

use super::shared::{Answer, TIME_TO_LIVE, cas, process, settle};
use super::{Script, Step, layer, of, streams, user};

const SECOND: Duration = Duration::from_secs(1);

/// A layer whose requests take as many slots as their path says.
fn with_costs(store: &FakeCasStore, slots: u32) -> InFlightLayer {
    process(store, slots).cost(|head: &Head<'_>| head.uri().path()[1..].parse::<u32>().unwrap())
}

/// A layer with 2 slots for `/export` and 20 for other paths.
fn with_two_numbers(store: &FakeCasStore) -> InFlightLayer {
    let (export, other) = (Slots::new(2), Slots::new(20));
    let slots = slots_by(move |head| if head.uri().path() == "/export" { export.clone() } else { other.clone() });
    InFlightLayer::new(slots, user()).storage(cas(store), OnError::Refuse)
}

fn path(path: &str) -> Request<()> {
    let mut request = of("a");
    *request.uri_mut() = path.parse().unwrap();
    request
}

/// Sends requests at the same time. All of them wait for the same claim.
fn send_all(layer: &InFlightLayer, requests: impl IntoIterator<Item = Request<()>>) -> Vec<JoinHandle<Answer>> {
    let send = |request| {
        let service = streams(layer);
        tokio::spawn(async move { service.oneshot(request).await.unwrap() })
    };
    requests.into_iter().map(send).collect()
}

/// Returns the responses in the order of the requests.
async fn answers(tasks: Vec<JoinHandle<Answer>>) -> Vec<Answer> {
    let mut answers = Vec::new();
    for task in tasks {
        answers.push(task.await.unwrap());
    }
    answers
}

fn statuses(answers: &[Answer]) -> Vec<u16> {
    answers.iter().map(|answer| answer.status().as_u16()).collect()
}

/// Opens a stream for each of these users, a millisecond after that of the user before.
async fn open(layer: &InFlightLayer, users: u32) -> Vec<Answer> {
    let mut held = Vec::new();
    for user in 0..users {
        held.push(ask(&streams(layer), of(&user.to_string())).await);
        sleep(Duration::from_millis(1)).await;
    }
    held
}

fn paused_runtime() -> Runtime {
    Builder::new_current_thread().enable_all().start_paused(true).build().unwrap()
}

#[tokio::test(start_paused = true)]
async fn request_does_not_wait_for_the_renewals_of_other_keys() {
    let store = FakeCasStore::default();
    let layer = layer(4).storage(cas(&store), OnError::Admit);
    let _held = open(&layer, 1_000).await;
    store.hang(true);
    // The renewal of 1,000 keys has begun.
    sleep(TIME_TO_LIVE / 3).await;
    let begin = Instant::now();
    let admitted = ask(&streams(&layer), of("999")).await;
    assert_eq!(admitted.status(), 200, "the layer admits requests while the store fails");
    assert!(begin.elapsed() <= SECOND + Duration::from_millis(5), "the timeout of one claim: {:?}", begin.elapsed());
}

#[tokio::test(start_paused = true)]
async fn slow_renewals_begin_every_third_of_the_time_to_live() {
    let store = FakeCasStore::default();
    let layer = process(&store, 4);
    let _held = open(&layer, 640).await;
    // A round takes 2 seconds: ten times a load and a swap.
    store.answer_after(100);
    sleep(SECOND * 5).await;
    store.trips();
    sleep(TIME_TO_LIVE / 3 * 12).await;
    assert_eq!(store.trips(), (12 * 640, 12 * 640));
}

#[test]
fn claims_go_on_when_the_runtime_of_the_first_request_has_ended() {
    let store = FakeCasStore::default();
    let layer = layer(4).storage(Cas::new(store.clone()).timeout(SECOND * 60), OnError::Refuse);
    let (first, second) = (paused_runtime(), paused_runtime());
    let held = first.block_on(async {
        let held = open(&layer, 200).await;
        store.hang(true);
        // Renewals are in flight.
        sleep(TIME_TO_LIVE / 3).await;
        held
    });
    drop(first);
    store.hang(false);
    second.block_on(async {
        let mut more = Vec::new();
        for user in 0..200 {
            more.push(ask(&streams(&layer), of(&user.to_string())).await);
        }
        assert!(more.iter().all(|response| response.status() == 200));
        sleep(TIME_TO_LIVE / 6).await;
        store.trips();
        sleep(TIME_TO_LIVE).await;
        assert_eq!(store.trips(), (600, 600), "the second runtime renews the slots of all keys");
    });
    // A response that is dropped outside of a runtime gives its slot back in the runtime of the last claim.
    drop(held);
    second.block_on(settle());
    assert_eq!((store.trips(), layer.in_use()), ((200, 200), 0));
}

#[tokio::test(start_paused = true)]
async fn request_that_waits_for_its_own_number_of_slots_asks_ten_times_a_second() {
    let store = FakeCasStore::default();
    store.answer_after(1);
    let layer = with_two_numbers(&store).wait(SECOND * 60, 100);
    let held = [path("/"), path("/"), path("/")];
    let _held = answers(send_all(&layer, held)).await;
    let waits = send_all(&layer, [path("/export"), path("/")]);
    settle().await;
    store.trips();
    sleep(SECOND * 10).await;
    let (loads, swaps) = store.trips();
    assert!((90..=100).contains(&loads) && swaps == loads, "{loads} loads, {swaps} swaps");
    assert!(waits.iter().all(|task| !task.is_finished()), "three slots are in use, and the first request has two");
}

#[tokio::test(start_paused = true)]
async fn request_that_waits_after_its_slots_were_lowered_asks_ten_times_a_second() {
    let store = FakeCasStore::default();
    store.answer_after(1);
    let live = LiveSlots::new(4);
    let one = InFlightLayer::new(live.clone(), user()).storage(cas(&store), OnError::Refuse).wait(SECOND * 60, 100);
    let two = process(&store, 4);
    let _held = answers(send_all(&one, [of("a"), of("a")])).await;
    let mut others = answers(send_all(&two, [of("a"), of("a")])).await;
    let waits = send_all(&one, [of("a")]);
    settle().await;
    live.set(2);
    others.pop();
    settle().await;
    store.trips();
    sleep(SECOND * 10).await;
    let (loads, swaps) = store.trips();
    assert!((90..=100).contains(&loads) && swaps == loads, "{loads} loads, {swaps} swaps");
    assert!(!waits[0].is_finished());
}

#[tokio::test(start_paused = true)]
async fn request_takes_a_place_only_if_the_slots_do_not_suffice() {
    let store = FakeCasStore::default();
    store.answer_after(2);
    let layer = process(&store, 5).wait(SECOND * 60, 4);
    let mut tasks = send_all(&layer, (0..20).map(|_| of("a")));
    settle().await;
    // A key gets as many of the places as it leaves free.
    assert!(tasks[5..7].iter().all(|task| !task.is_finished()), "two requests wait");
    let refused = answers(tasks.split_off(7)).await;
    assert_eq!(statuses(&refused), [429; 13]);
    let waits = tasks.split_off(5);
    let held = answers(tasks).await;
    assert_eq!((statuses(&held), layer.in_use()), (vec![200; 5], 5));
    drop(held);
    assert_eq!(statuses(&answers(waits).await), [200, 200]);
}

#[tokio::test(start_paused = true)]
async fn wait_begins_when_the_store_has_answered() {
    let store = FakeCasStore::default();
    let wait = Duration::from_millis(500);
    for (on_error, expected) in [(OnError::Admit, 200), (OnError::Refuse, 503)] {
        let layer = layer(4).storage(cas(&store), on_error).wait(wait, 100);
        store.hang(true);
        let begin = Instant::now();
        assert_eq!(status(&streams(&layer), of("a")).await, expected, "{on_error}");
        assert!(begin.elapsed() >= SECOND, "the timeout of the store is longer than the wait");
        store.hang(false);
    }
    let layer = process(&store, 1).wait(wait, 100);
    let _held = ask(&streams(&layer), of("b")).await;
    store.answer_after(400);
    let begin = Instant::now();
    assert_eq!(status(&streams(&layer), of("b")).await, 429);
    assert_eq!(begin.elapsed().as_millis() / 10, 130, "a load, a swap and the wait");
}

#[tokio::test(start_paused = true)]
async fn request_that_does_not_fit_is_refused_alone() {
    let store = FakeCasStore::default();
    store.answer_after(2);
    for (paths, expected) in [
        (["/10", "/1", "/1"], [429, 200, 200]),
        (["/1", "/10", "/2"], [200, 429, 200]),
        (["/9", "/10", "/1"], [200, 429, 429]),
        (["/10", "/10", "/9"], [429, 429, 200]),
    ] {
        let layer = with_costs(&store, 10);
        let held = ask(&streams(&layer), path("/1")).await;
        let sent = answers(send_all(&layer, paths.map(path))).await;
        assert_eq!(statuses(&sent), expected, "{paths:?}");
        drop((held, sent));
        settle().await;
    }
}

#[tokio::test(start_paused = true)]
async fn request_is_not_refused_because_of_the_number_of_another_request() {
    let store = FakeCasStore::default();
    store.answer_after(2);
    let layer = with_two_numbers(&store);
    let _held = answers(send_all(&layer, [path("/"), path("/"), path("/")])).await;
    for (paths, expected) in [(["/", "/export"], [200, 429]), (["/export", "/"], [429, 200])] {
        assert_eq!(statuses(&answers(send_all(&layer, paths.map(path))).await), expected, "{paths:?}");
        settle().await;
    }
}

#[tokio::test(start_paused = true)]
async fn keys_of_a_failed_store_are_forgotten() {
    for hangs in [false, true] {
        let store = FakeCasStore::default();
        let layer = layer(4).storage(cas(&store), OnError::Admit);
        store.fail(!hangs);
        store.hang(hangs);
        let admitted = answers(send_all(&layer, (0..100).map(|user| of(&user.to_string())))).await;
        assert_eq!(statuses(&admitted), [200; 100]);
        drop(admitted);
        store.trips();
        sleep(TIME_TO_LIVE * 2).await;
        assert_eq!(store.trips(), (0, 0), "hangs: {hangs}");
    }
}

#[tokio::test(start_paused = true)]
async fn slots_that_the_store_may_count_are_forgotten_when_the_store_has_forgotten_them() {
    let store = FakeCasStore::default();
    let layer = process(&store, 4);
    store.hang_from_swap(1);
    assert_eq!(status(&streams(&layer), of("a")).await, 503);
    store.trips();
    sleep(TIME_TO_LIVE).await;
    assert_eq!(store.trips(), (4, 4), "the slot is given back at once, and with each renewal");
    sleep(TIME_TO_LIVE * 2).await;
    store.trips();
    sleep(TIME_TO_LIVE * 2).await;
    assert_eq!(store.trips(), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn slots_that_were_given_back_during_a_short_outage_are_free_after_the_next_renewal() {
    let store = FakeCasStore::default();
    let (one, two) = (process(&store, 4), process(&store, 4));
    let held = answers(send_all(&one, (0..4).map(|_| of("a")))).await;
    store.fail(true);
    for _ in 0..10 {
        assert_eq!(status(&streams(&one), of("a")).await, 503);
    }
    drop(held);
    settle().await;
    store.fail(false);
    assert_eq!(status(&streams(&two), of("a")).await, 429);
    sleep(TIME_TO_LIVE / 3).await;
    assert_eq!(statuses(&answers(send_all(&two, (0..4).map(|_| of("a")))).await), [200; 4]);
}

#[tokio::test(start_paused = true)]
async fn slot_whose_return_lost_all_races_is_given_back_again() {
    let store = FakeCasStore::default();
    let (one, two) = (process(&store, 1), process(&store, 1));
    let held = ask(&streams(&one), of("a")).await;
    store.lose(1_000_000);
    drop(held);
    sleep(SECOND).await;
    store.lose(0);
    sleep(SECOND * 2).await;
    assert_eq!(status(&streams(&two), of("a")).await, 200, "before the next renewal");
    store.trips();
    settle().await;
    assert_eq!(store.trips(), (1, 1), "the first process makes no more claims");
}

#[tokio::test(start_paused = true)]
async fn requests_wait_for_the_inner_service_without_slots() {
    for waits in [false, true] {
        let store = FakeCasStore::default();
        store.answer_after(2);
        let layer = process(&store, 100);
        let layer = if waits { layer.wait(SECOND * 60, 100) } else { layer };
        let inner = service_fn(|_: Request<()>| async {
            sleep(SECOND * 600).await;
            Ok::<_, Infallible>(Response::new(Script::new(&[Step::Hang])))
        });
        let service = layer.layer(ConcurrencyLimit::new(inner, 1));
        for _ in 0..5 {
            tokio::spawn(service.clone().oneshot(of("a")));
        }
        settle().await;
        assert_eq!(layer.in_use(), 1, "waits: {waits}");
    }
}

/// It may hold a permit of the inner service until then.
#[tokio::test(start_paused = true)]
async fn request_behind_one_that_waits_is_answered_by_the_next_claim() {
    let store = FakeCasStore::default();
    store.answer_after(1);
    let (one, two) = (process(&store, 1), process(&store, 1).wait(SECOND * 60, 1));
    let _held = ask(&streams(&one), of("a")).await;
    let waits = send_all(&two, [of("a")]);
    settle().await;
    for _ in 0..10 {
        let begin = Instant::now();
        assert_eq!(status(&streams(&two), of("a")).await, 429);
        assert_eq!(begin.elapsed(), Duration::from_millis(2), "a load and a swap");
        sleep(Duration::from_millis(7)).await;
    }
    assert!(!waits[0].is_finished());
}

#[tokio::test(start_paused = true)]
async fn claim_that_loses_every_race_refuses_and_takes_no_slot() {
    let store = FakeCasStore::default();
    let layer = process(&store, 1);
    store.lose(1_000);
    let refused = ask(&streams(&layer), of("a")).await;
    assert_eq!(refused.status(), 429);
    assert_eq!(refused.headers()["x-ratelimit-remaining"], "0", "it is not known whether the slot is free");
    store.lose(0);
    assert_eq!(status(&streams(&layer), of("a")).await, 200);
}

#[tokio::test(start_paused = true)]
async fn failed_claim_ends_the_wait_of_all_requests_of_the_key() {
    let store = FakeCasStore::default();
    for (on_error, expected) in [(OnError::Admit, 200), (OnError::Refuse, 503)] {
        let other = process(&store, 1);
        let held = ask(&streams(&other), of("a")).await;
        let layer = layer(1).storage(cas(&store), on_error).wait(SECOND * 60, 100);
        let waits = send_all(&layer, [of("a"), of("a"), of("a")]);
        settle().await;
        assert!(waits.iter().all(|task| !task.is_finished()));
        store.hang(true);
        assert_eq!(statuses(&answers(waits).await), [expected; 3], "{on_error}");
        store.hang(false);
        drop(held);
        settle().await;
    }
}

#[tokio::test(start_paused = true)]
async fn request_that_waits_for_a_slot_of_another_process_holds_no_permit_of_the_inner_service() {
    let store = FakeCasStore::default();
    let (one, two) = (process(&store, 1), process(&store, 1).wait(SECOND * 60, 100));
    let inner = service_fn(|_: Request<()>| async { Ok::<_, Infallible>(Response::new(Script::new(&[Step::Hang]))) });
    let service = two.layer(ConcurrencyLimit::new(inner, 1));
    let held = ask(&streams(&one), of("a")).await;
    let waits = tokio::spawn(service.clone().oneshot(of("a")));
    settle().await;
    assert_eq!(ask(&service, of("b")).await.status(), 200, "the inner permit is free");
    drop(held);
    assert_eq!(waits.await.unwrap().unwrap().status(), 200);
}

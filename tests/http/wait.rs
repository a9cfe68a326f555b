//! Requests that wait instead of being refused. Tokio's time is paused.

use std::convert::Infallible;
use std::fmt::Debug;
use std::future::ready;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{Behavior, FakeStorage, Inner, ask, get, numbers, policy, retry_after, slow, status};
use http::{Request, Response, StatusCode};
use tokio::task::{JoinHandle, yield_now};
use tokio::time::{Instant, sleep};
use tower::limit::ConcurrencyLimit;
use tower::{Layer, Service, ServiceExt};
use tower_ratelimit::extract::Head;
use tower_ratelimit::storage::{AnyStorage, TokioClock};
use tower_ratelimit::{
    Decision, Event, EventKind, Global, Header, Headers, Key, LivePolicy, MemoryStorage, OnError, RateLimitLayer,
    Storage, policy_by,
};

use crate::probe::Probe;

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);

fn memory() -> MemoryStorage {
    MemoryStorage::builder().clock(TokioClock::new()).build().unwrap()
}

fn layer(text: &str, storage: impl Storage) -> RateLimitLayer {
    RateLimitLayer::new(policy(text), Global::new()).storage(storage, OnError::Refuse).wait(MINUTE, 1_000)
}

/// Lets the spawned tasks run until all of them wait.
async fn settle() {
    for _ in 0..20 {
        yield_now().await;
    }
}

/// Sends a request in a task, and lets it run until it waits.
async fn start<S>(service: &S, path: &str) -> JoinHandle<Response<String>>
where
    S: Service<Request<()>, Response = Response<String>, Error: Debug, Future: Send> + Clone + Send + 'static,
{
    let (service, request) = (service.clone(), get(path));
    let task = tokio::spawn(async move { service.oneshot(request).await.unwrap() });
    settle().await;
    task
}

/// Returns the units that remain for every request of the layer.
async fn left(layer: &RateLimitLayer) -> u32 {
    layer.limiter().unwrap().peek(&Key::global()).await.unwrap().remaining()
}

/// Asserts that `time` is `due`, or later by at most the jitter and the lateness of timers.
fn assert_due(time: Duration, due: Duration) {
    assert!((due..=due + due / 10 + Duration::from_millis(5)).contains(&time), "due after {due:?}, was after {time:?}");
}

#[tokio::test(start_paused = true)]
async fn request_waits_until_it_is_admitted() {
    async fn check(storage: impl Storage) {
        let layer = layer("fixed-window 2 per 10 seconds", storage);
        let probe = Probe::new();
        let service = layer.layer(probe.clone());
        let begin = Instant::now();
        for (calls, due, remaining) in [(1, 0, 1), (2, 0, 0), (3, 10, 1), (4, 10, 0), (5, 20, 1)] {
            let response = ask(&service, get("/")).await;
            assert_eq!((response.status(), retry_after(&response)), (StatusCode::OK, None));
            assert_eq!(numbers(&response).map(|[limit, left, _]| [limit, left]), Some([2, remaining]));
            let time = begin.elapsed();
            assert!(time >= due * SECOND && time <= (due + 3) * SECOND, "due after {due} s, was after {time:?}");
            assert_eq!(probe.calls.load(Ordering::SeqCst), calls);
        }
    }
    check(memory()).await;
    check(slow(memory())).await;
    check(AnyStorage::new(memory())).await;
}

#[tokio::test(start_paused = true)]
async fn request_that_would_wait_too_long_is_refused_at_once() {
    let layer = layer("fixed-window 1 per 61 seconds", memory());
    let (inner, begin) = (Inner::default(), Instant::now());
    let service = layer.layer(inner.clone());
    assert_eq!(status(&service, get("/")).await, 200);
    let response = ask(&service, get("/")).await;
    assert_eq!((response.status().as_u16(), retry_after(&response)), (429, Some(61)));
    assert_eq!((begin.elapsed(), inner.calls()), (Duration::ZERO, 1));

    let costly = RateLimitLayer::new(policy("fixed-window 1/second"), Global::new())
        .storage(memory(), OnError::Refuse)
        .cost(|_| 2_u32)
        .wait(Duration::MAX, usize::MAX);
    let response = ask(&costly.layer(inner), get("/")).await;
    assert_eq!((response.status().as_u16(), retry_after(&response)), (429, None));
    assert_eq!(begin.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn refusal_after_waiting_reports_the_limits_of_that_instant() {
    async fn check(storage: impl Storage) {
        let layer = layer("fixed-window 1 per 50 seconds", storage).headers(Headers::x_rate_limit().reset_in_seconds());
        let inner = Inner::default();
        let service = layer.layer(inner.clone());
        let begin = Instant::now();
        let mut requests = Vec::new();
        for _ in 0..4 {
            requests.push(start(&service, "/").await);
        }
        let mut responses = Vec::new();
        for request in requests {
            responses.push(request.await.unwrap());
        }
        assert_due(begin.elapsed(), 50 * SECOND);
        let statuses: Vec<u16> = responses.iter().map(|response| response.status().as_u16()).collect();
        assert_eq!((statuses, inner.calls()), (vec![200, 200, 429, 429], 2));
        for refused in &responses[2..] {
            assert_eq!((retry_after(refused), numbers(refused)), (Some(50), Some([1, 0, 50])));
            assert_eq!(refused.headers()["cache-control"], "no-store");
            assert!(refused.extensions().get::<Decision>().unwrap().is_refused());
        }
    }
    check(memory()).await;
    check(slow(memory())).await;
}

#[tokio::test(start_paused = true)]
async fn at_most_max_waiting_requests_wait() {
    async fn check(storage: impl Storage) {
        let layer = layer("fixed-window 1 per 10 seconds", storage).wait(MINUTE, 2);
        let service = layer.layer(Inner::default());
        assert_eq!(status(&service, get("/")).await, 200);
        let [first, second] = [start(&service, "/").await, start(&service, "/").await];
        let begin = Instant::now();
        let response = ask(&service.clone(), get("/")).await;
        assert_eq!((response.status().as_u16(), retry_after(&response)), (429, Some(10)));
        assert_eq!(begin.elapsed(), Duration::ZERO);

        // A client that disconnects frees its place, and so does an admitted request.
        first.abort();
        settle().await;
        let third = start(&service, "/").await;
        assert_eq!(status(&service, get("/")).await, 429);
        assert_eq!(second.await.unwrap().status(), 200);
        let fourth = start(&service, "/").await;
        assert_eq!(status(&service, get("/")).await, 429);
        assert_eq!([third.await.unwrap().status(), fourth.await.unwrap().status()], [200, 200]);
    }
    check(memory()).await;
    check(slow(memory())).await;
}

#[tokio::test(start_paused = true)]
async fn disconnected_client_spends_nothing() {
    async fn check(storage: impl Storage) {
        let layer = layer("fixed-window 1 per 10 seconds", storage);
        let inner = Inner::default();
        let service = layer.layer(inner.clone());
        assert_eq!(status(&service, get("/")).await, 200);
        let waiting = [start(&service, "/").await, start(&service, "/").await];
        waiting.iter().for_each(JoinHandle::abort);
        sleep(20 * SECOND).await;
        assert_eq!((left(&layer).await, inner.calls()), (1, 1));
    }
    check(memory()).await;
    check(slow(memory())).await;
}

#[tokio::test(start_paused = true)]
async fn hit_in_flight_of_a_disconnected_client_is_refunded() {
    let storage = FakeStorage::around(memory());
    let layer = layer("fixed-window 1 per 10 seconds", storage.clone());
    let service = layer.layer(Inner::default());
    assert_eq!(status(&service, get("/")).await, 200);
    let waiting = start(&service, "/").await;
    storage.close();
    sleep(12 * SECOND).await;
    waiting.abort();
    settle().await;
    storage.open();
    settle().await;
    assert_eq!((left(&layer).await, storage.changes()), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn failed_refund_of_a_disconnected_client_is_reported() {
    let events = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&events);
    let storage = FakeStorage::around(memory());
    let layer = layer("fixed-window 1 per 10 seconds", storage.clone()).observer(move |event: &Event<'_>| {
        if let EventKind::SettleFailed { decision, actual, .. } = event.kind {
            seen.lock().unwrap().push((decision.cost(), actual, event.key.cloned()));
        }
    });
    let service = layer.layer(Inner::default());
    assert_eq!(status(&service, get("/")).await, 200);
    let waiting = start(&service, "/").await;
    storage.close();
    sleep(12 * SECOND).await;
    waiting.abort();
    settle().await;
    storage.set_changes(Behavior::Fails);
    storage.open();
    settle().await;
    assert_eq!(*events.lock().unwrap(), [(1, 0, Some(Key::global()))]);
    assert_eq!(left(&layer).await, 0);
}

#[tokio::test(start_paused = true)]
async fn waiting_request_holds_no_permit() {
    let by_client = |head: &Head<'_>| Ok(Some(Key::from(head.uri().path())));
    let layer = RateLimitLayer::new(policy("fixed-window 1 per 10 seconds"), by_client)
        .storage(memory(), OnError::Refuse)
        .wait(MINUTE, 10);
    for is_slow in [false, true] {
        let limited = layer.clone();
        let service = ConcurrencyLimit::new(Inner::default(), 1);
        let service = if is_slow {
            tower::util::BoxCloneSyncService::new(limited.storage(slow(memory()), OnError::Refuse).layer(service))
        } else {
            tower::util::BoxCloneSyncService::new(limited.layer(service))
        };
        let begin = Instant::now();
        assert_eq!(status(&service, get("/alice")).await, 200);
        let waiting = start(&service, "/alice").await;
        assert_eq!(status(&service, get("/bob")).await, 200);
        assert_eq!(begin.elapsed(), Duration::ZERO);
        assert_eq!(waiting.await.unwrap().status(), 200);
        assert_due(begin.elapsed(), 10 * SECOND);
    }
}

#[tokio::test(start_paused = true)]
async fn admitted_request_waits_for_a_busy_inner_service() {
    let mut busy = ConcurrencyLimit::new(Inner::default(), 1);
    let service = layer("fixed-window 1 per 10 seconds", memory()).layer(busy.clone());
    assert_eq!(status(&service, get("/")).await, 200);
    let waiting = start(&service, "/").await;
    busy.ready().await.unwrap();
    sleep(15 * SECOND).await;
    assert!(!waiting.is_finished(), "the only permit is taken");
    drop(busy);
    assert_eq!(waiting.await.unwrap().status(), 200);
}

#[tokio::test(start_paused = true)]
async fn request_dropped_while_the_inner_service_is_busy_is_refunded() {
    for text in ["fixed-window 1 per 10 seconds", "leaky-bucket 1 per 10 seconds queue 0"] {
        let mut busy = ConcurrencyLimit::new(Inner::default(), 1);
        let layer = layer(text, memory());
        let service = layer.layer(busy.clone());
        assert_eq!(status(&service, get("/")).await, 200);
        let waiting = start(&service, "/").await;
        busy.ready().await.unwrap();
        sleep(12 * SECOND).await;
        assert_eq!(left(&layer).await, 0, "the request has had its turn");
        waiting.abort();
        settle().await;
        assert_eq!(left(&layer).await, 1);
    }
}

/// The units are free again before the first request of the queue asks.
#[tokio::test(start_paused = true)]
async fn new_requests_do_not_overtake_waiting_ones() {
    let storage = FakeStorage::around(memory());
    let layer = layer("fixed-window 1 per 10 seconds", storage.clone());
    let service = layer.layer(Inner::default());
    assert_eq!(status(&service, get("/")).await, 200);
    let first = start(&service, "/").await;
    let limiter = layer.limiter().unwrap();
    limiter.clear(&Key::global()).await.unwrap();
    let decisions = storage.decisions();
    let second = start(&service, "/").await;
    // The limiters of a layer share its queues.
    let third = tokio::spawn(limiter.acquire(&Key::global(), MINUTE));
    settle().await;
    assert_eq!((second.is_finished(), third.is_finished(), storage.decisions()), (false, false, decisions));
    assert_eq!(first.await.unwrap().status(), 200);
    assert!(!second.is_finished());
    assert_eq!(second.await.unwrap().status(), 200);
    assert!(!third.is_finished());
    assert!(third.await.unwrap().unwrap().is_admitted());
}

#[tokio::test(start_paused = true)]
async fn waiting_requests_cause_one_storage_call_per_admission_and_one_per_window() {
    let storage = FakeStorage::around(memory());
    let service = layer("fixed-window 10 per 50 seconds", storage.clone()).layer(Inner::default());
    let requests: Vec<_> = (0..1_000).map(|_| tokio::spawn(service.clone().oneshot(get("/")))).collect();
    let mut admitted = 0;
    for request in requests {
        admitted += u32::from(request.await.unwrap().unwrap().status() == 200);
    }
    assert_eq!((admitted, storage.decisions()), (20, 11 + 11));
}

#[tokio::test(start_paused = true)]
async fn on_error_applies_if_the_storage_fails_during_the_wait() {
    for (on_error, expected) in [(OnError::Refuse, 503), (OnError::Admit, 200)] {
        let storage = FakeStorage::around(memory());
        let layer = RateLimitLayer::new(policy("fixed-window 1 per 10 seconds"), Global::new())
            .storage(storage.clone(), on_error)
            .wait(MINUTE, 10);
        let service = layer.layer(Probe::new());
        assert_eq!(status(&service, get("/")).await, 200);
        let waiting = [start(&service, "/").await, start(&service, "/").await];
        storage.set(Behavior::Fails);
        for request in waiting {
            let response = request.await.unwrap();
            assert_eq!((response.status().as_u16(), numbers(&response)), (expected, None));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn request_waits_for_all_limits_of_the_policy() {
    let service = layer("fixed-window 1/second; fixed-window 2 per 10 seconds", memory()).layer(Inner::default());
    let begin = Instant::now();
    for due in [0, 1, 10] {
        assert_eq!(status(&service, get("/")).await, 200);
        assert_due(begin.elapsed(), due * SECOND);
    }
}

#[tokio::test(start_paused = true)]
async fn waiting_request_follows_a_live_policy_but_keeps_a_chosen_one() {
    let api = |text: &str| policy(text).with_name("api");
    let (raised, old) = (api("fixed-window 5 per 10 seconds"), api("fixed-window 1 per 10 seconds"));
    let live = LivePolicy::new(old.clone());
    let follows =
        RateLimitLayer::new(live.clone(), Global::new()).storage(memory(), OnError::Refuse).wait(12 * SECOND, 10);
    let keeps = RateLimitLayer::new(policy_by(move |_| old.clone()), Global::new())
        .storage(memory(), OnError::Refuse)
        .wait(12 * SECOND, 10);
    for (layer, limit) in [(follows, 5), (keeps, 1)] {
        let service = layer.layer(Inner::default());
        assert_eq!(status(&service, get("/")).await, 200);
        let waiting = [start(&service, "/").await, start(&service, "/").await];
        live.set(raised.clone()).unwrap();
        let mut seen = Vec::new();
        for request in waiting {
            let response = request.await.unwrap();
            seen.push((response.status().as_u16(), numbers(&response).map(|[limit, ..]| limit)));
        }
        let second = if limit == 5 { 200 } else { 429 };
        assert_eq!(seen, [(200, Some(limit)), (second, Some(limit))]);
    }
}

/// A request first waits for a slot in the bucket's queue, and then for the delay of this slot.
#[tokio::test(start_paused = true)]
async fn request_waits_for_a_slot_of_a_leaky_bucket_and_then_for_its_delay() {
    let service = layer("leaky-bucket 1 per 10 seconds queue 1", memory()).layer(Probe::new());
    let begin = Instant::now();
    let mut requests = Vec::new();
    for _ in 0..3 {
        requests.push(start(&service, "/").await);
    }
    for (request, due) in requests.into_iter().zip([0, 10, 20]) {
        assert_eq!(request.await.unwrap().status(), 200);
        assert_due(begin.elapsed(), due * SECOND);
    }
}

#[tokio::test(start_paused = true)]
async fn request_dropped_during_the_delay_after_its_wait_is_refunded() {
    let layer = layer("leaky-bucket 1 per 10 seconds queue 1", memory());
    let service = layer.layer(Inner::default());
    assert_eq!(status(&service, get("/")).await, 200);
    let [queued, waiting] = [start(&service, "/").await, start(&service, "/").await];
    assert_eq!(queued.await.unwrap().status(), 200);
    sleep(2 * SECOND).await;
    assert_eq!(left(&layer).await, 0, "the waiting request has the slot");
    waiting.abort();
    settle().await;
    assert_eq!(left(&layer).await, 1);
}

#[tokio::test(start_paused = true)]
async fn observer_gets_one_event_when_the_wait_is_over() {
    let events = Arc::new(Mutex::new(Vec::new()));
    let (seen, begin) = (Arc::clone(&events), Instant::now());
    let observer = move |event: &Event<'_>| seen.lock().unwrap().push((event.outcome(), begin.elapsed().as_secs()));
    let layer = layer("fixed-window 1 per 50 seconds", memory()).observer(observer);
    let service = layer.layer(Inner::default());
    let mut requests = Vec::new();
    for _ in 0..3 {
        requests.push(start(&service, "/").await);
    }
    for request in requests {
        request.await.unwrap();
    }
    let events: Vec<_> = events.lock().unwrap().iter().map(|(outcome, at)| (*outcome, *at >= 50)).collect();
    assert_eq!(events, [("admitted", false), ("admitted", true), ("refused", true)]);
}

#[tokio::test(start_paused = true)]
async fn request_that_waited_is_settled_by_its_response() {
    let layer = layer("fixed-window 1 per 10 seconds", memory())
        .charge_when(|response| response.status == StatusCode::UNAUTHORIZED);
    let service = layer.layer(common::AnswersWithStatus);
    assert_eq!(status(&service, get("/401")).await, 401);
    assert_eq!(start(&service, "/200").await.await.unwrap().status(), 200);
    assert_eq!(left(&layer).await, 1, "the waited request was refunded");
    let waited = start(&service, "/401").await.await.unwrap();
    assert_eq!((waited.status().as_u16(), left(&layer).await), (401, 0));
}

#[tokio::test(start_paused = true)]
async fn request_that_waited_has_its_decision_and_is_counted_by_shadow_limits() {
    let events = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&events);
    let observer = move |event: &Event<'_>| seen.lock().unwrap().push((event.shadow, event.outcome()));
    let layer = layer("fixed-window 1 per 10 seconds; shadow fixed-window 1/minute", memory())
        .share_decision()
        .observer(observer);
    let inner = tower::service_fn(|request: Request<()>| {
        let has_decision = request.extensions().get().is_some_and(Decision::is_admitted);
        ready(Ok::<_, Infallible>(Response::new(has_decision.to_string())))
    });
    let service = layer.layer(inner);
    for _ in 0..2 {
        assert_eq!(ask(&service, get("/")).await.into_body(), "true");
    }
    let expected = [(false, "admitted"), (true, "admitted"), (false, "admitted"), (true, "refused")];
    assert_eq!(*events.lock().unwrap(), expected);
}

#[tokio::test(start_paused = true)]
async fn no_request_waits_in_a_shadow_layer() {
    let service = layer("fixed-window 1/minute", memory()).shadow().layer(Inner::default());
    let begin = Instant::now();
    for _ in 0..3 {
        assert_eq!(status(&service, get("/")).await, 200);
    }
    assert_eq!(begin.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn request_that_nothing_polls_does_not_block_the_others() {
    async fn check(storage: impl Storage) {
        let layer = layer("fixed-window 1 per 10 seconds", storage);
        let inner = Inner::default();
        let service = layer.layer(inner.clone());
        assert_eq!(status(&service, get("/")).await, 200);
        let mut left_behind = Box::pin(service.clone().oneshot(get("/")));
        for _ in 0..5 {
            assert!(common::poll(&mut left_behind).is_pending());
        }
        let begin = Instant::now();
        assert_eq!(start(&service, "/").await.await.unwrap().status(), 200);
        assert!(begin.elapsed() <= Duration::from_millis(11_410), "{:?}", begin.elapsed());
        assert_eq!((inner.calls(), left_behind.await.unwrap().status().as_u16()), (2, 200));
        assert_eq!((inner.calls(), left(&layer).await), (3, 0));
    }
    check(memory()).await;
    check(slow(memory())).await;
}

#[tokio::test(start_paused = true)]
async fn layer_without_wait_refuses_at_once() {
    let layer = RateLimitLayer::new(policy("fixed-window 1/second"), Global::new()).storage(memory(), OnError::Refuse);
    let (service, begin) = (layer.layer(Inner::default()), Instant::now());
    for expected in [200, 429] {
        assert_eq!(status(&service, get("/")).await, expected);
    }
    let none = layer.wait(MINUTE, 0).layer(Inner::default());
    assert_eq!((status(&none, get("/")).await, begin.elapsed()), (429, Duration::ZERO));
}

/// Guards against this defect: one client fills all places, and no other can wait.
#[tokio::test(start_paused = true)]
async fn one_key_cannot_take_all_places() {
    let layer = RateLimitLayer::new(policy("fixed-window 1 per 50 seconds"), Header::new("x-user"))
        .storage(memory(), OnError::Refuse)
        .wait(MINUTE, 8);
    let service = layer.layer(Inner::default());
    let request = |user: &str| common::with("x-user", user);
    let mut waiting = Vec::new();
    let mut places = async |user: &str| {
        assert_eq!(status(&service, request(user)).await, 200);
        for number in 0.. {
            let (service, request) = (service.clone(), request(user));
            let task = tokio::spawn(async move { service.oneshot(request).await.unwrap() });
            settle().await;
            if task.is_finished() {
                assert_eq!(task.await.unwrap().status(), 429);
                return number;
            }
            waiting.push(task);
        }
        unreachable!("at most 8 requests wait")
    };
    let taken = [places("a").await, places("b").await, places("c").await, places("d").await];
    assert_eq!(taken, [4, 2, 1, 1]);
}

#[tokio::test(start_paused = true)]
async fn one_key_cannot_take_all_places_by_several_policies() {
    let policies = |head: &Head<'_>| policy("fixed-window 1 per 50 seconds").with_name(&head.uri().path()[1..]);
    let layer = RateLimitLayer::new(policy_by(policies), Header::new("x-user"))
        .storage(memory(), OnError::Refuse)
        .wait(MINUTE, 8);
    let service = layer.layer(Inner::default());
    let mut waiting = Vec::new();
    for route in ["one", "two", "three", "four", "five", "six"] {
        for _ in 0..2 {
            let mut request = common::with("x-user", "a");
            *request.uri_mut() = format!("/{route}").parse().unwrap();
            waiting.push(tokio::spawn(service.clone().oneshot(request)));
            settle().await;
        }
    }
    assert_eq!(waiting.iter().filter(|task| !task.is_finished()).count(), 4);
}

//! Requests that are settled after their admission: by the head of the response, or later.

use std::convert::Infallible;
use std::future::{pending, ready};
use std::process::Command;
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::Request as AxumRequest;
use axum::routing::get as on_get;
use common::{
    AnswersWithStatus, Behavior, FAILURE, FakeStorage, Inner, ask, failing, get, memory_with_manual_clock, numbers,
    outside_of_a_runtime, policy, poll, remaining, retry_after, slow, status,
};
use futures_util::stream::unfold;
use http::{Request, Response};
use http_body_util::BodyExt;
use tokio::runtime::Builder;
use tower::{Layer, Service, service_fn};
use tower_ratelimit::extract::{Head, NoReservation};
use tower_ratelimit::storage::{Breaker, TokioClock};
use tower_ratelimit::{
    Event, EventKind, Global, Headers, Key, MemoryStorage, OnError, Policy, PolicyLookup, RateLimitLayer, RateLimiter,
    Reservation, Reservations, ResponseHead, Storage,
};

use crate::log::log_of;

const POLICY: &str = "token-bucket 60/minute burst 100";

type Outcomes = Arc<Mutex<Vec<String>>>;

/// A layer named `tokens`. The path of a request is its estimated cost.
fn layer(text: &str, storage: impl Storage) -> RateLimitLayer {
    let cost = |head: &Head<'_>| head.uri().path()[1..].parse::<u32>().unwrap();
    RateLimitLayer::new(policy(text).with_name("tokens"), Global::new()).storage(storage, OnError::Refuse).cost(cost)
}

/// Adds an observer that collects the outcomes and their units. A `?` marks those of shadow limits.
fn observed(layer: RateLimitLayer) -> (RateLimitLayer, Outcomes) {
    let outcomes = Outcomes::default();
    let events = Arc::clone(&outcomes);
    let layer = layer.observer(move |event: &Event<'_>| {
        let mark = if event.shadow { "?" } else { "" };
        let units = event.settled_units().map(|units| format!(" {units}")).unwrap_or_default();
        events.lock().unwrap().push(format!("{}{units}{mark}", event.outcome()));
    });
    (layer, outcomes)
}

fn take(outcomes: &Outcomes) -> Vec<String> {
    std::mem::take(&mut outcomes.lock().unwrap())
}

/// A slot into which a service puts the reservation of its request.
type Taken = Arc<Mutex<Option<Reservation>>>;

fn take_reservation(request: &Request<()>) -> Option<Reservation> {
    request.extensions().get().and_then(Reservations::take)
}

/// A service that keeps the reservation of each request.
fn keeps_reservation(
    taken: &Taken,
) -> impl Service<
    Request<()>,
    Response = Response<String>,
    Error = Infallible,
    Future: Future<Output = Result<Response<String>, Infallible>> + Send,
> + Clone
+ use<> {
    let taken = Arc::clone(taken);
    service_fn(move |request: Request<()>| {
        *taken.lock().unwrap() = take_reservation(&request);
        ready(Ok(Response::new(String::new())))
    })
}

/// Returns the units that remain for every request of the layer.
fn left(text: &str, storage: &MemoryStorage) -> u32 {
    let limiter = RateLimiter::with_storage(policy(text).with_name("tokens"), storage.clone());
    common::now(limiter.peek(&Key::global())).remaining()
}

/// Lets the spawned tasks run until all of them wait.
async fn yields() {
    for _ in 0..20 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn head_of_the_response_settles_the_cost() {
    let (storage, clock) = memory_with_manual_clock();
    let cost = |response: &ResponseHead<'_>| response.headers.get("x-cost")?.to_str().ok()?.parse().ok();
    let inner = service_fn(|request: Request<()>| {
        let mut response = Response::new(String::new());
        if let Some(cost) = request.uri().query() {
            response.headers_mut().insert("x-cost", cost.parse().unwrap());
        }
        ready(Ok::<_, Infallible>(response))
    });
    let (layer, outcomes) = observed(layer(POLICY, storage.clone()));
    let service = layer.settle(cost).layer(inner);
    for (path, expected) in [("/10?4", 96), ("/10?30", 66), ("/10", 56), ("/10?10", 46), ("/10?x", 36)] {
        assert_eq!(remaining(&ask(&service, get(path)).await), Some(expected), "{path}");
    }
    let settled = take(&outcomes).into_iter().filter(|outcome| outcome != "admitted").collect::<Vec<_>>();
    assert_eq!(settled, ["refunded 6", "charged 20"]);

    // 36 units remain, so an actual cost of 336 leaves a debt of 300 units.
    assert_eq!(remaining(&ask(&service, get("/1?336")).await), Some(0));
    let refused = ask(&service, get("/60")).await;
    assert_eq!((refused.status().as_u16(), remaining(&refused), retry_after(&refused)), (429, Some(0), Some(360)));
    clock.advance(Duration::from_secs(359));
    assert_eq!(status(&service, get("/60")).await, 429);
    clock.advance(Duration::from_secs(1));
    assert_eq!(status(&service, get("/60")).await, 200, "the debt is paid");
}

#[tokio::test]
async fn every_family_of_fields_reports_the_debt() {
    let headers = Headers::x_rate_limit().and(Headers::draft11()).and(Headers::draft6());
    let (storage, _clock) = memory_with_manual_clock();
    let service = RateLimitLayer::new(policy("fixed-window 100/minute").with_name("tokens"), Global::new())
        .storage(storage, OnError::Refuse)
        .headers(headers)
        .settle(|response| Some(u32::from(response.status.as_u16())))
        .layer(AnswersWithStatus);
    let response = ask(&service, get("/401")).await;
    let field = |name: &str| response.headers()[name].to_str().unwrap().to_owned();
    assert_eq!((field("x-ratelimit-remaining"), field("ratelimit-remaining")), ("0".to_owned(), "0".to_owned()));
    assert_eq!(field("ratelimit"), "\"tokens\";r=0;t=60");
    assert_eq!(retry_after(&ask(&service, get("/200")).await), Some(60));
}

#[tokio::test]
async fn reservation_is_settled_after_the_response() {
    let (storage, clock) = memory_with_manual_clock();
    let taken = Taken::default();
    let (layer, outcomes) = observed(layer(POLICY, storage.clone()));
    let service = layer.settle_later().layer(keeps_reservation(&taken));
    assert_eq!(remaining(&ask(&service, get("/20")).await), Some(80), "the estimate");
    let reservation = taken.lock().unwrap().take().unwrap();
    assert_eq!((reservation.cost(), reservation.remaining(), reservation.policy().identity()), (20, 80, "tokens"));
    reservation.settle(5).await.unwrap();
    assert_eq!((left(POLICY, &storage), take(&outcomes)), (95, vec!["admitted".to_owned(), "refunded 15".to_owned()]));

    ask(&service, get("/20")).await;
    let reservation = taken.lock().unwrap().take().unwrap();
    reservation.settle(395).await.unwrap();
    assert_eq!((left(POLICY, &storage), take(&outcomes)), (0, vec!["admitted".to_owned(), "charged 375".to_owned()]));
    assert_eq!(retry_after(&ask(&service, get("/1")).await), Some(301));
    clock.advance(Duration::from_secs(301));
    assert_eq!(status(&service, get("/1")).await, 200);
}

/// A request that is sent twice, as by a retry, shares its reservations with its clone.
#[tokio::test]
async fn reservation_is_taken_once() {
    let (storage, _clock) = memory_with_manual_clock();
    let taken = Taken::default();
    let (layer, outcomes) = observed(layer(POLICY, storage.clone()));
    let slot = Arc::clone(&taken);
    let service = layer.settle_later().layer(service_fn(move |request: Request<()>| {
        let again = request.extensions().clone();
        *slot.lock().unwrap() = take_reservation(&request);
        assert!(take_reservation(&request).is_none());
        let again = again.get::<Reservations>().unwrap();
        assert!(again.take().is_none() && again.take_policy("tokens").is_none());
        ready(Ok::<_, Infallible>(Response::new(String::new())))
    }));
    ask(&service, get("/20")).await;
    let reservation = taken.lock().unwrap().take().unwrap();
    reservation.settle(30).await.unwrap();
    assert_eq!(left(POLICY, &storage), 70);
    assert_eq!(take(&outcomes), ["admitted", "charged 10"], "no event of a dropped reservation");
}

#[tokio::test]
async fn kept_reservation_reports_nothing() {
    let (storage, _clock) = memory_with_manual_clock();
    let taken = Taken::default();
    let (layer, outcomes) = observed(layer(POLICY, storage.clone()));
    ask(&layer.settle_later().layer(keeps_reservation(&taken)), get("/20")).await;
    let decision = taken.lock().unwrap().take().unwrap().keep();
    assert_eq!((decision.cost(), left(POLICY, &storage), take(&outcomes)), (20, 80, vec!["admitted".to_owned()]));
}

#[test]
fn dropped_reservation_keeps_its_estimate_and_logs() {
    let (storage, _clock) = memory_with_manual_clock();
    let (layer, outcomes) = observed(layer(POLICY, storage.clone()));
    let lines = log_of(|| {
        let service = layer.settle_later().layer(Inner::default());
        assert!(poll(&mut Box::pin(ask(&service, get("/20")))).is_ready());
    });
    assert_eq!((left(POLICY, &storage), take(&outcomes)), (80, vec!["admitted".to_owned(), "unsettled 0".to_owned()]));
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(
        lines[0].starts_with("DEBUG") && lines[0].contains("reservation dropped without a settlement"),
        "{lines:?}"
    );
    assert!(lines[0].contains("cost=20") && lines[0].contains("policy=\"tokens\""), "{lines:?}");
}

#[tokio::test]
async fn request_without_a_response_keeps_its_estimate() {
    let (storage, _clock) = memory_with_manual_clock();
    let inner = service_fn(|_: Request<()>| pending::<Result<Response<String>, Infallible>>());
    let mut service = layer(POLICY, storage.clone()).settle_later().layer(inner);
    let mut dropped = Box::pin(service.call(get("/20")));
    assert!(poll(&mut dropped).is_pending());
    drop(dropped);
    assert_eq!(left(POLICY, &storage), 80);

    let taken = Taken::default();
    let slot = Arc::clone(&taken);
    let failing = service_fn(move |request: Request<()>| {
        *slot.lock().unwrap() = take_reservation(&request);
        ready(Err::<Response<String>, _>("broken"))
    });
    let mut service = layer(POLICY, storage.clone()).settle_later().layer(failing);
    assert_eq!(service.call(get("/20")).await.unwrap_err(), "broken");
    assert_eq!(left(POLICY, &storage), 60);
    taken.lock().unwrap().take().unwrap().settle(0);
    assert_eq!(left(POLICY, &storage), 80, "a reservation outlives the response");
}

#[tokio::test]
async fn response_reports_a_reservation_that_was_settled_before_it() {
    let inner = service_fn(|request: Request<()>| {
        take_reservation(&request).unwrap().settle(50);
        ready(Ok::<_, Infallible>(Response::new(String::new())))
    });
    let headers = Headers::x_rate_limit().and(Headers::draft11());
    let (storage, _clock) = memory_with_manual_clock();
    let service = layer(POLICY, storage).headers(headers).settle_later().layer(inner);
    let response = ask(&service, get("/20")).await;
    assert_eq!(remaining(&response), Some(50));
    assert!(response.headers()["ratelimit"].to_str().unwrap().starts_with("\"tokens\";r=50;"), "{response:?}");

    let (storage, _clock) = memory_with_manual_clock();
    let service = layer(POLICY, slow(storage.clone())).settle_later().layer(inner);
    assert_eq!(remaining(&ask(&service, get("/20")).await), Some(80), "the response does not wait for the storage");
    yields().await;
    assert_eq!(left(POLICY, &storage), 50, "a task settles it");
}

#[tokio::test]
async fn each_stacked_layer_has_its_own_reservation() {
    let (storage, _clock) = memory_with_manual_clock();
    let taken = Arc::new(Mutex::new(None));
    let slot = Arc::clone(&taken);
    let inner = service_fn(move |request: Request<()>| {
        *slot.lock().unwrap() = request.extensions().get::<Reservations>().cloned();
        ready(Ok::<_, Infallible>(Response::new(String::new())))
    });
    let named = |name: &str| {
        RateLimitLayer::new(policy("token-bucket 100/hour").with_name(name), Global::new())
            .storage(storage.clone(), OnError::Refuse)
            .cost(|_| 10)
            .settle_later()
    };
    let plain = RateLimitLayer::new(policy("60/minute").with_name("requests"), Global::new());
    let service = named("images").layer(plain.layer(named("tokens").layer(inner)));
    ask(&service, get("/")).await;
    let reservations: Reservations = taken.lock().unwrap().take().unwrap();
    assert!(reservations.take_policy("requests").is_none());
    reservations.take_policy("images").unwrap().settle(1);
    let innermost = reservations.take().unwrap();
    assert_eq!(innermost.policy().identity(), "tokens");
    innermost.settle(30);
    assert!(reservations.take().is_none() && reservations.take_policy("images").is_none());
    let left = |name: &str| {
        let limiter = RateLimiter::with_storage(policy("token-bucket 100/hour").with_name(name), storage.clone());
        common::now(limiter.peek(&Key::global())).remaining()
    };
    assert_eq!((left("images"), left("tokens")), (99, 70));
}

#[tokio::test]
async fn shadow_limits_are_settled_too() {
    for later in [false, true] {
        for is_slow in [false, true] {
            let (storage, _clock) = memory_with_manual_clock();
            let fake = FakeStorage::around(storage.clone());
            fake.set(if is_slow { Behavior::WorksAfterPolls(2) } else { Behavior::Works });
            let (layer, outcomes) = observed(layer("token-bucket 100/hour; shadow 50/hour", fake));
            let taken = Taken::default();
            if later {
                let service = layer.settle_later().layer(keeps_reservation(&taken));
                ask(&service, get("/20")).await;
                yields().await;
                assert_eq!(take(&outcomes).len(), 2, "both hits are decided, slow: {is_slow}");
                taken.lock().unwrap().take().unwrap().settle(5);
            } else {
                ask(&layer.settle(|_| Some(5)).layer(Inner::default()), get("/20")).await;
            }
            yields().await;
            let mut settled = take(&outcomes);
            settled.retain(|outcome| !outcome.starts_with("admitted"));
            settled.sort();
            assert_eq!(settled, ["refunded 15", "refunded 15?"], "later: {later}, slow: {is_slow}");
        }
    }
}

/// Guards against this defect: a refund after the end of the window counts as refunded units.
#[tokio::test(start_paused = true)]
async fn refund_of_an_expired_hit_is_reported_as_expired() {
    for is_slow in [false, true] {
        for (text, seconds, refund) in [
            ("fixed-window 100/minute", 59, "refunded 15"),
            ("fixed-window 100/minute", 60, "expired 0"),
            ("token-bucket 100/minute", 11, "refunded 15"),
            ("token-bucket 100/minute", 12, "expired 0"),
            ("fixed-window 100/minute; fixed-window 200/hour", 61, "refunded 15"),
            ("fixed-window 100/minute; fixed-window 200/hour", 3_600, "expired 0"),
            // The level is kept for longer than the window.
            ("lockout 100/minute for 1h x2 up to 1d", 59, "refunded 15"),
            ("lockout 100/minute for 1h x2 up to 1d", 60, "expired 0"),
        ] {
            let storage = MemoryStorage::builder().clock(TokioClock::new()).build().unwrap();
            let fake = FakeStorage::around(storage);
            fake.set(if is_slow { Behavior::WorksAfterPolls(2) } else { Behavior::Works });
            let taken = Taken::default();
            let (layer, outcomes) = observed(layer(text, fake));
            let service = layer.settle_later().layer(keeps_reservation(&taken));
            for (actual, expected) in [(5, refund), (30, "charged 10")] {
                ask(&service, get("/20")).await;
                tokio::time::advance(Duration::from_secs(seconds)).await;
                taken.lock().unwrap().take().unwrap().settle(actual);
                yields().await;
                let what = format!("{text}, {seconds} s, slow: {is_slow}");
                assert_eq!(take(&outcomes), ["admitted", expected], "{what}");
            }
        }
    }
}

/// Guards against this defect: a refund counts as refunded units until the level of a lockout is
/// forgotten.
#[tokio::test(start_paused = true)]
async fn refund_after_the_end_of_a_lock_is_reported_as_expired() {
    for (text, seconds, outcome) in [
        ("lockout 20/minute for 10m x2 up to 1d", 599, vec!["admitted", "refunded 15"]),
        ("lockout 20/minute for 10m x2 up to 1d", 600, vec!["admitted", "expired 0", "locked"]),
    ] {
        let storage = MemoryStorage::builder().clock(TokioClock::new()).build().unwrap();
        let taken = Taken::default();
        let (layer, outcomes) = observed(layer(text, storage));
        let service = layer.settle_later().layer(keeps_reservation(&taken));
        assert_eq!(status(&service, get("/20")).await, 200);
        tokio::time::advance(Duration::from_secs(seconds)).await;
        taken.lock().unwrap().take().unwrap().settle(5);
        yields().await;
        assert_eq!(take(&outcomes), outcome, "{text}, {seconds} s");
    }
}

/// Guards against this defect: the age of a hit counts from the end of its delay.
#[tokio::test(start_paused = true)]
async fn refund_after_a_delay_expires_by_the_time_of_the_decision() {
    for (seconds, expected) in [(19, "refunded 15"), (21, "expired 0")] {
        let storage = MemoryStorage::builder().clock(TokioClock::new()).build().unwrap();
        let taken = Taken::default();
        let (layer, outcomes) = observed(layer("leaky-bucket 60/minute queue 100", slow(storage)));
        let service = layer.settle_later().layer(keeps_reservation(&taken));
        ask(&service, get("/20")).await;
        let _ = taken.lock().unwrap().take().unwrap().keep();
        // It is delayed by the 20 seconds of the first request, and expires 20 seconds after them.
        ask(&service, get("/20")).await;
        tokio::time::advance(Duration::from_secs(seconds)).await;
        taken.lock().unwrap().take().unwrap().settle(5);
        yields().await;
        assert_eq!(take(&outcomes).last().unwrap(), expected, "{seconds} s");
    }
}

/// The storage may have sent the call before it was dropped.
#[test]
fn settlement_that_is_dropped_outside_of_a_runtime_may_have_counted() {
    let (fake, _clock) = FakeStorage::in_memory(Behavior::Works);
    fake.set_changes(Behavior::WorksAfterPolls(2));
    let (taken, doubts) = (Taken::default(), Arc::new(Mutex::new(Vec::new())));
    let errors = Arc::clone(&doubts);
    let layer = layer(POLICY, fake).observer(move |event: &Event<'_>| {
        if let EventKind::SettleFailed { error, .. } = event.kind {
            errors.lock().unwrap().push(error.may_have_counted());
        }
    });
    let service = layer.settle_later().layer(keeps_reservation(&taken));
    outside_of_a_runtime(ask(&service, get("/20")));
    drop(taken.lock().unwrap().take().unwrap().settle(5));
    assert_eq!(*doubts.lock().unwrap(), [true]);
}

/// The clock of a storage that is immediately ready may differ from that of the machine.
#[tokio::test]
async fn refund_expires_by_the_clock_of_a_memory_storage() {
    let (storage, clock) = memory_with_manual_clock();
    let taken = Taken::default();
    let (layer, outcomes) = observed(layer("fixed-window 100/minute", storage));
    let service = layer.settle_later().layer(keeps_reservation(&taken));
    for (seconds, expected) in [(59, "refunded 15"), (60, "expired 0")] {
        ask(&service, get("/20")).await;
        clock.advance(Duration::from_secs(seconds));
        taken.lock().unwrap().take().unwrap().settle(5);
        assert_eq!(take(&outcomes), ["admitted", expected], "{seconds} s");
        clock.advance(Duration::from_secs(60));
    }
}

/// The reservation is settled while the shadow limit is still undecided.
#[tokio::test]
async fn undecided_shadow_limit_is_settled_after_it_is_decided() {
    let (storage, _clock) = memory_with_manual_clock();
    let (layer, outcomes) = observed(layer("token-bucket 100/hour", slow(storage)).shadow());
    let inner = service_fn(|request: Request<()>| {
        take_reservation(&request).unwrap().settle(5);
        ready(Ok::<_, Infallible>(Response::new(String::new())))
    });
    let response = ask(&layer.settle_later().layer(inner), get("/20")).await;
    assert_eq!(numbers(&response), None);
    yields().await;
    assert_eq!(take(&outcomes), ["admitted?", "refunded 15?"]);
}

/// No lock is held while the observer is called. The test runs in a separate thread,
/// because a deadlock would block it forever.
#[test]
fn observer_may_settle_the_reservation_of_its_request() {
    let (send, outcomes) = mpsc::channel();
    thread::spawn(move || {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        send.send(runtime.block_on(settle_in_the_observer())).unwrap();
    });
    let outcomes = outcomes.recv_timeout(Duration::from_secs(20)).expect("the observer waits for a lock");
    assert_eq!(outcomes, ["admitted", "admitted?", "refunded 17", "refunded 17?"]);
}

/// Settles the reservation when the observer is called. The storage decides slowly and refunds at
/// once, so the events are reported while the hits are shared.
async fn settle_in_the_observer() -> Vec<String> {
    let storage = slow(memory_with_manual_clock().0);
    storage.set_changes(Behavior::Works);
    let (outcomes, taken) = (Outcomes::default(), Taken::default());
    let (events, reservation) = (Arc::clone(&outcomes), Arc::clone(&taken));
    let layer =
        layer("fixed-window 100/hour; shadow fixed-window 100/hour", storage).observer(move |event: &Event<'_>| {
            let (units, mark) = (event.settled_units(), if event.shadow { "?" } else { "" });
            let units = units.map(|units| format!(" {units}")).unwrap_or_default();
            events.lock().unwrap().push(format!("{}{units}{mark}", event.outcome()));
            let reservation = reservation.lock().unwrap().take();
            drop(reservation.map(|reservation| reservation.settle(3)));
        });
    let inner = service_fn(move |request: Request<()>| {
        *taken.lock().unwrap() = take_reservation(&request);
        async {
            yields().await;
            Ok::<_, Infallible>(Response::new(String::new()))
        }
    });
    assert_eq!(status(&layer.settle_later().layer(inner), get("/20")).await, 200);
    take(&outcomes)
}

#[tokio::test]
async fn free_request_has_nothing_to_settle() {
    for is_shadow in [false, true] {
        let (storage, _clock) = memory_with_manual_clock();
        let taken = Taken::default();
        let (layer, outcomes) = observed(layer(POLICY, storage.clone()));
        let layer = if is_shadow { layer.shadow() } else { layer };
        ask(&layer.settle_later().layer(keeps_reservation(&taken)), get("/0")).await;
        let reservation = taken.lock().unwrap().take().unwrap();
        assert!(reservation.is_admitted() && reservation.cost() == 0);
        reservation.settle(7).await.unwrap();
        let expected: &[&str] = if is_shadow { &[] } else { &["admitted"] };
        assert_eq!(
            (left(POLICY, &storage), &*take(&outcomes)),
            (100, &*expected.iter().map(|o| (*o).to_owned()).collect::<Vec<_>>())
        );
        let service = never_settled(&storage);
        assert_eq!(remaining(&ask(&service.layer(Inner::default()), get("/0")).await), Some(100));
    }
}

fn never_settled(storage: &MemoryStorage) -> RateLimitLayer {
    layer(POLICY, storage.clone()).settle(|_| panic!("a free request is not settled"))
}

#[tokio::test]
async fn failed_settlement_keeps_the_estimate_and_reports_the_difference() {
    let (storage, _clock) = FakeStorage::in_memory(Behavior::Works);
    storage.set_changes(Behavior::Fails);
    let taken = Taken::default();
    let doubts = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&doubts);
    let layer = layer(POLICY, storage.clone()).observer(move |event: &Event<'_>| {
        if let EventKind::SettleFailed { decision, actual, .. } = event.kind {
            seen.lock().unwrap().push((decision.cost(), actual, event.settled_units()));
        }
    });
    let service = layer.settle_later().layer(keeps_reservation(&taken));
    ask(&service, get("/20")).await;
    let reservation = taken.lock().unwrap().take().unwrap();
    assert_eq!(common::message(reservation.settle(50).await.unwrap_err()), common::FAILURE);
    assert_eq!(*doubts.lock().unwrap(), [(20, 50, Some(30))]);
    assert_eq!(left(POLICY, storage.inner()), 80);
}

#[tokio::test]
async fn reservation_settles_in_the_fallback_that_decided() {
    let (fallback, _clock) = memory_with_manual_clock();
    let primary = FakeStorage::in_memory(Behavior::Fails).0;
    let breaker = Breaker::new(primary.clone()).failures(1).fallback(fallback.clone(), 1);
    let taken = Taken::default();
    let service = layer(POLICY, breaker).settle_later().layer(keeps_reservation(&taken));
    ask(&service, get("/20")).await;
    primary.set(Behavior::Works);
    taken.lock().unwrap().take().unwrap().settle(90);
    yields().await;
    assert_eq!((left(POLICY, &fallback), left(POLICY, primary.inner())), (10, 100));
}

/// A body may be dropped in any thread.
#[test]
fn reservation_settles_in_a_thread_without_a_runtime() {
    let (storage, _clock) = memory_with_manual_clock();
    let taken = Taken::default();
    let service = layer(POLICY, storage.clone()).settle_later().layer(keeps_reservation(&taken));
    assert!(poll(&mut Box::pin(ask(&service, get("/20")))).is_ready());
    taken.lock().unwrap().take().unwrap().settle(50);
    assert_eq!(left(POLICY, &storage), 50, "an immediate storage needs no runtime");

    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let (storage, _clock) = memory_with_manual_clock();
    let service = layer(POLICY, slow(storage.clone())).settle_later().layer(keeps_reservation(&taken));
    runtime.block_on(ask(&service, get("/20")));
    let reservation = taken.lock().unwrap().take().unwrap();
    std::thread::spawn(move || drop(reservation.settle(50))).join().unwrap();
    runtime.block_on(yields());
    assert_eq!(left(POLICY, &storage), 50, "the runtime of the request settles it");
}

#[tokio::test]
async fn settle_replaces_charge_when() {
    let (storage, _clock) = memory_with_manual_clock();
    let never = |_: &ResponseHead<'_>| false;
    let service = layer(POLICY, storage).charge_when(never).settle(|_| Some(30));
    let inner = service_fn(|request: Request<()>| {
        assert!(request.extensions().get::<Reservations>().is_none());
        ready(Ok::<_, Infallible>(Response::new(String::new())))
    });
    assert_eq!(remaining(&ask(&service.layer(inner), get("/20")).await), Some(70));
}

#[tokio::test]
async fn handlers_extract_the_reservation() {
    let app = || {
        let settle = |reservation: Reservation| async move { format!("{:?}", reservation.settle(1).await.is_ok()) };
        let maybe = |reservation: Option<Reservation>| async move { format!("{}", reservation.is_some()) };
        Router::new().route("/must", on_get(settle)).route("/may", on_get(maybe))
    };
    let body = async |app: &Router, path: &str| {
        let response = ask(app, AxumRequest::get(path).body(Body::empty()).unwrap()).await;
        let status = response.status().as_u16();
        (status, axum::body::to_bytes(response.into_body(), 1_000).await.unwrap())
    };
    let layer = || RateLimitLayer::new(policy("9/minute"), Global::new());
    let settling = app().layer(layer().cost(|_| 3).settle_later());
    assert_eq!(body(&settling, "/must").await, (200, "true".into()));
    assert_eq!(body(&settling, "/may").await, (200, "true".into()));
    for unlimited in [app().layer(layer()), app().layer(layer().settle_later().skip(|_| true))] {
        assert_eq!(body(&unlimited, "/may").await, (200, "false".into()));
        let (status, text) = body(&unlimited, "/must").await;
        assert_eq!((status, text), (500, format!("{}\n", NoReservation::default()).into()));
    }
    assert!(NoReservation::default().to_string().contains("settle_later()"));
    // A reservation without a storage or a policy does nothing.
    let without_storage = layer().storage(failing(), OnError::Admit);
    let lookup = PolicyLookup::new(|_: &Head<'_>| Some(()), |()| async { Err::<Policy, _>("the database is down") });
    let without_policy = RateLimitLayer::new(lookup, Global::new()).storage(MemoryStorage::new(), OnError::Admit);
    for admitting in [without_storage, without_policy] {
        let admitting = app().layer(admitting.cost(|_| 3).settle_later());
        assert_eq!(body(&admitting, "/may").await, (200, "true".into()));
        assert_eq!(body(&admitting, "/must").await, (200, "true".into()));
    }
}

#[tokio::test]
async fn reservation_without_a_storage_reports_nothing() {
    let (limit, outcomes) = observed(layer(POLICY, failing()).settle_later().storage(failing(), OnError::Admit));
    let taken = Taken::default();
    let service = limit.charge_when(|_| false).layer(keeps_reservation(&taken));
    let _ = ask(&service, get("/30")).await;
    let reservation = taken.lock().unwrap().take().unwrap();
    assert_eq!((reservation.cost(), reservation.remaining()), (30, 100));
    reservation.settle(10).await.unwrap();
    let _ = ask(&service, get("/30")).await;
    drop(taken.lock().unwrap().take());
    assert_eq!(take(&outcomes), ["failed_open", "failed_open"]);
}

/// Runs in a process of its own, because only the first missing reservation of a process is logged.
#[test]
fn missing_reservation_is_logged_once() {
    const ALONE: &str = "TOWER_RATELIMIT_TEST_ALONE";
    if std::env::var_os(ALONE).is_none() {
        let mut alone = Command::new(std::env::current_exe().unwrap());
        alone.args(["--exact", "settle::missing_reservation_is_logged_once"]).env(ALONE, "1");
        let output = alone.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("1 passed"), "{text}");
        return;
    }
    let app = Router::new()
        .route("/", on_get(|_: Reservation| async {}))
        .layer(RateLimitLayer::new(policy("9/minute"), Global::new()));
    let lines = log_of(|| {
        for _ in 0..3 {
            let _ = outside_of_a_runtime(ask(&app, AxumRequest::get("/").body(Body::empty()).unwrap()));
        }
    });
    let errors: Vec<&String> = lines.iter().filter(|line| line.contains("no reservation to settle")).collect();
    assert!(errors.len() == 1 && errors[0].contains("ERROR"), "{lines:?}");
}

#[tokio::test(start_paused = true)]
async fn reservation_of_a_delayed_request_is_inserted_after_the_delay() {
    let storage = MemoryStorage::builder().clock(tower_ratelimit::storage::TokioClock::new()).build().unwrap();
    let taken = Taken::default();
    let service = layer("leaky-bucket 1/second queue 5", storage).settle_later().layer(keeps_reservation(&taken));
    for _ in 0..2 {
        ask(&service, get("/1")).await;
        // The client then owes three places of the queue.
        let reservation = taken.lock().unwrap().take().unwrap();
        reservation.settle(4).await.unwrap();
    }
    let before = tokio::time::Instant::now();
    ask(&service, get("/1")).await;
    assert_eq!(before.elapsed().as_secs(), 4);
}

/// Guards against this defect: a client that hangs up before the first token pays for the estimate.
#[tokio::test]
async fn counter_settles_when_the_client_hangs_up() {
    for is_slow in [false, true] {
        for frames in [0, 1, 3, 9] {
            let (storage, _clock) = memory_with_manual_clock();
            let fake = FakeStorage::around(storage.clone());
            fake.set(if is_slow { Behavior::WorksAfterPolls(2) } else { Behavior::Works });
            let handler = |reservation: Reservation| async {
                let counter = reservation.counter();
                Body::from_stream(unfold((0, counter), |(sent, mut counter)| async move {
                    if sent == 5 {
                        return None;
                    }
                    counter.add(2);
                    Some((Ok::<_, Infallible>("token"), (sent + 1, counter)))
                }))
            };
            let (layer, outcomes) = observed(layer(POLICY, fake));
            let app = Router::new().route("/20", on_get(handler)).layer(layer.settle_later());
            let mut body = ask(&app, AxumRequest::get("/20").body(Body::empty()).unwrap()).await.into_body();
            for _ in 0..frames.min(6) {
                body.frame().await;
            }
            drop(body);
            yields().await;
            let actual = 2 * frames.min(5);
            assert_eq!(left(POLICY, &storage), 100 - actual, "{frames} frames, slow: {is_slow}");
            assert_eq!(take(&outcomes), ["admitted".to_owned(), format!("refunded {}", 20 - actual)]);
        }
    }
}

#[test]
fn settlement_of_a_limiter_that_fails_unseen_logs_one_line() {
    let fake = slow(memory_with_manual_clock().0);
    let limiter = RateLimiter::with_storage(policy("1000000/day").with_name("tokens"), fake.clone());
    let reserve = || outside_of_a_runtime(limiter.reserve(&Key::global(), 20)).unwrap();
    for cause in ["outside of a tokio runtime", FAILURE] {
        // At most one line is logged per second.
        let lines = loop {
            let counter = reserve().counter();
            if cause == FAILURE {
                // The storage is immediately ready with an error.
                fake.set_changes(Behavior::Fails);
            }
            let lines = log_of(|| drop(counter));
            if !lines.is_empty() {
                break lines;
            }
            thread::sleep(Duration::from_millis(20));
        };
        assert_eq!(lines.len(), 1, "{cause}: {lines:?}");
        assert!(lines[0].starts_with("WARN") && lines[0].contains("settlement failed"), "{lines:?}");
        assert!(lines[0].contains(cause) && lines[0].contains("policy=\"tokens\""), "{lines:?}");
    }
    assert!(log_of(|| drop(reserve())).is_empty(), "a reservation of a limiter may be dropped");
}

/// No caller is left that could get the error.
#[test]
fn failed_refund_of_a_dropped_acquire_logs_one_line() {
    let fake = FakeStorage::around(memory_with_manual_clock().0);
    let limiter = RateLimiter::with_storage(policy("1000000/day").with_name("tokens"), fake.clone());
    let runtime = Builder::new_current_thread().enable_time().build().unwrap();
    fake.set_changes(Behavior::Fails);
    // At most one line is logged per second.
    let lines = loop {
        let lines = log_of(|| {
            runtime.block_on(async {
                fake.close();
                let mut call = Box::pin(limiter.acquire(&Key::global(), Duration::from_secs(60)));
                assert!(poll(&mut call).is_pending());
                drop(call);
                fake.open();
                yields().await;
            });
        });
        if !lines.is_empty() {
            break lines;
        }
        thread::sleep(Duration::from_millis(20));
    };
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(lines[0].starts_with("WARN") && lines[0].contains("settlement failed"), "{lines:?}");
    assert!(lines[0].contains(FAILURE) && lines[0].contains("policy=\"tokens\""), "{lines:?}");
}

/// A handler that expects the reservation of the inner layer must not settle that of the outer one.
#[tokio::test]
async fn layer_without_a_reservation_hides_those_of_outer_layers() {
    let (storage, _clock) = memory_with_manual_clock();
    let named = |name: &str| {
        RateLimitLayer::new(policy(POLICY).with_name(name), Global::new())
            .storage(storage.clone(), OnError::Refuse)
            .settle_later()
    };
    let taken = Arc::new(Mutex::new(None));
    let slot = Arc::clone(&taken);
    let inner = service_fn(move |request: Request<()>| {
        *slot.lock().unwrap() = request.extensions().get::<Reservations>().cloned();
        ready(Ok::<_, Infallible>(Response::new(String::new())))
    });
    let skips = named("tokens").skip(|_| true);
    let fails = named("tokens").storage(failing(), OnError::Admit);
    for (layer, is_limited) in [(skips, false), (fails, true)] {
        let service = named("requests").layer(layer.layer(inner.clone()));
        ask(&service, get("/")).await;
        let reservations: Reservations = taken.lock().unwrap().take().unwrap();
        let own = reservations.take();
        assert_eq!(own.map(|own| own.policy().identity().to_owned()), is_limited.then(|| "tokens".to_owned()));
        assert!(reservations.take_policy("tokens").is_none());
        assert!(reservations.take_policy("requests").is_some());
    }
}

#[tokio::test]
async fn policies_of_one_identity_share_no_reservation() {
    let (storage, _clock) = memory_with_manual_clock();
    let taken = Arc::new(Mutex::new(None));
    let slot = Arc::clone(&taken);
    let inner = service_fn(move |request: Request<()>| {
        *slot.lock().unwrap() = request.extensions().get::<Reservations>().cloned();
        ready(Ok::<_, Infallible>(Response::new(String::new())))
    });
    let same = || layer(POLICY, storage.clone()).settle_later();
    let service = same().layer(same().layer(inner));
    ask(&service, get("/1")).await;
    let reservations: Reservations = taken.lock().unwrap().take().unwrap();
    assert!(reservations.take_policy("tokens").is_some());
    assert!(reservations.take_policy("tokens").is_none(), "the outer layer limits another key");
}

/// A body that is not a number is rejected before the handler takes the reservation.
#[tokio::test]
async fn request_that_fails_before_its_handler_is_settled_by_its_response() {
    let handler = |reservation: Reservation, body: String| async move {
        let used = body.parse().unwrap_or(0);
        reservation.settle(used);
    };
    let (storage, _) = memory_with_manual_clock();
    let (limit, outcomes) = observed(layer(POLICY, storage.clone()).settle_later());
    let router = || Router::new().route("/50", axum::routing::post(handler));
    let send = |path: &str, body: Body| Request::post(path).body(body).unwrap();
    let invalid = || Body::from(vec![0xff]);

    // Without a rule, the request keeps its estimated cost.
    let plain = router().layer(limit.clone());
    assert_eq!(status(&plain, send("/50", Body::from("20"))).await, 200);
    assert_eq!((take(&outcomes), left(POLICY, &storage)), (vec!["admitted".into(), "refunded 30".into()], 80));

    let by_response = router().layer(limit.charge_when(|response| !response.status.is_client_error()));
    // The handler's reservation wins over the response.
    assert_eq!(status(&by_response, send("/50", Body::from("30"))).await, 200);
    assert_eq!((take(&outcomes), left(POLICY, &storage)), (vec!["admitted".into(), "refunded 20".into()], 50));
    // No route.
    assert_eq!(status(&by_response, send("/40", Body::empty())).await, 404);
    assert_eq!((take(&outcomes), left(POLICY, &storage)), (vec!["admitted".into(), "refunded 40".into()], 50));
    // The body is not valid, but the reservation was taken first: it was dropped by the extractors.
    assert_eq!(status(&by_response, send("/50", invalid())).await, 400);
    assert_eq!((take(&outcomes), left(POLICY, &storage)), (vec!["admitted".into(), "refunded 50".into()], 50));
}

/// A response that charges a request which no handler settles keeps its cost, without an event.
#[tokio::test]
async fn response_that_charges_an_abandoned_request_keeps_its_cost() {
    let (storage, _) = memory_with_manual_clock();
    let (limit, outcomes) = observed(layer(POLICY, storage.clone()).settle_later());
    let service = limit.charge_when(|_| true).layer(Inner::default());
    let _ = ask(&service, get("/30")).await;
    assert_eq!((take(&outcomes), left(POLICY, &storage)), (vec!["admitted".into()], 70));
}

/// While a handler holds the reservation, the head of the response settles nothing.
#[tokio::test]
async fn held_reservation_is_not_settled_by_the_response() {
    let (storage, _) = memory_with_manual_clock();
    let (limit, outcomes) = observed(layer(POLICY, storage.clone()).settle_later());
    let taken = Taken::default();
    let service = limit.charge_when(|_| false).layer(keeps_reservation(&taken));
    let _ = ask(&service, get("/30")).await;
    assert_eq!((take(&outcomes), left(POLICY, &storage)), (vec!["admitted".into()], 70));
    let reservation = taken.lock().unwrap().take().unwrap();
    reservation.settle(10).await.unwrap();
    assert_eq!((take(&outcomes), left(POLICY, &storage)), (vec!["refunded 20".into()], 90));
}

#[tokio::test(start_paused = true)]
async fn key_is_cleared_by_the_response_or_by_the_reservation() {
    async fn check(storage: impl Storage + Clone, immediate: MemoryStorage) {
        let (limit, outcomes) = observed(layer(POLICY, storage.clone()));
        let answers = |clears: bool| limit.clone().clear_when(move |_| clears).layer(Inner::default());
        for _ in 0..2 {
            let _ = ask(&answers(false), get("/30")).await;
        }
        assert_eq!((take(&outcomes).len(), left(POLICY, &immediate)), (2, 40));
        let _ = ask(&answers(true), get("/30")).await;
        yields().await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!((take(&outcomes), left(POLICY, &immediate)), (vec!["admitted".into(), "cleared 0".into()], 100));

        let taken = Taken::default();
        let service = limit.clone().settle_later().layer(keeps_reservation(&taken));
        let _ = ask(&service, get("/30")).await;
        let reservation = taken.lock().unwrap().take().unwrap();
        reservation.clear().await.unwrap();
        assert_eq!((take(&outcomes), left(POLICY, &immediate)), (vec!["admitted".into(), "cleared 0".into()], 100));
    }
    let storage = memory_with_manual_clock().0;
    check(storage.clone(), storage).await;
    let storage = memory_with_manual_clock().0;
    check(slow(storage.clone()), storage).await;
}

#[tokio::test]
async fn failed_clear_is_reported() {
    let storage = FakeStorage::around(memory_with_manual_clock().0);
    let (limit, outcomes) = observed(layer(POLICY, storage.clone()));
    storage.set_changes(Behavior::Fails);
    let _ = ask(&limit.clear_when(|_| true).layer(Inner::default()), get("/30")).await;
    assert_eq!(take(&outcomes), ["admitted", "settle_failed 30"]);
}

/// The closure of `settle` is not called for a response that clears.
#[tokio::test]
async fn response_that_clears_is_not_settled() {
    let (limit, outcomes) = observed(layer(POLICY, memory_with_manual_clock().0));
    let service = limit.settle(|_| unreachable!("the key is cleared")).clear_when(|_| true).layer(Inner::default());
    let first = ask(&service, get("/30")).await;
    assert_eq!((remaining(&first), take(&outcomes)), (Some(100), vec!["admitted".into(), "cleared 0".into()]));
}

//! Requests that are settled after their admission: by the head of the response, or later.

use std::convert::Infallible;
use std::future::{pending, ready};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::Request as AxumRequest;
use axum::routing::get as on_get;
use common::{
    AnswersWithStatus, Behavior, FakeStorage, Inner, ask, failing, get, memory_with_manual_clock, numbers, policy,
    poll, remaining, retry_after, slow, status,
};
use http::{Request, Response};
use tokio::runtime::Builder;
use tower::{Layer, Service, service_fn};
use tower_ratelimit::extract::{Head, NoCharge};
use tower_ratelimit::storage::{Breaker, TokioClock};
use tower_ratelimit::{
    Charge, Event, EventKind, Global, Headers, Key, MemoryStorage, OnError, RateLimitLayer, RateLimiter, ResponseHead,
    SettleError, Storage,
};

use crate::log::log_of;

const POLICY: &str = "token-bucket 60/minute burst 100";

type Outcomes = Arc<Mutex<Vec<String>>>;

/// A layer named `tokens`. The path of a request is its estimated cost.
fn layer(text: &str, storage: impl Storage) -> RateLimitLayer {
    let cost = |head: &Head<'_>| head.uri().path()[1..].parse::<u32>().unwrap();
    RateLimitLayer::new(policy(text).with_name("tokens"), Global).storage(storage, OnError::Refuse).cost(cost)
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

/// A slot into which a service puts the charge of its request.
type Taken = Arc<Mutex<Option<Charge>>>;

/// A service that keeps the charge of each request.
fn keeps_charge(
    taken: &Taken,
) -> impl Service<
    Request<()>,
    Response = Response<String>,
    Error = Infallible,
    Future: Future<Output = Result<Response<String>, Infallible>> + Send,
> + Clone
+ use<> {
    let taken = Arc::clone(taken);
    service_fn(move |mut request: Request<()>| {
        *taken.lock().unwrap() = request.extensions_mut().remove();
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
    let headers = Headers::x_rate_limit().and(Headers::ietf()).and(Headers::draft6());
    let (storage, _clock) = memory_with_manual_clock();
    let service = RateLimitLayer::new(policy("fixed-window 100/minute").with_name("tokens"), Global)
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
async fn charge_is_settled_after_the_response() {
    let (storage, clock) = memory_with_manual_clock();
    let taken = Taken::default();
    let (layer, outcomes) = observed(layer(POLICY, storage.clone()));
    let service = layer.settle_later().layer(keeps_charge(&taken));
    assert_eq!(remaining(&ask(&service, get("/20")).await), Some(80), "the estimate");
    let charge = taken.lock().unwrap().take().unwrap();
    assert_eq!((charge.cost(), charge.policy()), (20, "tokens"));
    assert_eq!(charge.settle(5), Ok(()));
    assert_eq!((left(POLICY, &storage), take(&outcomes)), (95, vec!["admitted".to_owned(), "refunded 15".to_owned()]));

    ask(&service, get("/20")).await;
    let charge = taken.lock().unwrap().take().unwrap();
    assert_eq!(charge.settle(395), Ok(()));
    assert_eq!((left(POLICY, &storage), take(&outcomes)), (0, vec!["admitted".to_owned(), "charged 375".to_owned()]));
    assert_eq!(retry_after(&ask(&service, get("/1")).await), Some(301));
    clock.advance(Duration::from_secs(301));
    assert_eq!(status(&service, get("/1")).await, 200);
}

#[tokio::test]
async fn charge_can_be_settled_only_once() {
    let (storage, _clock) = memory_with_manual_clock();
    let taken = Taken::default();
    let (layer, outcomes) = observed(layer(POLICY, storage.clone()));
    let service = layer.settle_later().layer(keeps_charge(&taken));
    ask(&service, get("/20")).await;
    let charge = taken.lock().unwrap().take().unwrap();
    let other = charge.clone();
    assert_eq!(charge.settle(30), Ok(()));
    assert_eq!(
        (charge.settle(40), other.settle(0)),
        (Err(SettleError::AlreadySettled), Err(SettleError::AlreadySettled))
    );
    drop((charge, other));
    assert_eq!(left(POLICY, &storage), 70);
    assert_eq!(take(&outcomes), ["admitted", "charged 10"], "no event of a dropped charge");
}

#[test]
fn dropped_charge_keeps_its_estimate_and_logs() {
    let (storage, _clock) = memory_with_manual_clock();
    let (layer, outcomes) = observed(layer(POLICY, storage.clone()));
    let lines = log_of(|| {
        let service = layer.settle_later().layer(Inner::default());
        assert!(poll(&mut Box::pin(ask(&service, get("/20")))).is_ready());
    });
    assert_eq!((left(POLICY, &storage), take(&outcomes)), (80, vec!["admitted".to_owned(), "unsettled 0".to_owned()]));
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(lines[0].starts_with("DEBUG") && lines[0].contains("charge dropped without a settlement"), "{lines:?}");
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
    let failing = service_fn(move |mut request: Request<()>| {
        *slot.lock().unwrap() = request.extensions_mut().remove();
        ready(Err::<Response<String>, _>("broken"))
    });
    let mut service = layer(POLICY, storage.clone()).settle_later().layer(failing);
    assert_eq!(service.call(get("/20")).await.unwrap_err(), "broken");
    assert_eq!(left(POLICY, &storage), 60);
    taken.lock().unwrap().take().unwrap().settle(0).unwrap();
    assert_eq!(left(POLICY, &storage), 80, "a charge outlives the response");
}

#[tokio::test]
async fn response_reports_a_charge_that_was_settled_before_it() {
    let inner = service_fn(|request: Request<()>| {
        request.extensions().get::<Charge>().unwrap().settle(50).unwrap();
        ready(Ok::<_, Infallible>(Response::new(String::new())))
    });
    let headers = Headers::x_rate_limit().and(Headers::ietf());
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
async fn each_stacked_layer_has_its_own_charge() {
    let (storage, _clock) = memory_with_manual_clock();
    let taken = Taken::default();
    let named = |name: &str| {
        RateLimitLayer::new(policy("token-bucket 100/hour").with_name(name), Global)
            .storage(storage.clone(), OnError::Refuse)
            .cost(|_| 10)
            .settle_later()
    };
    let plain = RateLimitLayer::new(policy("60/minute").with_name("requests"), Global);
    let service = named("images").layer(plain.layer(named("tokens").layer(keeps_charge(&taken))));
    ask(&service, get("/")).await;
    let charge = taken.lock().unwrap().take().unwrap();
    assert_eq!(charge.policy(), "tokens", "the innermost layer");
    assert_eq!(charge.of_policy("tokens").map(Charge::policy), Some("tokens"));
    assert!(charge.of_policy("requests").is_none());
    charge.of_policy("images").unwrap().settle(1).unwrap();
    charge.settle(30).unwrap();
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
                let service = layer.settle_later().layer(keeps_charge(&taken));
                ask(&service, get("/20")).await;
                yields().await;
                assert_eq!(take(&outcomes).len(), 2, "both hits are decided, slow: {is_slow}");
                taken.lock().unwrap().take().unwrap().settle(5).unwrap();
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
        ] {
            let storage = MemoryStorage::builder().clock(TokioClock::new()).build().unwrap();
            let fake = FakeStorage::around(storage);
            fake.set(if is_slow { Behavior::WorksAfterPolls(2) } else { Behavior::Works });
            let taken = Taken::default();
            let (layer, outcomes) = observed(layer(text, fake));
            let service = layer.settle_later().layer(keeps_charge(&taken));
            for (actual, expected) in [(5, refund), (30, "charged 10")] {
                ask(&service, get("/20")).await;
                tokio::time::advance(Duration::from_secs(seconds)).await;
                taken.lock().unwrap().take().unwrap().settle(actual).unwrap();
                yields().await;
                let what = format!("{text}, {seconds} s, slow: {is_slow}");
                assert_eq!(take(&outcomes), ["admitted", expected], "{what}");
            }
        }
    }
}

/// The clock of a storage that is immediately ready may differ from that of the machine.
#[tokio::test]
async fn refund_expires_by_the_clock_of_a_memory_storage() {
    let (storage, clock) = memory_with_manual_clock();
    let taken = Taken::default();
    let (layer, outcomes) = observed(layer("fixed-window 100/minute", storage));
    let service = layer.settle_later().layer(keeps_charge(&taken));
    for (seconds, expected) in [(59, "refunded 15"), (60, "expired 0")] {
        ask(&service, get("/20")).await;
        clock.advance(Duration::from_secs(seconds));
        taken.lock().unwrap().take().unwrap().settle(5).unwrap();
        assert_eq!(take(&outcomes), ["admitted", expected], "{seconds} s");
        clock.advance(Duration::from_secs(60));
    }
}

/// The charge is settled while the shadow limit is still undecided.
#[tokio::test]
async fn undecided_shadow_limit_is_settled_after_it_is_decided() {
    let (storage, _clock) = memory_with_manual_clock();
    let (layer, outcomes) = observed(layer("token-bucket 100/hour", slow(storage)).shadow());
    let inner = service_fn(|request: Request<()>| {
        request.extensions().get::<Charge>().unwrap().settle(5).unwrap();
        ready(Ok::<_, Infallible>(Response::new(String::new())))
    });
    let response = ask(&layer.settle_later().layer(inner), get("/20")).await;
    assert_eq!(numbers(&response), None);
    yields().await;
    assert_eq!(take(&outcomes), ["admitted?", "refunded 15?"]);
}

/// The charge holds no lock while it calls the observer. The test runs in a separate thread,
/// because a deadlock would block it forever.
#[test]
fn observer_may_use_the_charge_of_its_request() {
    let (send, outcomes) = mpsc::channel();
    thread::spawn(move || {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        send.send(runtime.block_on(settle_in_the_observer())).unwrap();
    });
    let outcomes = outcomes.recv_timeout(Duration::from_secs(20)).expect("the observer waits for a lock");
    assert_eq!(outcomes, ["admitted", "admitted?", "refunded 17", "refunded 17?"]);
}

/// Settles a charge whenever its observer is called. The storage decides slowly and refunds at
/// once, so each event is reported by another part of the charge.
async fn settle_in_the_observer() -> Vec<String> {
    let storage = slow(memory_with_manual_clock().0);
    storage.set_changes(Behavior::Works);
    let (outcomes, taken) = (Outcomes::default(), Taken::default());
    let (events, charge) = (Arc::clone(&outcomes), Arc::clone(&taken));
    let layer =
        layer("fixed-window 100/hour; shadow fixed-window 100/hour", storage).observer(move |event: &Event<'_>| {
            let (units, mark) = (event.settled_units(), if event.shadow { "?" } else { "" });
            let units = units.map(|units| format!(" {units}")).unwrap_or_default();
            events.lock().unwrap().push(format!("{}{units}{mark}", event.outcome()));
            let charge = charge.lock().unwrap().clone();
            let _ = charge.map(|charge| charge.settle(3));
        });
    let inner = service_fn(move |request: Request<()>| {
        *taken.lock().unwrap() = request.extensions().get().cloned();
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
        ask(&layer.settle_later().layer(keeps_charge(&taken)), get("/0")).await;
        let charge = taken.lock().unwrap().take().unwrap();
        assert_eq!((charge.cost(), charge.settle(7)), (0, Err(SettleError::NothingSpent)));
        drop(charge);
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
        if let EventKind::NotSettled { decision, actual, .. } = event.kind {
            seen.lock().unwrap().push((decision.cost(), actual, event.settled_units()));
        }
    });
    let service = layer.settle_later().layer(keeps_charge(&taken));
    ask(&service, get("/20")).await;
    let charge = taken.lock().unwrap().take().unwrap();
    assert_eq!(charge.settle(50), Ok(()));
    assert_eq!(*doubts.lock().unwrap(), [(20, 50, Some(30))]);
    assert_eq!(left(POLICY, storage.inner()), 80);
    assert_eq!(charge.settle(50), Err(SettleError::AlreadySettled));
}

#[tokio::test]
async fn charge_settles_in_the_fallback_that_decided() {
    let (fallback, _clock) = memory_with_manual_clock();
    let primary = FakeStorage::in_memory(Behavior::Fails).0;
    let breaker = Breaker::new(primary.clone()).failures(1).fallback(fallback.clone(), 1);
    let taken = Taken::default();
    let service = layer(POLICY, breaker).settle_later().layer(keeps_charge(&taken));
    ask(&service, get("/20")).await;
    primary.set(Behavior::Works);
    taken.lock().unwrap().take().unwrap().settle(90).unwrap();
    yields().await;
    assert_eq!((left(POLICY, &fallback), left(POLICY, primary.inner())), (10, 100));
}

/// A body may be dropped in any thread.
#[test]
fn charge_settles_in_a_thread_without_a_runtime() {
    let (storage, _clock) = memory_with_manual_clock();
    let taken = Taken::default();
    let service = layer(POLICY, storage.clone()).settle_later().layer(keeps_charge(&taken));
    assert!(poll(&mut Box::pin(ask(&service, get("/20")))).is_ready());
    taken.lock().unwrap().take().unwrap().settle(50).unwrap();
    assert_eq!(left(POLICY, &storage), 50, "an immediate storage needs no runtime");

    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let (storage, _clock) = memory_with_manual_clock();
    let service = layer(POLICY, slow(storage.clone())).settle_later().layer(keeps_charge(&taken));
    runtime.block_on(ask(&service, get("/20")));
    let charge = taken.lock().unwrap().take().unwrap();
    std::thread::spawn(move || charge.settle(50).unwrap()).join().unwrap();
    runtime.block_on(yields());
    assert_eq!(left(POLICY, &storage), 50, "the runtime of the request settles it");
}

#[tokio::test]
async fn last_settle_option_replaces_the_others() {
    let (storage, _clock) = memory_with_manual_clock();
    let never = |_: &ResponseHead<'_>| false;
    let service = layer(POLICY, storage).settle_later().charge_when(never).settle(|_| Some(30));
    let inner = service_fn(|request: Request<()>| {
        assert!(request.extensions().get::<Charge>().is_none());
        ready(Ok::<_, Infallible>(Response::new(String::new())))
    });
    assert_eq!(remaining(&ask(&service.layer(inner), get("/20")).await), Some(70));
}

#[tokio::test]
async fn handlers_extract_the_charge() {
    let app = || {
        let settle = |charge: Charge| async move { format!("{:?}", charge.settle(1)) };
        let maybe = |charge: Option<Charge>| async move { format!("{}", charge.is_some()) };
        Router::new().route("/must", on_get(settle)).route("/may", on_get(maybe))
    };
    let body = async |app: &Router, path: &str| {
        let response = ask(app, AxumRequest::get(path).body(Body::empty()).unwrap()).await;
        let status = response.status().as_u16();
        (status, axum::body::to_bytes(response.into_body(), 100).await.unwrap())
    };
    let layer = || RateLimitLayer::new(policy("9/minute"), Global);
    let settling = app().layer(layer().cost(|_| 3).settle_later());
    assert_eq!(body(&settling, "/must").await, (200, "Ok(())".into()));
    assert_eq!(body(&settling, "/may").await, (200, "true".into()));
    for unlimited in [
        app().layer(layer()),
        app().layer(layer().settle_later().skip(|_| true)),
        app().layer(layer().settle_later().storage(failing(), OnError::Admit)),
    ] {
        assert_eq!(body(&unlimited, "/may").await, (200, "false".into()));
        let (status, text) = body(&unlimited, "/must").await;
        assert!(status == 500 && !text.windows(6).any(|part| part == b"settle"), "{text:?}");
    }
    assert!(NoCharge::default().to_string().contains("settle_later()"));
}

#[tokio::test(start_paused = true)]
async fn charge_of_a_delayed_request_is_inserted_after_the_delay() {
    let storage = MemoryStorage::builder().clock(tower_ratelimit::storage::TokioClock::new()).build().unwrap();
    let taken = Taken::default();
    let service = layer("leaky-bucket 1/second queue 5", storage).settle_later().layer(keeps_charge(&taken));
    for _ in 0..2 {
        ask(&service, get("/1")).await;
        let charge = taken.lock().unwrap().take().unwrap();
        assert_eq!(charge.settle(4), Ok(()), "the client owes three places of the queue");
    }
    let before = tokio::time::Instant::now();
    ask(&service, get("/1")).await;
    assert_eq!(before.elapsed().as_secs(), 4);
}

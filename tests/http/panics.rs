//! Events of requests whose handler panics. The observer is then called during the unwinding.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use common::{Behavior, FakeStorage, counted, get, memory_with_manual_clock, policy, poll};
use http::{Request, Response};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_http::catch_panic::CatchPanicLayer;
use tower_ratelimit::storage::TokioClock;
use tower_ratelimit::{Event, EventKind, Global, MemoryStorage, OnError, RateLimitLayer, Reservations, Storage};

type Outcomes = Arc<Mutex<Vec<String>>>;

fn layer(text: &str, storage: impl Storage) -> (RateLimitLayer, Outcomes) {
    let outcomes = Outcomes::default();
    let events = Arc::clone(&outcomes);
    let layer = RateLimitLayer::new(policy(text), Global::new()).storage(storage, OnError::Refuse).observer(
        move |event: &Event<'_>| {
            let mark = if event.shadow { "?" } else { "" };
            let units = event.settled_units().map(|units| format!(" {units}")).unwrap_or_default();
            events.lock().unwrap().push(format!("{}{units}{mark}", event.outcome()));
        },
    );
    (layer, outcomes)
}

fn bug() -> Response<String> {
    panic!("a bug in the handler")
}

/// Sends a request in a task, which must panic with this text.
async fn assert_panics<S>(service: &S, expected: &str)
where
    S: Service<Request<()>, Response = Response<String>, Error: std::fmt::Debug + Send, Future: Send>
        + Clone
        + Send
        + 'static,
{
    let panic = tokio::spawn(service.clone().oneshot(get("/"))).await.unwrap_err().into_panic();
    assert_eq!(panic.downcast_ref::<&str>(), Some(&expected));
}

#[tokio::test]
async fn reservation_that_a_panicking_handler_counts_or_drops_is_reported() {
    for (actual, expected) in [(Some(5), "charged 4"), (Some(0), "refunded 1"), (None, "unsettled 0")] {
        let (layer, outcomes) = layer("10/minute", memory_with_manual_clock().0);
        let handler = service_fn(move |request: Request<()>| async move {
            let reservation = request.extensions().get::<Reservations>().unwrap().take().unwrap();
            let _counter = actual.map(|actual| {
                let mut counter = reservation.counter();
                counter.add(actual);
                counter
            });
            tokio::task::yield_now().await;
            Ok::<_, Infallible>(bug())
        });
        assert_panics(&layer.settle_later().layer(handler), "a bug in the handler").await;
        assert_eq!(*outcomes.lock().unwrap(), ["admitted", expected]);
    }
}

#[tokio::test]
async fn shadow_decision_is_reported_if_the_handler_panics() {
    // The storage has decided when it is polled by the drop of the request, or in a task after it.
    for polls in [1, 2, 5] {
        let (memory, _clock) = memory_with_manual_clock();
        let storage = FakeStorage::around(memory);
        let (layer, outcomes) = layer("10/minute; shadow 5/minute", storage.clone());
        let slow = storage.clone();
        let handler = service_fn(|_: Request<()>| -> Ready<Result<Response<String>, Infallible>> {
            panic!("a bug in the handler")
        });
        // Only the decision on the shadow limit is slow.
        let head = move |_: &tower_ratelimit::extract::Head<'_>| {
            slow.set(Behavior::WorksAfterPolls(polls));
            1_u32
        };
        assert_panics(&layer.cost(head).layer(handler), "a bug in the handler").await;
        for _ in 0..20 {
            tokio::task::yield_now().await;
        }
        assert_eq!(*outcomes.lock().unwrap(), ["admitted", "admitted?"], "after {polls} polls");
    }
}

/// A service that panics when it is polled ready for the third time.
#[derive(Clone, Default)]
struct PanicsWhenReady(Arc<Mutex<u32>>);

impl Service<Request<()>> for PanicsWhenReady {
    type Response = Response<String>;
    type Error = Infallible;
    type Future = Ready<Result<Response<String>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        let times = {
            let mut times = self.0.lock().unwrap();
            *times += 1;
            *times
        };
        assert!(times < 3, "{}", "a bug in the service");
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<()>) -> Self::Future {
        ready(Ok(Response::new(String::new())))
    }
}

#[tokio::test(start_paused = true)]
async fn refund_of_a_delayed_request_is_reported_if_the_inner_service_panics() {
    let memory = MemoryStorage::builder().clock(TokioClock::new()).build().unwrap();
    let (layer, outcomes) = layer("leaky-bucket 1 per 10 seconds queue 2", memory);
    let service = layer.layer(PanicsWhenReady::default());
    service.clone().oneshot(get("/")).await.unwrap();
    assert!(tokio::spawn(service.oneshot(get("/"))).await.unwrap_err().is_panic());
    assert_eq!(*outcomes.lock().unwrap(), ["admitted", "delayed", "refunded 1"]);
}

#[tokio::test(start_paused = true)]
async fn failed_refund_of_a_hit_in_flight_is_reported_if_its_task_panics() {
    let storage = FakeStorage::around(MemoryStorage::builder().clock(TokioClock::new()).build().unwrap());
    let (layer, outcomes) = layer("fixed-window 1 per 10 seconds", storage.clone());
    let service = layer
        .wait(Duration::from_secs(60), 10)
        .layer(service_fn(|_: Request<()>| ready(Ok::<_, Infallible>(Response::new(String::new())))));
    service.clone().oneshot(get("/")).await.unwrap();
    let task = tokio::spawn(async move {
        let mut waiting = Box::pin(service.oneshot(get("/")));
        assert!(poll(&mut waiting).is_pending());
        storage.close();
        tokio::time::sleep(Duration::from_secs(12)).await;
        assert!(poll(&mut waiting).is_pending(), "the hit is in flight");
        storage.open();
        storage.set_changes(Behavior::Fails);
        panic!("a bug in the task");
    });
    assert!(task.await.unwrap_err().is_panic());
    assert_eq!(*outcomes.lock().unwrap(), ["admitted", "settle_failed 1"]);
}

/// A panic that leaves a destructor during the unwinding would abort the process.
#[tokio::test]
async fn panic_of_the_observer_during_the_unwinding_does_not_abort_the_process() {
    let calls = Arc::new(Mutex::new(0));
    let seen = Arc::clone(&calls);
    let observer = move |event: &Event<'_>| {
        if matches!(event.kind, EventKind::Unsettled(_)) {
            *seen.lock().unwrap() += 1;
            panic!("a bug in the observer");
        }
    };
    let layer =
        RateLimitLayer::new(policy("10/minute; shadow 5/minute"), Global::new()).settle_later().observer(observer);
    let handler = service_fn(|_: Request<()>| async { Ok::<_, Infallible>(bug()) });
    let service = layer.layer(handler);
    for times in [1, 2] {
        assert_panics(&service, "a bug in the handler").await;
        assert_eq!(*calls.lock().unwrap(), 2 * times, "for the policy and for the shadow limit");
    }
}

#[tokio::test]
async fn panic_keeps_the_estimate_unless_a_layer_inside_answers_it() {
    async fn handler() -> &'static str {
        panic!("a bug")
    }
    let (storage, _clock) = memory_with_manual_clock();
    let limits = policy("fixed-window 9/hour");
    let app = Router::new().route("/", axum::routing::get(handler));
    let limited = |app: Router| {
        app.layer(
            RateLimitLayer::new(limits.clone(), Global::new())
                .storage(storage.clone(), OnError::Refuse)
                .cost(|_| 2)
                .charge_when(|response| response.status.is_success()),
        )
    };
    let panicked = tokio::spawn(limited(app.clone()).oneshot(get("/").map(|()| Body::empty()))).await;
    assert!(panicked.unwrap_err().is_panic());
    assert_eq!(counted(&storage, &limits), 2, "without a response");
    let answered = limited(app.layer(CatchPanicLayer::new()));
    let response = answered.oneshot(get("/").map(|()| Body::empty())).await.unwrap();
    assert_eq!((response.status().as_u16(), counted(&storage, &limits)), (500, 2), "nothing for a 500");
}

//! Readiness, slow and failing storages, delays, and dropped futures.

use std::cell::Cell;
use std::convert::Infallible;
use std::fmt::Debug;
use std::future::{pending, ready};
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use common::fake_cas_store::FakeCasStore;
use common::{Inner, ask, failing, get, memory_with_manual_clock, numbers, policy, poll, retry_after, slow};
use http::{Request, Response};
use tower::buffer::Buffer;
use tower::limit::ConcurrencyLimit;
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_ratelimit::extract::{Head, KeyError};
use tower_ratelimit::storage::{Cas, StorageFuture, StorageRequest, TokioClock};
use tower_ratelimit::{
    Decision, Event, EventKind, Global, Key, MemoryStorage, OnError, Op, Policy, RateLimitLayer, RateLimiter,
    RejectReason, Storage,
};

use crate::probe::Probe;

fn layer(text: &str, storage: impl Storage) -> RateLimitLayer {
    RateLimitLayer::new(policy(text), Global::new()).storage(storage, OnError::Refuse)
}

async fn units_left(limiter: &RateLimiter) -> u32 {
    limiter.peek(&Key::global()).await.unwrap().remaining()
}

/// Guards against this defect: a clone of the inner service is called without being polled ready.
#[tokio::test]
async fn ready_service_is_called_without_a_clone() {
    let mut service = layer("fixed-window 2/minute", memory_with_manual_clock().0).layer(Probe::new());
    for expected in [200, 200, 429, 429] {
        let response = service.ready().await.unwrap().call(get("/")).await.unwrap();
        assert_eq!(response.status(), expected);
    }
    assert_eq!(service.get_ref().clones.load(Ordering::SeqCst), 0);
    assert_eq!(service.get_ref().calls.load(Ordering::SeqCst), 2);
}

/// Guards against this defect: a clone of the inner service is called without being polled ready.
#[tokio::test]
async fn ready_service_moves_into_the_future_while_the_storage_is_pending() {
    let mut service = layer("fixed-window 3/minute", slow(memory_with_manual_clock().0)).layer(Probe::new());
    let first = service.ready().await.unwrap().call(get("/"));
    let second = service.ready().await.unwrap().call(get("/"));
    let third = service.ready().await.unwrap().call(get("/"));
    assert_eq!(second.await.unwrap().into_body(), "1");
    assert_eq!(first.await.unwrap().into_body(), "0");
    assert_eq!(third.await.unwrap().into_body(), "2");
}

/// Guards against this defect: the inner service is called before the decision.
#[tokio::test]
async fn inner_service_is_not_called_before_the_decision() {
    let inner = Inner::default();
    let mut service = layer("fixed-window 1/minute", slow(memory_with_manual_clock().0)).layer(inner.clone());
    for (expected, calls) in [(200, 1), (429, 1)] {
        let before = inner.calls();
        let mut response = Box::pin(service.ready().await.unwrap().call(get("/")));
        assert_eq!(inner.calls(), before);
        let mut polls = 0;
        let response = loop {
            polls += 1;
            match poll(&mut response) {
                Poll::Ready(response) => break response.unwrap(),
                Poll::Pending => assert_eq!(inner.calls(), before),
            }
        };
        assert_eq!(polls, 2, "the storage is ready after `call` and one poll");
        assert_eq!((response.status().as_u16(), inner.calls()), (expected, calls));
    }
}

#[tokio::test]
async fn poll_ready_returns_the_result_of_the_inner_service() {
    let (mut service, mut handle) = tower_test::mock::spawn_layer::<Request<()>, Response<String>, _>(layer(
        "fixed-window 1/minute",
        slow(memory_with_manual_clock().0),
    ));
    handle.allow(0);
    assert!(service.poll_ready::<Request<()>>().is_pending());
    handle.allow(1);
    assert!(service.is_woken());
    assert!(matches!(service.poll_ready::<Request<()>>(), Poll::Ready(Ok(()))));

    let (mut service, mut handle) = tower_test::mock::spawn_layer::<Request<()>, Response<String>, _>(layer(
        "fixed-window 1/minute",
        memory_with_manual_clock().0,
    ));
    handle.send_error("closed for today");
    let Poll::Ready(Err(error)) = service.poll_ready::<Request<()>>() else { panic!("no error") };
    assert_eq!(error.to_string(), "closed for today");
}

#[tokio::test]
async fn slow_storage_gives_the_same_responses_as_a_fast_one() {
    async fn answers<St: Storage>(
        storage: impl FnOnce(MemoryStorage) -> St,
    ) -> Vec<(u16, Option<[u64; 3]>, Option<u64>)> {
        let (memory, clock) = memory_with_manual_clock();
        let key = |head: &Head<'_>| match head.uri().path() {
            "/missing" => Err(KeyError::client("no key")),
            "/broken" => Err(KeyError::server("no key")),
            "/free" => Ok(None),
            _ => Ok(Some(Key::from("a"))),
        };
        let text = "fixed-window 4/minute; token-bucket 2/second";
        let layer = RateLimitLayer::new(policy(text), key).storage(storage(memory), OnError::Refuse);
        let layer = layer.cost(|head| head.uri().query().map_or(1, |cost| cost.parse().unwrap()));
        let service = layer.layer(Probe::new());
        let mut answers = Vec::new();
        for path in ["/", "/", "/", "/?0", "/?2", "/missing", "/?1", "/broken", "/free", "/?9", "/", "/"] {
            let response = ask(&service, get(path)).await;
            answers.push((response.status().as_u16(), numbers(&response), retry_after(&response)));
            clock.advance(Duration::from_millis(170));
        }
        answers
    }
    let at_once = answers(|memory| memory).await;
    assert_eq!(at_once, answers(slow).await);
    for expected in [200, 429, 400, 500] {
        assert!(at_once.iter().any(|(status, ..)| *status == expected), "the script has no {expected}");
    }
}

#[tokio::test]
async fn requests_pass_without_fields_when_the_storage_fails_open() {
    async fn check(storage: impl Storage) {
        let service =
            RateLimitLayer::new(policy("1/minute"), Global::new()).storage(storage, OnError::Admit).layer(Probe::new());
        for _ in 0..3 {
            let response = ask(&service, get("/")).await;
            assert_eq!(response.status(), 200);
            assert!(response.headers().is_empty(), "{:?}", response.headers());
        }
    }
    check(failing()).await;
    check(slow(failing())).await;
}

/// Guards against this defect: `runtime.block_on(service.call(request))` calls the storage before the
/// runtime is entered, and the storage fails without one.
#[test]
fn request_of_a_runtime_that_was_not_entered_before_is_decided() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let storage = Cas::new(FakeCasStore::default()).timeout(Duration::from_secs(60));
    let layer = layer("fixed-window 1/day; shadow fixed-window 2/day", storage);
    let failures = Arc::new(AtomicU64::new(0));
    let seen = Arc::clone(&failures);
    let layer = layer.observer(move |event| {
        seen.fetch_add(u64::from(matches!(event.kind, EventKind::Failed { .. })), Ordering::SeqCst);
    });
    let mut service = layer.layer(Inner::default());
    for expected in [200, 429] {
        let response = runtime.block_on(service.call(get("/"))).unwrap();
        assert_eq!(response.status(), expected);
    }
    assert_eq!(failures.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn response_is_503_with_retry_after_one_when_the_storage_fails_closed() {
    async fn check(storage: impl Storage) {
        let inner = Inner::default();
        let limited = layer("1/minute", storage);
        let response = ask(&limited.layer(inner.clone()), get("/")).await;
        assert_eq!((response.status().as_u16(), retry_after(&response), numbers(&response)), (503, Some(1), None));
        assert!(!response.body().contains("secret-host"), "{}", response.body());

        let own = |refused: RejectReason<'_>, _: &Head<'_>| {
            assert!(matches!(refused, RejectReason::Storage), "{refused:?}");
            Response::builder().status(500).body("mine".to_owned()).unwrap()
        };
        let response = ask(&limited.rejection(own).layer(inner.clone()), get("/")).await;
        assert_eq!((response.status().as_u16(), retry_after(&response), numbers(&response)), (500, Some(1), None));
        assert_eq!((response.body().as_str(), inner.calls()), ("mine", 0));
    }
    check(failing()).await;
    check(slow(failing())).await;
}

#[tokio::test]
async fn request_is_charged_inside_call_and_stays_charged_if_its_future_is_dropped() {
    async fn check(storage: impl Storage) {
        let layer = layer("fixed-window 5/minute", storage);
        let limiter = layer.limiter().unwrap();
        let mut service = layer.layer(Probe::new());
        drop(service.ready().await.unwrap().call(get("/")));
        assert_eq!(units_left(&limiter).await, 4, "never polled");
        let mut response = Box::pin(service.ready().await.unwrap().call(get("/")));
        let _ = poll(&mut response);
        drop(response);
        tokio::task::yield_now().await;
        assert_eq!(units_left(&limiter).await, 3, "polled once");
    }
    check(memory_with_manual_clock().0).await;
    check(slow(memory_with_manual_clock().0)).await;
}

/// A storage that is not ready at once, and counts the peeks that it executes.
#[derive(Debug)]
struct CountsPeeks(MemoryStorage, Arc<AtomicU64>);

impl Storage for CountsPeeks {
    fn decide(&self, request: StorageRequest<'_>) -> StorageFuture<Decision> {
        let (decided, peeks) = (self.0.decide(request), Arc::clone(&self.1));
        let is_peek = request.op == Op::Peek;
        StorageFuture::new(async move {
            peeks.fetch_add(u64::from(is_peek), Ordering::SeqCst);
            tokio::task::yield_now().await;
            decided.await
        })
    }

    fn clear(&self, policy: &Policy, key: &Key) -> StorageFuture<()> {
        self.0.clear(policy, key)
    }

    fn settle(&self, policy: &Policy, key: &Key, decision: &Decision, actual: u32) -> StorageFuture<()> {
        self.0.settle(policy, key, decision, actual)
    }
}

/// A delayed response does not wait for a peek, so a peek would be sent to a server for nothing.
#[tokio::test(start_paused = true)]
async fn delayed_request_sends_no_peek_to_a_storage_that_is_not_ready() {
    let peeks = Arc::new(AtomicU64::new(0));
    let memory = MemoryStorage::builder().clock(TokioClock::new()).build().unwrap();
    let inner = service_fn(|_: Request<()>| ready(Ok::<_, Infallible>(Response::new(String::new()))));
    let service = layer(QUEUE, CountsPeeks(memory, Arc::clone(&peeks))).layer(inner);
    let begin = tokio::time::Instant::now();
    for _ in 0..2 {
        assert_eq!(ask(&service, get("/")).await.status(), 200);
    }
    assert!(begin.elapsed() >= Duration::from_secs(10), "the second request is delayed");
    assert_eq!(peeks.load(Ordering::SeqCst), 0);
}

/// One request per 10 s. Two may wait.
const QUEUE: &str = "leaky-bucket 1 per 10 seconds queue 2";

#[tokio::test(start_paused = true)]
async fn inner_service_is_called_after_the_delay() {
    async fn check<St: Storage>(storage: impl FnOnce(MemoryStorage) -> St, left: [u64; 3]) {
        let storage = storage(MemoryStorage::builder().clock(TokioClock::new()).build().unwrap());
        let begin = tokio::time::Instant::now();
        let calls = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&calls);
        let inner = service_fn(move |_: Request<()>| {
            seen.lock().unwrap().push(begin.elapsed().as_millis());
            ready(Ok::<_, Infallible>(Response::new(String::new())))
        });
        let mut service = layer(QUEUE, storage).layer(inner);
        let mut answers = Vec::new();
        for _ in 0..4 {
            answers.push(tokio::spawn(service.ready().await.unwrap().call(get("/"))));
            tokio::task::yield_now().await;
        }
        let mut shown = Vec::new();
        for answer in answers {
            let response = answer.await.unwrap().unwrap();
            shown.push((response.status().as_u16(), numbers(&response).map(|[limit, left, _]| (limit, left))));
        }
        let [first, second, third] = left.map(|left| (200, Some((3, left))));
        assert_eq!(shown, [first, second, third, (429, Some((3, 0)))]);
        let calls = calls.lock().unwrap().clone();
        assert_eq!(calls.len(), 3);
        // A tokio timer may be a millisecond late, but it is never early.
        for (call, due) in calls.into_iter().zip([0, 10_000, 20_000]) {
            assert!((due..=due + 2).contains(&call), "due after {due} ms, called after {call}");
        }
    }
    // The response has the state after the delay if the storage is ready at once. Otherwise it has
    // the state before the delay.
    check(|memory| memory, [2, 1, 2]).await;
    check(slow, [2, 1, 0]).await;
}

/// [`Probe`] panics if a clone is called that was not polled ready.
#[tokio::test(start_paused = true)]
async fn clone_becomes_ready_and_is_called_after_the_delay() {
    async fn check<St: Storage>(storage: St, ids: [&str; 3]) {
        let mut service = layer(QUEUE, storage).layer(Probe::new());
        let [first, waiting, last] = [
            service.ready().await.unwrap().call(get("/")),
            service.ready().await.unwrap().call(get("/")),
            service.ready().await.unwrap().call(get("/")),
        ];
        let calls = Arc::clone(&service.get_ref().calls);
        for (number, response) in [first, waiting, last].into_iter().enumerate() {
            assert_eq!(response.await.unwrap().into_body(), ids[number]);
            assert_eq!(calls.load(Ordering::SeqCst), number + 1);
        }
    }
    // Each waiting request makes two clones: one to wait with and one for the next request.
    check(memory_with_manual_clock().0, ["0", "2", "4"]).await;
    check(slow(memory_with_manual_clock().0), ["0", "4", "5"]).await;
}

/// Client `a` is delayed by 10 s. The inner service can serve one request at a time.
async fn assert_other_client_is_served_during_the_delay<S>(inner: S, storage: impl Storage)
where
    S: Service<Request<()>, Response = Response<String>, Error: Debug + Send, Future: Send> + Clone + Send + 'static,
{
    let by_client = |head: &Head<'_>| Ok(Some(Key::from(head.uri().path())));
    let limited = RateLimitLayer::new(policy(QUEUE), by_client).storage(storage, OnError::Refuse);
    let service = limited.layer(inner);
    let begin = tokio::time::Instant::now();
    assert_eq!(ask(&service, get("/a")).await.status(), 200);
    let waiting = tokio::spawn(service.clone().oneshot(get("/a")));
    for _ in 0..10 {
        tokio::task::yield_now().await;
    }
    for _ in 0..3 {
        let client = format!("/{}", begin.elapsed().as_millis());
        assert_eq!(ask(&service, get(&client)).await.status(), 200);
        assert!(begin.elapsed() < Duration::from_secs(1), "waited {:?}", begin.elapsed());
        tokio::time::advance(Duration::from_millis(10)).await;
    }
    assert!(!waiting.is_finished());
    assert_eq!(waiting.await.unwrap().unwrap().status(), 200);
    assert!(begin.elapsed() >= Duration::from_secs(10), "the client kept its slot");
}

#[tokio::test(start_paused = true)]
async fn delayed_request_holds_no_permit_of_a_concurrency_limit() {
    let memory = || MemoryStorage::builder().clock(TokioClock::new()).build().unwrap();
    assert_other_client_is_served_during_the_delay(ConcurrencyLimit::new(Inner::default(), 1), memory()).await;
    assert_other_client_is_served_during_the_delay(ConcurrencyLimit::new(Inner::default(), 1), slow(memory())).await;
}

#[tokio::test(start_paused = true)]
async fn delayed_request_holds_no_slot_of_a_buffer() {
    let memory = || MemoryStorage::builder().clock(TokioClock::new()).build().unwrap();
    assert_other_client_is_served_during_the_delay(Buffer::new(Inner::default(), 1), memory()).await;
    assert_other_client_is_served_during_the_delay(Buffer::new(Inner::default(), 1), slow(memory())).await;
}

#[tokio::test(start_paused = true)]
async fn request_waits_for_a_busy_inner_service_after_its_delay() {
    let limit = ConcurrencyLimit::new(Inner::default(), 1);
    let storage = MemoryStorage::builder().clock(TokioClock::new()).build().unwrap();
    let limited = layer(QUEUE, storage);
    let service = limited.layer(limit.clone());
    ask(&service, get("/")).await;
    let mut busy = limit;
    let waiting = tokio::spawn(service.clone().oneshot(get("/")));
    tokio::time::sleep(Duration::from_secs(5)).await;
    busy.ready().await.unwrap();
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert!(!waiting.is_finished(), "the only permit is taken");
    drop(busy);
    let response = waiting.await.unwrap().unwrap();
    assert_eq!((response.status().as_u16(), numbers(&response).map(|[_, left, _]| left)), (200, Some(2)));
}

#[tokio::test(start_paused = true)]
async fn error_of_poll_ready_after_the_delay_is_returned() {
    let layer = layer(QUEUE, memory_with_manual_clock().0);
    let limiter = layer.limiter().unwrap();
    let (mut service, mut handle) = tower_test::mock::spawn_layer::<Request<()>, Response<String>, _>(layer);
    handle.allow(2);
    for number in 0..2 {
        assert!(matches!(service.poll_ready::<Request<()>>(), Poll::Ready(Ok(()))));
        let response = service.call(get("/"));
        if number == 1 {
            handle.send_error("closed for today");
            let response = tokio::time::timeout(Duration::from_secs(60), response).await;
            assert_eq!(response.expect("the service becomes ready").unwrap_err().to_string(), "closed for today");
            assert_eq!(units_left(&limiter).await, 2, "it was refunded");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn dropping_the_last_delayed_request_refunds_its_slot() {
    for polled in [false, true] {
        let layer = layer(QUEUE, memory_with_manual_clock().0);
        let limiter = layer.limiter().unwrap();
        let mut service = layer.layer(Inner::default());
        let mut places = Vec::new();
        for left in [2, 1, 0] {
            places.push(Box::pin(service.ready().await.unwrap().call(get("/"))));
            assert_eq!(units_left(&limiter).await, left);
        }
        let mut last = places.pop().unwrap();
        if polled {
            assert!(poll(&mut last).is_pending());
        }
        drop(last);
        assert_eq!(units_left(&limiter).await, 1, "refunded at once, polled: {polled}");
        assert_eq!(limiter.hit(&Key::global()).await.unwrap().delay(), Duration::from_secs(20));
        assert_eq!(service.get_ref().calls(), 1, "only the first was served");
    }
}

#[tokio::test(start_paused = true)]
async fn dropping_an_earlier_delayed_request_refunds_nothing() {
    let layer = layer(QUEUE, memory_with_manual_clock().0);
    let limiter = layer.limiter().unwrap();
    let mut service = layer.layer(Inner::default());
    let _first = service.ready().await.unwrap().call(get("/"));
    let second = service.ready().await.unwrap().call(get("/"));
    let _third = service.ready().await.unwrap().call(get("/"));
    drop(second);
    assert_eq!(units_left(&limiter).await, 0);
}

#[tokio::test(start_paused = true)]
async fn remote_storage_refunds_the_slot_in_the_background() {
    let (memory, _clock) = memory_with_manual_clock();
    let layer = layer(QUEUE, slow(memory));
    let limiter = layer.limiter().unwrap();
    let mut service = layer.layer(Probe::new());
    service.ready().await.unwrap().call(get("/")).await.unwrap();
    let mut waiting = Box::pin(service.ready().await.unwrap().call(get("/")));
    for _ in 0..3 {
        assert!(poll(&mut waiting).is_pending());
    }
    assert_eq!(units_left(&limiter).await, 1);
    drop(waiting);
    for _ in 0..10 {
        tokio::task::yield_now().await;
    }
    assert_eq!(units_left(&limiter).await, 2);
}

#[tokio::test(start_paused = true)]
async fn slot_is_refunded_when_the_observer_panics() {
    async fn check(storage: impl Storage) {
        let observer = |event: &Event<'_>| assert_ne!(event.outcome(), "delayed", "the observer panics");
        let layer = layer(QUEUE, storage).observer(observer);
        let limiter = layer.limiter().unwrap();
        let service = layer.layer(Inner::default());
        assert_eq!(ask(&service, get("/")).await.status(), 200);
        for _ in 0..5 {
            let answer = tokio::spawn(service.clone().oneshot(get("/"))).await;
            assert!(answer.unwrap_err().is_panic());
            for _ in 0..10 {
                tokio::task::yield_now().await;
            }
            assert_eq!(units_left(&limiter).await, 2);
        }
    }
    check(memory_with_manual_clock().0).await;
    check(slow(memory_with_manual_clock().0)).await;
}

#[tokio::test(start_paused = true)]
async fn dropping_a_request_in_service_refunds_nothing() {
    let storage = MemoryStorage::builder().clock(TokioClock::new()).build().unwrap();
    let layer = layer(QUEUE, storage);
    let limiter = layer.limiter().unwrap();
    let mut service = layer.layer(service_fn(|_: Request<()>| pending::<Result<Response<String>, Infallible>>()));

    let mut at_once = Box::pin(service.ready().await.unwrap().call(get("/")));
    assert!(poll(&mut at_once).is_pending());
    drop(at_once);
    assert_eq!(units_left(&limiter).await, 2, "the request was not delayed");

    let waited = service.ready().await.unwrap().call(get("/"));
    assert_eq!(units_left(&limiter).await, 1);
    assert!(tokio::time::timeout(Duration::from_millis(10_005), waited).await.is_err());
    assert_eq!(units_left(&limiter).await, 2, "its slot is taken until 20 s");
}

#[test]
fn delayed_request_may_be_dropped_after_its_runtime() {
    fn check(storage: impl Storage) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        let mut service = layer(QUEUE, storage).layer(Inner::default());
        let mut waiting = None;
        runtime.block_on(async {
            ask(&service, get("/")).await;
            let response = waiting.insert(Box::pin(service.ready().await.unwrap().call(get("/"))));
            for _ in 0..3 {
                assert!(poll(response).is_pending());
            }
        });
        drop(runtime);
        drop(waiting);
    }
    check(memory_with_manual_clock().0);
    check(slow(memory_with_manual_clock().0));
}

#[tokio::test]
async fn inner_service_need_not_be_send_or_static() {
    let calls = Cell::new(0);
    let inner = service_fn(|request: Request<Rc<str>>| {
        calls.set(calls.get() + 1);
        let body = request.into_body();
        async move {
            tokio::task::yield_now().await;
            Ok::<_, Infallible>(Response::new(body.to_string()))
        }
    });
    let service = layer("fixed-window 1/minute", slow(memory_with_manual_clock().0)).layer(inner);
    assert_eq!(ask(&service, Request::new(Rc::from("local"))).await.into_body(), "local");
    assert_eq!(ask(&service, Request::new(Rc::from("local"))).await.status(), 429);
    assert_eq!(calls.get(), 1);
}

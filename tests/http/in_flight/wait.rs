//! Requests that wait for a slot. Tokio's time is paused.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use common::{ask, poll, retry_after};
use http::{Request, Response};
use tokio::task::{JoinHandle, yield_now};
use tokio::time::{Instant, sleep};
use tower::limit::ConcurrencyLimit;
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_ratelimit::extract::Head;
use tower_ratelimit::{Global, InFlightBody, InFlightLayer, LiveSlots, Slots, slots_by};

use super::{Script, Step, layer, of, streams};

const MINUTE: Duration = Duration::from_secs(60);

type Answer = Response<InFlightBody<Script>>;

/// Sends a request in a task, and lets it run until it waits.
async fn start<S>(service: &S, request: Request<()>) -> JoinHandle<Answer>
where
    S: Service<Request<()>, Response = Answer, Error = Infallible, Future: Send> + Clone + Send + 'static,
{
    let service = service.clone();
    let task = tokio::spawn(async move { service.oneshot(request).await.unwrap() });
    for _ in 0..20 {
        yield_now().await;
    }
    task
}

#[tokio::test(start_paused = true)]
async fn requests_get_their_slots_in_the_order_of_arrival() {
    let layer = layer(1).wait(MINUTE, 100);
    let order = Arc::new(Mutex::new(Vec::new()));
    let called = Arc::clone(&order);
    let service = layer.layer(service_fn(move |request: Request<()>| {
        called.lock().unwrap().push(request.uri().path()[1..].parse::<u32>().unwrap());
        ready(Ok::<_, Infallible>(Response::new(Script::new(&[Step::Hang]))))
    }));
    let mut tasks = Vec::new();
    for number in 0..10 {
        let mut request = of("a");
        *request.uri_mut() = format!("/{number}").parse().unwrap();
        tasks.push(start(&service, request).await);
    }
    for (number, task) in tasks.into_iter().enumerate() {
        let response = task.await.unwrap();
        assert_eq!(response.headers()["x-ratelimit-remaining"], "0");
        assert_eq!((order.lock().unwrap().len(), layer.in_use()), (number + 1, 1));
        drop(response);
        yield_now().await;
    }
    assert_eq!(*order.lock().unwrap(), (0..10).collect::<Vec<_>>());
    assert_eq!(layer.in_use(), 0);
}

#[tokio::test(start_paused = true)]
async fn request_that_finds_no_slot_in_time_is_refused() {
    let layer = layer(1).wait(MINUTE, 100);
    let service = streams(&layer);
    let held = ask(&service, of("a")).await;
    let begin = Instant::now();
    let refused = ask(&service, of("a")).await;
    assert_eq!((refused.status().as_u16(), retry_after(&refused), layer.in_use()), (429, Some(1), 1));
    assert!(begin.elapsed() >= MINUTE && begin.elapsed() < MINUTE + Duration::from_millis(10));
    // The wait begins with the call, and not with the first poll.
    let called = service.clone().call(of("a"));
    sleep(MINUTE / 2).await;
    assert_eq!((called.await.unwrap().status().as_u16(), begin.elapsed().as_secs()), (429, 120));
    drop(held);
    assert_eq!(ask(&service, of("a")).await.status(), 200);
}

#[tokio::test(start_paused = true)]
async fn small_requests_do_not_overtake_a_large_one() {
    let cost = |head: &tower_ratelimit::extract::Head<'_>| head.uri().path()[1..].parse::<u32>().unwrap();
    let layer = InFlightLayer::new(4, Global::new()).cost(cost).wait(MINUTE, 100);
    let service = streams(&layer);
    let request = |cost: u32| common::get(&format!("/{cost}"));
    let (two, one) = (ask(&service, request(2)).await, ask(&service, request(1)).await);
    let large = start(&service, request(3)).await;
    let small = start(&service, request(1)).await;
    assert!(!large.is_finished() && !small.is_finished(), "one slot is free, and the large request is first");
    drop(one);
    yield_now().await;
    assert!(!large.is_finished() && !small.is_finished());
    drop(two);
    let (large, small) = (large.await.unwrap(), small.await.unwrap());
    assert_eq!((large.status().as_u16(), small.status().as_u16(), layer.in_use()), (200, 200, 4));
    let never = ask(&service, request(5)).await;
    assert_eq!((never.status().as_u16(), retry_after(&never)), (503, None), "it is refused at once");
}

#[tokio::test(start_paused = true)]
async fn client_that_disconnects_leaves_the_queue() {
    let layer = layer(1).wait(MINUTE, 2);
    let service = streams(&layer);
    let held = ask(&service, of("a")).await;
    let gone = start(&service, of("a")).await;
    assert_eq!(ask(&service, of("a")).await.status(), 429, "one of the two places is free, and the key has one");
    gone.abort();
    assert!(gone.await.unwrap_err().is_cancelled());
    let waits = start(&service, of("a")).await;
    drop(held);
    assert_eq!(waits.await.unwrap().status(), 200);
    assert_eq!(layer.in_use(), 0);
}

/// A request whose client leaves when it is the first gives its turn to the next, which needs less.
#[tokio::test(start_paused = true)]
async fn next_request_gets_its_slots_when_the_first_of_the_queue_leaves() {
    let cost = |head: &tower_ratelimit::extract::Head<'_>| head.uri().path()[1..].parse::<u32>().unwrap();
    let layer = InFlightLayer::new(4, Global::new()).cost(cost).wait(MINUTE, 100);
    let service = streams(&layer);
    let _two = ask(&service, common::get("/2")).await;
    let large = start(&service, common::get("/3")).await;
    let small = start(&service, common::get("/1")).await;
    large.abort();
    assert_eq!(small.await.unwrap().status(), 200);
}

#[tokio::test(start_paused = true)]
async fn one_key_cannot_take_all_places() {
    let layer = layer(1).wait(MINUTE, 8);
    let service = streams(&layer);
    let mut held = Vec::new();
    for user in ["a", "b", "c", "d"] {
        held.push(ask(&service, of(user)).await);
    }
    let mut waiting = Vec::new();
    let mut places = async |user: &str| {
        for number in 0.. {
            let task = start(&service, of(user)).await;
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
async fn one_key_cannot_take_all_places_by_several_names() {
    let slots = |head: &Head<'_>| Slots::new(1).with_name(&head.uri().path()[1..]);
    let layer = InFlightLayer::new(slots_by(slots), super::user()).wait(MINUTE, 8);
    let service = streams(&layer);
    let request = |route: &str| {
        let mut request = of("a");
        *request.uri_mut() = format!("/{route}").parse().unwrap();
        request
    };
    let (mut held, mut waiting) = (Vec::new(), Vec::new());
    for route in ["one", "two", "three", "four", "five", "six"] {
        held.push(ask(&service, request(route)).await);
        waiting.push(start(&service, request(route)).await);
    }
    assert_eq!(waiting.iter().filter(|task| !task.is_finished()).count(), 4);
}

#[tokio::test(start_paused = true)]
async fn the_global_key_can_take_all_places() {
    let layer = InFlightLayer::new(1, Global::new()).wait(MINUTE, 3);
    let service = streams(&layer);
    let _held = ask(&service, common::get("/")).await;
    let mut tasks = Vec::new();
    for _ in 0..3 {
        tasks.push(start(&service, common::get("/")).await);
    }
    assert_eq!(ask(&service, common::get("/")).await.status(), 503);
    assert!(tasks.iter().all(|task| !task.is_finished()));
}

#[tokio::test(start_paused = true)]
async fn waiting_request_holds_no_permit_of_the_inner_service() {
    let layer = layer(1).wait(MINUTE, 100);
    let inner = service_fn(|_: Request<()>| async {
        sleep(Duration::from_secs(1)).await;
        Ok::<_, Infallible>(Response::new(Script::new(&[Step::Hang])))
    });
    let service = layer.layer(ConcurrencyLimit::new(inner, 1));
    let held = ask(&service, of("a")).await;
    let waits = start(&service, of("a")).await;
    let other = start(&service, of("b")).await;
    assert_eq!(other.await.unwrap().status(), 200, "the inner permit is free");
    drop(held);
    assert_eq!(waits.await.unwrap().status(), 200);
}

/// A service that is ready until it fails.
#[derive(Clone, Default)]
struct FailsLater(Arc<AtomicBool>);

impl Service<Request<()>> for FailsLater {
    type Response = Response<Script>;
    type Error = &'static str;
    type Future = Ready<Result<Self::Response, Self::Error>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(if self.0.load(Ordering::Relaxed) { Err("failed") } else { Ok(()) })
    }

    fn call(&mut self, _: Request<()>) -> Self::Future {
        ready(Ok(Response::new(Script::new(&[Step::Hang]))))
    }
}

#[tokio::test(start_paused = true)]
async fn slot_is_given_back_when_the_inner_service_fails_after_the_wait() {
    let (layer, inner) = (layer(1).wait(Duration::from_secs(60), 10), FailsLater::default());
    let held = layer.layer(inner.clone()).oneshot(of("a")).await.unwrap();
    let mut waits = layer.layer(inner.clone()).oneshot(of("a"));
    assert!(poll(&mut waits).is_pending());
    inner.0.store(true, Ordering::Relaxed);
    drop(held);
    assert_eq!(poll(&mut waits).map(Result::unwrap_err), Poll::Ready("failed"));
    assert_eq!(layer.in_use(), 0, "before the future is dropped");
}

#[tokio::test(start_paused = true)]
async fn waiting_requests_follow_live_slots_when_a_slot_is_given_back() {
    let live = LiveSlots::new(2);
    let layer = InFlightLayer::new(live.clone(), Global::new()).wait(MINUTE, 100);
    let service = streams(&layer);
    let mut held = vec![ask(&service, common::get("/")).await, ask(&service, common::get("/")).await];
    let mut waiting = Vec::new();
    for _ in 0..3 {
        waiting.push(start(&service, common::get("/")).await);
    }
    live.set(1);
    held.pop();
    yield_now().await;
    assert!(waiting.iter().all(|task| !task.is_finished()), "one request is in flight");
    live.set(3);
    held.pop();
    for task in waiting {
        held.push(task.await.unwrap());
    }
    assert_eq!(layer.in_use(), 3);
}

#[tokio::test(start_paused = true)]
async fn raised_live_slots_reach_the_queue_before_a_new_request() {
    let live = LiveSlots::new(1);
    let layer = InFlightLayer::new(live.clone(), Global::new()).wait(MINUTE, 2);
    let service = streams(&layer);
    let mut held = vec![ask(&service, common::get("/")).await];
    let waiting = [start(&service, common::get("/")).await, start(&service, common::get("/")).await];
    live.set(4);
    held.push(ask(&service, common::get("/")).await);
    for task in waiting {
        held.push(task.await.unwrap());
    }
    let statuses: Vec<u16> = held.iter().map(|response| response.status().as_u16()).collect();
    assert_eq!((statuses, layer.in_use()), (vec![200; 4], 4));
    let fields = |name: &str| held[1..].iter().map(|held| held.headers()[name].clone()).collect::<Vec<_>>();
    assert_eq!(fields("x-ratelimit-remaining"), ["0", "2", "1"], "the waiting requests have their slots");
    assert_eq!(fields("x-ratelimit-limit"), ["4", "4", "4"]);
}

#[tokio::test(start_paused = true)]
async fn waiting_request_that_needs_more_than_the_lowered_slots_is_refused() {
    let cost = |head: &tower_ratelimit::extract::Head<'_>| head.uri().path()[1..].parse::<u32>().unwrap();
    let live = LiveSlots::new(10);
    let layer = InFlightLayer::new(live.clone(), Global::new()).cost(cost).wait(MINUTE, 100);
    let service = streams(&layer);
    let held = ask(&service, common::get("/5")).await;
    let (large, small) = (start(&service, common::get("/8")).await, start(&service, common::get("/1")).await);
    live.set(6);
    let begin = Instant::now();
    drop(held);
    let (large, small) = (large.await.unwrap(), small.await.unwrap());
    assert_eq!((large.status().as_u16(), small.status().as_u16(), layer.in_use()), (503, 200, 1));
    assert_eq!(begin.elapsed(), Duration::ZERO, "the small request does not wait for the end of the large one");
    assert_eq!((large.headers()["x-ratelimit-limit"].clone(), retry_after(&large)), ("6".parse().unwrap(), None));
}

#[tokio::test(start_paused = true)]
async fn slot_that_arrives_when_its_client_has_left_goes_to_the_next() {
    let layer = layer(1).wait(MINUTE, 100);
    let service = streams(&layer);
    let held = ask(&service, of("a")).await;
    let mut left = Box::pin(service.clone().oneshot(of("a")));
    assert!(common::poll(&mut left).is_pending());
    let next = start(&service, of("a")).await;
    drop(held);
    // The slot is on its way to the first request, which is dropped before it is polled.
    assert_eq!(layer.in_use(), 1);
    drop(left);
    assert_eq!(next.await.unwrap().status(), 200);
    assert_eq!(layer.in_use(), 0);
}

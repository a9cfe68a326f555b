//! The end of a request: each slot is given back exactly once.

use std::convert::Infallible;
use std::future::{pending, ready};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::task::{Context, Poll};
use std::time::Duration;

use common::poll;
use common::random::Numbers;
use futures_util::FutureExt;
use http::{Method, Request, Response};
use http_body_util::BodyExt;
use hyper::body::{Body, Bytes, Frame};
use tokio::task::yield_now;
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_ratelimit::extract::key_by;
use tower_ratelimit::{Global, InFlightBody, InFlightLayer, Key, Permit};

use super::{Script, Step, layer, of, send, streams};

#[tokio::test]
async fn slot_is_held_until_the_body_has_ended() {
    let layer = layer(1);
    let steps = [Step::Data("one"), Step::Data("two"), Step::Trailers];
    let response = send(&layer, of("a"), Script::new(&steps)).await;
    let mut body = response.into_body();
    for (left, _) in steps.iter().enumerate() {
        assert_eq!(layer.in_use(), 1);
        assert_eq!((body.size_hint().exact(), body.is_end_stream()), (Some((steps.len() - left) as u64), false));
        let frame = body.frame().await.unwrap().unwrap();
        if left == 2 {
            assert_eq!(frame.into_trailers().unwrap()["x-sum"], "7");
        } else {
            assert_eq!(frame.into_data().unwrap(), ["one", "two"][left]);
        }
    }
    assert!(body.is_end_stream());
    assert_eq!(layer.in_use(), 0, "the last frame ends the body, even if nothing polls it again");
    assert!(body.frame().await.is_none());
    assert_eq!(layer.in_use(), 0);
}

#[tokio::test]
async fn slot_is_given_back_when_the_body_fails_or_is_dropped() {
    let layer = layer(1);
    let mut body = send(&layer, of("a"), Script::new(&[Step::Fail, Step::Hang])).await.into_body();
    assert_eq!(body.frame().await.unwrap().unwrap_err(), "the body failed");
    assert_eq!(layer.in_use(), 0);
    drop(body);

    let body = send(&layer, of("a"), Script::new(&[Step::Data("x"), Step::Hang])).await.into_body();
    assert_eq!(layer.in_use(), 1);
    drop(body);
    assert_eq!(layer.in_use(), 0);

    let mut body = send(&layer, of("a"), Script::new(&[Step::Panic])).await.into_body();
    let panicked = catch_unwind(AssertUnwindSafe(|| drop(body.frame().now_or_never())));
    assert!(panicked.is_err());
    drop(body);
    assert_eq!(layer.in_use(), 0);
}

#[tokio::test]
async fn response_without_a_body_gives_the_slot_back_with_its_head() {
    let layer = layer(1);
    let hang = Script::new(&[Step::Hang]);
    for (method, status, body, in_use) in [
        (Method::GET, 200, hang.clone(), 1),
        (Method::POST, 206, hang.clone(), 1),
        (Method::GET, 200, Script::default(), 0),
        (Method::HEAD, 200, hang.clone(), 0),
        (Method::GET, 204, hang.clone(), 0),
        (Method::GET, 304, hang.clone(), 0),
        (Method::CONNECT, 200, Script::default(), 0),
    ] {
        let inner = service_fn(|_| {
            let response = Response::builder().status(status).body(body.clone());
            ready(Ok::<_, Infallible>(response.unwrap()))
        });
        let mut request = of("a");
        *request.method_mut() = method.clone();
        let response = layer.layer(inner).oneshot(request).await.unwrap();
        assert_eq!(layer.in_use(), in_use, "{method} {status}");
        drop(response);
        assert_eq!(layer.in_use(), 0, "{method} {status}");
    }
}

#[tokio::test]
async fn slot_is_taken_before_the_inner_service_is_called() {
    let layer = layer(2);
    let observed = layer.clone();
    let inner = service_fn(move |_: Request<()>| {
        let in_use = observed.in_use();
        ready(Ok::<_, Infallible>(Response::new(in_use.to_string())))
    });
    let response = layer.layer(inner).oneshot(of("a")).await.unwrap();
    assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), "1");
    assert_eq!(layer.in_use(), 0);
}

#[tokio::test]
async fn slot_is_given_back_when_the_inner_service_fails_or_panics_or_the_future_is_dropped() {
    let layer = layer(1);
    let failing = service_fn(|_: Request<()>| ready(Err::<Response<String>, _>("failed")));
    let mut future = layer.layer(failing).oneshot(of("a"));
    assert_eq!(poll(&mut future).map(Result::unwrap_err), Poll::Ready("failed"));
    assert_eq!(layer.in_use(), 0, "before the future is dropped");
    drop(future);

    let panics = service_fn(|_: Request<()>| async { panic!("the handler panics") });
    let service = layer.layer(panics.map_result(|result: Result<Response<String>, Infallible>| result));
    assert!(AssertUnwindSafe(service.oneshot(of("a"))).catch_unwind().await.is_err());
    assert_eq!(layer.in_use(), 0);

    let mut panics = layer.layer(service_fn(|request: Request<()>| {
        assert!(request.uri().path().is_empty(), "the call panics");
        ready(Ok::<_, Infallible>(Response::new(String::new())))
    }));
    assert!(catch_unwind(AssertUnwindSafe(|| drop(panics.call(of("a"))))).is_err());
    assert_eq!(layer.in_use(), 0);

    let mut hangs = layer.layer(service_fn(|_| pending::<Result<Response<String>, Infallible>>()));
    let never_polled = hangs.call(of("a"));
    assert_eq!(layer.in_use(), 1);
    drop(never_polled);
    assert_eq!(layer.in_use(), 0);
    {
        let mut polled = pin!(hangs.call(of("a")));
        assert!(poll(&mut polled).is_pending());
        assert_eq!(layer.in_use(), 1);
    }
    assert_eq!(layer.in_use(), 0);
}

#[tokio::test]
async fn permit_holds_the_slot_until_its_last_clone_is_dropped() {
    let layer = layer(1);
    let upgrade = service_fn(|request: Request<()>| {
        let permit: Permit = request.extensions().get().cloned().unwrap();
        let mut response = Response::new(String::new());
        response.extensions_mut().insert(permit.clone());
        drop(permit);
        ready(Ok::<_, Infallible>(response))
    });
    let mut response = layer.layer(upgrade).oneshot(of("a")).await.unwrap();
    let permit: Permit = response.extensions_mut().remove().unwrap();
    drop(response);
    let clone = permit.clone();
    drop(permit);
    assert_eq!(layer.in_use(), 1);
    assert_eq!(common::status(&streams(&layer), of("a")).await, 429);
    drop(clone);
    assert_eq!(layer.in_use(), 0);
}

#[tokio::test]
async fn innermost_permit_holds_the_slots_of_all_layers() {
    let (outer, inner) = (InFlightLayer::new(5, Global::new()), layer(2));
    let service = service_fn(|request: Request<()>| {
        let permit: Permit = request.extensions().get().cloned().unwrap();
        let mut response = Response::new(String::new());
        response.extensions_mut().insert(permit);
        ready(Ok::<_, Infallible>(response))
    });
    let response = outer.layer(inner.layer(service)).oneshot(of("a")).await.unwrap();
    assert_eq!((outer.in_use(), inner.in_use()), (1, 1));
    drop(response);
    assert_eq!((outer.in_use(), inner.in_use()), (0, 0));
}

/// A body that returns nothing, and allocates nothing.
struct Endless;

impl Body for Endless {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Pending
    }
}

impl From<String> for Endless {
    fn from(_: String) -> Self {
        Self
    }
}

/// The phases in which a client disconnects.
#[derive(Clone, Copy)]
enum Phase {
    BeforeTheFirstPoll,
    Waiting,
    InTheHandler,
    AfterTheHead,
    InTheBody(usize),
    AtTheEnd,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn ten_thousand_aborted_streams_leak_no_slot() {
    // A layer without options takes slots on a short path.
    for layer in [layer(3), layer(3).wait(Duration::from_secs(60), 100)] {
        abort_streams(&layer).await;
    }
}

async fn abort_streams(layer: &InFlightLayer) {
    const USERS: usize = 20;
    let inner = service_fn(|request: Request<()>| async move {
        yield_now().await;
        let permit = request.extensions().get::<Permit>().cloned();
        let steps = match request.uri().path() {
            "/fail" => return Err("failed"),
            "/panic" => panic!("the handler panics"),
            "/job" => {
                tokio::spawn(async move {
                    yield_now().await;
                    drop(permit);
                });
                &[Step::Data("x"), Step::Data("x")][..]
            }
            "/body-fails" => &[Step::Data("x"), Step::Fail],
            _ => &[Step::Data("x"), Step::Data("x"), Step::Data("x"), Step::Trailers],
        };
        Ok(Response::new(Script::new(steps)))
    });
    let service = layer.layer(inner);
    let mut numbers = Numbers(20_261_125);
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..10_000 {
        let phase = numbers.one_of(&[
            Phase::BeforeTheFirstPoll,
            Phase::Waiting,
            Phase::InTheHandler,
            Phase::AfterTheHead,
            Phase::InTheBody(1),
            Phase::InTheBody(2),
            Phase::AtTheEnd,
        ]);
        let path = numbers.one_of(&["/", "/", "/", "/job", "/fail", "/body-fails"]);
        let user = numbers.below(USERS as u64).to_string();
        let request = Request::get(path).header("x-user", user).body(()).unwrap();
        let service = service.clone();
        tasks.spawn(abort_in(phase, service, request));
        if tasks.len() >= 200 {
            tasks.join_next().await.unwrap().unwrap();
        }
    }
    while let Some(ended) = tasks.join_next().await {
        ended.unwrap();
    }
    // The jobs hold their permits until their tasks have run.
    common::time::eventually("all slots are given back", async || layer.in_use() == 0).await;
    for user in 0..USERS {
        let user = user.to_string();
        let streams = streams(layer);
        let bodies = [(); 3].map(|()| streams.clone().oneshot(of(&user)));
        let bodies: Vec<_> = futures_util::future::join_all(bodies).await;
        assert!(bodies.iter().all(|response| response.as_ref().unwrap().status() == 200), "user {user}");
        assert_eq!(layer.in_use(), 3, "user {user}");
    }
    assert_eq!(layer.in_use(), 0);
}

async fn abort_in<S>(phase: Phase, service: S, request: Request<()>)
where
    S: Service<Request<()>, Response = Response<InFlightBody<Script>>, Error = &'static str> + Clone,
{
    let mut future = pin!(service.oneshot(request));
    let polls = match phase {
        Phase::BeforeTheFirstPoll => return,
        Phase::Waiting => 1,
        Phase::InTheHandler => 3,
        _ => usize::MAX,
    };
    let mut response = None;
    for _ in 0..polls {
        if let Poll::Ready(ended) = poll(&mut future) {
            response = Some(ended);
            break;
        }
        yield_now().await;
    }
    let Some(Ok(response)) = response else { return };
    let frames = match phase {
        Phase::AfterTheHead => 0,
        Phase::InTheBody(frames) => frames,
        _ => usize::MAX,
    };
    let mut body = response.into_body();
    for _ in 0..frames {
        match body.frame().await {
            Some(Ok(_)) => yield_now().await,
            _ => break,
        }
    }
}

#[test]
fn hundred_thousand_keys_with_one_slot_each_take_at_most_10_mb() {
    const KEYS: usize = 100_000;
    let key = key_by(|head| Key::from(head.extensions.get::<u64>().copied().unwrap()));
    let layer = InFlightLayer::new(20, key);
    let mut service = layer.layer(service_fn(|_: Request<()>| ready(Ok::<_, Infallible>(Response::new(Endless)))));
    let mut responses = Vec::with_capacity(KEYS);
    let allocated = allocation_counter::measure(|| {
        for key in 0..KEYS as u64 {
            let mut request = Request::new(());
            request.extensions_mut().insert(key);
            responses.push(service.call(request).now_or_never().unwrap().unwrap().into_body());
        }
    });
    assert_eq!(layer.in_use(), KEYS as u64);
    assert!(allocated.bytes_current <= 10_000_000, "{}", allocated.bytes_current);
    drop(responses);
    assert_eq!(layer.in_use(), 0);
}

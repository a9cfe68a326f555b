//! The middlewares around the services of `tower-resilience-core`, which check tower's contract: a
//! service is called only after it was polled ready, and a clone of it is not ready.

use std::convert::Infallible;
use std::fmt::Debug;
use std::future::{poll_fn, ready};
use std::task::{Context, Poll};
use std::time::Duration;

use http::{Request, Response, StatusCode};
use tokio::time::timeout;
use tower::limit::ConcurrencyLimit;
use tower::util::{MapRequest, MapResponse};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_ratelimit::extract::Head;
use tower_ratelimit::storage::{Leases, TokioClock};
use tower_ratelimit::{
    BoxError, ClientLimitLayer, Global, InFlightLayer, MemoryStorage, OnError, Policy, RateLimitLayer, RateLimiter,
};
use tower_resilience_core::testing::{ControlledService, ControlledServiceClosed, ServiceProbe, StatefulInner};

/// A service that panics if it is called without being polled ready, in a limit on concurrent calls that
/// does the same, in a probe that counts.
type Probed = ServiceProbe<ConcurrencyLimit<Answering<StatefulInner>>>;
type Answering<S> = MapResponse<MapRequest<S, fn(Request<()>)>, fn(()) -> Response<String>>;

/// A service that waits until it may be ready, and then until it may respond.
type Controlled = ServiceProbe<MapResponse<ControlledService, fn(Request<()>) -> Response<String>>>;

fn probed(answer: fn(()) -> Response<String>) -> Probed {
    let inner = StatefulInner::new().map_request((|_| ()) as fn(Request<()>));
    ServiceProbe::new(ConcurrencyLimit::new(inner.map_response(answer), 2))
}

fn ok(_: ()) -> Response<String> {
    Response::default()
}

fn refused(_: ()) -> Response<String> {
    let mut response = ok(());
    *response.status_mut() = StatusCode::TOO_MANY_REQUESTS;
    response.headers_mut().insert("retry-after", "1".parse().unwrap());
    response
}

/// A storage whose clock is that of tokio, which tests pause.
fn storage() -> MemoryStorage {
    MemoryStorage::builder().clock(TokioClock::new()).build().unwrap()
}

fn policy(text: &str) -> Policy {
    text.parse().unwrap()
}

fn rate_limit(text: &str) -> RateLimitLayer {
    RateLimitLayer::new(policy(text), Global::new()).storage(storage(), OnError::Refuse)
}

/// Calls the service once after another, by several clones at a time, and by calls that are given up.
async fn check<L, S, B>(name: &str, layer: L, inner: Probed)
where
    L: Layer<Probed, Service = S>,
    S: Service<Request<()>, Response = Response<B>, Error: Debug> + Clone,
{
    let handle = inner.handle();
    let mut service = layer.layer(inner);
    let mut responses = 0;
    for _ in 0..3 {
        let called = service.ready().await.unwrap().call(Request::new(()));
        responses += u32::from(called.await.is_ok());
    }
    let one = || service.clone().oneshot(Request::new(()));
    let (a, b, c, d, e) = tokio::join!(one(), one(), one(), one(), one());
    responses += [a, b, c, d, e].into_iter().map(|result| u32::from(result.is_ok())).sum::<u32>();
    // Calls that are given up, after several polls.
    for polls in 0..3 {
        let mut called = Box::pin(service.ready().await.unwrap().call(Request::new(())));
        let mut has_ended = false;
        for _ in 0..polls {
            has_ended = has_ended || poll_fn(|cx| Poll::Ready(called.as_mut().poll(cx).is_ready())).await;
        }
    }
    // No call of the inner service is left, and its permits are free.
    responses += u32::from(service.oneshot(Request::new(())).await.is_ok());
    handle.assert_ready_contract();
    handle.assert_quiescent();
    let seen = handle.snapshot();
    println!("  {name}: {} calls, {} clones, {responses} of 9 responses", seen.calls, seen.clones);
    assert!(responses > 0 && seen.calls > 0 && seen.peak_in_flight <= 2, "{name}: {seen:?}");
}

#[tokio::test(start_paused = true)]
async fn services_are_called_only_when_they_are_ready() {
    println!("tower-resilience-core, probes of tower's contract:");
    let second = Duration::from_secs(1);
    check("RateLimit", rate_limit("fixed-window 4/minute"), probed(ok)).await;
    check("RateLimit that waits", rate_limit("token-bucket 1/second").wait(60 * second, 100), probed(ok)).await;
    check("RateLimit that delays", rate_limit("leaky-bucket 1/second queue 20"), probed(ok)).await;
    let leases = Leases::new(storage(), 2);
    let pending = RateLimitLayer::new(policy("fixed-window 6/minute"), Global::new()).storage(leases, OnError::Refuse);
    check("RateLimit with a pending storage", pending, probed(ok)).await;
    check(
        "RateLimit without headers or a key",
        RateLimitLayer::new(policy("1/day"), |_: &Head<'_>| Ok(None)),
        probed(ok),
    )
    .await;
    check("InFlight", InFlightLayer::new(3, Global::new()), probed(ok)).await;
    check("InFlight that waits", InFlightLayer::new(1, Global::new()).wait(60 * second, 100), probed(ok)).await;
    check("ClientLimit", ClientLimitLayer::new(), probed(ok)).await;
    let own = RateLimiter::with_storage(policy("token-bucket 1/second"), storage());
    check("ClientLimit with its own limit", ClientLimitLayer::new().limit(own), probed(ok)).await;
    check("ClientLimit of a paused host", ClientLimitLayer::new(), probed(refused)).await;
    let retry = ClientLimitLayer::new().retry_once(|request: &Request<()>| Some(request.clone()));
    check("ClientLimit that retries", retry, probed(refused)).await;
}

/// Checks a service with this layer around an inner one that is not ready, responds late, and fails.
async fn check_controlled<L, S, B>(name: &str, layer: L)
where
    L: Layer<Controlled, Service = S>,
    S: Service<Request<()>, Response = Response<B>, Error: Debug + Into<BoxError>, Future: Send>
        + Clone
        + Send
        + 'static,
    B: Send,
{
    let (inner, control) = ControlledService::new(false);
    let answer: fn(Request<()>) -> Response<String> = |_| Response::default();
    let inner = ServiceProbe::new(inner.map_response(answer));
    let handle = inner.handle();
    let mut service = layer.layer(inner);

    assert!(poll_fn(|cx| Poll::Ready(service.poll_ready(cx).is_pending())).await, "{name} waits for the inner service");
    let mut clone = service.clone();
    let waiting = tokio::spawn(async move { clone.ready().await.is_ok() });
    tokio::task::yield_now().await;
    control.set_ready(true);
    assert!(timeout(Duration::from_secs(9), waiting).await.unwrap().unwrap(), "{name} is woken");

    let mut call = Box::pin(service.ready().await.unwrap().call(Request::new(())));
    assert!(timeout(Duration::from_secs(9), &mut call).await.is_err(), "{name} waits for the response");
    assert_eq!(handle.snapshot().in_flight, 1, "{name}");
    drop(call);
    assert_eq!((handle.snapshot().in_flight, handle.snapshot().cancelled), (0, 1), "{name} gives up the inner call");

    control.allow(1);
    service.ready().await.unwrap().call(Request::new(())).await.unwrap();
    control.close();
    let error: BoxError = poll_fn(|cx| service.poll_ready(cx)).await.unwrap_err().into();
    assert!(error.is::<ControlledServiceClosed>(), "{name} returns the error of the inner service");
    handle.assert_ready_contract();
    handle.assert_quiescent();
    println!("  {name}: waits for the inner service, gives up its call, and returns its error");
}

#[tokio::test(start_paused = true)]
async fn readiness_cancellation_and_errors_are_passed_on() {
    check_controlled("RateLimit", rate_limit("fixed-window 9/minute")).await;
    check_controlled("InFlight", InFlightLayer::new(3, Global::new())).await;
    check_controlled("ClientLimit", ClientLimitLayer::new()).await;
}

/// Otherwise the checks above would show nothing.
#[tokio::test]
async fn probe_detects_a_clone_that_was_not_polled() {
    #[derive(Clone)]
    struct Careless<S>(S);

    impl<S: Service<Request<()>> + Clone> Service<Request<()>> for Careless<S> {
        type Response = S::Response;
        type Error = S::Error;
        type Future = S::Future;

        fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
            self.0.poll_ready(cx)
        }

        fn call(&mut self, request: Request<()>) -> Self::Future {
            self.0.clone().call(request)
        }
    }

    let inner = ServiceProbe::new(service_fn(|_: Request<()>| ready(Ok::<_, Infallible>(()))));
    let handle = inner.handle();
    Careless(inner).ready().await.unwrap().call(Request::new(())).await.unwrap();
    assert_eq!(handle.snapshot().readiness_violations, 1);
}

//! The client of the crate `reqwest`, limited as the guide shows, on connections to a server.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::Router;
use axum::routing::post;
use common::policy;
use http::{Request, Response};
use http_body_util::BodyExt;
use tokio::net::TcpListener;
use tower::{Service, ServiceBuilder, ServiceExt, service_fn};
use tower_ratelimit::{
    BoxError, ClientLimit, ClientLimitError, ClientLimitLayer, CopyRequest, Global, RateLimitLayer, RateLimiter,
};

/// Serves the app until the test ends. Returns its address.
async fn serve(app: Router) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}/", listener.local_addr().unwrap());
    tokio::spawn(async { axum::serve(listener, app).await });
    address
}

/// Returns the client of the guide.
fn limited<R: CopyRequest<String>>(
    limit: ClientLimitLayer<R>,
) -> ClientLimit<
    impl Service<Request<String>, Response = Response<reqwest::Body>, Error = BoxError, Future: Send>
    + Clone
    + Send
    + 'static,
    R,
> {
    // A proxy in the environment must not answer.
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    ServiceBuilder::new().layer(limit).service(service_fn(move |request: Request<String>| {
        let http = http.clone();
        async move { Ok::<_, BoxError>(Response::<reqwest::Body>::from(http.execute(request.try_into()?).await?)) }
    }))
}

fn to(address: &str, body: &str) -> Request<String> {
    Request::post(address).header("content-type", "text/plain").body(body.to_owned()).unwrap()
}

#[tokio::test]
async fn reqwest_sends_nothing_while_the_server_reports_that_nothing_remains() {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let bodies = Arc::clone(&seen);
    let echo = post(move |body: String| async move {
        bodies.lock().unwrap().push(body.clone());
        body
    });
    let limit = RateLimitLayer::new(policy("fixed-window 2/day"), Global::new());
    let address = serve(Router::new().route("/", echo).layer(limit)).await;
    let client = limited(ClientLimitLayer::new());
    for body in ["first", "second"] {
        let response = client.clone().oneshot(to(&address, body)).await.unwrap();
        assert_eq!(response.status(), 200);
        assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), body);
    }
    let error = client.clone().oneshot(to(&address, "third")).await.unwrap_err();
    let wait = error.downcast_ref::<ClientLimitError>().and_then(ClientLimitError::retry_after).unwrap();
    assert!(wait > Duration::from_secs(80_000), "{wait:?}");
    assert_eq!(*seen.lock().unwrap(), ["first", "second"]);
}

#[tokio::test]
async fn reqwest_waits_after_a_refusal_and_sends_the_request_again() {
    const WAIT: Duration = Duration::from_millis(200);
    let arrivals = Arc::new(Mutex::new(Vec::new()));
    let calls = Arc::clone(&arrivals);
    let refuse_once = post(move |body: String| async move {
        let mut calls = calls.lock().unwrap();
        calls.push((Instant::now(), body));
        if calls.len() == 1 { Err((http::StatusCode::TOO_MANY_REQUESTS, [("retry-after-ms", "200")])) } else { Ok("") }
    });
    let address = serve(Router::new().route("/", refuse_once)).await;
    let client = limited(ClientLimitLayer::new().retry_once(|request: &Request<String>| Some(request.clone())));
    assert_eq!(client.oneshot(to(&address, "again")).await.unwrap().status(), 200);
    let arrivals = arrivals.lock().unwrap();
    let [(first, _), (second, again)] = &arrivals[..] else { panic!("{arrivals:?}") };
    assert!(second.duration_since(*first) >= WAIT && again == "again", "{arrivals:?}");
}

#[tokio::test]
async fn reqwest_keeps_to_the_limit_of_the_client() {
    let arrivals = Arc::new(Mutex::new(0));
    let calls = Arc::clone(&arrivals);
    let count = post(move || async move { *calls.lock().unwrap() += 1 });
    let address = serve(Router::new().route("/", count)).await;
    let client = limited(ClientLimitLayer::new().limit(RateLimiter::new(policy("fixed-window 2/day"))));
    for _ in 0..2 {
        assert_eq!(client.clone().oneshot(to(&address, "")).await.unwrap().status(), 200);
    }
    let error = client.oneshot(to(&address, "")).await.unwrap_err();
    assert!(error.is::<ClientLimitError>(), "{error}");
    assert_eq!(*arrivals.lock().unwrap(), 2);
}

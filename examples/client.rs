//! Limits the requests of an HTTP client for each host, and keeps to the limits that servers report.
//!
//! `cargo run --example client --features client` starts a server that admits 3 requests per
//! second, and sends it 8 requests. The client's own limit is 10 requests per second and 2 at once.
//! So the first requests wait for the client's limit, and later ones for the server's.

use std::sync::Mutex;
use std::time::Duration;

use axum::Router;
use axum::routing::get;
use http::{Request, StatusCode, Uri};
use http_body_util::Empty;
use hyper::body::Bytes;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use tokio::net::TcpListener;
use tokio::time::Instant;
use tower::{ServiceBuilder, ServiceExt};
use tower_ratelimit::{
    BoxError, ClientLimit, ClientLimitLayer, CopyRequest, FixedWindow, Global, Policy, Quota, RateLimitLayer,
    RateLimiter,
};

type Body = Empty<Bytes>;
type LimitedClient<R> = ClientLimit<Client<HttpConnector, Body>, R>;

fn client(quota: Quota) -> LimitedClient<impl CopyRequest<Body>> {
    let limit = ClientLimitLayer::new()
        .limit(RateLimiter::new(quota))
        .max_wait(Duration::from_secs(10))
        // A response that arrives while others are on their way cannot prevent their refusal.
        .retry_once(|request: &Request<Body>| Some(request.clone()));
    ServiceBuilder::new().layer(limit).service(Client::builder(TokioExecutor::new()).build_http())
}

async fn send(client: &LimitedClient<impl CopyRequest<Body>>, uri: &Uri) -> Result<StatusCode, BoxError> {
    let request = Request::get(uri).body(Empty::new())?;
    Ok(client.clone().oneshot(request).await?.status())
}

/// Serves until the listener fails.
async fn server(listener: TcpListener) -> std::io::Result<()> {
    let policy = Policy::new(FixedWindow::new(), Quota::per_second(3)).with_name("server");
    let app = Router::new().route("/", get(|| async { "hello" })).layer(RateLimitLayer::new(policy, Global::new()));
    axum::serve(listener, app).await
}

/// Starts a server and sends it this many requests at once. Returns their results in the order in
/// which they end.
async fn app(requests: usize) -> Result<Vec<(Duration, StatusCode)>, BoxError> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let uri: Uri = format!("http://{}/", listener.local_addr()?).parse()?;
    tokio::spawn(server(listener));
    let client = client(Quota::per_second(10).burst(2));
    let begin = Instant::now();
    let ended = Mutex::new(Vec::new());
    let requests = (1..=requests).map(async |number| {
        let status = send(&client, &uri).await?;
        println!("request {number}: {status} after {} ms", begin.elapsed().as_millis());
        ended.lock().unwrap().push((begin.elapsed(), status));
        Ok::<_, BoxError>(())
    });
    futures_util::future::try_join_all(requests).await?;
    Ok(ended.into_inner().unwrap())
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), BoxError> {
    app(8).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use http::header::RETRY_AFTER;

    use super::*;

    #[tokio::test]
    async fn every_request_is_admitted_in_the_end() {
        let ended = app(5).await.unwrap();
        assert_eq!(ended.len(), 5);
        assert!(ended.iter().all(|(_, status)| *status == StatusCode::OK), "{ended:?}");
        // The client's own limit delays the third request, and the server's limit the fourth.
        assert!(ended[2].0 >= Duration::from_millis(99), "{ended:?}");
        assert!(ended[3].0 >= Duration::from_millis(999), "{ended:?}");
    }

    #[tokio::test]
    async fn later_requests_fail_without_a_call_during_a_long_retry_after() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let uri: Uri = format!("http://{}/", listener.local_addr().unwrap()).parse().unwrap();
        let calls = Arc::new(AtomicU32::new(0));
        let seen = Arc::clone(&calls);
        let refuse = get(move || async move {
            seen.fetch_add(1, Ordering::Relaxed);
            (StatusCode::TOO_MANY_REQUESTS, [(RETRY_AFTER, u64::MAX.to_string())])
        });
        tokio::spawn(async { axum::serve(listener, Router::new().route("/", refuse)).await });
        let client = client(Quota::per_second(10));
        assert_eq!(send(&client, &uri).await.unwrap(), StatusCode::TOO_MANY_REQUESTS);
        let error = send(&client, &uri).await.unwrap_err().to_string();
        assert!(error.ends_with("longer than the maximum 10s"), "{error}");
        assert_eq!(calls.load(Ordering::Relaxed), 1);
    }
}

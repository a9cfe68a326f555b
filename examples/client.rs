//! Limits the requests of an HTTP client for each host, and honours the server's `Retry-After`.
//!
//! `cargo run --example client --features client` starts a server that admits 3 requests per
//! second, and sends it 8 requests. The client's own limit is 10 requests per second and 2 at once.
//! So the first requests wait for the client's limit, and later ones for the server's.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::{Duration, SystemTime};

use axum::Router;
use axum::routing::get;
use http::header::RETRY_AFTER;
use http::{HeaderMap, Response, StatusCode, Uri};
use http_body_util::Empty;
use hyper::body::{Bytes, Incoming};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use tokio::net::TcpListener;
use tokio::time::{Instant, sleep_until};
use tower_ratelimit::{BoxError, Global, Key, Policy, Quota, RateLimitLayer, RateLimiter};

/// The maximum wait for the client's limit, and the maximum `Retry-After` that the client waits
/// for.
const MAX_WAIT: Duration = Duration::from_secs(10);
const MAX_ATTEMPTS: u32 = 5;

struct LimitedClient {
    http: Client<HttpConnector, Empty<Bytes>>,
    limiter: RateLimiter,
    /// The hosts that have asked the client to wait, and the ends of their pauses.
    paused: Mutex<HashMap<String, Instant>>,
}

impl LimitedClient {
    fn new(quota: Quota) -> Self {
        let http = Client::builder(TokioExecutor::new()).build_http();
        Self { http, limiter: RateLimiter::new(quota), paused: Mutex::default() }
    }

    /// Waits until the client's limit admits the request, and sends it. If the server refuses it
    /// with `Retry-After`, waits and sends it again, up to [`MAX_ATTEMPTS`] times in total.
    async fn get(&self, uri: &Uri) -> Result<Response<Incoming>, BoxError> {
        let host = uri.authority().ok_or("the URL has no host")?.as_str();
        for attempt in 1.. {
            if self.limiter.acquire(&Key::from(host), MAX_WAIT).await?.is_refused() {
                return Err(format!("too many requests to {host} wait already").into());
            }
            self.wait_for_pause(host).await;
            let response = self.http.get(uri.clone()).await?;
            let is_refused =
                [StatusCode::TOO_MANY_REQUESTS, StatusCode::SERVICE_UNAVAILABLE].contains(&response.status());
            let wait = retry_after(response.headers(), SystemTime::now()).filter(|wait| *wait <= MAX_WAIT);
            match wait.filter(|_| is_refused && attempt < MAX_ATTEMPTS) {
                Some(wait) => self.pause(host, wait),
                None => return Ok(response),
            }
        }
        unreachable!("the last attempt returns")
    }

    /// Pauses all requests to the host, because others would be refused too.
    fn pause(&self, host: &str, wait: Duration) {
        println!("{host} asks to wait for {wait:?}");
        let end = Instant::now() + wait;
        let mut paused = self.paused.lock().unwrap();
        let latest = paused.entry(host.to_owned()).or_insert(end);
        *latest = end.max(*latest);
    }

    async fn wait_for_pause(&self, host: &str) {
        // Another response may have extended the pause meanwhile.
        while let Some(end) = self.paused_until(host) {
            sleep_until(end).await;
        }
    }

    fn paused_until(&self, host: &str) -> Option<Instant> {
        let mut paused = self.paused.lock().unwrap();
        paused.retain(|_, end| *end > Instant::now());
        paused.get(host).copied()
    }
}

/// Reads `Retry-After`: seconds, or an HTTP date.
fn retry_after(headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    let value = headers.get(RETRY_AFTER)?.to_str().ok()?;
    match value.parse() {
        Ok(seconds) => Some(Duration::from_secs(seconds)),
        Err(_) => Some(httpdate::parse_http_date(value).ok()?.duration_since(now).unwrap_or_default()),
    }
}

/// Serves until the listener fails.
async fn server(listener: TcpListener) -> std::io::Result<()> {
    let policy = Policy::from(Quota::per_second(3)).with_name("server");
    let app = Router::new().route("/", get(|| async { "hello" })).layer(RateLimitLayer::new(policy, Global));
    axum::serve(listener, app).await
}

/// Starts a server and sends it this many requests at once. Returns their results in the order in
/// which they end.
async fn app(requests: usize) -> Result<Vec<(Duration, StatusCode)>, BoxError> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let uri: Uri = format!("http://{}/", listener.local_addr()?).parse()?;
    tokio::spawn(server(listener));
    let client = LimitedClient::new(Quota::per_second(10).burst(2));
    let begin = Instant::now();
    let ended = Mutex::new(Vec::new());
    let requests = (1..=requests).map(async |number| {
        let status = client.get(&uri).await?.status();
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

    #[test]
    fn retry_after_is_a_number_of_seconds_or_a_date() {
        let now = httpdate::parse_http_date("Sun, 06 Nov 1994 08:49:37 GMT").unwrap();
        for (value, expected) in [
            ("120", Some(120)),
            ("Sun, 06 Nov 1994 08:50:07 GMT", Some(30)),
            ("Sun, 06 Nov 1994 08:00:00 GMT", Some(0)),
            ("soon", None),
        ] {
            let headers = HeaderMap::from_iter([(RETRY_AFTER, value.parse().unwrap())]);
            assert_eq!(retry_after(&headers, now), expected.map(Duration::from_secs), "{value}");
        }
        assert_eq!(retry_after(&HeaderMap::new(), now), None);
    }
}

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
/// The maximum pause of a host, in case that its `Retry-After` is a mistake.
const MAX_PAUSE: Duration = Duration::from_secs(86_400);
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
        let host = host_and_port(uri)?;
        for attempt in 1.. {
            self.wait_for_turn(&host).await?;
            let response = self.http.get(uri.clone()).await?;
            let is_refused =
                [StatusCode::TOO_MANY_REQUESTS, StatusCode::SERVICE_UNAVAILABLE].contains(&response.status());
            let wait = retry_after(response.headers(), SystemTime::now()).filter(|_| is_refused);
            let Some(wait) = wait else { return Ok(response) };
            // Pauses the host after the last attempt too, because the pause is for all requests.
            self.pause(&host, wait);
            if attempt == MAX_ATTEMPTS {
                return Ok(response);
            }
        }
        unreachable!("the last attempt returns")
    }

    /// Pauses all requests to the host, because others would be refused too.
    fn pause(&self, host: &str, wait: Duration) {
        println!("{host} asks to wait for {wait:?}");
        let end = Instant::now() + wait.min(MAX_PAUSE);
        let mut paused = self.paused.lock().unwrap();
        let latest = paused.entry(host.to_owned()).or_insert(end);
        *latest = end.max(*latest);
    }

    /// Waits for the end of a pause, and then for the client's limit. A request that waited for the
    /// limit first could spend a unit long before it is sent.
    async fn wait_for_turn(&self, host: &str) -> Result<(), BoxError> {
        let key = Key::from(host);
        loop {
            // Another response may have extended the pause meanwhile.
            while let Some(end) = self.paused_until(host) {
                if end > Instant::now() + MAX_WAIT {
                    return Err(format!("{host} asks to wait for more than {MAX_WAIT:?}").into());
                }
                sleep_until(end).await;
            }
            let hit = self.limiter.acquire(&key, MAX_WAIT).await?;
            if hit.is_refused() {
                return Err(format!("too many requests to {host} wait already").into());
            }
            if self.paused_until(host).is_none() {
                return Ok(());
            }
            // A pause has begun meanwhile.
            hit.refund().await?;
        }
    }

    fn paused_until(&self, host: &str) -> Option<Instant> {
        let mut paused = self.paused.lock().unwrap();
        paused.retain(|_, end| *end > Instant::now());
        paused.get(host).copied()
    }
}

/// Returns the host and the port, without the user of the URL. Host names ignore case.
fn host_and_port(uri: &Uri) -> Result<String, BoxError> {
    let host = uri.host().ok_or("the URL has no host")?.to_ascii_lowercase();
    let default = if uri.scheme_str() == Some("https") { 443 } else { 80 };
    Ok(format!("{host}:{}", uri.port_u16().unwrap_or(default)))
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
    let app = Router::new().route("/", get(|| async { "hello" })).layer(RateLimitLayer::new(policy, Global::new()));
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
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

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
        let client = LimitedClient::new(Quota::per_second(10));
        for _ in 0..2 {
            let error = client.get(&uri).await.unwrap_err().to_string();
            assert!(error.ends_with("asks to wait for more than 10s"), "{error}");
        }
        assert_eq!(calls.load(Ordering::Relaxed), 1);
    }

    /// Otherwise the request would spend a unit long before it is sent.
    #[tokio::test]
    async fn pause_that_begins_during_the_wait_for_the_limit_delays_the_request() {
        let client = LimitedClient::new(Quota::per_second(5).burst(1));
        client.wait_for_turn("host").await.unwrap();
        let begin = Instant::now();
        let pause = async {
            tokio::time::sleep(Duration::from_millis(50)).await;
            client.pause("host", Duration::from_millis(700));
        };
        let (waited, ()) = tokio::join!(client.wait_for_turn("host"), pause);
        waited.unwrap();
        assert!(begin.elapsed() >= Duration::from_millis(750), "{:?}", begin.elapsed());
    }

    #[test]
    fn requests_to_one_host_and_port_have_one_key() {
        for (uri, key) in [
            ("http://alice:secret@API.example.com/", "api.example.com:80"),
            ("https://api.example.com/v1", "api.example.com:443"),
            ("http://api.example.com:8080/", "api.example.com:8080"),
        ] {
            assert_eq!(host_and_port(&uri.parse().unwrap()).unwrap(), key);
        }
        assert!(host_and_port(&Uri::from_static("/path")).is_err());
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

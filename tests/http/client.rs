//! Clients that keep to the limits of other servers. Tokio's time is paused.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{Inner, policy};
use http::{Request, Response, StatusCode};
use tokio::time::{Instant, sleep};
use tower::limit::ConcurrencyLimit;
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_ratelimit::storage::TokioClock;
use tower_ratelimit::{
    BoxError, ClientLimitError, ClientLimitLayer, CopyRequest, Global, GrpcRejection, Header, Headers, MemoryStorage,
    OnError, RateLimitLayer, RateLimiter,
};

use crate::log::log_of;

const SECOND: Duration = Duration::from_secs(1);

/// The tolerated lateness of timers. Each of tokio's timers is up to a millisecond late.
const LATE: Duration = Duration::from_millis(2);

fn response(status: u16, fields: &[(&'static str, &str)]) -> Response<String> {
    let mut response = Response::new(String::new());
    *response.status_mut() = StatusCode::from_u16(status).unwrap();
    for (name, value) in fields {
        response.headers_mut().append(*name, value.parse().unwrap());
    }
    response
}

/// A server that gives these responses, and then responds with 200. It keeps the times of the requests.
#[derive(Clone)]
struct Server {
    responses: Arc<Mutex<VecDeque<Response<String>>>>,
    started: Instant,
    times: Arc<Mutex<Vec<Duration>>>,
}

impl Server {
    fn new(responses: impl IntoIterator<Item = Response<String>>) -> Self {
        let responses = Arc::new(Mutex::new(responses.into_iter().collect()));
        Self { responses, started: Instant::now(), times: Arc::default() }
    }

    fn service(
        &self,
    ) -> impl Service<Request<()>, Response = Response<String>, Error = BoxError, Future: Send> + Clone + Send + use<>
    {
        let server = self.clone();
        service_fn(move |_: Request<()>| {
            server.times.lock().unwrap().push(server.started.elapsed());
            let next = server.responses.lock().unwrap().pop_front();
            async move { Ok::<_, BoxError>(next.unwrap_or_default()) }
        })
    }

    /// Returns the times at which requests arrived, in whole seconds.
    fn seconds(&self) -> Vec<u64> {
        self.times.lock().unwrap().iter().map(|time| (*time + SECOND / 2).as_secs()).collect()
    }
}

fn get(uri: &str) -> Request<()> {
    Request::get(uri).body(()).unwrap()
}

async fn send<R: CopyRequest<()>>(
    layer: &ClientLimitLayer<R>,
    server: &Server,
    request: Request<()>,
) -> Result<StatusCode, BoxError> {
    Ok(layer.layer(server.service()).oneshot(request).await?.status())
}

fn not_sent(error: &BoxError) -> &ClientLimitError {
    error.downcast_ref().unwrap()
}

const NOW: &str = "Fri, 04 Oct 2024 00:00:00 GMT";

/// An API, the page that documents its fields, the status and the fields of a response, and the seconds
/// for which the client does not send the next request. All responses have the `Date` [`NOW`], whose
/// seconds since the epoch are 1728000000.
type Recorded = (&'static str, &'static str, u16, &'static [(&'static str, &'static str)], u64);

const RECORDED: &[Recorded] = &[
    (
        "GitHub, primary limit",
        "Rate limits for the REST API",
        403,
        &[
            ("x-ratelimit-limit", "60"),
            ("x-ratelimit-remaining", "0"),
            ("x-ratelimit-used", "60"),
            ("x-ratelimit-reset", "1728000900"),
            ("x-ratelimit-resource", "core"),
        ],
        900,
    ),
    (
        "GitHub, secondary limit",
        "Rate limits for the REST API",
        429,
        &[
            ("retry-after", "60"),
            ("x-ratelimit-limit", "5000"),
            ("x-ratelimit-remaining", "4321"),
            ("x-ratelimit-reset", "1728003000"),
        ],
        60,
    ),
    ("Stripe", "Rate limits", 429, &[("stripe-rate-limited-reason", "global-rate")], 0),
    (
        "OpenAI, tokens",
        "Rate limits in headers",
        200,
        &[
            ("x-ratelimit-limit-requests", "60"),
            ("x-ratelimit-limit-tokens", "150000"),
            ("x-ratelimit-remaining-requests", "59"),
            ("x-ratelimit-remaining-tokens", "0"),
            ("x-ratelimit-reset-requests", "1s"),
            ("x-ratelimit-reset-tokens", "6m0s"),
        ],
        360,
    ),
    (
        "OpenAI, units remain",
        "Rate limits in headers",
        200,
        &[
            ("x-ratelimit-remaining-requests", "59"),
            ("x-ratelimit-remaining-tokens", "149984"),
            ("x-ratelimit-reset-requests", "1s"),
            ("x-ratelimit-reset-tokens", "6m0s"),
        ],
        0,
    ),
    (
        "Anthropic, requests",
        "Rate limits, response headers",
        200,
        &[
            ("anthropic-ratelimit-requests-limit", "50"),
            ("anthropic-ratelimit-requests-remaining", "0"),
            ("anthropic-ratelimit-requests-reset", "2024-10-04T00:00:42Z"),
            ("anthropic-ratelimit-tokens-remaining", "39000"),
            ("anthropic-ratelimit-tokens-reset", "2024-10-04T00:05:00Z"),
        ],
        42,
    ),
    (
        "Anthropic, refused",
        "Rate limits, response headers",
        429,
        &[
            ("retry-after", "17"),
            ("anthropic-ratelimit-requests-remaining", "0"),
            ("anthropic-ratelimit-requests-reset", "2024-10-04T00:00:42Z"),
        ],
        17,
    ),
    (
        "Discord",
        "Rate Limits, header format",
        200,
        &[
            ("x-ratelimit-limit", "5"),
            ("x-ratelimit-remaining", "0"),
            ("x-ratelimit-reset", "1728000060"),
            ("x-ratelimit-reset-after", "1.0"),
            ("x-ratelimit-bucket", "abcd1234"),
        ],
        1,
    ),
    ("Slack", "Rate limits", 429, &[("retry-after", "30")], 30),
    (
        "Shopify",
        "REST Admin API rate limits",
        429,
        &[("retry-after", "2.0"), ("x-shopify-shop-api-call-limit", "40/40")],
        2,
    ),
    (
        "X",
        "Rate limits",
        429,
        &[("x-rate-limit-limit", "15"), ("x-rate-limit-remaining", "0"), ("x-rate-limit-reset", "1728000600")],
        600,
    ),
    (
        "GitLab",
        "User and IP rate limits, response headers",
        429,
        &[
            ("ratelimit-limit", "60"),
            ("ratelimit-name", "throttle_authenticated_web"),
            ("ratelimit-observed", "67"),
            ("ratelimit-remaining", "0"),
            ("ratelimit-reset", "1728000060"),
            ("ratelimit-resettime", "Fri, 04 Oct 2024 00:01:00 GMT"),
            ("retry-after", "30"),
        ],
        30,
    ),
    (
        "Reddit",
        "Reddit Data API wiki",
        200,
        &[("x-ratelimit-used", "100"), ("x-ratelimit-remaining", "0.0"), ("x-ratelimit-reset", "583")],
        583,
    ),
    (
        "Okta",
        "Rate limits",
        429,
        &[("x-rate-limit-limit", "20"), ("x-rate-limit-remaining", "0"), ("x-rate-limit-reset", "1728000045")],
        45,
    ),
    (
        "Docker Hub",
        "Docker Hub usage and limits",
        429,
        &[("ratelimit-limit", "100;w=21600"), ("ratelimit-remaining", "0;w=21600")],
        0,
    ),
    (
        "a server with milliseconds",
        "none: the dialect of several libraries",
        200,
        &[("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "1728000009000")],
        9,
    ),
    (
        "a server with `Retry-After-Ms`",
        "none: the dialect of several libraries",
        429,
        &[("retry-after-ms", "4000"), ("retry-after", "30")],
        4,
    ),
    (
        "draft 6",
        "draft-ietf-httpapi-ratelimit-headers-06",
        200,
        &[("ratelimit-limit", "10"), ("ratelimit-remaining", "0"), ("ratelimit-reset", "50")],
        50,
    ),
    (
        "draft 7",
        "draft-ietf-httpapi-ratelimit-headers-07",
        200,
        &[("ratelimit", "limit=100, remaining=0, reset=50")],
        50,
    ),
    (
        "draft 11",
        "draft-ietf-httpapi-ratelimit-headers-11",
        200,
        &[
            ("ratelimit-policy", "\"burst\";q=100;w=60, \"day\";q=1000;w=86400"),
            ("ratelimit", "\"burst\";r=0;t=30, \"day\";r=5;t=900"),
        ],
        30,
    ),
];

#[tokio::test(start_paused = true)]
async fn answers_of_public_apis_pause_the_host() {
    for (api, source, status, fields, expected) in RECORDED {
        let server = Server::new([response(*status, &[&[("date", NOW)], *fields].concat())]);
        let layer = ClientLimitLayer::new().max_wait(SECOND * 1_000);
        assert_eq!(send(&layer, &server, get("http://api/")).await.unwrap(), *status);
        assert_eq!(send(&layer, &server, get("http://api/")).await.unwrap(), 200);
        assert_eq!(server.seconds(), [0, *expected], "{api} ({source})");
        // Another host is not paused.
        let layer = ClientLimitLayer::new();
        let server = Server::new([response(*status, &[&[("date", NOW)], *fields].concat())]);
        send(&layer, &server, get("http://api/")).await.unwrap();
        send(&layer, &server, get("http://other/")).await.unwrap();
        assert_eq!(server.seconds(), [0, 0], "{api} ({source})");
    }
}

/// The server's limit is ours, in every family of fields. No request is refused, because the client
/// waits as soon as nothing remains.
#[tokio::test(start_paused = true)]
async fn client_of_our_own_layer_is_never_refused() {
    for headers in [
        Headers::x_rate_limit().reset_in_seconds(),
        Headers::x_rate_limit().suffix("tokens").reset_in_seconds(),
        Headers::draft11(),
        Headers::draft6(),
    ] {
        for text in ["fixed-window 3/10s", "token-bucket 3/10s", "2/s; moving-window 3/10s"] {
            let (storage, inner) =
                (MemoryStorage::builder().clock(TokioClock::new()).build().unwrap(), Inner::default());
            let limit =
                RateLimitLayer::new(policy(text), Global::new()).storage(storage, OnError::Refuse).headers(headers);
            let client = ClientLimitLayer::new().layer(limit.layer(inner.clone()));
            for _ in 0..10 {
                assert_eq!(client.clone().oneshot(get("/")).await.unwrap().status(), 200, "{text} {headers}");
            }
            assert_eq!(inner.calls(), 10);
        }
    }
}

/// The pushback, the `RetryInfo` if the pushback forbids a retry, and the header field.
#[tokio::test(start_paused = true)]
async fn grpc_refusals_pause_the_channel_to_the_millisecond() {
    for max_pushback in [SECOND * 60, Duration::ZERO] {
        let storage = MemoryStorage::builder().clock(TokioClock::new()).build().unwrap();
        let limit = RateLimitLayer::new(policy("fixed-window 1/10s"), Global::new())
            .storage(storage, OnError::Refuse)
            .headers(Headers::none())
            .rejection(GrpcRejection::new().max_pushback(max_pushback));
        let inner = Inner::default();
        let client = ClientLimitLayer::new().layer(limit.layer(inner.clone()));
        let start = Instant::now();
        client.clone().oneshot(get("/pkg.Service/Call")).await.unwrap();
        sleep(Duration::from_millis(2_500)).await;
        let refused = client.clone().oneshot(get("/pkg.Service/Call")).await.unwrap();
        assert_eq!(refused.headers()["grpc-status"], "8");
        let admitted = client.oneshot(get("/pkg.Service/Call")).await.unwrap();
        assert!(!admitted.headers().contains_key("grpc-status"));
        assert_eq!(inner.calls(), 2);
        let waited = start.elapsed();
        assert!((SECOND * 10..=SECOND * 10 + 3 * LATE).contains(&waited), "{max_pushback:?}: {waited:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn request_that_would_wait_too_long_fails_at_once_and_is_not_sent() {
    let layer = ClientLimitLayer::new().max_wait(SECOND * 5);
    for (wait, expected) in [("6", 6), ("31536000", 86_400), ("99999999999999999999", 86_400)] {
        let server = Server::new([response(429, &[("retry-after", wait)])]);
        let uri = format!("http://{wait}/");
        send(&layer, &server, get(&uri)).await.unwrap();
        let error = send(&layer, &server, get(&uri)).await.unwrap_err();
        assert_eq!(not_sent(&error).retry_after(), Some(SECOND * expected), "{error}");
        assert_eq!(server.seconds(), [0]);
    }
    let own = RateLimiter::new(policy("fixed-window 1/minute"));
    let (layer, server) = (layer.limit(own), Server::new([]));
    send(&layer, &server, get("http://a/")).await.unwrap();
    let error = send(&layer, &server, get("http://a/")).await.unwrap_err();
    assert!(not_sent(&error).retry_after().unwrap() > SECOND * 50, "{error}");
    assert_eq!(server.seconds(), [0]);
}

#[tokio::test(start_paused = true)]
async fn number_of_waiting_requests_is_bounded() {
    let layer = ClientLimitLayer::new().max_waiting(2);
    let server = Server::new([response(429, &[("retry-after", "5")])]);
    send(&layer, &server, get("http://a/")).await.unwrap();
    let (first, second, third) = tokio::join!(
        send(&layer, &server, get("http://a/")),
        send(&layer, &server, get("http://a/")),
        send(&layer, &server, get("http://a/")),
    );
    assert!(first.is_ok() && second.is_ok());
    assert_eq!(third.unwrap_err().to_string(), "request not sent: 2 requests wait already");
    assert_eq!(server.seconds(), [0, 5, 5]);
    // The places are free again, and other hosts need none.
    send(&layer, &server, get("http://a/")).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn request_is_sent_once_more_after_a_429_that_states_a_wait() {
    let layer = ClientLimitLayer::new().retry_once(|request: &Request<()>| Some(request.clone()));
    let refused = || response(429, &[("retry-after", "3")]);
    let server = Server::new([refused(), response(200, &[])]);
    assert_eq!(send(&layer, &server, get("http://a/")).await.unwrap(), 200);
    assert_eq!(server.seconds(), [0, 3]);
    // Only once.
    let server = Server::new([refused(), refused(), refused()]);
    assert_eq!(send(&layer, &server, get("http://b/")).await.unwrap(), 429);
    assert_eq!(server.seconds(), [0, 3]);
    // Not after other responses, without a wait, or with one that is too long.
    for (host, first) in [
        ("c", response(503, &[("retry-after", "3")])),
        ("d", response(429, &[])),
        ("e", response(429, &[("retry-after", "31")])),
    ] {
        let (status, server) = (first.status(), Server::new([first]));
        assert_eq!(send(&layer, &server, get(&format!("http://{host}/"))).await.unwrap(), status);
        assert_eq!(server.seconds(), [0]);
    }
    // Not if the closure returns no copy.
    let layer = ClientLimitLayer::new().retry_once(|_: &Request<()>| None);
    let server = Server::new([refused()]);
    assert_eq!(send(&layer, &server, get("http://a/")).await.unwrap(), 429);
    assert_eq!(server.seconds(), [0]);
}

#[tokio::test(start_paused = true)]
async fn refusal_is_returned_if_its_retry_finds_no_place() {
    let layer = ClientLimitLayer::new().max_waiting(0).retry_once(|request: &Request<()>| Some(request.clone()));
    let server = Server::new([response(429, &[("retry-after", "3")])]);
    assert_eq!(send(&layer, &server, get("http://a/")).await.unwrap(), 429);
    assert_eq!(server.seconds(), [0]);
}

/// Guards against this defect: requests to a paused host hold all connections.
#[tokio::test(start_paused = true)]
async fn request_that_waits_holds_no_permit_of_the_inner_service() {
    let (layer, server) = (ClientLimitLayer::new(), Server::new([response(429, &[("retry-after", "9")])]));
    send(&layer, &server, get("http://a/")).await.unwrap();
    let client = layer.layer(ConcurrencyLimit::new(server.service(), 1));
    let other = async {
        sleep(SECOND).await;
        client.clone().oneshot(get("http://b/")).await
    };
    let (waited, other) = tokio::join!(client.clone().oneshot(get("http://a/")), other);
    assert!(waited.is_ok() && other.is_ok());
    assert_eq!(server.seconds(), [0, 1, 9]);
}

#[tokio::test(start_paused = true)]
async fn pause_that_begins_while_the_service_becomes_ready_delays_the_request() {
    let refused = |after| response(429, &[("retry-after", after)]);
    let (layer, server) = (ClientLimitLayer::new(), Server::new([refused("2"), refused("5")]));
    send(&layer, &server, get("http://a/")).await.unwrap();
    // Both wait for the pause, and then one of them for the permit of the other.
    let client = layer.layer(ConcurrencyLimit::new(server.service(), 1));
    let (first, second) =
        tokio::join!(client.clone().oneshot(get("http://a/")), client.clone().oneshot(get("http://a/")));
    let mut statuses = [first.unwrap().status(), second.unwrap().status()];
    statuses.sort();
    assert_eq!(statuses, [StatusCode::OK, StatusCode::TOO_MANY_REQUESTS]);
    assert_eq!(server.seconds(), [0, 2, 7]);
}

/// Otherwise the request would spend a unit long before it is sent.
#[tokio::test(start_paused = true)]
async fn pause_that_begins_during_the_wait_for_the_limit_delays_the_request() {
    let storage = MemoryStorage::builder().clock(TokioClock::new()).build().unwrap();
    let own = RateLimiter::with_storage(policy("token-bucket 1/4s"), storage);
    // A clone without a limit has the same state.
    let (unlimited, server) = (ClientLimitLayer::new(), Server::new([]));
    let layer = unlimited.clone().limit(own);
    send(&layer, &server, get("http://a/")).await.unwrap();
    let refusing = Server::new([response(429, &[("retry-after", "7")])]);
    let late = async {
        sleep(SECOND).await;
        send(&unlimited, &refusing, get("http://a/")).await
    };
    let (waited, late) = tokio::join!(send(&layer, &server, get("http://a/")), late);
    assert_eq!((waited.unwrap(), late.unwrap()), (StatusCode::OK, StatusCode::TOO_MANY_REQUESTS));
    assert_eq!(server.seconds(), [0, 8]);
}

#[tokio::test(start_paused = true)]
async fn keys_replace_the_host() {
    let layer = ClientLimitLayer::new().key(Header::new("authorization"));
    let server = Server::new([response(429, &[("retry-after", "5")])]);
    let with = |token| Request::get("http://a/").header("authorization", token).body(()).unwrap();
    send(&layer, &server, with("one")).await.unwrap();
    send(&layer, &server, with("two")).await.unwrap();
    send(&layer, &server, with("one")).await.unwrap();
    assert_eq!(server.seconds(), [0, 0, 5]);
    let error = send(&layer, &server, get("http://a/")).await.unwrap_err();
    assert_eq!(error.to_string(), "request not sent: it has no rate limit key");
}

#[test]
fn nonsense_is_ignored_and_logged_once_at_debug() {
    let lines = log_of(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let nonsense = || response(429, &[("retry-after", "soon"), ("ratelimit", "?")]);
            let (layer, server) = (ClientLimitLayer::new(), Server::new([nonsense(), nonsense()]));
            for _ in 0..3 {
                send(&layer, &server, get("http://a/")).await.unwrap();
            }
            assert_eq!(server.seconds(), [0, 0, 0]);
        });
    });
    let [line] = &lines[..] else { panic!("once: {lines:?}") };
    assert!(line.contains("DEBUG") && line.contains("retry-after"), "{line}");
}

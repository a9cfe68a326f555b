//! gRPC with tonic: a real server and a real client, over a socket.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use common::{failing, memory_with_manual_clock, policy, slow};
use http::Request;
use tokio::net::TcpListener;
use tonic::transport::server::{TcpConnectInfo, TcpIncoming};
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Code, Status};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;
use tonic_types::StatusExt;
use tower_ratelimit::extract::{Head, KeyError};
use tower_ratelimit::{
    Global, GrpcRejection, Header, Key, KeyExtractor, LocalLimiter, OnError, PeerIp, Quota, RateLimitLayer, Storage,
};

/// A client of tonic's health service behind this layer.
async fn client(layer: RateLimitLayer<GrpcRejection>) -> HealthClient<Channel> {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (_, health) = tonic_health::server::health_reporter();
    let server = Server::builder().layer(layer).add_service(health);
    tokio::spawn(server.serve_with_incoming(TcpIncoming::from(listener)));
    HealthClient::new(Endpoint::from_shared(format!("http://{address}")).unwrap().connect().await.unwrap())
}

fn question() -> HealthCheckRequest {
    HealthCheckRequest::default()
}

/// A number in a status's metadata.
fn number(status: &Status, name: &str) -> Option<u64> {
    status.metadata().get(name).map(|value| value.to_str().unwrap().parse().unwrap())
}

#[tokio::test]
async fn calls_beyond_the_limit_are_resource_exhausted_until_retry_after() {
    async fn check(storage: impl Storage, advance: impl Fn(Duration)) {
        let layer = RateLimitLayer::new(policy("fixed-window 2 per 10 seconds"), Global::new())
            .storage(storage, OnError::Refuse)
            .rejection(GrpcRejection::new());
        let mut health = client(layer).await;
        for left in ["1", "0"] {
            let answer = health.check(question()).await.unwrap();
            assert_eq!(answer.metadata().get("x-ratelimit-remaining").unwrap(), left);
        }
        let refused = health.check(question()).await.unwrap_err();
        assert_eq!((refused.code(), refused.message()), (Code::ResourceExhausted, "too many requests, retry in 10 s"));
        assert_eq!((number(&refused, "retry-after"), number(&refused, "x-ratelimit-limit")), (Some(10), Some(2)));
        assert_eq!(
            health.watch(question()).await.unwrap_err().code(),
            Code::ResourceExhausted,
            "a stream is refused too"
        );
        advance(Duration::from_secs(10));
        assert!(health.check(question()).await.is_ok(), "on the same connection");
    }
    let (storage, clock) = memory_with_manual_clock();
    check(storage, |wait| clock.advance(wait)).await;
    let (storage, clock) = memory_with_manual_clock();
    check(slow(storage), |wait| clock.advance(wait)).await;
}

#[tokio::test]
async fn calls_are_unavailable_when_the_storage_fails_closed() {
    let layer = RateLimitLayer::new(Quota::per_hour(1), Global::new()).rejection(GrpcRejection::new());
    let refused = client(layer.clone().storage(failing(), OnError::Refuse)).await.check(question()).await.unwrap_err();
    assert_eq!((refused.code(), number(&refused, "retry-after")), (Code::Unavailable, Some(1)));
    assert!(!format!("{refused:?}").contains("secret-host"), "{refused:?}");
    assert!(client(layer.storage(failing(), OnError::Admit)).await.check(question()).await.is_ok());
}

#[tokio::test]
async fn missing_key_is_answered_with_a_grpc_status_and_its_reason() {
    for (missing, expected) in [
        (KeyError::client("send the field é"), Code::InvalidArgument),
        (KeyError::unauthorized("send a token"), Code::Unauthenticated),
        (KeyError::server("no table"), Code::Internal),
    ] {
        let reason = missing.reason().to_owned();
        let key = move |_: &Head<'_>| -> Result<Key, _> { Err(missing.clone()) };
        let layer = RateLimitLayer::new(Quota::per_hour(1), key).rejection(GrpcRejection::new());
        let refused = client(layer).await.check(question()).await.unwrap_err();
        assert_eq!(refused.code(), expected);
        assert!(refused.message() == reason || expected == Code::Internal, "{refused:?}");
    }
}

/// The delay in the `RetryInfo` of a status.
fn retry_delay(status: &Status) -> Option<Duration> {
    status.get_details_retry_info().and_then(|info| info.retry_delay)
}

#[tokio::test]
async fn details_of_a_refusal_contain_the_wait_and_the_limits_that_refuse() {
    let (storage, clock) = memory_with_manual_clock();
    let policy = policy("fixed-window 2 per 10 seconds; fixed-window 100/hour; \"daily\" fixed-window 2/day");
    let layer = RateLimitLayer::new(policy.with_name("free"), Header::new("x-client"))
        .storage(storage, OnError::Refuse)
        .rejection(GrpcRejection::new());
    let mut health = client(layer).await;
    let question = || {
        let mut question = tonic::Request::new(question());
        question.metadata_mut().insert("x-client", "alice".parse().unwrap());
        question
    };
    for _ in 0..2 {
        health.check(question()).await.unwrap();
    }
    for (elapsed, violated) in [
        (
            Duration::from_micros(500),
            &[("free-1", "fixed-window 2/10 seconds"), ("daily", "\"daily\" fixed-window 2/day")][..],
        ),
        (Duration::from_secs(10), &[("daily", "\"daily\" fixed-window 2/day")]),
    ] {
        clock.advance(elapsed);
        let refused = health.check(question()).await.unwrap_err();
        let wait = retry_delay(&refused).unwrap();
        assert_eq!(wait.as_micros() % 1_000, 0, "rounded up to milliseconds");
        assert_eq!(wait.as_secs().div_ceil(3_600), 24, "a day, and not the bound of the pushback");
        assert_eq!(pushback(&refused), "-1");
        let violations = refused.get_details_quota_failure().unwrap().violations;
        let violations: Vec<_> =
            violations.iter().map(|one| (one.subject.as_str(), one.description.as_str())).collect();
        assert_eq!(violations, violated);
        let details = String::from_utf8_lossy(refused.details());
        assert!(!details.contains("alice") && details.contains(refused.message()), "{details}");
    }
}

#[tokio::test]
async fn client_that_obeys_retry_info_is_admitted() {
    let (storage, clock) = memory_with_manual_clock();
    let layer = RateLimitLayer::new(policy("token-bucket 3/second"), Global::new())
        .storage(storage, OnError::Refuse)
        .rejection(GrpcRejection::new());
    let mut health = client(layer).await;
    for _ in 0..3 {
        health.check(question()).await.unwrap();
    }
    let wait = retry_delay(&health.check(question()).await.unwrap_err()).unwrap();
    assert_eq!(wait, Duration::from_millis(334));
    clock.advance(Duration::from_millis(333));
    assert_eq!(retry_delay(&health.check(question()).await.unwrap_err()), Some(Duration::from_millis(1)));
    clock.advance(Duration::from_millis(1));
    assert!(health.check(question()).await.is_ok());
}

fn pushback(status: &Status) -> &str {
    status.metadata().get("grpc-retry-pushback-ms").unwrap().to_str().unwrap()
}

/// Clients with a retry policy sleep for the pushback. With a long one they would hang until their
/// deadline.
#[tokio::test]
async fn pushback_beyond_its_bound_is_never_and_the_retry_info_is_kept() {
    let (default, longer) = (GrpcRejection::new(), GrpcRejection::new().max_pushback(Duration::from_secs(61)));
    let never = GrpcRejection::default().max_pushback(Duration::ZERO);
    for (seconds, rejection, expected) in [
        (60, default, "60000"),
        (61, default, "-1"),
        (61, longer, "61000"),
        (62, longer, "-1"),
        (1, never, "-1"),
        (86_400, GrpcRejection::new().max_pushback(Duration::MAX), "86400000"),
    ] {
        let (storage, _clock) = memory_with_manual_clock();
        let layer = RateLimitLayer::new(policy(&format!("fixed-window 1 per {seconds} seconds")), Global::new())
            .storage(storage, OnError::Refuse)
            .rejection(rejection);
        let mut health = client(layer).await;
        health.check(question()).await.unwrap();
        let refused = health.check(question()).await.unwrap_err();
        assert_eq!(pushback(&refused), expected, "{seconds} s, {rejection:?}");
        assert_eq!(retry_delay(&refused), Some(Duration::from_secs(seconds)));
        assert_eq!(number(&refused, "retry-after"), Some(seconds));
    }
}

#[tokio::test]
async fn details_contain_no_retry_info_if_a_retry_cannot_succeed() {
    let layer = RateLimitLayer::new(policy("fixed-window 2/day"), Global::new()).cost(|_| 3);
    let refused = client(layer.rejection(GrpcRejection::new())).await.check(question()).await.unwrap_err();
    assert_eq!(refused.metadata().get("grpc-retry-pushback-ms").unwrap(), "-1");
    assert!(refused.get_details_retry_info().is_none() && refused.get_details_quota_failure().is_some());
}

#[tokio::test]
async fn details_of_a_storage_failure_contain_only_a_wait() {
    let layer = RateLimitLayer::new(Quota::per_hour(1), Global::new()).storage(failing(), OnError::Refuse);
    let refused = client(layer.rejection(GrpcRejection::new())).await.check(question()).await.unwrap_err();
    assert_eq!(retry_delay(&refused), Some(Duration::from_secs(1)));
    assert!(refused.get_details_quota_failure().is_none());
}

#[tokio::test]
async fn outer_layer_extends_the_retry_info_of_an_inner_refusal() {
    // The pushback of the first one is within its bound, and that of the second one is not.
    for inner in ["fixed-window 1/minute", "fixed-window 1/61 seconds"] {
        let (storage, _clock) = memory_with_manual_clock();
        let layer = |text: &str| {
            let layer = RateLimitLayer::new(policy(text), Global::new()).rejection(GrpcRejection::new());
            layer.storage(storage.clone(), OnError::Refuse)
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (_, health) = tonic_health::server::health_reporter();
        let mut layers = Server::builder().layer(layer("fixed-window 2/hour")).layer(layer(inner));
        tokio::spawn(layers.add_service(health).serve_with_incoming(TcpIncoming::from(listener)));
        let channel = Endpoint::from_shared(format!("http://{address}")).unwrap().connect().await.unwrap();
        let mut health = HealthClient::new(channel);
        health.check(question()).await.unwrap();
        let refused = health.check(question()).await.unwrap_err();
        assert_eq!(
            (number(&refused, "retry-after"), retry_delay(&refused)),
            (Some(3_600), Some(Duration::from_secs(3_600)))
        );
        let violations = refused.get_details_quota_failure().unwrap().violations;
        assert_eq!(violations.len(), 1, "the inner limit refused: {violations:?}");
        assert_eq!(violations[0].description, inner);
        assert_eq!(pushback(&refused), "-1");
    }
}

#[tokio::test]
async fn peer_ip_reads_the_address_that_tonic_attaches() {
    let limiter = LocalLimiter::new(Quota::per_hour(5));
    let mut health =
        client(RateLimitLayer::from_limiter(&limiter, PeerIp::new()).rejection(GrpcRejection::new())).await;
    for left in [4, 3] {
        health.check(question()).await.unwrap();
        assert_eq!(limiter.peek(&Key::from(Ipv4Addr::LOCALHOST)).remaining(), left);
    }
}

#[test]
fn tonics_connect_info_takes_precedence_over_a_plain_address() {
    let [by_tonic, plain] = ["1.2.3.4:5", "5.6.7.8:9"].map(|text| text.parse::<SocketAddr>().unwrap());
    let key = |remote_addr: Option<SocketAddr>, plain: Option<SocketAddr>| {
        let info = TcpConnectInfo { local_addr: Some("9.9.9.9:9".parse().unwrap()), remote_addr };
        let mut request = Request::get("/").extension(info).body(()).unwrap();
        if let Some(plain) = plain {
            request.extensions_mut().insert(plain);
        }
        PeerIp::new().extract(&Head::from_request(&request))
    };
    assert_eq!(key(Some(by_tonic), Some(plain)), Ok(Some(by_tonic.ip().into())));
    assert_eq!(key(None, Some(plain)), Ok(Some(plain.ip().into())));
    let missing = key(None, None).unwrap_err();
    assert!(!missing.is_clients_fault() && missing.reason().contains("with tonic, serve over TCP"), "{missing}");
}

//! With tonic: a real server and a real client, over a socket.

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
use tower_ratelimit::extract::{Head, KeyError};
use tower_ratelimit::{
    Global, GrpcRejection, Key, KeyExtractor, OnError, PeerIp, Quota, RateLimitLayer, RateLimiter, Storage,
};

/// A client of tonic's health service behind this layer.
async fn client<St: Storage>(layer: RateLimitLayer<St, GrpcRejection>) -> HealthClient<Channel> {
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
    async fn check<St: Storage>(storage: St, advance: impl Fn(Duration)) {
        let layer = RateLimitLayer::new(policy("fixed-window 2 per 10 seconds"), Global)
            .storage(storage, OnError::Refuse)
            .rejection(GrpcRejection);
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
    let layer = RateLimitLayer::new(Quota::per_hour(1), Global).rejection(GrpcRejection);
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
        let layer = RateLimitLayer::new(Quota::per_hour(1), key).rejection(GrpcRejection);
        let refused = client(layer).await.check(question()).await.unwrap_err();
        assert_eq!(refused.code(), expected);
        assert!(refused.message() == reason || expected == Code::Internal, "{refused:?}");
    }
}

#[tokio::test]
async fn peer_ip_reads_the_address_that_tonic_attaches() {
    let limiter = RateLimiter::new(Quota::per_hour(5));
    let mut health = client(RateLimitLayer::from_limiter(&limiter, PeerIp::new()).rejection(GrpcRejection)).await;
    for left in [4, 3] {
        health.check(question()).await.unwrap();
        assert_eq!(limiter.peek(&Key::from(Ipv4Addr::LOCALHOST)).await.unwrap().remaining(), left);
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
        PeerIp::new().extract(&Head::of(&request))
    };
    assert_eq!(key(Some(by_tonic), Some(plain)), Ok(Some(by_tonic.ip().into())));
    assert_eq!(key(None, Some(plain)), Ok(Some(plain.ip().into())));
    let missing = key(None, None).unwrap_err();
    assert!(!missing.is_clients_fault() && missing.reason().contains("with tonic, serve over TCP"), "{missing}");
}

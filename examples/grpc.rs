//! One limit for two servers: gRPC calls and HTTP requests of a client count together.

use std::io;
use std::net::SocketAddr;

use axum::Router;
use axum::routing::get;
use tokio::net::TcpListener;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tower_ratelimit::{GrpcRejection, LocalLimiter, PeerIp, ProblemRejection, Quota, RateLimitLayer};

/// Serves gRPC until the listener fails. A refused call ends with `RESOURCE_EXHAUSTED`.
async fn grpc(listener: TcpListener, limiter: &LocalLimiter) -> io::Result<()> {
    let limit = RateLimitLayer::from_limiter(limiter, PeerIp::new()).rejection(GrpcRejection::new());
    let (_, health) = tonic_health::server::health_reporter();
    let server = Server::builder().layer(limit).add_service(health);
    server.serve_with_incoming(TcpIncoming::from(listener)).await.map_err(io::Error::other)
}

/// Serves HTTP until the listener fails. A refused request gets a 429 with a problem in JSON.
async fn http(listener: TcpListener, limiter: &LocalLimiter) -> io::Result<()> {
    let limit = RateLimitLayer::from_limiter(limiter, PeerIp::new()).rejection(ProblemRejection::new());
    let app = Router::new().route("/", get(|| async { "hello\n" })).layer(limit);
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await
}

#[tokio::main]
async fn main() -> io::Result<()> {
    let limiter = LocalLimiter::new(Quota::per_minute(10));
    let (calls, requests) = (TcpListener::bind("127.0.0.1:50051").await?, TcpListener::bind("127.0.0.1:3000").await?);
    tokio::try_join!(grpc(calls, &limiter), http(requests, &limiter))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;
    use tonic::Code;
    use tonic::transport::{Channel, Endpoint, Error};
    use tonic_health::pb::HealthCheckRequest;
    use tonic_health::pb::health_client::HealthClient;
    use tower::ServiceBuilder;
    use tower_ratelimit::{ClientLimit, ClientLimitLayer};

    use super::*;

    /// Connects a client that keeps to the limits that the server reports.
    async fn connect(address: String) -> Result<HealthClient<ClientLimit<Channel>>, Error> {
        let channel = Endpoint::from_shared(address)?.connect().await?;
        let limited = ServiceBuilder::new().layer(ClientLimitLayer::new()).service(channel);
        Ok(HealthClient::new(limited))
    }

    async fn ask(address: SocketAddr) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    #[tokio::test]
    async fn calls_and_requests_of_one_peer_count_together() {
        let limiter = LocalLimiter::new(Quota::per_hour(3));
        let calls = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let requests = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (grpc_at, http_at) = (calls.local_addr().unwrap(), requests.local_addr().unwrap());
        tokio::spawn(async move { tokio::try_join!(grpc(calls, &limiter), http(requests, &limiter)) });
        let channel = Endpoint::from_shared(format!("http://{grpc_at}")).unwrap().connect().await.unwrap();
        let mut health = HealthClient::new(channel);
        let mut call = async || health.check(HealthCheckRequest::default()).await;

        assert_eq!(call().await.unwrap().metadata().get("x-ratelimit-remaining").unwrap(), "2");
        let admitted = ask(http_at).await;
        assert!(
            admitted.starts_with("HTTP/1.1 200") && admitted.contains("x-ratelimit-remaining: 1\r\n"),
            "{admitted}"
        );
        assert_eq!(call().await.unwrap().metadata().get("x-ratelimit-remaining").unwrap(), "0");

        let refused = ask(http_at).await;
        assert!(refused.starts_with("HTTP/1.1 429") && refused.contains("#quota-exceeded"), "{refused}");
        assert_eq!(call().await.unwrap_err().code(), Code::ResourceExhausted);

        // A client with the layer sends no second call before the end of the pushback.
        let mut health = connect(format!("http://{grpc_at}")).await.unwrap();
        let mut call = async || health.check(HealthCheckRequest::default()).await.unwrap_err();
        assert_eq!(call().await.code(), Code::ResourceExhausted);
        let error = call().await.to_string();
        assert!(error.contains("request not sent: the server asks to wait"), "{error}");
    }
}

//! Server streams over HTTP/2, with tonic's server and client, over a socket.

use std::net::SocketAddr;

use common::time::eventually;
use tokio::net::TcpListener;
use tonic::Code;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Channel, Endpoint, Server};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;
use tower_ratelimit::{Global, GrpcRejection, InFlightLayer};

/// A client of tonic's health service behind this layer.
async fn client(layer: InFlightLayer<GrpcRejection>) -> HealthClient<Channel> {
    let listener = TcpListener::bind(SocketAddr::from(([127, 0, 0, 1], 0))).await.unwrap();
    let address = listener.local_addr().unwrap();
    let (_, health) = tonic_health::server::health_reporter();
    let server = Server::builder().layer(layer).add_service(health);
    tokio::spawn(server.serve_with_incoming(TcpIncoming::from(listener)));
    HealthClient::new(Endpoint::from_shared(format!("http://{address}")).unwrap().connect().await.unwrap())
}

fn question() -> HealthCheckRequest {
    HealthCheckRequest::default()
}

#[tokio::test]
async fn server_stream_holds_its_slot_until_the_client_resets_it() {
    let layer = InFlightLayer::new(2, Global::new()).rejection(GrpcRejection::new());
    let mut health = client(layer.clone()).await;
    for _ in 0..50 {
        let mut streams = Vec::new();
        for _ in 0..2 {
            let mut stream = health.watch(question()).await.unwrap().into_inner();
            assert!(stream.message().await.unwrap().is_some());
            streams.push(stream);
        }
        assert_eq!(layer.in_use(), 2);
        let refused = health.check(question()).await.unwrap_err();
        assert_eq!(refused.code(), Code::Unavailable);
        assert_eq!(refused.message(), "too many requests in flight, retry in 1 s");
        // Dropping a stream of the client sends a reset.
        drop(streams);
        eventually("all slots are given back", async || layer.in_use() == 0).await;
    }
    // A unary call ends with its trailers.
    assert!(health.check(question()).await.is_ok());
    eventually("the slot is given back", async || layer.in_use() == 0).await;
}

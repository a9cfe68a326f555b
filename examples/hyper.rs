//! Without axum: a tower service on a hyper server, limited by the peer's address.

use std::convert::Infallible;
use std::net::SocketAddr;

use http::{Request, Response};
use http_body_util::Full;
use hyper::body::Bytes;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tower::{ServiceBuilder, service_fn};
use tower_ratelimit::{PeerIp, Quota, RateLimitLayer};

/// Serves until the listener fails.
async fn app(listener: TcpListener) -> std::io::Result<()> {
    // All connections share one layer, because the layer holds the counts.
    let limit = RateLimitLayer::new(Quota::per_minute(3), PeerIp::new());
    loop {
        let (stream, peer) = listener.accept().await?;
        let service = ServiceBuilder::new()
            .map_request(move |request| with_peer(request, peer))
            .layer(limit.clone())
            .service(service_fn(|_| async { Ok::<_, Infallible>(Response::new(Full::new(Bytes::from("hello")))) }));
        tokio::spawn(async move {
            let connection = hyper::server::conn::http1::Builder::new();
            if let Err(error) =
                connection.serve_connection(TokioIo::new(stream), TowerToHyperService::new(service)).await
            {
                eprintln!("{peer}: {error}");
            }
        });
    }
}

/// Inserts the address of the connection, which `PeerIp` reads.
fn with_peer<B>(mut request: Request<B>, peer: SocketAddr) -> Request<B> {
    request.extensions_mut().insert(peer);
    request
}

#[tokio::main]
async fn main() -> std::io::Result<()> {
    app(TcpListener::bind("127.0.0.1:3000").await?).await
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;

    use super::*;

    #[tokio::test]
    async fn connections_of_one_peer_share_its_limit() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(app(listener));
        let mut answers = Vec::new();
        for _ in 0..4 {
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream.write_all(b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").await.unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).await.unwrap();
            answers.push(answer);
        }
        for (left, answer) in (0..3).rev().zip(&answers) {
            assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
            assert!(answer.contains(&format!("x-ratelimit-remaining: {left}\r\n")), "{answer}");
        }
        assert!(answers[3].starts_with("HTTP/1.1 429") && answers[3].contains("\r\nretry-after: "), "{}", answers[3]);
    }
}

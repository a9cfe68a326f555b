//! Streams over sockets, while hyper shuts down gracefully.

use std::convert::Infallible;

use axum::Router;
use axum::body::Body;
use axum::routing::get;
use common::time::eventually;
use futures_util::stream::unfold;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{oneshot, watch};
use tower_ratelimit::{Global, InFlightLayer};

/// Reads from a stream until it has sent this text.
async fn read_until(stream: &mut TcpStream, text: &str) {
    let mut answer = String::new();
    while !answer.contains(text) {
        let mut buffer = [0; 1_024];
        let read = stream.read(&mut buffer).await.unwrap();
        assert!(read > 0, "{answer}");
        answer.push_str(std::str::from_utf8(&buffer[..read]).unwrap());
    }
}

#[tokio::test]
async fn graceful_shutdown_ends_with_no_slot_in_use() {
    let layer = InFlightLayer::new(4, Global::new());
    let (end, ended) = watch::channel(());
    // A stream of two chunks, with the second one when the test says so.
    let stream = async move || {
        Body::from_stream(unfold((0, ended), async |(chunks, mut ended)| match chunks {
            0 => Some((Ok::<_, Infallible>("first"), (1, ended))),
            1 => {
                let _ = ended.changed().await;
                Some((Ok("last"), (2, ended)))
            }
            _ => None,
        }))
    };
    let app: Router = Router::new().route("/", get(stream)).layer(layer.clone());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (stop, stopped) = oneshot::channel::<()>();
    let server = axum::serve(listener, app).with_graceful_shutdown(async { drop(stopped.await) });
    let server = tokio::spawn(async move { server.await });
    let mut streams = Vec::new();
    for _ in 0..4 {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n").await.unwrap();
        read_until(&mut stream, "first").await;
        streams.push(stream);
    }
    assert_eq!(layer.in_use(), 4);
    stop.send(()).unwrap();
    // A client disconnects while the server waits for its streams.
    streams.pop();
    eventually("its slot is given back", async || layer.in_use() == 3).await;
    assert!(!server.is_finished());
    end.send(()).unwrap();
    for stream in &mut streams {
        read_until(stream, "last").await;
    }
    server.await.unwrap().unwrap();
    assert_eq!(layer.in_use(), 0);
}

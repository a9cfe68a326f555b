//! Tunnels: an HTTP/1 connection that `CONNECT` has upgraded keeps its slot.

use std::future::poll_fn;
use std::net::SocketAddr;
use std::pin::Pin;

use axum::Router;
use axum::extract::Request;
use common::time::eventually;
use http::StatusCode;
use hyper::rt::{Read, ReadBuf, Write};
use hyper::upgrade::Upgraded;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tower_ratelimit::{Global, InFlightLayer, Permit};

/// Answers each byte with itself. The byte `!` drops the permit. Ends when the client disconnects.
async fn echo(mut tunnel: Upgraded, permit: Permit) {
    let mut permit = Some(permit);
    loop {
        let mut buffer = [0; 1];
        let mut read = ReadBuf::new(&mut buffer);
        let polled = poll_fn(|cx| Pin::new(&mut tunnel).poll_read(cx, read.unfilled())).await;
        if polled.is_err() || read.filled().is_empty() {
            return drop(permit);
        }
        if buffer == *b"!" {
            permit = None;
        }
        poll_fn(|cx| Pin::new(&mut tunnel).poll_write(cx, &buffer)).await.unwrap();
        poll_fn(|cx| Pin::new(&mut tunnel).poll_flush(cx)).await.unwrap();
    }
}

async fn connect(permit: Permit, mut request: Request) -> StatusCode {
    let upgrade = hyper::upgrade::on(&mut request);
    tokio::spawn(async move { echo(upgrade.await.unwrap(), permit).await });
    StatusCode::OK
}

/// Sends a `CONNECT` request. Returns the connection and the head of the response.
async fn open(address: SocketAddr) -> (TcpStream, String) {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(b"CONNECT host.test:443 HTTP/1.1\r\nhost: host.test:443\r\n\r\n").await.unwrap();
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.unwrap());
    }
    (stream, String::from_utf8(head).unwrap())
}

async fn assert_echoes(tunnel: &mut TcpStream, byte: u8) {
    tunnel.write_u8(byte).await.unwrap();
    assert_eq!(tunnel.read_u8().await.unwrap(), byte);
}

#[tokio::test]
async fn tunnel_keeps_its_slot_as_long_as_the_permit_is_held() {
    let layer = InFlightLayer::new(2, Global::new());
    let app: Router = Router::new().fallback(connect).layer(layer.clone());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let server = tokio::spawn(async move { axum::serve(listener, app).await });
    let mut tunnels = Vec::new();
    for _ in 0..2 {
        let (mut tunnel, head) = open(address).await;
        assert!(head.starts_with("HTTP/1.1 200"), "{head}");
        assert_echoes(&mut tunnel, b'x').await;
        tunnels.push(tunnel);
    }
    assert_eq!(layer.in_use(), 2);
    let (_, head) = open(address).await;
    assert!(head.starts_with("HTTP/1.1 503"), "all slots are in use: {head}");
    for tunnel in &mut tunnels {
        assert_echoes(tunnel, b'x').await;
    }
    // The tunnel goes on without its permit.
    assert_echoes(&mut tunnels[0], b'!').await;
    assert_eq!(layer.in_use(), 1);
    assert_echoes(&mut tunnels[0], b'x').await;
    let (mut third, head) = open(address).await;
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    assert_echoes(&mut third, b'x').await;
    assert_eq!(layer.in_use(), 2);
    drop((tunnels, third));
    eventually("the clients have left", async || layer.in_use() == 0).await;
    server.abort();
}

//! Streams of events and web sockets, at most two of each client at once.
//!
//! Run `cargo run --example streams --features websocket`, and then this command three times at once.
//! The third one gets a 429. When one of the others is stopped, it gets a stream:
//!
//! `curl -iN localhost:3000/events`

use std::convert::Infallible;
use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use axum::extract::ws::{Message, WebSocket, WebSocketUpgrade};
use axum::response::Response;
use axum::response::sse::{Event, Sse};
use axum::routing::get;
use futures_util::stream::{Stream, unfold};
use tower_ratelimit::{InFlightLayer, PeerIp, Permit};

fn app(limit: InFlightLayer) -> Router {
    Router::new().route("/events", get(events)).route("/socket", get(socket)).layer(limit)
}

/// Sends a number each 100 ms. The body of the response holds the slot until the client disconnects.
async fn events() -> Sse<impl Stream<Item = Result<Event, Infallible>>> {
    Sse::new(unfold(0, |number| async move {
        tokio::time::sleep(Duration::from_millis(100)).await;
        Some((Ok(Event::default().data(number.to_string())), number + 1))
    }))
}

/// Returns the texts of the client. The response ends with its head, so the permit holds the slot.
async fn socket(permit: Permit, upgrade: WebSocketUpgrade) -> Response {
    upgrade.on_upgrade(async |mut socket: WebSocket| {
        while let Some(Ok(Message::Text(text))) = socket.recv().await {
            if socket.send(Message::Text(text)).await.is_err() {
                break;
            }
        }
        drop(permit);
    })
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    let app = app(InFlightLayer::new(2, PeerIp::new()));
    // Attaches the peer's address to each request, which `PeerIp` reads.
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use futures_util::{SinkExt, StreamExt};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};
    use tokio_tungstenite::{connect_async, tungstenite};

    use super::*;

    async fn start() -> (InFlightLayer, SocketAddr) {
        let limit = InFlightLayer::new(2, PeerIp::new());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let app = app(limit.clone()).into_make_service_with_connect_info::<SocketAddr>();
        tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        (limit, address)
    }

    /// Opens a stream of events, and returns it with its status when the first event has arrived.
    async fn events_of(address: SocketAddr) -> (TcpStream, String) {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(b"GET /events HTTP/1.1\r\nhost: localhost\r\n\r\n").await.unwrap();
        let mut answer = String::new();
        while !(answer.contains("data: 0") || answer.contains("in flight")) {
            let mut buffer = [0; 1_024];
            let read = stream.read(&mut buffer).await.unwrap();
            answer.push_str(std::str::from_utf8(&buffer[..read]).unwrap());
        }
        (stream, answer["HTTP/1.1 ".len()..][..3].to_owned())
    }

    async fn all_slots_are_free(limit: &InFlightLayer) {
        while limit.in_use() > 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    #[tokio::test]
    async fn stream_holds_its_slot_until_the_client_disconnects() {
        let (limit, address) = start().await;
        let streams = [events_of(address).await, events_of(address).await];
        assert!(streams.iter().all(|(_, status)| status == "200"));
        assert_eq!(limit.in_use(), 2);
        assert_eq!(events_of(address).await.1, "429");
        drop(streams);
        all_slots_are_free(&limit).await;
        assert_eq!(events_of(address).await.1, "200");
    }

    #[tokio::test]
    async fn websocket_holds_its_slot_until_it_is_closed() {
        let (limit, address) = start().await;
        let url = format!("ws://{address}/socket");
        let (mut one, _) = connect_async(&url).await.unwrap();
        let (two, _) = connect_async(&url).await.unwrap();
        for number in 0..20 {
            let text = tungstenite::Message::text(number.to_string());
            one.send(text.clone()).await.unwrap();
            assert_eq!(one.next().await.unwrap().unwrap(), text);
            assert_eq!(limit.in_use(), 2);
        }
        let tungstenite::Error::Http(refused) = connect_async(&url).await.unwrap_err() else { panic!("not refused") };
        assert_eq!((refused.status().as_u16(), &refused.headers()["retry-after"]), (429, &"1".parse().unwrap()));
        one.close(None).await.unwrap();
        // The other connection is lost without a closing handshake.
        drop(two);
        all_slots_are_free(&limit).await;
        assert!(connect_async(&url).await.is_ok());
    }
}

//! Limits the messages of web sockets to five per minute for each user, on all of its connections.
//!
//! A user that sends more gets a text, and then its connection is closed with the code 1008. The reason
//! contains the time to wait.
//!
//! Run `cargo run --example websocket --features websocket`, and connect with a client:
//!
//! `websocat -H 'x-api-key: key-of-alice' ws://localhost:3000/chat`

use std::time::Duration;

use axum::Router;
use axum::extract::Request;
use axum::extract::ws::{CloseFrame, Message, WebSocket, WebSocketUpgrade, close_code};
use axum::http::{HeaderValue, StatusCode};
use axum::middleware::{Next, from_fn};
use axum::response::Response;
use axum::routing::get;
use tower_ratelimit::extract::Extension;
use tower_ratelimit::{FixedWindow, Key, Meter, OnError, Policy, Quota, RateLimitLayer, Storage};

/// An authenticated user.
#[derive(Clone)]
struct User {
    id: u64,
}

/// Looks up the user of an API key. A real server has a database.
async fn authenticate(mut request: Request, next: Next) -> Result<Response, StatusCode> {
    let id = match request.headers().get("x-api-key").map(HeaderValue::as_bytes) {
        Some(b"key-of-alice") => 1,
        Some(b"key-of-bob") => 2,
        _ => return Err(StatusCode::UNAUTHORIZED),
    };
    request.extensions_mut().insert(User { id });
    Ok(next.run(request).await)
}

fn app(storage: impl Storage) -> Router {
    let messages = Policy::named("messages").limit(FixedWindow::new(), Quota::per_minute(5));
    let limit = RateLimitLayer::new(messages, Extension::new(|user: &User| Key::from(user.id)))
        .storage(storage, OnError::Refuse)
        // The request that opens a connection costs nothing. Its messages do.
        .cost(|_| 0)
        .meter();
    Router::new().route("/chat", get(chat)).layer(limit).layer(from_fn(authenticate))
}

/// Returns the texts of the user. The meter outlives the response, which ends with its head.
async fn chat(meter: Meter, upgrade: WebSocketUpgrade) -> Response {
    upgrade.on_upgrade(async move |mut socket: WebSocket| {
        while let Some(Ok(message)) = socket.recv().await {
            let Message::Text(text) = message else { continue };
            let (code, reason) = match meter.hit(1).await {
                Ok(hit) if hit.is_admitted() => {
                    if socket.send(Message::Text(text)).await.is_err() {
                        return;
                    }
                    continue;
                }
                Ok(refusal) => (close_code::POLICY, retry_in(refusal.retry_after())),
                Err(_) => (close_code::AGAIN, "try again later".to_owned()),
            };
            // The client may have left.
            let _ = socket.send(Message::text(format!("message dropped, {reason}"))).await;
            let _ = socket.send(Message::Close(Some(CloseFrame { code, reason: reason.into() }))).await;
            return;
        }
    })
}

/// Returns the time to wait in whole seconds, rounded up.
fn retry_in(wait: Option<Duration>) -> String {
    let seconds = wait.unwrap_or_default().as_micros().div_ceil(1_000_000);
    format!("retry in {seconds} s")
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    axum::serve(listener, app(tower_ratelimit::MemoryStorage::new())).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use futures_util::{SinkExt, StreamExt};
    use tokio::net::{TcpListener, TcpStream};
    use tokio_tungstenite::tungstenite::client::IntoClientRequest;
    use tokio_tungstenite::tungstenite::{Error, Message};
    use tokio_tungstenite::{MaybeTlsStream, WebSocketStream, connect_async};
    use tower_ratelimit::MemoryStorage;
    use tower_ratelimit::storage::{ManualClock, StorageError, StorageErrorKind, StorageFuture, StorageRequest};
    use tower_ratelimit::{Decision, Op};

    use super::*;

    type Client = WebSocketStream<MaybeTlsStream<TcpStream>>;

    async fn start(storage: impl Storage) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move { axum::serve(listener, app(storage)).await.unwrap() });
        address
    }

    async fn connect(address: SocketAddr, user: &str) -> Result<Client, Error> {
        let mut request = format!("ws://{address}/chat").into_client_request().unwrap();
        request.headers_mut().insert("x-api-key", format!("key-of-{user}").parse().unwrap());
        Ok(connect_async(request).await?.0)
    }

    /// Sends texts, each of which comes back.
    async fn chat(client: &mut Client, texts: u32) {
        for number in 0..texts {
            let text = Message::text(number.to_string());
            client.send(text.clone()).await.unwrap();
            assert_eq!(client.next().await.unwrap().unwrap(), text);
        }
    }

    /// Sends a text, and returns the answer, and the code and the reason of the close after it.
    async fn last_text(client: &mut Client) -> (String, u16, String) {
        client.send(Message::text("one more")).await.unwrap();
        let answer = client.next().await.unwrap().unwrap().into_text().unwrap().to_string();
        let Message::Close(Some(close)) = client.next().await.unwrap().unwrap() else { panic!("not closed") };
        (answer, close.code.into(), close.reason.to_string())
    }

    #[tokio::test]
    async fn connections_of_a_user_share_the_messages_and_are_closed_with_the_wait() {
        let clock = ManualClock::default();
        let address = start(MemoryStorage::builder().clock(clock.clone()).build().unwrap()).await;
        let [mut one, mut two] = [connect(address, "alice").await.unwrap(), connect(address, "alice").await.unwrap()];
        chat(&mut one, 3).await;
        clock.advance(Duration::from_millis(17_500));
        chat(&mut two, 2).await;
        for client in [&mut one, &mut two] {
            let refused = ("message dropped, retry in 43 s".to_owned(), 1008, "retry in 43 s".to_owned());
            assert_eq!(last_text(client).await, refused);
        }
        // Other users are not affected, and a new connection of the same user is.
        chat(&mut connect(address, "bob").await.unwrap(), 5).await;
        assert_eq!(last_text(&mut connect(address, "alice").await.unwrap()).await.1, 1008);
        clock.advance(Duration::from_millis(42_500));
        chat(&mut connect(address, "alice").await.unwrap(), 5).await;
    }

    #[tokio::test]
    async fn connections_without_a_user_are_refused() {
        let address = start(MemoryStorage::new()).await;
        let Error::Http(refused) = connect(address, "nobody").await.unwrap_err() else { panic!("not refused") };
        assert_eq!(refused.status(), 401);
    }

    /// A storage on which peeks work and hits fail.
    #[derive(Debug)]
    struct OnlyReads(MemoryStorage);

    impl Storage for OnlyReads {
        fn decide(&self, request: StorageRequest<'_>) -> StorageFuture<Decision> {
            if request.op == Op::Peek {
                return self.0.decide(request);
            }
            StorageFuture::ready(Err(StorageError::new(StorageErrorKind::Other, "read-only")))
        }

        fn clear(&self, policy: &Policy, key: &Key) -> StorageFuture<()> {
            self.0.clear(policy, key)
        }

        fn settle(&self, policy: &Policy, key: &Key, decision: &Decision, actual: u32) -> StorageFuture<()> {
            self.0.settle(policy, key, decision, actual)
        }
    }

    #[tokio::test]
    async fn connection_is_closed_for_a_later_try_if_the_storage_fails() {
        let address = start(OnlyReads(MemoryStorage::new())).await;
        let mut client = connect(address, "alice").await.unwrap();
        let failed = ("message dropped, try again later".to_owned(), 1013, "try again later".to_owned());
        assert_eq!(last_text(&mut client).await, failed);
    }
}

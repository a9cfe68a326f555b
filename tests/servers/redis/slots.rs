//! Slots of requests in flight.

use std::convert::Infallible;
use std::future;
use std::time::Duration;

use common::servers::Server;
use common::{ask, with};
use http::{Request, Response};
use tower::{Layer, Service, service_fn};
use tower_ratelimit::{Header, InFlightBody, InFlightLayer, OnError, Permit};

use super::{ready, storage};

/// A layer with four slots for each user.
async fn users(server: &Server) -> InFlightLayer {
    let storage = storage(&server.url());
    ready(&storage).await;
    InFlightLayer::new(4, Header::new("x-user")).time_to_live(Duration::from_secs(60)).storage(storage, OnError::Refuse)
}

/// A service whose responses hold their slots by the permit in their extensions.
fn holding(
    layer: &InFlightLayer,
) -> impl Service<Request<()>, Response = Response<InFlightBody<String>>, Error = Infallible, Future: Send> + Clone + use<>
{
    layer.layer(service_fn(|request: Request<()>| {
        let mut response = Response::new(String::new());
        response.extensions_mut().insert(request.extensions().get::<Permit>().cloned());
        future::ready(Ok::<_, Infallible>(response))
    }))
}

/// A process renews the slots of 64 keys at once, and their commands share the writes of its connection.
#[tokio::test]
async fn renewals_of_many_keys_share_messages_to_the_server() {
    const KEYS: u64 = 640;
    let server = Server::start(&[]);
    let layer = users(&server).await;
    let service = holding(&layer);
    let mut held = Vec::new();
    for user in 0..KEYS {
        held.push(ask(&service, with("x-user", &user.to_string())).await);
    }
    assert_eq!(layer.in_use(), KEYS);
    let reads = || {
        let stats = server.ask(&["INFO", "stats"]).to_string();
        let reads = stats.lines().find_map(|line| line.strip_prefix("total_reads_processed:"));
        reads.unwrap().trim().parse::<u64>().unwrap()
    };
    let (calls, before) = (server.calls("evalsha"), reads());
    // Gives the slots back in the way of a renewal, without waiting for one.
    layer.close().await.unwrap();
    let (calls, reads) = (server.calls("evalsha") - calls, reads() - before);
    assert_eq!(calls, KEYS, "one script for each key");
    assert!(reads * 4 <= calls, "{reads} reads for {calls} calls");
    println!("{calls} calls in {reads} messages");
}

#[tokio::test]
async fn slots_of_an_unknown_format_are_never_overwritten() {
    const KEY: &str = "rl:{in-flight|t:a}slots";
    let server = Server::start(&[]);
    let service = holding(&users(&server).await);
    let held = ask(&service, with("x-user", "a")).await;
    assert!(held.status() == 200 && server.ask(&["GET", KEY]).to_string().starts_with("slots1 "));
    for unknown in
        ["slots2 1,1,1,1", "slots10 1,1,1,1", "slots1x", "slots1  ", "slots1 1,1,1", "slots1 1,1,1,1,1", "v1 5"]
    {
        server.ask(&["SET", KEY, unknown]);
        assert_eq!(ask(&service, with("x-user", "a")).await.status(), 503, "{unknown}");
        assert_eq!(server.ask(&["GET", KEY]).to_string(), unknown);
    }
    // A key of another type is of another program, and is overwritten.
    server.ask(&["DEL", KEY]);
    server.ask(&["RPUSH", KEY, "a"]);
    assert_eq!(ask(&service, with("x-user", "a")).await.status(), 200);
    assert!(server.ask(&["GET", KEY]).to_string().starts_with("slots1 "));
}

/// The server forgets its scripts, for example when it is restarted.
#[tokio::test]
async fn flushed_scripts_are_sent_again() {
    let server = Server::start(&[]);
    let service = holding(&users(&server).await);
    for _ in 0..2 {
        server.ask(&["SCRIPT", "FLUSH"]);
        drop(ask(&service, with("x-user", "a")).await);
        assert_eq!(ask(&service, with("x-user", "a")).await.status(), 200);
    }
}

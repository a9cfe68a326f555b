//! Slots of requests in flight.

use std::convert::Infallible;
use std::future::ready;
use std::time::Duration;

use common::servers::Server;
use common::{ask, with};
use http::{Request, Response};
use tower::{Layer, service_fn};
use tower_ratelimit::{Header, InFlightLayer, OnError, Permit};

use super::storage;

/// A process renews the slots of 64 keys at once, and their commands share the writes of its connection.
#[tokio::test]
async fn renewals_of_many_keys_share_messages_to_the_server() {
    const KEYS: u64 = 640;
    let server = Server::start(&[]);
    let layer = InFlightLayer::new(4, Header::new("x-user"))
        .time_to_live(Duration::from_secs(60))
        .storage(storage(&server.url()), OnError::Refuse);
    // The permit in the extensions of the response holds the slot.
    let service = layer.layer(service_fn(|request: Request<()>| {
        let mut response = Response::new(String::new());
        response.extensions_mut().insert(request.extensions().get::<Permit>().cloned());
        ready(Ok::<_, Infallible>(response))
    }));
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
    let (calls, before) = (server.calls("eval"), reads());
    // Gives the slots back in the way of a renewal, without waiting for one.
    layer.close().await.unwrap();
    let (calls, reads) = (server.calls("eval") - calls, reads() - before);
    assert_eq!(calls, 2 * KEYS, "a load and a swap of each key");
    assert!(reads * 4 <= calls, "{reads} reads for {calls} calls");
    println!("{calls} calls in {reads} messages");
}

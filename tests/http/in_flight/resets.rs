//! Streams of HTTP/2 that the client resets, over a socket. Dropping a future or a body of hyper's client
//! sends a reset.

use std::collections::HashSet;
use std::convert::Infallible;
use std::future::pending;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use common::poll;
use common::random::Numbers;
use common::time::eventually;
use http::{Request, Response};
use http_body_util::{BodyExt, Empty};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http2::{self, SendRequest};
use hyper::server::conn::http2 as server;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{JoinSet, yield_now};
use tower::{Layer, ServiceExt, service_fn};
use tower_ratelimit::{Global, InFlightLayer};

use super::{Script, Step};

const ROUNDS: u64 = 20;
const STREAMS: u16 = 150;

/// The numbers of the requests that a handler has begun to answer.
type Begun = watch::Sender<HashSet<u64>>;

type Client = SendRequest<Empty<Bytes>>;

/// The phase in which a client resets a stream.
#[derive(Clone, Copy, Debug)]
enum Phase {
    /// The client has polled its request this often. The server may not know it yet.
    AfterPolls(u32),
    InTheHandler,
    AfterTheHead,
    /// The client has read this many bytes.
    InTheBody(usize),
    /// The client drops a stream that has ended, which sends no reset.
    AfterTheEnd,
}

/// Starts a server with this layer, and returns a client of it.
async fn connect(layer: &InFlightLayer, begun: &Arc<Begun>) -> Client {
    let begun = Arc::clone(begun);
    let service = layer.layer(service_fn(move |request: Request<Incoming>| {
        let begun = Arc::clone(&begun);
        async move {
            let (path, number) = request.uri().path()[1..].split_once('/').unwrap();
            begun.send_modify(|numbers| assert!(numbers.insert(number.parse().unwrap())));
            // The length of the body is the number of its steps.
            let steps = match path {
                "hangs" => return pending().await,
                "stream" => [Step::Data("xx"), Step::Data("x"), Step::Data("x"), Step::Hang],
                _ => [Step::Data("xx"), Step::Data("x"), Step::Data("x"), Step::Trailers],
            };
            Ok::<_, Infallible>(Response::new(Script::new(&steps)))
        }
    }));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        let service = hyper::service::service_fn(move |request| service.clone().oneshot(request));
        let mut builder = server::Builder::new(TokioExecutor::new());
        // A server closes a connection with many resets at once, to defend itself.
        builder
            .max_pending_accept_reset_streams(usize::from(STREAMS))
            .serve_connection(TokioIo::new(stream), service)
            .await
    });
    let stream = TcpStream::connect(address).await.unwrap();
    let (client, connection) = http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    client
}

fn get(path: &str, number: u64) -> Request<Empty<Bytes>> {
    Request::get(format!("http://localhost/{path}/{number}")).body(Empty::new()).unwrap()
}

async fn reset_in(phase: Phase, mut client: Client, begun: Arc<Begun>, number: u64) {
    let path = match phase {
        Phase::InTheHandler => "hangs",
        Phase::AfterTheEnd => "ends",
        _ => "stream",
    };
    let mut response = pin!(client.send_request(get(path, number)));
    let response = match phase {
        Phase::AfterPolls(polls) => {
            for _ in 0..polls {
                if poll(&mut response).is_ready() {
                    break;
                }
                yield_now().await;
            }
            return;
        }
        Phase::InTheHandler => {
            let mut begun = begun.subscribe();
            tokio::select! {
                _ = response => panic!("the handler hangs"),
                _ = begun.wait_for(|numbers| numbers.contains(&number)) => return,
            }
        }
        _ => response.await.unwrap(),
    };
    let (mut body, mut read) = (response.into_body(), 0);
    let end = match phase {
        Phase::InTheBody(bytes) => bytes,
        Phase::AfterTheEnd => usize::MAX,
        _ => 0,
    };
    while read < end {
        let Some(frame) = body.frame().await else { break };
        read += frame.unwrap().into_data().map_or(0, |data| data.len());
    }
}

#[tokio::test]
async fn streams_that_the_client_resets_leak_no_slot() {
    // A request of the second layer can also be reset while it waits for a slot.
    let waits = InFlightLayer::new(20, Global::new()).wait(Duration::from_secs(60), 1_000);
    for layer in [InFlightLayer::new(1_000, Global::new()), waits] {
        let begun = Arc::new(watch::channel(HashSet::new()).0);
        let mut client = connect(&layer, &begun).await;
        let mut numbers = Numbers(20_261_128);
        // A slot that is given back twice is that of another stream.
        let held = [client.send_request(get("stream", 0)).await, client.send_request(get("stream", 1)).await];
        for round in 1..=ROUNDS {
            let mut streams = JoinSet::new();
            for stream in 0..u64::from(STREAMS) {
                let polls = u32::try_from(numbers.below(30)).unwrap();
                let phase = numbers.one_of(&[
                    Phase::AfterPolls(polls),
                    Phase::AfterPolls(polls),
                    Phase::InTheHandler,
                    Phase::AfterTheHead,
                    Phase::InTheBody(1),
                    Phase::InTheBody(3),
                    Phase::AfterTheEnd,
                ]);
                streams.spawn(reset_in(phase, client.clone(), Arc::clone(&begun), round * u64::from(STREAMS) + stream));
            }
            streams.join_all().await;
            eventually("the slots of the other streams are given back", async || layer.in_use() == 2).await;
        }
        assert!(held.iter().all(|response| response.as_ref().unwrap().status() == 200));
        drop(held);
        eventually("all slots are given back", async || layer.in_use() == 0).await;
    }
}

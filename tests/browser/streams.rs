//! The `EventSource` of a browser on a limit of requests in flight. It connects again by itself,
//! unless it was refused. Whatever ends its streams, no slot stays in use.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::Router;
use axum::http::Uri;
use axum::response::sse::{Event, Sse};
use axum::response::{Html, IntoResponse};
use axum::routing::get;
use futures_util::StreamExt;
use futures_util::stream::unfold;
use tokio::net::TcpListener;
use tower_ratelimit::{InFlightLayer, PeerIp};

use crate::visit::{PATIENCE, Visit};

/// The page. Without the link, the browser asks for an icon, and logs that there is none.
const PAGE: &str = "<!doctype html><title>streams</title><link rel=icon href=data:,><script>
    const sources = [];
    let seen = 0;
    function open(path) {
        const source = new EventSource(path);
        source.onmessage = () => { seen += 1; };
        return sources.push(source);
    }
    const states = () => sources.map((source) => source.readyState).join();
</script>";

/// The server of the page and of streams, at most two of each client at once.
struct Streams {
    limit: InFlightLayer,
    address: String,
    /// The largest number of slots in use when a stream began.
    most: Arc<AtomicU64>,
}

impl Streams {
    async fn start() -> Self {
        let (limit, most) = (InFlightLayer::new(2, PeerIp::new()), Arc::new(AtomicU64::new(0)));
        let (counted, highest) = (limit.clone(), Arc::clone(&most));
        let stream = async move |uri: Uri| {
            highest.fetch_max(counted.in_use(), Ordering::SeqCst);
            events(&uri)
        };
        let streams = Router::new().route("/events", get(stream)).layer(limit.clone());
        let app = Router::new().route("/", get(async || Html(PAGE))).merge(streams);
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        let address = format!("http://{}", listener.local_addr().expect("it is bound"));
        let app = app.into_make_service_with_connect_info::<SocketAddr>();
        tokio::spawn(async move { axum::serve(listener, app).await.expect("the server runs") });
        Self { limit, address, most }
    }

    async fn visit(&self) -> Visit {
        Visit::open(&self.address, None).await
    }

    /// Waits until this number of slots is in use.
    async fn until_in_use(&self, slots: u64) {
        let in_use = async {
            while self.limit.in_use() != slots {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let result = tokio::time::timeout(PATIENCE, in_use).await;
        assert!(result.is_ok(), "{} slots are in use instead of {slots}", self.limit.in_use());
    }
}

/// Sends an event each 20 ms. The query is the number of events after which the stream ends.
fn events(uri: &Uri) -> impl IntoResponse + use<> {
    let length = uri.query().and_then(|length| length.parse().ok()).unwrap_or(usize::MAX);
    let events = unfold((), async |()| {
        tokio::time::sleep(Duration::from_millis(20)).await;
        // The browser connects again after 10 ms.
        let event = Event::default().retry(Duration::from_millis(10)).data("event");
        Some((Ok::<_, Infallible>(event), ()))
    });
    Sse::new(events.take(length))
}

#[tokio::test]
async fn event_source_holds_its_slot_until_it_is_closed() {
    let streams = Streams::start().await;
    let visit = streams.visit().await;
    for _ in 0..2 {
        visit.value::<u32>("open('/events')").await;
    }
    visit.until("states() === '1,1' && seen > 4").await;
    assert_eq!(streams.limit.in_use(), 2);
    // A refused one is closed, and does not connect again.
    visit.value::<u32>("open('/events')").await;
    visit.until("states() === '1,1,2'").await;
    assert_eq!(streams.limit.in_use(), 2);
    visit.value::<bool>("(sources[0].close(), true)").await;
    streams.until_in_use(1).await;
    visit.value::<u32>("open('/events')").await;
    visit.until("states() === '2,1,2,1'").await;
    assert_eq!(streams.limit.in_use(), 2);
    // Loading the page again ends its streams. Those of a page that was left can go on for a
    // minute, because the browser keeps it for a way back.
    visit.reload().await;
    streams.until_in_use(0).await;
    assert_eq!(streams.most.load(Ordering::SeqCst), 2);
    visit.end().await;
}

#[tokio::test]
async fn event_source_that_connects_again_holds_one_slot() {
    let streams = Streams::start().await;
    let visit = streams.visit().await;
    visit.value::<u32>("open('/events?3')").await;
    // The server ends each stream after three events.
    visit.until("seen >= 60").await;
    assert_eq!(streams.most.load(Ordering::SeqCst), 1);
    visit.value::<bool>("(sources[0].close(), true)").await;
    streams.until_in_use(0).await;
    visit.end().await;
}

#[tokio::test]
async fn killed_browser_leaves_no_slot_in_use() {
    let streams = Streams::start().await;
    let visit = streams.visit().await;
    for _ in 0..2 {
        visit.value::<u32>("open('/events')").await;
    }
    visit.until("states() === '1,1'").await;
    assert_eq!(streams.limit.in_use(), 2);
    visit.kill().await;
    streams.until_in_use(0).await;
}

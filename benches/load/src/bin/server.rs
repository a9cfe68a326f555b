//! A server on one thread. All routes return the same response, with different layers.
//!
//! It prints its address, and exits when its standard input ends, so that it ends with its parent
//! process.

use std::io::{Read, Write, stdin, stdout};
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;
use std::{process, thread};

use axum::Router;
use axum::http::{HeaderName, HeaderValue};
use axum::routing::{MethodRouter, get};
use tokio::net::TcpListener;
use tower_governor::GovernorLayer;
use tower_governor::governor::GovernorConfigBuilder;
use tower_layer::Identity;
use tower_ratelimit::{Headers, PeerIp, Policy, Quota, RateLimitLayer, TokenBucket};

/// A burst that is never exhausted. It has a usual number of digits, because each response contains
/// it.
const BURST: u32 = 999_999;

/// Returns constant header fields of the same length as those of a limit.
fn same_headers() -> [(HeaderName, HeaderValue); 3] {
    [("x-ratelimit-limit", "999999"), ("x-ratelimit-remaining", "999998"), ("x-ratelimit-reset", "1728000001")]
        .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)))
}

fn main() {
    thread::spawn(|| {
        _ = stdin().read(&mut [0]);
        process::exit(0);
    });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().expect("a runtime");
    runtime.block_on(serve());
}

async fn serve() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a free port");
    println!("{}", listener.local_addr().expect("its address"));
    stdout().flush().expect("the parent process reads stdout");
    let service = app().into_make_service_with_connect_info::<SocketAddr>();
    axum::serve(listener, service).await.expect("the server does not fail");
}

fn app() -> Router {
    let ample = Quota::per_second(1_000_000).burst(BURST);
    let day = Duration::from_secs(86_400);
    Router::new()
        .route("/bare", hello().layer(Identity::new()))
        .route("/bare-same-headers", get(async || (same_headers(), "hello")).layer(Identity::new()))
        .route("/limited", hello().layer(ours(ample)))
        .route("/limited-no-headers", hello().layer(ours(ample).headers(Headers::none())))
        .route("/refused", hello().layer(ours(Quota::per_day(1))))
        .route("/governor", governed(Duration::from_micros(1), BURST))
        .route("/governor-refused", governed(day, 1))
}

fn hello() -> MethodRouter {
    get(async || "hello")
}

fn ours(quota: Quota) -> RateLimitLayer {
    RateLimitLayer::new(Policy::new(TokenBucket::new(), quota), PeerIp::new())
}

fn governed(period: Duration, burst: u32) -> MethodRouter {
    let config = GovernorConfigBuilder::default().period(period).burst_size(burst).use_headers().finish();
    hello().layer(GovernorLayer::new(config.expect("period and burst are not zero")))
}

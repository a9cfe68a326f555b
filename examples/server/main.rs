//! An axum server whose limits are set by flags.
//!
//! `cargo run --example server` prints `listening on http://ADDRESS` and a command to try. `--help`
//! lists the flags. The log goes to the error output.

mod options;

use std::net::SocketAddr;
use std::process::ExitCode;

use axum::Router;
use axum::body::Body;
use axum::http::{HeaderName, StatusCode, Uri};
use axum::routing::any;
use options::{Options, USAGE};
use tower_ratelimit::extract::{Head, KeyError};
use tower_ratelimit::storage::{AnyStorage, Breaker, Leases, RefusalCache};
use tower_ratelimit::{MemoryStorage, Policy, RateLimitLayer, Rejection, ResponseHead};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

fn app(options: &Options, storage: &AnyStorage) -> Result<Router, String> {
    let mut app = Router::new().fallback(answer);
    for (path, policy) in &options.routes {
        app = app.route(path, any(answer).layer(layer(options, storage, policy)?));
    }
    Ok(app.layer(layer(options, storage, &options.policy)?))
}

/// Returns the storage with its wrappers, and the leases. The breaker is innermost, because it has
/// to see each call to the server.
fn storage(options: &Options) -> (AnyStorage, Option<Leases<AnyStorage>>) {
    let mut storage = options.storage.clone();
    if let Some(replicas) = options.replicas {
        storage = AnyStorage::new(Breaker::new(storage).fallback(MemoryStorage::new(), replicas));
    }
    if options.deny_cache {
        storage = AnyStorage::new(RefusalCache::new(storage));
    }
    let Some(slice) = options.lease else { return (storage, None) };
    let leases = Leases::new(storage, slice);
    (AnyStorage::new(leases.clone()), Some(leases))
}

fn layer(
    options: &Options,
    storage: &AnyStorage,
    policy: &Policy,
) -> Result<RateLimitLayer<AnyStorage, Box<dyn Rejection<Body>>>, String> {
    let mut layer = RateLimitLayer::new(policy.clone(), options.key()?)
        .try_storage(storage.clone(), options.on_error)
        .map_err(|error| format!("--storage or --lease cannot keep a --policy or --route: {error}"))?
        .headers(options.headers)
        .rejection(options.rejection.rejection());
    if let Some(header) = options.cost_header.clone() {
        layer = layer.cost(move |head: &Head<'_>| cost(&header, head));
    }
    if let Some(allowed) = options.allow_list().map_err(|error| error.to_string())? {
        layer = layer.skip(allowed);
    }
    if !options.charge.is_empty() {
        let charged = options.charge.clone();
        layer = layer.charge_when(move |response: &ResponseHead<'_>| {
            charged.iter().any(|statuses| statuses.contain(response.status))
        });
    }
    Ok(if options.shadow { layer.shadow() } else { layer })
}

/// Reads the cost of a request from its header.
fn cost(header: &HeaderName, head: &Head<'_>) -> Result<u32, KeyError> {
    let Some(value) = head.headers.get(header) else { return Ok(1) };
    value
        .to_str()
        .ok()
        .and_then(|value| value.trim().parse().ok())
        .ok_or_else(|| KeyError::client(format!("{header} is not a whole number from 0 to 4294967295")))
}

async fn answer(uri: Uri) -> (StatusCode, &'static str) {
    let status = uri.path().strip_prefix("/status/").and_then(|code| code.parse().ok());
    // 1xx statuses do not end a response.
    let status = status.filter(|status: &StatusCode| status.as_u16() >= 200);
    (status.unwrap_or(StatusCode::OK), "hello\n")
}

#[tokio::main]
async fn main() -> ExitCode {
    if std::env::args().any(|argument| argument == "--help" || argument == "-h") {
        print!("{USAGE}");
        return ExitCode::SUCCESS;
    }
    let started = match Options::parse(std::env::args().skip(1)) {
        Ok(options) => start(options).await,
        Err(error) => Err(error),
    };
    match started {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("server: {error}");
            ExitCode::from(2)
        }
    }
}

async fn start(options: Options) -> Result<(), String> {
    // Refusals are logged at DEBUG. Shadow limits are only visible there.
    let has_shadow = options.shadow || !options.policy.shadows().is_empty();
    let level = if has_shadow { LevelFilter::DEBUG } else { LevelFilter::WARN };
    let log = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_ansi(false);
    tracing_subscriber::registry().with(log).with(Targets::new().with_target("tower_ratelimit", level)).init();

    let (storage, leases) = storage(&options);
    let app = app(&options, &storage)?;
    let listen = options.listen;
    let listener =
        tokio::net::TcpListener::bind(listen).await.map_err(|error| format!("cannot listen on {listen}: {error}"))?;
    let address = listener.local_addr().map_err(|error| error.to_string())?;
    println!("listening on http://{address}");
    println!("try: curl -i http://{address}/");
    let service = app.into_make_service_with_connect_info::<SocketAddr>();
    let served = axum::serve(listener, service).with_graceful_shutdown(stop_signal()).await;
    if let Some(leases) = leases {
        // Refunds the leased units that were not spent.
        leases.close().await.map_err(|error| format!("cannot refund the leased units: {error:#}"))?;
    }
    served.map_err(|error| error.to_string())
}

/// Completes at Ctrl-C, and on Unix also at SIGTERM.
async fn stop_signal() {
    let interrupt = async { tokio::signal::ctrl_c().await.expect("Ctrl-C can be listened for") };
    #[cfg(unix)]
    let terminate = async {
        use tokio::signal::unix::{SignalKind, signal};
        signal(SignalKind::terminate()).expect("SIGTERM can be listened for").recv().await;
    };
    #[cfg(not(unix))]
    let terminate = std::future::pending();
    tokio::select! {
        () = interrupt => {}
        () = terminate => {}
    }
}

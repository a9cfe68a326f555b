//! An axum server whose limits are set by flags.
//!
//! `cargo run --example server` prints `listening on http://ADDRESS` and a command to try. `--help`
//! lists the flags. The log goes to the error output.

mod options;
mod policies;

use std::convert::Infallible;
use std::future::ready;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, StatusCode, Uri};
use axum::middleware::map_request;
use axum::routing::any;
use futures_util::stream::unfold;
use options::{Options, USAGE};
use policies::{Current, Policies, PoliciesFile};
use tokio::time::sleep;
use tower_ratelimit::extract::{Head, KeyError};
use tower_ratelimit::storage::{AnyStorage, Breaker, InOrder, Leases, RefusalCache};
use tower_ratelimit::{
    InFlightLayer, IntoPolicySource, MemoryStorage, Policy, RateLimitLayer, Rejection, Storage, policy_by,
};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

/// Returns the app with the limits of the flags.
fn app(options: &Options, storage: &AnyStorage) -> Result<Router, String> {
    let settle_header = options.settle_header.clone();
    let answer = move |uri: Uri| ready(answer(&uri, settle_header));
    let mut app = Router::new().fallback(answer.clone());
    for (path, policy) in &options.routes {
        app = app.route(path, any(answer.clone()).layer(layer(options, storage, policy.clone())?));
    }
    in_flight(options, app.layer(layer(options, storage, options.policy.clone())?))
}

/// Returns the app with the limits of a policies file. Each request takes the current policies once,
/// and both layers choose from them.
fn app_of_file(options: &Options, storage: &AnyStorage, current: Current) -> Result<Router, String> {
    let mut by_client = by_client(options, storage)?;
    if let Some(outer) = &current.get().within {
        by_client = by_client.within(options.key_of(outer).map_err(|error| format!("--policies: within: {error}"))?);
    }
    for (position, key) in current.get().keys().iter().enumerate() {
        let also = policy_by(move |head| policies_of(head).also.get(position).map(|also| also.policy.clone()));
        let key = options.key_of(key).map_err(|error| format!("--policies: [[also]]: {error}"))?;
        by_client = by_client.try_and(also, key).map_err(|error| format!("--policies: [[also]]: {error}"))?;
    }
    let by_route = policy_by(|head| policies_of(head).routes.get(head.uri().path()).cloned());
    let take_policies = map_request(move |mut request: Request| {
        request.extensions_mut().insert(current.get());
        ready(request)
    });
    let settle_header = options.settle_header.clone();
    let answer = move |uri: Uri| ready(answer(&uri, settle_header));
    let app = Router::new().fallback(answer).layer(layer(options, storage, by_route)?);
    in_flight(options, app.layer(by_client).layer(take_policies))
}

/// Adds the limit on requests in flight around the rate limits, so that its refusals spend nothing.
fn in_flight(options: &Options, app: Router) -> Result<Router, String> {
    let Some(slots) = options.in_flight else { return Ok(app) };
    let mut layer =
        InFlightLayer::new(slots, options.key()?).headers(options.headers).rejection(options.rejection.rejection());
    if let Some(header) = options.cost_header.clone() {
        layer = layer.cost(move |head| cost(&header, head));
    }
    if let Some(allowed) = options.allow_list().map_err(|error| error.to_string())? {
        layer = layer.allow_list(allowed);
    }
    Ok(app.layer(if options.shadow { layer.shadow() } else { layer }))
}

/// A layer with the policies of the tiers of a policies file.
fn by_client(options: &Options, storage: &AnyStorage) -> Result<RateLimitLayer<Box<dyn Rejection<Body>>>, String> {
    let header = options.tier_header.clone();
    let by_tier = policy_by(move |head| {
        let policies = policies_of(head);
        let tier = head.headers.get(&header).and_then(|tier| policies.tiers.get(tier.to_str().ok()?));
        tier.unwrap_or(&policies.default).clone()
    });
    layer(options, storage, by_tier)
}

fn policies_of<'a>(head: &Head<'a>) -> &'a Policies {
    head.extensions.get::<Arc<Policies>>().expect("the outermost layer inserts the policies")
}

/// Checks that the storage supports the policies, and that the names of those that are decided together
/// differ.
fn check(policies: &Policies, storage: &AnyStorage) -> Result<(), String> {
    policies.all().try_for_each(|(place, policy)| {
        let checked = [policy].into_iter().chain(policy.shadows()).try_for_each(|policy| storage.validate(policy));
        checked.map_err(|error| format!("{place}: {error}"))
    })?;
    let of_client = [&policies.default].into_iter().chain(policies.tiers.values());
    let mut together: Vec<_> = of_client.map(Policy::identity).collect();
    for also in policies.also.iter().map(|also| also.policy.identity()) {
        if together.contains(&also) {
            return Err(format!("[[also]]: another policy is named {also:?} already: use another name"));
        }
        together.push(also);
    }
    Ok(())
}

/// Checks a policies file that was changed. The keys stay those of the start.
fn check_change(policies: &Policies, at_start: &Policies, storage: &AnyStorage) -> Result<(), String> {
    if policies.keys() != at_start.keys() {
        return Err("the keys of [[also]] have changed: restart the server to use them".to_owned());
    }
    if policies.within != at_start.within {
        return Err("`within` has changed: restart the server to use it".to_owned());
    }
    check(policies, storage)
}

/// Returns the storage with its wrappers, and the leases to close at shutdown. The breaker is
/// innermost, because it must observe each call to the server.
fn storage(options: &Options) -> (AnyStorage, Option<Leases>) {
    let mut storage = options.storage.clone();
    if let Some(replicas) = options.replicas {
        storage = AnyStorage::new(Breaker::new(storage).fallback(MemoryStorage::new(), replicas));
    }
    if options.deny_cache {
        storage = AnyStorage::new(RefusalCache::new(storage));
    }
    if options.in_order {
        storage = AnyStorage::new(InOrder::new(storage));
    }
    let Some(slice) = options.lease else { return (storage, None) };
    let leases = Leases::new(storage, slice);
    (AnyStorage::new(leases.clone()), Some(leases))
}

fn layer(
    options: &Options,
    storage: &AnyStorage,
    policy: impl IntoPolicySource,
) -> Result<RateLimitLayer<Box<dyn Rejection<Body>>>, String> {
    let mut layer = RateLimitLayer::new(policy, options.key()?)
        .try_storage(storage.clone(), options.on_error)
        .map_err(|error| format!("--storage or --lease does not support a --policy or --route: {error}"))?
        .headers(options.headers)
        .rejection(options.rejection.rejection());
    if let Some(header) = options.cost_header.clone() {
        layer = layer.cost(move |head| cost(&header, head));
    }
    if let Some(allowed) = options.allow_list().map_err(|error| error.to_string())? {
        layer = layer.allow_list(allowed);
    }
    if !options.charge.is_empty() {
        let charged = options.charge.clone();
        layer = layer.charge_when(move |response| charged.iter().any(|statuses| statuses.contain(response.status)));
    }
    if !options.clear.is_empty() {
        let cleared = options.clear.clone();
        layer = layer.clear_when(move |response| cleared.iter().any(|statuses| statuses.contain(response.status)));
    }
    if let Some(header) = options.settle_header.clone() {
        layer = layer.settle(move |response| response.headers.get(&header)?.to_str().ok()?.parse().ok());
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

/// Responds with the status of the path, and writes the cost of the query into `header`. Streams the
/// body of `/slow`.
fn answer(uri: &Uri, header: Option<HeaderName>) -> (StatusCode, HeaderMap, Body) {
    let status = uri.path().strip_prefix("/status/").and_then(|code| code.parse().ok());
    // 1xx statuses do not end a response.
    let status = status.filter(|status: &StatusCode| status.as_u16() >= 200);
    let fields = header.zip(parameter::<u32>(uri, "cost=")).map(|(name, cost)| (name, cost.into()));
    let body = if uri.path() == "/slow" { slow(parameter(uri, "ms=").unwrap_or(1_000)) } else { "hello\n".into() };
    (status.unwrap_or(StatusCode::OK), fields.into_iter().collect(), body)
}

/// Reads a number from the query.
fn parameter<T: FromStr>(uri: &Uri, name: &str) -> Option<T> {
    let mut parts = uri.query()?.split('&');
    parts.find_map(|part| part.strip_prefix(name)?.parse().ok())
}

/// Streams a chunk each 100 ms.
fn slow(ms: u64) -> Body {
    Body::from_stream(unfold(ms / 100, |left| async move {
        let left = left.checked_sub(1)?;
        sleep(Duration::from_millis(100)).await;
        Some((Ok::<_, Infallible>("chunk\n"), left))
    }))
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
    let file = options.policies.as_deref().map(PoliciesFile::open).transpose();
    let file = file.map_err(|error| format!("--policies: {error}"))?;
    // Refusals are logged at DEBUG. Shadow limits are only visible there.
    let has_shadow = options.shadow
        || !options.policy.shadows().is_empty()
        || file.iter().any(|(_, policies)| policies.all().any(|(_, policy)| !policy.shadows().is_empty()));
    let level = if has_shadow { LevelFilter::DEBUG } else { LevelFilter::WARN };
    let log = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_ansi(false);
    let targets = Targets::new().with_target("tower_ratelimit", level).with_target(module_path!(), LevelFilter::INFO);
    tracing_subscriber::registry().with(log).with(targets).init();

    let (storage, leases) = storage(&options);
    let app = match file {
        None => app(&options, &storage)?,
        Some((file, policies)) => {
            check(&policies, &storage).map_err(|error| format!("--policies: {error}"))?;
            if options.shadow && (!policies.also.is_empty() || policies.within.is_some()) {
                return Err(
                    "--shadow does not support [[also]] and within: write shadow limits into the file".to_owned()
                );
            }
            let current = Current::new(policies);
            let app = app_of_file(&options, &storage, current.clone())?;
            let (storage, at_start) = (storage.clone(), current.get());
            tokio::spawn(file.follow(current, move |policies| check_change(policies, &at_start, &storage)));
            app
        }
    };
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

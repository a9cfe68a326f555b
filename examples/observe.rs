//! Observability: counters by policy and outcome, a stricter shadow limit, the log, and header
//! fields.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::routing::get;
use tower_ratelimit::{ConfigError, Event, Headers, Lint, Observer, PeerIp, Policy, RateLimitLayer};

/// Counts events for the page `/counts`. With the feature `metrics`, `MetricsObserver` writes to
/// the program's metrics recorder instead.
#[derive(Clone, Default)]
struct Counts(Arc<Mutex<BTreeMap<(String, &'static str), u64>>>);

impl Observer for Counts {
    fn observe(&self, event: &Event<'_>) {
        let entry = (event.policy.identity().to_owned(), event.outcome());
        *self.0.lock().unwrap().entry(entry).or_default() += 1;
    }

    fn warn(&self, lint: Lint) {
        eprintln!("{}: {lint} ({})", lint.code(), lint.docs());
    }
}

impl Counts {
    fn page(&self) -> String {
        self.0.lock().unwrap().iter().fold(String::new(), |mut page, ((policy, outcome), count)| {
            writeln!(page, "{policy} {outcome} {count}").expect("writing to a string does not fail");
            page
        })
    }
}

fn app(counts: &Counts) -> Result<Router, ConfigError> {
    // The shadow limit of three per minute is counted, but refuses nothing.
    let policy = "fixed-window 5/minute; shadow fixed-window 3/minute".parse::<Policy>()?.with_name("api");
    let limit = RateLimitLayer::new(policy, PeerIp::new())
        .headers(Headers::x_rate_limit().reset_in_seconds().and(Headers::ietf()))
        .observer(counts.clone())
        .log_keys();
    let page = counts.clone();
    Ok(Router::new()
        .route("/", get(|| async { "hello\n" }))
        .layer(limit)
        .route("/counts", get(move || async move { page.page() })))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Refusals are logged at DEBUG. `log_keys` adds their keys.
    tracing_subscriber::fmt().with_max_level(tracing::Level::DEBUG).init();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    axum::serve(listener, app(&Counts::default())?.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use axum::http::Request;
    use tower::ServiceExt;

    use super::*;

    #[tokio::test]
    async fn page_counts_refusals_and_shadow_refusals() {
        let counts = Counts::default();
        let app = app(&counts).unwrap();
        for _ in 0..6 {
            let mut request = Request::new(Body::empty());
            request.extensions_mut().insert(SocketAddr::from(([192, 0, 2, 1], 1234)));
            let response = app.clone().oneshot(request).await.unwrap();
            assert!(
                response.headers().contains_key("ratelimit") && response.headers().contains_key("x-ratelimit-limit")
            );
        }
        let expected = "api admitted 5\napi refused 1\napi\u{b7}shadow-1 admitted 3\napi\u{b7}shadow-1 refused 2\n";
        assert_eq!(counts.page(), expected);
    }
}

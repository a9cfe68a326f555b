//! Observability: metrics for Prometheus, a dashboard for Grafana, a shadow limit, the log, and
//! header fields.
//!
//! `cargo run --example observe --features metrics,redis -- redis://localhost`, and then
//!
//! ```text
//! curl -i http://127.0.0.1:3000/        a limited request
//! curl http://127.0.0.1:3000/metrics    the metrics in Prometheus's format
//! ```
//!
//! Without a URL, the counts are in memory. To see the metrics in Grafana, let Prometheus scrape
//! `/metrics`, and import `examples/observe/dashboard.json`.

use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use axum::routing::get;
use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};
use tower_ratelimit::storage::{AnyStorage, Breaker, RefusalCache};
use tower_ratelimit::{
    BoxError, ConfigError, Headers, MemoryStorage, OnError, PeerIp, Policy, RateLimitLayer, metrics_observer,
};

/// The upper bounds of the latency buckets, in seconds. Without them, the exporter computes
/// quantiles, which cannot be aggregated over several processes.
const LATENCY_BUCKETS: [f64; 9] = [0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25];

/// The fallback admits a third of the quota, because three servers share the storage.
const REPLICAS: u32 = 3;

fn recorder() -> Result<PrometheusBuilder, BuildError> {
    PrometheusBuilder::new().set_buckets_for_metric(Matcher::Suffix("_duration_seconds".to_owned()), &LATENCY_BUCKETS)
}

fn app(url: &str, metrics: PrometheusHandle) -> Result<Router, ConfigError> {
    // The shadow limit of three per minute is counted, but refuses nothing.
    let policy = "fixed-window 5/minute; shadow fixed-window 3/minute".parse::<Policy>()?.with_name("api");
    let storage = Breaker::new(url.parse::<AnyStorage>()?).fallback(MemoryStorage::new(), REPLICAS);
    let limit = RateLimitLayer::new(policy, PeerIp::new())
        .storage(RefusalCache::new(storage), OnError::Admit)
        .headers(Headers::x_rate_limit().reset_in_seconds().and(Headers::draft11()))
        .observer(metrics_observer())
        .log_keys();
    Ok(Router::new()
        .route("/", get(|| async { "hello\n" }))
        .layer(limit)
        .route("/metrics", get(move || async move { metrics.render() })))
}

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    // Refusals are logged at DEBUG. `log_keys` adds their keys.
    tracing_subscriber::fmt().with_max_level(tracing::Level::DEBUG).init();
    // Install the recorder before the first storage is created. Earlier events are not counted.
    let metrics = recorder()?.install_recorder()?;
    let url = std::env::args().nth(1).unwrap_or_else(|| "memory://".to_owned());
    let app = app(&url, metrics.clone())?;
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(Duration::from_secs(5)).await;
            // Bounds the memory of the histograms while Prometheus does not scrape them.
            metrics.run_upkeep();
        }
    });
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use axum::http::Request;
    use http_body_util::BodyExt;
    use tower::ServiceExt;

    use super::*;

    async fn ask(app: &Router, path: &str) -> axum::response::Response {
        let mut request = Request::get(path).body(Body::empty()).unwrap();
        request.extensions_mut().insert(SocketAddr::from(([192, 0, 2, 1], 1234)));
        app.clone().oneshot(request).await.unwrap()
    }

    #[test]
    fn metrics_page_contains_refusals_shadow_refusals_and_sources() {
        let recorder = recorder().unwrap().build_recorder();
        let handle = recorder.handle();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let page = metrics::with_local_recorder(&recorder, || {
            runtime.block_on(async {
                let app = app("memory://", handle).unwrap();
                for _ in 0..6 {
                    let response = ask(&app, "/").await;
                    let has = |name: &str| response.headers().contains_key(name);
                    assert!(has("ratelimit") && has("x-ratelimit-limit"));
                }
                ask(&app, "/metrics").await.into_body().collect().await.unwrap().to_bytes()
            })
        });
        let page = String::from_utf8(page.to_vec()).unwrap();
        for expected in [
            r#"ratelimit_decisions_total{policy="api",outcome="admitted",mode="enforced"} 5"#,
            r#"ratelimit_decisions_total{policy="api",outcome="refused",mode="enforced"} 1"#,
            "ratelimit_decisions_total{policy=\"api\u{b7}shadow-1\",outcome=\"refused\",mode=\"shadow\"} 2",
            r#"ratelimit_path_total{path="primary"}"#,
            "ratelimit_memory_keys ",
        ] {
            assert!(page.contains(expected), "{expected} is not in\n{page}");
        }
    }
}

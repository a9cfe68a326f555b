//! What an operator wants to see and to do: how far somebody is limited, letting somebody go on, and how the storages stand.
//!
//! `cargo run --example operator -- redis://localhost`, and then
//!
//! ```text
//! curl -i -H 'x-api-key: k-42' http://127.0.0.1:3000/         is limited
//! curl http://127.0.0.1:3001/limits/k-42                      looks, and spends nothing
//! curl -X DELETE http://127.0.0.1:3001/limits/k-42            forgets what was spent
//! curl http://127.0.0.1:3001/storage                          who decides, and what is known
//! ```
//!
//! Stop that Redis and see who decides now. The second address is for operators: whoever reaches it lifts limits.

use axum::Router;
use axum::extract::{Path, State};
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use serde_json::json;
use tower_ratelimit::storage::{AnyStorage, Breaker, RefusalCache};
use tower_ratelimit::{
    BoxError, ConfigError, Header, Key, MemoryStorage, OnError, Policy, Quota, RateLimitLayer, RateLimiter,
};

/// On one of three servers, so that it admits a third by itself while the storage is away.
const REPLICAS: u32 = 3;

type Limiter = RateLimiter<RefusalCache<Breaker<AnyStorage, MemoryStorage>>>;

fn limiter(url: &str) -> Result<Limiter, ConfigError> {
    let storage = Breaker::new(url.parse()?).fallback(MemoryStorage::new(), REPLICAS);
    RateLimiter::try_with_storage(Policy::from(Quota::per_minute(30)).with_name("api"), RefusalCache::new(storage))
}

fn api(limiter: &Limiter) -> Router {
    let limit = RateLimitLayer::new(limiter.policy().clone(), Header::new("x-api-key"))
        .storage(limiter.storage().clone(), OnError::Admit);
    Router::new().route("/", get(|| async { "hello\n" })).layer(limit)
}

/// For operators. It shares the storage with what is limited, and knows its policy.
fn operators(limiter: Limiter) -> Router {
    Router::new()
        .route("/limits/{key}", get(look).delete(let_go_on))
        .route("/storage", get(storage))
        .with_state(limiter)
}

async fn look(State(limiter): State<Limiter>, Path(key): Path<String>) -> impl IntoResponse {
    let looked = limiter.peek(&Key::from(&*key)).await;
    looked.map_err(unavailable).map(|decision| {
        let limits = limiter.policy().limits().iter().zip(decision.limits());
        let limits = limits.map(|(limit, status)| {
            json!({
                "limit": limit.to_string(),
                "capacity": status.capacity(),
                "remaining": status.remaining(),
                "full_in_seconds": status.reset_after().as_secs_f64(),
            })
        });
        page(&json!({
            "policy": limiter.policy().identity(),
            "would_be_admitted": decision.is_admitted(),
            "retry_in_seconds": decision.retry_after().map(|wait| wait.as_secs_f64()),
            "by_fallback": decision.is_from_fallback(),
            "limits": limits.collect::<Vec<_>>(),
        }))
    })
}

async fn let_go_on(State(limiter): State<Limiter>, Path(key): Path<String>) -> impl IntoResponse {
    // While the storage is away only the fallback forgets, and that is an error.
    limiter.clear(&Key::from(&*key)).await.map(|()| StatusCode::NO_CONTENT).map_err(unavailable)
}

async fn storage(State(limiter): State<Limiter>) -> impl IntoResponse {
    let cache = limiter.storage();
    let circuit = cache.inner().circuit().state();
    page(&json!({
        "breaker": {
            "phase": format!("{:?}", circuit.phase).to_lowercase(),
            "failures_in_a_row": circuit.failures,
            "probe_in_seconds": circuit.probe_in.map(|wait| wait.as_secs_f64()),
            "decisions": {
                "by_storage": circuit.by_primary,
                "by_fallback": circuit.by_fallback,
                "by_none": circuit.by_none,
            },
        },
        "refusals": { "keys": cache.held(), "answered_here": cache.answered(), "asked": cache.asked() },
    }))
}

fn page(value: &serde_json::Value) -> impl IntoResponse + use<> {
    ([(header::CONTENT_TYPE, "application/json")], format!("{value:#}\n"))
}

fn unavailable(error: impl Into<BoxError>) -> (StatusCode, String) {
    (StatusCode::SERVICE_UNAVAILABLE, format!("{}\n", error.into()))
}

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let url = std::env::args().nth(1).unwrap_or_else(|| "memory://".to_owned());
    let limiter = limiter(&url)?;
    let [users, operator] = [3000, 3001].map(|port| tokio::net::TcpListener::bind(("127.0.0.1", port)));
    let (users, operator) = (users.await?, operator.await?);
    println!("limited: http://127.0.0.1:3000/\nfor operators: http://127.0.0.1:3001/storage and /limits/KEY");
    let api = axum::serve(users, api(&limiter)).into_future();
    let operators = axum::serve(operator, operators(limiter)).into_future();
    tokio::try_join!(api, operators)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use axum::http::Request;
    use http_body_util::BodyExt;
    use serde_json::Value;
    use tower::ServiceExt;

    use super::*;

    async fn ask(app: &Router, method: &str, path: &str) -> (u16, Value) {
        let request = Request::builder().method(method).uri(path).header("x-api-key", "k-42");
        let response = app.clone().oneshot(request.body(Body::empty()).unwrap()).await.unwrap();
        let status = response.status().as_u16();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        (status, serde_json::from_slice(&body).unwrap_or_default())
    }

    #[tokio::test]
    async fn operators_see_how_far_somebody_is_limited_and_let_them_go_on() {
        let limiter = limiter("memory://").unwrap();
        let (api, operators) = (api(&limiter), operators(limiter));
        for _ in 0..30 {
            assert_eq!(ask(&api, "GET", "/").await.0, 200);
        }
        for _ in 0..5 {
            assert_eq!(ask(&api, "GET", "/").await.0, 429);
        }
        let (_, seen) = ask(&operators, "GET", "/limits/k-42").await;
        assert_eq!((&seen["would_be_admitted"], &seen["by_fallback"]), (&json!(false), &json!(false)));
        assert_eq!((&seen["policy"], &seen["limits"][0]["remaining"]), (&json!("api"), &json!(0)));
        assert!(seen["retry_in_seconds"].as_f64().unwrap() > 0.0);
        let (_, storage) = ask(&operators, "GET", "/storage").await;
        assert_eq!(storage["refusals"]["keys"], 1);
        assert!(storage["refusals"]["answered_here"].as_u64().unwrap() >= 4, "{storage}");

        assert_eq!(ask(&operators, "DELETE", "/limits/k-42").await.0, 204);
        let (_, seen) = ask(&operators, "GET", "/limits/k-42").await;
        assert_eq!((&seen["would_be_admitted"], &seen["limits"][0]["remaining"]), (&json!(true), &json!(30)));
        assert_eq!(ask(&api, "GET", "/").await.0, 200);
    }

    #[cfg(feature = "redis")]
    #[tokio::test]
    async fn operators_see_that_the_storage_is_away() {
        let limiter = limiter("redis://127.0.0.1:1").unwrap();
        let (api, operators) = (api(&limiter), operators(limiter));
        let mut admitted = 0;
        for _ in 0..15 {
            admitted += u32::from(ask(&api, "GET", "/").await.0 == 200);
        }
        assert_eq!(admitted, 10, "a third");
        let (_, seen) = ask(&operators, "GET", "/limits/k-42").await;
        assert_eq!((&seen["by_fallback"], &seen["limits"][0]["capacity"]), (&json!(true), &json!(10)));
        let (_, storage) = ask(&operators, "GET", "/storage").await;
        assert_ne!(storage["breaker"]["phase"], "closed");
        assert_eq!(storage["breaker"]["decisions"]["by_fallback"], 16);
        assert_eq!(ask(&operators, "DELETE", "/limits/k-42").await.0, 503);
        assert_eq!(ask(&api, "GET", "/").await.0, 200, "the fallback has forgotten");
    }
}

//! An operator's view: the remaining units and the lock of a client, ways to lock and to clear it, the
//! locks that have begun, and the state of the storages.
//!
//! `cargo run --example operator --features redis -- redis://localhost`, and then
//!
//! ```text
//! curl -i -H 'x-api-key: k-42' http://127.0.0.1:3000/   a limited request
//! curl http://127.0.0.1:3001/limits/alice               peeks at a user's limits and spends nothing
//! curl http://127.0.0.1:3001/limits                     lists the users that have spent units, 100 per page
//! curl http://127.0.0.1:3001/states/alice               the stored states of a user, with a redis:// URL
//! curl -X DELETE http://127.0.0.1:3001/limits/alice     clears the user's limits and its lock
//! curl -X DELETE http://127.0.0.1:3001/limits           clears the limits of all users
//! curl -X PUT http://127.0.0.1:3001/locks/alice         locks the user now
//! curl http://127.0.0.1:3001/locks                      lists the users whose lock has not ended
//! curl http://127.0.0.1:3001/storage                    the circuit breaker and the refusal cache
//! curl -i http://127.0.0.1:3001/health                  200 while the process runs
//! curl -i http://127.0.0.1:3001/ready                   200 while Redis can decide, else 503 and the cause
//! ```
//!
//! A user who sends 1,000 requests within an hour is locked for 15 minutes, the next time for 30, and
//! so on. The list has the locks that began in this process. The layer reports each of them once.
//!
//! While Redis is down, the fallback decides. Keep the second address private, because its
//! clients can clear limits.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::extract::{Path, Query, Request, State};
use axum::http::{HeaderValue, StatusCode};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, put};
use tower_ratelimit::extract::Extension;
use tower_ratelimit::storage::{AnyStorage, Breaker, Circuit, RefusalCache, Storage};
use tower_ratelimit::strategy::Status;
use tower_ratelimit::{
    BoxError, ConfigError, Decision, EventKind, Key, MemoryStorage, OnError, Policy, RateLimitLayer, RateLimiter,
};

/// The fallback admits a third of the quota, because three servers share the storage.
const REPLICAS: u32 = 3;

const POLICY: &str = "30/minute; lockout 1000/hour for 15m x2 up to 1d";

/// The units that lock a user at once.
const STRIKES: u32 = 1_000;

/// The limiter of the API, and handles to the wrappers of its storage.
#[derive(Clone)]
struct Limits {
    limiter: RateLimiter,
    circuit: Circuit,
    cache: RefusalCache,
    /// The users whose lock has begun.
    locked: Arc<Mutex<HashSet<Key>>>,
}

fn limits(url: &str, policy: &str) -> Result<Limits, ConfigError> {
    let storage = match url {
        // Keeps the keys, so that they can be listed.
        "memory://" => MemoryStorage::builder().keep_keys(true).build()?.into(),
        url => url.parse::<AnyStorage>()?,
    };
    let breaker = Breaker::new(storage).fallback(MemoryStorage::new(), REPLICAS);
    let (circuit, cache) = (breaker.circuit().clone(), RefusalCache::new(breaker));
    let policy = policy.parse::<Policy>()?.with_name("api");
    let limiter = RateLimiter::try_with_storage(policy, cache.clone())?;
    Ok(Limits { limiter, circuit, cache, locked: Arc::default() })
}

/// An authenticated user.
#[derive(Clone)]
struct User(&'static str);

/// Looks up the API key and inserts the user.
///
/// The limit does not use the API key itself, because a client could invent a new key for each
/// request.
async fn authenticate(mut request: Request, next: Next) -> Result<Response, StatusCode> {
    // A real server looks the key up in its database.
    let user = match request.headers().get("x-api-key").map(HeaderValue::as_bytes) {
        Some(b"k-42") => User("alice"),
        _ => return Err(StatusCode::UNAUTHORIZED),
    };
    request.extensions_mut().insert(user);
    Ok(next.run(request).await)
}

fn api(Limits { limiter, locked, .. }: &Limits) -> Router {
    let by_user = Extension::new(|user: &User| Key::from(user.0));
    let locked = Arc::clone(locked);
    let limit = RateLimitLayer::new(limiter.policy(), by_user)
        .storage(limiter.storage().clone(), OnError::Admit)
        .observer(move |event| {
            if let (EventKind::Locked(_), Some(key)) = (&event.kind, event.key) {
                locked.lock().unwrap().insert(key.clone());
            }
        });
    Router::new().route("/", get(|| async { "hello\n" })).layer(limit).layer(from_fn(authenticate))
}

/// Returns the routes for operators. They share the limiter of the API.
fn operators(limits: Limits) -> Router {
    Router::new()
        .route("/limits", get(list).delete(clear_all))
        .route("/limits/{user}", get(peek).delete(clear))
        .route("/locks", get(locks))
        .route("/locks/{user}", put(lock))
        .route("/storage", get(storage))
        .route("/health", get(|| async { "ok\n" }))
        .route("/ready", get(ready))
        .with_state(limits)
}

async fn peek(
    State(Limits { limiter, .. }): State<Limits>,
    Path(key): Path<String>,
) -> Result<String, (StatusCode, String)> {
    let decision = limiter.peek(&Key::from(&*key)).await.map_err(unavailable)?;
    let mut lines = vec![
        format!("policy {}", limiter.policy().identity()),
        format!("would_be_admitted {}", decision.is_admitted()),
        format!("by_fallback {}", decision.is_from_fallback()),
    ];
    lines.extend(decision.retry_after().map(|wait| format!("retry_in_seconds {}", wait.as_secs_f64())));
    for (limit, status) in limiter.policy().limits().iter().zip(decision.statuses()) {
        let (remaining, capacity) = (status.remaining(), status.capacity());
        lines.push(format!("limit {limit}: {remaining} of {capacity} remain, full in {:?}", status.reset_after()));
        lines.extend(status.lock().map(|lock| format!("lock {} ends in {:?}", lock.level() + 1, lock.ends_after())));
    }
    Ok(page(&lines))
}

/// Lists a page of users, with the policy's remaining units. `?after=` continues after a page.
async fn list(
    State(Limits { limiter, .. }): State<Limits>,
    Query(position): Query<HashMap<String, String>>,
) -> Result<String, (StatusCode, String)> {
    let after = position.get("after").map(String::as_str);
    let page = limiter.keys("t:", after, 100).await.map_err(unavailable)?;
    let line = |(key, peek): &(Key, Decision)| {
        let verdict = if peek.is_refused() { "refused" } else { "admitted" };
        format!("{key} {verdict}, {} of {} remain", peek.remaining(), peek.capacity())
    };
    let mut lines: Vec<_> = page.keys.iter().map(line).collect();
    lines.extend(page.next.map(|next| format!("next {next}")));
    Ok(self::page(&lines))
}

/// Locks a user as if all strikes of the lockout were spent.
async fn lock(
    State(Limits { limiter, locked, .. }): State<Limits>,
    Path(user): Path<String>,
) -> Result<StatusCode, (StatusCode, String)> {
    let user = Key::from(&*user);
    let _ = limiter.charge(&user, STRIKES).await.map_err(unavailable)?;
    locked.lock().unwrap().insert(user);
    Ok(StatusCode::NO_CONTENT)
}

/// Lists the locked users, and forgets those whose lock has ended.
async fn locks(State(Limits { limiter, locked, .. }): State<Limits>) -> Result<String, (StatusCode, String)> {
    let keys: Vec<Key> = locked.lock().unwrap().iter().cloned().collect();
    let mut lines = Vec::new();
    for key in keys {
        let decision = limiter.peek(&key).await.map_err(unavailable)?;
        let Some(lock) = decision.statuses().iter().find_map(Status::lock) else {
            locked.lock().unwrap().remove(&key);
            continue;
        };
        // The text of a key begins with its kind.
        let key = key.to_string();
        let user = key.strip_prefix("t:").unwrap_or(&key);
        lines.push(format!("{user} lock {} ends in {:?}", lock.level() + 1, lock.ends_after()));
    }
    lines.sort();
    Ok(page(&lines))
}

/// Returns the routes that show the states in Redis. The docs of `RedisStorage` explain the numbers.
#[cfg(feature = "redis")]
fn states(url: &str, policy: Policy) -> Result<Router, ConfigError> {
    let redis = tower_ratelimit::RedisStorage::new(url)?;
    let show = |Path(key): Path<String>| async move {
        redis.stored_states(&policy, &Key::from(&*key)).await.map(|lines| page(&lines)).map_err(unavailable)
    };
    Ok(Router::new().route("/states/{user}", get(show)))
}

async fn clear(State(Limits { limiter, .. }): State<Limits>, Path(key): Path<String>) -> impl IntoResponse {
    // While the storage fails, `clear` clears only the fallback and returns an error.
    limiter.clear(&Key::from(&*key)).await.map(|()| StatusCode::NO_CONTENT).map_err(unavailable)
}

async fn clear_all(State(Limits { limiter, .. }): State<Limits>) -> Result<String, (StatusCode, String)> {
    let keys = limiter.storage().clear_all().await.map_err(unavailable)?;
    Ok(format!("cleared_keys {keys}\n"))
}

async fn ready(State(Limits { limiter, .. }): State<Limits>) -> Result<&'static str, (StatusCode, String)> {
    // Checks Redis itself, even while the fallback decides.
    limiter.storage().check().await.map(|()| "ok\n").map_err(unavailable)
}

async fn storage(State(Limits { circuit, cache, .. }): State<Limits>) -> String {
    let circuit = circuit.state();
    let mut lines = vec![
        format!("circuit {}", format!("{:?}", circuit.phase).to_lowercase()),
        format!("failures_in_a_row {}", circuit.failures),
        format!("decisions_by_storage {}", circuit.by_primary),
        format!("decisions_by_fallback {}", circuit.by_fallback),
        format!("decisions_by_none {}", circuit.by_none),
        format!("cached_refusals {}", cache.len()),
        format!("cache_hits {}", cache.local_decisions()),
        format!("cache_misses {}", cache.misses()),
    ];
    lines.extend(circuit.probe_in.map(|wait| format!("probe_in_seconds {}", wait.as_secs_f64())));
    page(&lines)
}

fn page(lines: &[String]) -> String {
    lines.join("\n") + "\n"
}

/// Writes the error and its causes in one line.
fn unavailable(error: impl Into<BoxError>) -> (StatusCode, String) {
    (StatusCode::SERVICE_UNAVAILABLE, format!("{:#}\n", error.into()))
}

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let url = std::env::args().nth(1).unwrap_or_else(|| "memory://".to_owned());
    let limits = limits(&url, POLICY)?;
    let [users, operator] = [3000, 3001].map(|port| tokio::net::TcpListener::bind(("127.0.0.1", port)));
    let (users, operator) = (users.await?, operator.await?);
    println!("limited: http://127.0.0.1:3000/\nfor operators: http://127.0.0.1:3001/storage and /limits/USER");
    let api = axum::serve(users, api(&limits)).into_future();
    #[cfg(feature = "redis")]
    let states = url.starts_with("redis").then(|| states(&url, limits.limiter.policy())).transpose()?;
    let operators = operators(limits);
    #[cfg(feature = "redis")]
    let operators = operators.merge(states.unwrap_or_default());
    let operators = axum::serve(operator, operators).into_future();
    tokio::try_join!(api, operators)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use axum::http::Request;
    use http_body_util::BodyExt;
    use tower::ServiceExt;

    use super::*;

    async fn ask(app: &Router, method: &str, path: &str) -> (u16, String) {
        let request = Request::builder().method(method).uri(path).header("x-api-key", "k-42");
        let response = app.clone().oneshot(request.body(Body::empty()).unwrap()).await.unwrap();
        let status = response.status().as_u16();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        (status, String::from_utf8(body.to_vec()).unwrap())
    }

    /// Returns the value of a line of a page.
    fn value<'a>(page: &'a str, name: &str) -> &'a str {
        let value = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        value.unwrap_or_else(|| panic!("no {name}: {page}"))
    }

    #[tokio::test]
    async fn requests_without_a_valid_api_key_are_not_counted() {
        let limits = limits("memory://", POLICY).unwrap();
        let api = api(&limits);
        for number in 0..100 {
            let request = Request::get("/").header("x-api-key", number).body(Body::empty()).unwrap();
            assert_eq!(api.clone().oneshot(request).await.unwrap().status(), StatusCode::UNAUTHORIZED);
        }
        assert_eq!(limits.cache.misses(), 0);
    }

    #[tokio::test]
    async fn operators_see_a_limited_user_and_clear_its_limits() {
        let limits = limits("memory://", POLICY).unwrap();
        let (api, operators) = (api(&limits), operators(limits));
        for _ in 0..30 {
            assert_eq!(ask(&api, "GET", "/").await.0, 200);
        }
        for _ in 0..5 {
            assert_eq!(ask(&api, "GET", "/").await.0, 429);
        }
        let (_, seen) = ask(&operators, "GET", "/limits/alice").await;
        assert_eq!((value(&seen, "would_be_admitted"), value(&seen, "by_fallback")), ("false", "false"));
        assert_eq!(value(&seen, "policy"), "api");
        assert!(value(&seen, "limit").contains(": 0 of 30 remain"), "{seen}");
        assert!(value(&seen, "retry_in_seconds").parse::<f64>().unwrap() > 0.0);
        assert_eq!(ask(&operators, "GET", "/limits").await.1, "t:alice refused, 0 of 30 remain\n");
        let (_, storage) = ask(&operators, "GET", "/storage").await;
        assert_eq!(value(&storage, "cached_refusals"), "1");
        assert!(value(&storage, "cache_hits").parse::<u64>().unwrap() >= 4, "{storage}");

        assert_eq!(ask(&operators, "DELETE", "/limits/alice").await.0, 204);
        let (_, seen) = ask(&operators, "GET", "/limits/alice").await;
        assert_eq!(value(&seen, "would_be_admitted"), "true");
        assert!(value(&seen, "limit").contains(": 30 of 30 remain"), "{seen}");
        assert_eq!(ask(&api, "GET", "/").await.0, 200);

        assert_eq!(ask(&operators, "DELETE", "/limits").await, (200, "cleared_keys 1\n".to_owned()));
        let (_, seen) = ask(&operators, "GET", "/limits/alice").await;
        assert!(value(&seen, "limit").contains(": 30 of 30 remain"), "{seen}");
        assert_eq!(ask(&operators, "GET", "/health").await.0, 200);
        assert_eq!(ask(&operators, "GET", "/ready").await, (200, "ok\n".to_owned()));
    }

    #[tokio::test]
    async fn operators_lock_a_user_and_list_and_clear_the_lock() {
        let limits = limits("memory://", POLICY).unwrap();
        let (api, operators) = (api(&limits), operators(limits));
        assert_eq!(ask(&api, "GET", "/").await.0, 200);
        assert_eq!(ask(&operators, "GET", "/locks").await.1, "\n");
        assert_eq!(ask(&operators, "PUT", "/locks/alice").await.0, 204);
        assert_eq!(ask(&api, "GET", "/").await.0, 429);
        for (path, line) in [("/locks", "alice lock 1 ends in "), ("/limits/alice", "lock 1 ends in ")] {
            let (_, seen) = ask(&operators, "GET", path).await;
            let ends = seen.lines().find_map(|seen| seen.strip_prefix(line)).unwrap_or_else(|| panic!("{seen}"));
            assert!(ends.starts_with("899.") || ends == "900s", "{ends}");
        }
        assert_eq!(ask(&operators, "DELETE", "/limits/alice").await.0, 204);
        assert_eq!(ask(&operators, "GET", "/locks").await.1, "\n");
        assert_eq!(ask(&api, "GET", "/").await.0, 200);
    }

    #[tokio::test]
    async fn operators_list_a_lock_that_a_request_began() {
        let limits = limits("memory://", "lockout 3/hour for 15m").unwrap();
        let (api, operators) = (api(&limits), operators(limits));
        for listed in ["\n", "\n", "alice lock 1 ends in "] {
            assert_eq!(ask(&api, "GET", "/").await.0, 200);
            let (_, locks) = ask(&operators, "GET", "/locks").await;
            assert!(locks.starts_with(listed), "{locks}");
        }
    }

    #[cfg(feature = "redis")]
    #[tokio::test]
    async fn operators_see_that_the_fallback_decides() {
        let limits = limits("redis://127.0.0.1:1", POLICY).unwrap();
        let (api, operators) = (api(&limits), operators(limits));
        let mut admitted = 0;
        for _ in 0..15 {
            admitted += u32::from(ask(&api, "GET", "/").await.0 == 200);
        }
        assert_eq!(admitted, 10, "a third of the quota");
        let (_, seen) = ask(&operators, "GET", "/limits/alice").await;
        assert_eq!(value(&seen, "by_fallback"), "true");
        assert!(value(&seen, "limit").contains(" of 10 remain"), "{seen}");
        let (_, storage) = ask(&operators, "GET", "/storage").await;
        assert_ne!(value(&storage, "circuit"), "closed");
        assert_eq!(value(&storage, "decisions_by_fallback"), "16");
        assert_eq!(ask(&operators, "GET", "/health").await.0, 200);
        let (status, cause) = ask(&operators, "GET", "/ready").await;
        assert!(status == 503 && cause.starts_with("cannot reach 127.0.0.1:1: "), "{cause}");
        assert_eq!(ask(&operators, "DELETE", "/limits/alice").await.0, 503);
        assert_eq!(ask(&api, "GET", "/").await.0, 200, "the fallback was cleared");
    }
}

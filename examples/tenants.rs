//! A plan for each user, a quota for each tenant, and a limit for all clients, in one decision.
//!
//! A request spends from all three or from none. So a refused user takes nothing from the quota
//! of its tenant.

use axum::Router;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tower_ratelimit::extract::{Extension, Head};
use tower_ratelimit::{ConfigError, Global, Key, Policy, RateLimitLayer, policy_by};

/// An authenticated user of a tenant.
#[derive(Clone)]
struct User {
    name: &'static str,
    tenant: &'static str,
    /// The plan of the tenant.
    is_enterprise: bool,
}

/// Looks up a user. A real server has a database.
fn user_of(api_key: &[u8]) -> Option<User> {
    match api_key {
        b"key-of-alice" => Some(User { name: "alice", tenant: "acme", is_enterprise: false }),
        b"key-of-bob" => Some(User { name: "bob", tenant: "acme", is_enterprise: false }),
        b"key-of-carol" => Some(User { name: "carol", tenant: "umbrella", is_enterprise: true }),
        _ => None,
    }
}

async fn authenticate(mut request: Request, next: Next) -> Response {
    let user = request.headers().get("x-api-key").and_then(|key| user_of(key.as_bytes()));
    let Some(user) = user else {
        return (StatusCode::UNAUTHORIZED, "unknown API key\n").into_response();
    };
    request.extensions_mut().insert(user);
    next.run(request).await
}

fn app() -> Result<Router, ConfigError> {
    // Each policy has its own name, because a user and a tenant may have the same key.
    let per_user = "fixed-window 3/minute".parse::<Policy>()?.with_name("user");
    let small = "fixed-window 5/minute".parse::<Policy>()?.with_name("tenant");
    let enterprise = "fixed-window 5000/minute".parse::<Policy>()?.with_name("enterprise");
    let for_all = "fixed-window 10000/minute".parse::<Policy>()?.with_name("all");
    let plan = move |head: &Head<'_>| {
        let is_enterprise = head.extensions.get::<User>().is_some_and(|user| user.is_enterprise);
        if is_enterprise { enterprise.clone() } else { small.clone() }
    };
    let limit = RateLimitLayer::new(per_user, Extension::new(|user: &User| Key::from(user.name)))
        .and(policy_by(plan), Extension::new(|user: &User| Key::from(user.tenant)))
        .and(for_all, Global::new());
    Ok(Router::new()
        .route("/", get(|| async { "hello" }))
        .layer(limit.clone())
        // After the limit, so that looking at the usage is not limited.
        .route("/usage", get(limit.usage_handler()))
        // Outside of both, so that they find the user.
        .layer(from_fn(authenticate)))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    axum::serve(listener, app()?).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use axum::body::{Body, to_bytes};
    use axum::http::Request;
    use tower::ServiceExt;

    use super::*;

    async fn ask_path(app: &Router, path: &str, key: &str) -> Response {
        let request = Request::get(path).header("x-api-key", key).body(Body::empty()).unwrap();
        app.clone().oneshot(request).await.unwrap()
    }

    async fn ask(app: &Router, key: &str) -> Response {
        ask_path(app, "/", key).await
    }

    #[tokio::test]
    async fn usage_is_not_limited_and_spends_nothing() {
        let app = app().unwrap();
        for expected in [200, 200, 200, 429] {
            let usage = ask_path(&app, "/usage", "key-of-alice").await;
            assert_eq!(usage.status(), StatusCode::OK);
            assert_eq!(ask(&app, "key-of-alice").await.status(), expected);
        }
        let usage = ask_path(&app, "/usage", "key-of-alice").await;
        let usage = to_bytes(usage.into_body(), usize::MAX).await.unwrap();
        let usage = String::from_utf8(usage.to_vec()).unwrap();
        assert!(usage.contains(r#""admitted":false"#) && usage.contains(r#""name":"tenant""#), "{usage}");
    }

    #[tokio::test]
    async fn unknown_key_gets_a_401_and_spends_nothing() {
        let app = app().unwrap();
        for path in ["/", "/usage"] {
            assert_eq!(ask_path(&app, path, "key-of-mallory").await.status(), StatusCode::UNAUTHORIZED);
        }
        let first = ask(&app, "key-of-alice").await;
        assert_eq!(first.headers()["x-ratelimit-remaining"], "2");
    }

    #[tokio::test]
    async fn refused_user_takes_nothing_from_its_tenant() {
        let app = app().unwrap();
        for _ in 0..3 {
            assert_eq!(ask(&app, "key-of-alice").await.status(), StatusCode::OK);
        }
        for _ in 0..10 {
            assert_eq!(ask(&app, "key-of-alice").await.status(), StatusCode::TOO_MANY_REQUESTS);
        }
        // Two of the five units of the tenant are left for its other user.
        for expected in [StatusCode::OK, StatusCode::OK, StatusCode::TOO_MANY_REQUESTS] {
            assert_eq!(ask(&app, "key-of-bob").await.status(), expected);
        }
        assert_eq!(ask(&app, "key-of-carol").await.status(), StatusCode::OK);
    }
}

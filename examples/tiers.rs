//! Each user has the limits of its tier. Requests without a valid API key have the limits of the
//! free tier, with the address as the key.
//!
//! The authentication layer looks up the API key and inserts the user. The limit uses the user as
//! the key. The API key itself is not the key, because a client could invent a new one for each
//! request.

use std::net::SocketAddr;

use axum::Router;
use axum::extract::Request;
use axum::middleware::{Next, from_fn};
use axum::response::Response;
use axum::routing::get;
use tower_ratelimit::extract::{Extension, Head};
use tower_ratelimit::{
    FixedWindow, Key, KeyExtractor, MovingWindow, PeerIp, Policy, Quota, RateLimitLayer, TokenBucket, policy_by,
};

/// An authenticated user.
#[derive(Clone)]
struct User {
    id: u64,
    has_paid: bool,
}

/// Looks up a user. A real server has a database.
fn user_of(api_key: &[u8]) -> Option<User> {
    match api_key {
        b"key-of-alice" => Some(User { id: 1, has_paid: true }),
        b"key-of-bob" => Some(User { id: 2, has_paid: false }),
        b"key-of-carol" => Some(User { id: 3, has_paid: false }),
        _ => None,
    }
}

async fn authenticate(mut request: Request, next: Next) -> Response {
    let user = request.headers().get("x-api-key").and_then(|key| user_of(key.as_bytes()));
    if let Some(user) = user {
        request.extensions_mut().insert(user);
    }
    next.run(request).await
}

fn app() -> Router {
    let free = Policy::named("free")
        .limit(FixedWindow::new(), Quota::per_second(2))
        .limit(MovingWindow::new(), Quota::per_day(1_000));
    let paid = Policy::named("paid").limit(TokenBucket::new(), Quota::per_second(200).burst(400));
    let tier = move |head: &Head<'_>| {
        if head.uri().path() == "/health" {
            return None; // not limited
        }
        let has_paid = head.extensions.get::<User>().is_some_and(|user| user.has_paid);
        Some(if has_paid { paid.clone() } else { free.clone() })
    };
    let by_user = Extension::new(|user: &User| Key::from(user.id)).or(PeerIp::new());
    Router::new()
        .route("/", get(|| async { "hello" }))
        .route("/health", get(|| async { "well" }))
        .layer(RateLimitLayer::new(policy_by(tier), by_user))
        // Outside of the limit, so that the limit finds the user.
        .layer(from_fn(authenticate))
}

#[tokio::main]
async fn main() -> std::io::Result<()> {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    axum::serve(listener, app().into_make_service_with_connect_info::<SocketAddr>()).await
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use axum::http::{Request, StatusCode};
    use tower::ServiceExt;

    use super::*;

    async fn ask(app: &Router, path: &str, key: Option<&str>) -> Response {
        let mut request = Request::get(path);
        if let Some(key) = key {
            request = request.header("x-api-key", key);
        }
        let mut request = request.body(Body::empty()).unwrap();
        request.extensions_mut().insert(SocketAddr::from(([192, 0, 2, 1], 1234)));
        app.clone().oneshot(request).await.unwrap()
    }

    #[tokio::test]
    async fn each_tier_has_its_own_limits() {
        let app = app();
        for _ in 0..3 {
            assert_eq!(ask(&app, "/", Some("key-of-alice")).await.headers()["x-ratelimit-limit"], "400");
        }
        // Each free user, and each address without an API key, has two units per second.
        for client in [Some("key-of-bob"), Some("key-of-carol"), None] {
            assert_eq!(ask(&app, "/", client).await.headers()["x-ratelimit-limit"], "2");
            assert_eq!(ask(&app, "/", client).await.status(), StatusCode::OK);
            assert_eq!(ask(&app, "/", client).await.status(), StatusCode::TOO_MANY_REQUESTS);
        }
        assert!(!ask(&app, "/health", None).await.headers().contains_key("x-ratelimit-limit"));
    }

    #[tokio::test]
    async fn invented_api_keys_of_one_address_share_one_quota() {
        let app = app();
        let mut admitted = 0;
        for number in 0..100 {
            let key = format!("invented-key-{number}");
            admitted += u32::from(ask(&app, "/", Some(&key)).await.status() == StatusCode::OK);
        }
        assert!(admitted < 100, "each invented key has its own quota");
    }
}

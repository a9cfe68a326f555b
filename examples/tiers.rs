//! Each API key has the limits of its tier; who has none shares the free tier's by address.

use std::net::SocketAddr;

use axum::Router;
use axum::routing::get;
use tower_ratelimit::extract::Head;
use tower_ratelimit::{
    FixedWindow, Header, KeyExtractor, MovingWindow, PeerIp, Policy, Quota, RateLimitLayer, TokenBucket, policy_by,
};

fn app() -> Router {
    let free = Policy::named("free")
        .limit(FixedWindow::new(), Quota::per_second(2))
        .limit(MovingWindow::new(), Quota::per_day(1_000));
    let paid = Policy::named("paid").limit(TokenBucket::new(), Quota::per_second(200).burst(400));
    let tier = move |head: &Head<'_>| {
        if head.uri().path() == "/health" {
            return None; // not limited
        }
        Some(if is_paid(head) { paid.clone() } else { free.clone() })
    };
    Router::new()
        .route("/", get(|| async { "hello" }))
        .route("/health", get(|| async { "well" }))
        .layer(RateLimitLayer::new(policy_by(tier), Header::new("x-api-key").or(PeerIp::new())))
}

/// Stands for a look at the database of customers.
fn is_paid(head: &Head<'_>) -> bool {
    head.headers.get("x-api-key").is_some_and(|key| key.as_bytes().starts_with(b"paid-"))
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

    #[tokio::test]
    async fn each_tier_has_its_own_limits() {
        let app = app();
        let ask = async |path: &str, key: Option<&str>| {
            let mut request = Request::get(path);
            if let Some(key) = key {
                request = request.header("x-api-key", key);
            }
            let mut request = request.body(Body::empty()).unwrap();
            request.extensions_mut().insert(SocketAddr::from(([192, 0, 2, 1], 1234)));
            app.clone().oneshot(request).await.unwrap()
        };
        for _ in 0..3 {
            assert_eq!(ask("/", Some("paid-1")).await.headers()["x-ratelimit-limit"], "400");
        }
        // The second is all that is left, for each free key and for those without any.
        for client in [Some("free-1"), Some("free-2"), None] {
            assert_eq!(ask("/", client).await.headers()["x-ratelimit-limit"], "2");
            assert_eq!(ask("/", client).await.status(), StatusCode::OK);
            assert_eq!(ask("/", client).await.status(), StatusCode::TOO_MANY_REQUESTS);
        }
        assert!(!ask("/health", None).await.headers().contains_key("x-ratelimit-limit"));
    }
}

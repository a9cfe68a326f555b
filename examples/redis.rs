//! One limit that all processes share through Redis.

use std::net::SocketAddr;

use axum::Router;
use axum::routing::get;
use tower_ratelimit::storage::RedisStorage;
use tower_ratelimit::{ConfigError, OnError, PeerIp, Quota, RateLimitLayer};

fn app(url: &str) -> Result<Router, ConfigError> {
    let limit = RateLimitLayer::new(Quota::per_minute(10), PeerIp::new())
        // Admits all requests while Redis is unreachable.
        .storage(RedisStorage::new(url)?, OnError::Admit);
    Ok(Router::new().route("/", get(|| async { "hello\n" })).layer(limit))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::args().nth(1).unwrap_or_else(|| "redis://127.0.0.1:6379".to_owned());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    axum::serve(listener, app(&url)?.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use axum::http::Request;
    use tower::ServiceExt;

    use super::*;

    /// `tests/servers` tests the storage with a real server.
    #[tokio::test]
    async fn requests_are_admitted_while_redis_is_unreachable() {
        let mut request = Request::new(Body::empty());
        request.extensions_mut().insert(SocketAddr::from(([192, 0, 2, 1], 1234)));
        let response = app("redis://127.0.0.1:1").unwrap().oneshot(request).await.unwrap();
        assert_eq!(response.status(), 200);
        assert!(!response.headers().contains_key("x-ratelimit-limit"));
    }
}

//! A strict limit on one route inside a wide limit on all routes.

use axum::Router;
use axum::routing::{get, post};
use std::net::SocketAddr;
use tower_ratelimit::{ConfigError, Global, PeerIp, Policy, Quota, RateLimitLayer};

fn app() -> Result<Router, ConfigError> {
    // At most five attempts of a client in any minute.
    let login: Policy = "moving-window 5/minute".parse()?;
    Ok(Router::new()
        .route("/login", post(|| async { "welcome" }).layer(RateLimitLayer::new(login, PeerIp::new())))
        .route("/", get(|| async { "hello" }))
        // The outer layer decides first. It limits all clients together, on all routes.
        .layer(RateLimitLayer::new(Quota::per_second(1_000), Global::new())))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    // Attaches the peer's address to each request, which `PeerIp` reads.
    axum::serve(listener, app()?.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use axum::http::{Request, Response, StatusCode};
    use tower::ServiceExt;

    use super::*;

    #[tokio::test]
    async fn login_route_has_its_own_limit_per_client() {
        let app = app().unwrap();
        let ask = async |method: &str, path: &str| -> Response<Body> {
            let mut request = Request::builder().method(method).uri(path).body(Body::empty()).unwrap();
            request.extensions_mut().insert(SocketAddr::from(([192, 0, 2, 1], 1234)));
            app.clone().oneshot(request).await.unwrap()
        };
        for left in (0..5).rev() {
            let response = ask("POST", "/login").await;
            assert_eq!(response.status(), StatusCode::OK);
            assert_eq!(response.headers()["x-ratelimit-remaining"], left.to_string());
        }
        let refused = ask("POST", "/login").await;
        assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(refused.headers()["retry-after"], "60");
        let home = ask("GET", "/").await;
        assert_eq!(home.headers()["x-ratelimit-limit"], "1000");
    }
}

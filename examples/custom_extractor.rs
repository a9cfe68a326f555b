//! A custom key extractor: the tenant in the host name and the route, as one key.

use axum::Router;
use axum::routing::get;
use tower_ratelimit::extract::{Head, KeyError, MatchedPath};
use tower_ratelimit::{Key, KeyExtractor, Quota, RateLimitLayer};

/// Extracts the tenant from the host name: `acme` from `acme.example.com`.
#[derive(Clone, Debug)]
struct Tenant {
    domain: &'static str,
}

impl KeyExtractor for Tenant {
    fn extract(&self, head: &Head<'_>) -> Result<Option<Key>, KeyError> {
        let host = head.headers.get("host").and_then(|host| host.to_str().ok());
        let host = host.ok_or_else(|| KeyError::client("the Host header is missing"))?;
        match host.strip_suffix(self.domain).and_then(|tenant| tenant.strip_suffix('.')) {
            Some("status") => Ok(None), // not limited
            Some(tenant) => Ok(Some(Key::from(tenant))),
            None => Err(KeyError::client(format!("{host:?} is not a host of this server"))),
        }
    }
}

fn app() -> Router {
    let by_tenant_and_route = Tenant { domain: "example.com" }.and(MatchedPath::new());
    Router::new()
        .route("/reports/{id}", get(|| async { "a report" }))
        .route("/", get(|| async { "hello" }))
        .layer(RateLimitLayer::new(Quota::per_minute(2), by_tenant_and_route))
}

#[tokio::main]
async fn main() -> std::io::Result<()> {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    axum::serve(listener, app()).await
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use axum::http::{Request, StatusCode};
    use tower::ServiceExt;

    use super::*;

    #[tokio::test]
    async fn each_tenant_has_a_limit_for_each_route() {
        let app = app();
        let ask = async |host: &str, path: &str| {
            let request = Request::get(path).header("host", host).body(Body::empty()).unwrap();
            app.clone().oneshot(request).await.unwrap()
        };
        for (host, path) in [("acme.example.com", "/reports/1"), ("acme.example.com", "/"), ("ajax.example.com", "/")] {
            assert_eq!(ask(host, path).await.headers()["x-ratelimit-remaining"], "1");
        }
        assert_eq!(ask("acme.example.com", "/reports/2").await.headers()["x-ratelimit-remaining"], "0");
        assert_eq!(ask("acme.example.com", "/reports/3").await.status(), StatusCode::TOO_MANY_REQUESTS);
        assert!(!ask("status.example.com", "/").await.headers().contains_key("x-ratelimit-limit"));
        assert_eq!(ask("acme.example.org", "/").await.status(), StatusCode::BAD_REQUEST);
    }
}

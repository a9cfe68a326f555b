//! Behind a load balancer: the client's address comes from `X-Forwarded-For`. Monitoring and CORS
//! preflight requests are not limited.

use std::net::SocketAddr;

use axum::Router;
use axum::http::Method;
use axum::routing::get;
use tower_ratelimit::extract::AllowList;
use tower_ratelimit::{ClientIp, ConfigError, Quota, RateLimitLayer};

fn app() -> Result<Router, ConfigError> {
    // The networks of the load balancers. Other peers could write anything into `X-Forwarded-For`.
    let client = ClientIp::behind(["10.0.0.0/8", "fd00::/8"])?;
    // The first rule that matches the address decides.
    let monitoring = AllowList::new(client.clone()).except("192.0.2.7").allow("192.0.2.0/24");
    Ok(Router::new().route("/", get(|| async { "hello\n" })).layer(
        RateLimitLayer::new(Quota::per_minute(2), client)
            .allow_list(monitoring)
            .skip(|head| head.method == Method::OPTIONS || head.uri().path() == "/health"),
    ))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    axum::serve(listener, app()?.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use axum::http::Request;
    use tower::ServiceExt;

    use super::*;

    #[tokio::test]
    async fn client_is_resolved_through_the_load_balancer() {
        let app = app().unwrap();
        let ask = async |method: Method, forwarded_for: &str| {
            let request = Request::builder().method(method).header("x-forwarded-for", forwarded_for);
            let peer = SocketAddr::from(([10, 0, 0, 1], 1234));
            let mut request = request.body(Body::empty()).unwrap();
            request.extensions_mut().insert(peer);
            app.clone().oneshot(request).await.unwrap().status().as_u16()
        };
        for (client, expected) in [
            ("203.0.113.1", 200),
            ("203.0.113.1, 10.9.9.9", 200),
            ("8.8.8.8, 203.0.113.1", 429),
            ("203.0.113.2", 200),
            ("192.0.2.7", 200),
            ("192.0.2.7", 200),
            ("192.0.2.7", 429),
            ("192.0.2.8", 200),
            ("192.0.2.8", 200),
            ("192.0.2.8", 200),
        ] {
            assert_eq!(ask(Method::GET, client).await, expected, "{client}");
        }
        assert_eq!(ask(Method::OPTIONS, "203.0.113.1").await, 405, "not limited, but no handler");
    }
}

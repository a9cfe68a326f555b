//! A login form: only failed attempts count, the handler shows the remaining attempts, and an
//! operator can reset a client.

use std::net::{IpAddr, SocketAddr};

use axum::Router;
use axum::extract::Path;
use axum::http::StatusCode;
use axum::routing::post;
use tower_ratelimit::storage::StorageError;
use tower_ratelimit::{Decision, PeerIp, Policy, RateLimitLayer};

fn app() -> Result<Router, tower_ratelimit::ConfigError> {
    let attempts = "moving-window 3 per 15 minutes".parse::<Policy>()?.with_name("login");
    let limit = RateLimitLayer::new(attempts, PeerIp::new())
        // Charges before the handler runs, and refunds unless the response is 401.
        .charge_when(|response| response.status == StatusCode::UNAUTHORIZED)
        .share_decision();
    // This limiter shares the counts of the layer. Serve its route to operators only.
    let attempts = limit.limiter().expect("the layer has one policy");
    let unlock = async move |Path(client): Path<IpAddr>| {
        let key = PeerIp::new().key(client);
        let before = attempts.peek(&key).await.map_err(unavailable)?;
        attempts.clear(&key).await.map_err(unavailable)?;
        Ok::<_, StatusCode>(format!("had {} attempts left\n", before.remaining()))
    };
    Ok(Router::new().route("/login", post(login)).layer(limit).route("/operators/unlock/{client}", post(unlock)))
}

/// The memory storage never fails, but another one can.
fn unavailable(_: StorageError) -> StatusCode {
    StatusCode::SERVICE_UNAVAILABLE
}

async fn login(attempt: Decision, password: String) -> (StatusCode, String) {
    if password == "correct horse" {
        (StatusCode::OK, "welcome\n".to_owned())
    } else {
        (StatusCode::UNAUTHORIZED, format!("wrong, {} attempts left\n", attempt.remaining()))
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    axum::serve(listener, app()?.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use axum::body::{Body, to_bytes};
    use axum::http::Request;
    use tower::ServiceExt;

    use super::*;

    #[tokio::test]
    async fn only_failed_attempts_are_charged() {
        let app = app().unwrap();
        let ask = async |path: &str, body: &'static str| {
            let mut request = Request::post(path).body(Body::from(body)).unwrap();
            request.extensions_mut().insert(SocketAddr::from(([192, 0, 2, 1], 1234)));
            let response = app.clone().oneshot(request).await.unwrap();
            let status = response.status().as_u16();
            (status, String::from_utf8(to_bytes(response.into_body(), 100).await.unwrap().to_vec()).unwrap())
        };
        let try_with = async |password: &'static str| ask("/login", password).await;
        for _ in 0..5 {
            assert_eq!(try_with("correct horse").await.0, 200);
        }
        for left in [2, 1, 0] {
            assert_eq!(try_with("guess").await, (401, format!("wrong, {left} attempts left\n")));
        }
        assert_eq!(try_with("correct horse").await.0, 429, "refused after three failures");
        assert_eq!(ask("/operators/unlock/192.0.2.1", "").await, (200, "had 0 attempts left\n".to_owned()));
        assert_eq!(try_with("correct horse").await.0, 200);
    }
}

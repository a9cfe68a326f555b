//! A login form with two limits: failed attempts lock an account for one address, with longer and
//! longer locks, and many failed attempts lock the address for all accounts.

use std::net::SocketAddr;

use axum::Router;
use axum::extract::{ConnectInfo, Form, State};
use axum::http::StatusCode;
use axum::http::header::RETRY_AFTER;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use serde::Deserialize;
use tower_ratelimit::{ConfigError, Headers, Key, PeerIp, Policy, RateLimitLayer, RateLimiter};

/// Longer names are wrong, whatever the password is.
const LONGEST_ACCOUNT: usize = 100;

#[derive(Deserialize)]
struct Credentials {
    account: String,
    password: String,
}

const WRONG: &str = "wrong account or password\n";

fn app() -> Result<Router, ConfigError> {
    // The account and the address together, so that an attacker cannot lock out the owner.
    let accounts = "lockout 5/15m for 15m x2 up to 1d".parse::<Policy>()?.with_name("login-account");
    // The address alone, for one client that tries many accounts.
    let addresses = "lockout 50/h for 1h".parse::<Policy>()?.with_name("login-address");
    let layer = RateLimitLayer::new(addresses, PeerIp::new())
        .charge_when(|response| response.status == StatusCode::UNAUTHORIZED)
        // Its numbers are not those of the other limit. Its 429 keeps `Retry-After`.
        .headers(Headers::none());
    Ok(Router::new().route("/login", post(login).layer(layer)).with_state(RateLimiter::new(accounts)))
}

async fn login(
    State(limiter): State<RateLimiter>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    Form(Credentials { account, password }): Form<Credentials>,
) -> Response {
    let account = account.trim().to_lowercase();
    if account.len() > LONGEST_ACCOUNT {
        return (StatusCode::UNAUTHORIZED, WRONG).into_response();
    }
    let key = Key::join([&PeerIp::new().key(peer.ip()), &Key::from(&account)]);
    // Spends the attempt before the password is checked. So attempts that are sent at the same time
    // are limited, too.
    let Ok(attempt) = limiter.reserve(&key, 1).await else {
        return StatusCode::SERVICE_UNAVAILABLE.into_response();
    };
    if attempt.is_refused() {
        let seconds = attempt.retry_after().unwrap_or_default().as_secs_f64().ceil();
        return (StatusCode::TOO_MANY_REQUESTS, [(RETRY_AFTER, seconds.to_string())], "locked\n").into_response();
    }
    // An account that does not exist takes the same path and the same time.
    if !is_correct(&account, &password) {
        // The attempt stays spent. A limiter reports no events, so the lock is reported here.
        if attempt.new_lock().is_some() {
            println!("account {account:?} is locked for {}", peer.ip());
        }
        return (StatusCode::UNAUTHORIZED, WRONG).into_response();
    }
    match attempt.clear().await {
        Ok(()) => (StatusCode::OK, "welcome\n").into_response(),
        Err(_) => StatusCode::SERVICE_UNAVAILABLE.into_response(),
    }
}

/// Verify a slow hash here. For an unknown account, verify a fixed one.
fn is_correct(account: &str, password: &str) -> bool {
    account == "alice" && password == "correct horse"
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
    use axum::http::header::CONTENT_TYPE;
    use tower::ServiceExt;

    use super::*;

    async fn attempt(app: &Router, address: u8, account: &str, password: &str) -> (u16, bool) {
        let body = format!("account={account}&password={}", password.replace(' ', "+"));
        let mut request = Request::post("/login").body(Body::from(body)).unwrap();
        request.headers_mut().insert(CONTENT_TYPE, "application/x-www-form-urlencoded".parse().unwrap());
        request.extensions_mut().insert(ConnectInfo(SocketAddr::from(([192, 0, 2, address], 1234))));
        let response = app.clone().oneshot(request).await.unwrap();
        (response.status().as_u16(), response.headers().contains_key(RETRY_AFTER))
    }

    #[tokio::test]
    async fn five_failures_lock_the_account_for_one_address() {
        let app = app().unwrap();
        for account in ["alice", "alice", "ALICE", "Alice", "+alice"] {
            assert_eq!(attempt(&app, 1, account, "guess").await, (401, false));
        }
        assert_eq!(attempt(&app, 1, "alice", "correct horse").await, (429, true));
        assert_eq!(attempt(&app, 1, "nobody", "guess").await.0, 401, "other accounts have their own attempts");
        assert_eq!(attempt(&app, 2, "alice", "correct horse").await.0, 200, "alice herself is not locked out");
    }

    #[tokio::test]
    async fn success_forgets_the_failures() {
        let app = app().unwrap();
        for _ in 0..3 {
            for _ in 0..4 {
                assert_eq!(attempt(&app, 1, "alice", "guess").await.0, 401);
            }
            assert_eq!(attempt(&app, 1, "alice", "correct horse").await.0, 200);
        }
    }

    /// Guesses that are sent at the same time get no more answers than others.
    #[tokio::test]
    async fn concurrent_guesses_get_five_answers() {
        let app = app().unwrap();
        let guesses = (0..40).map(|number| {
            let app = app.clone();
            tokio::spawn(async move { attempt(&app, 1, "alice", &format!("guess {number}")).await.0 })
        });
        let mut answers = 0;
        for guess in guesses.collect::<Vec<_>>() {
            answers += u32::from(guess.await.unwrap() == 401);
        }
        assert_eq!(answers, 5);
    }

    #[tokio::test]
    async fn fifty_failures_lock_the_address_for_all_accounts() {
        let app = app().unwrap();
        for number in 0..50 {
            assert_eq!(attempt(&app, 1, &format!("user-{number}"), "password1").await.0, 401);
        }
        assert_eq!(attempt(&app, 1, "alice", "correct horse").await.0, 429);
        assert_eq!(attempt(&app, 2, "alice", "correct horse").await.0, 200);
    }
}

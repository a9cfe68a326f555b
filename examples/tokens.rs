//! A gateway to a language model, with two limits for each API key: requests per minute, and tokens
//! per minute.
//!
//! The number of tokens is known only at the end of a streamed answer. So a request is admitted on
//! an estimate, `max_tokens`, and settled when the stream ends or the client disconnects. A client
//! that used more tokens than it had owes the rest, and waits until it is paid back.
//!
//! Run `cargo run --example tokens`, and then these commands. The made-up model also spends
//! `reasoning` tokens, which `max_tokens` does not limit.
//!
//! An answer of 12 tokens. The head reports the estimate of 100 tokens, and 88 are refunded:
//!
//! `curl -iN -H 'x-api-key: alice' 'localhost:3000/complete?max_tokens=100'`
//!
//! The client disconnects after half a second, and pays for the tokens that the model has produced:
//!
//! `curl -iN -m 0.5 -H 'x-api-key: alice' 'localhost:3000/complete?max_tokens=100'`
//!
//! An answer that costs 69,900 tokens. Repeat it at once: 429 with `Retry-After: 300`, because the
//! client owes about five minutes' worth of tokens:
//!
//! `curl -iN -H 'x-api-key: bob' 'localhost:3000/complete?max_tokens=100&reasoning=69888'`
//!
//! An estimate above the capacity of the limit: 429 without `Retry-After`, because waiting does not
//! help:
//!
//! `curl -iN -H 'x-api-key: alice' 'localhost:3000/complete?max_tokens=20001'`
//!
//! 70 requests at once, of one token each. About ten get a 429 by the policy `requests`:
//!
//! ```text
//! seq 70 | xargs -P 70 -I N curl -so /dev/null -w '%{http_code}\n' -H 'x-api-key: carol' \
//!     'localhost:3000/complete?max_tokens=1'
//! ```

use std::convert::Infallible;
use std::time::Duration;

use axum::Router;
use axum::http::Uri;
use axum::response::sse::{Event, Sse};
use axum::routing::get;
use futures_util::stream::{Stream, unfold};
use tower_ratelimit::{ConfigError, Header, Headers, MemoryStorage, OnError, Policy, RateLimitLayer, Reservation};

/// The answer of the made-up model to every prompt. Each word is a token.
const ANSWER: &str = "every word of this short answer counts as exactly one single token";

/// The estimate for a request without `max_tokens`.
const DEFAULT_MAX_TOKENS: u32 = 256;

fn app(storage: &MemoryStorage) -> Result<Router, ConfigError> {
    // In a real gateway, an outer layer authenticates the key.
    let key = || Header::new("x-api-key");
    // Requests and tokens have separate policies. Each response has the fields of both.
    let requests = "token-bucket 60/minute".parse::<Policy>()?.with_name("requests");
    let tokens = "token-bucket 10000/minute burst 20000".parse::<Policy>()?.with_name("tokens");
    let requests =
        RateLimitLayer::new(requests, key()).storage(storage.clone(), OnError::Refuse).headers(Headers::draft11());
    let tokens = RateLimitLayer::new(tokens, key())
        .storage(storage.clone(), OnError::Refuse)
        // The client may choose its estimate, because the end of the stream corrects the cost.
        .cost(|head| max_tokens(head.uri()))
        .settle_later()
        .headers(Headers::draft11());
    // The outer layer decides first.
    Ok(Router::new().route("/complete", get(complete)).layer(tokens).layer(requests))
}

/// Returns the number of tokens that the client permits. It is at least one, because a request that
/// costs nothing passes even if the client is in debt, and is not settled.
fn max_tokens(uri: &Uri) -> u32 {
    parameter(uri, "max_tokens").unwrap_or(DEFAULT_MAX_TOKENS).max(1)
}

fn parameter(uri: &Uri, name: &str) -> Option<u32> {
    let mut pairs = uri.query()?.split('&').filter_map(|pair| pair.split_once('='));
    pairs.find(|(key, _)| *key == name)?.1.parse().ok()
}

async fn complete(uri: Uri, reservation: Reservation) -> Sse<impl Stream<Item = Result<Event, Infallible>>> {
    let words = ANSWER.split(' ').take(max_tokens(&uri).try_into().unwrap_or(usize::MAX));
    // Settled when it is dropped: at the end of the stream, or when the client disconnects.
    let mut tokens = reservation.counter();
    tokens.add(parameter(&uri, "reasoning").unwrap_or(0));
    // The first token counts from the start, so a client that disconnects before it pays for it.
    tokens.add(1);
    Sse::new(unfold((words.enumerate(), tokens), |(mut words, mut tokens)| async move {
        tokio::time::sleep(Duration::from_millis(100)).await;
        let (number, word) = words.next()?;
        tokens.add(u32::from(number > 0));
        Some((Ok(Event::default().data(word)), (words, tokens)))
    }))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    axum::serve(listener, app(&MemoryStorage::new())?).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use axum::http::{Request, Response};
    use http_body_util::BodyExt;
    use tower::ServiceExt;
    use tower_ratelimit::storage::ManualClock;

    use super::*;

    struct Gateway {
        app: Router,
        clock: ManualClock,
    }

    impl Gateway {
        fn start() -> Self {
            let clock = ManualClock::default();
            let storage = MemoryStorage::builder().clock(clock.clone()).build().unwrap();
            Self { app: app(&storage).unwrap(), clock }
        }

        async fn head(&self, key: &str, query: &str) -> Response<Body> {
            let request = Request::get(format!("/complete?{query}")).header("x-api-key", key);
            self.app.clone().oneshot(request.body(Body::empty()).unwrap()).await.unwrap()
        }

        /// Reads a response to its end. Returns the status, `Retry-After` and the body.
        async fn complete(&self, key: &str, query: &str) -> (u16, Option<String>, String) {
            let response = self.head(key, query).await;
            let retry_after = response.headers().get("retry-after").map(|value| value.to_str().unwrap().to_owned());
            let status = response.status().as_u16();
            let body = response.into_body().collect().await.unwrap().to_bytes();
            (status, retry_after, String::from_utf8(body.to_vec()).unwrap())
        }

        /// Returns the remaining requests and tokens, after a request of one token.
        async fn remaining(&self, key: &str) -> [u32; 2] {
            let response = self.head(key, "max_tokens=1").await;
            let lists: Vec<_> = response.headers().get_all("ratelimit").iter().map(|v| v.to_str().unwrap()).collect();
            let lists = lists.join(", ");
            ["\"requests\";r=", "\"tokens\";r="].map(|start| {
                let rest = lists.split(start).nth(1).unwrap_or_else(|| panic!("{start} is not in {lists}"));
                rest.split(';').next().unwrap().parse().unwrap()
            })
        }
    }

    #[tokio::test(start_paused = true)]
    async fn end_of_the_stream_settles_the_estimate() {
        let gateway = Gateway::start();
        let (status, _, body) = gateway.complete("alice", "max_tokens=100").await;
        assert_eq!((status, body.matches("data: ").count()), (200, 12));
        assert_eq!(gateway.remaining("alice").await, [58, 20_000 - 12 - 1]);
        // The response above was dropped before the first token, and costs one.
        assert_eq!(gateway.remaining("alice").await, [57, 20_000 - 13 - 1]);
        let (_, _, body) = gateway.complete("alice", "max_tokens=3").await;
        assert_eq!(body.matches("data: ").count(), 3);
        assert_eq!(gateway.remaining("alice").await, [55, 20_000 - 17 - 1]);
        assert_eq!(gateway.remaining("bob").await, [59, 19_999], "each key has its own limits");
    }

    #[tokio::test(start_paused = true)]
    async fn client_that_disconnects_pays_for_the_tokens_until_then() {
        let gateway = Gateway::start();
        let mut body = gateway.head("alice", "max_tokens=100&reasoning=500").await.into_body();
        for _ in 0..2 {
            body.frame().await.unwrap().unwrap();
        }
        assert_eq!(gateway.remaining("alice").await[1], 20_000 - 100 - 1, "the estimate, while it streams");
        drop(body);
        assert_eq!(gateway.remaining("alice").await[1], 20_000 - 502 - 1 - 1);
    }

    #[tokio::test(start_paused = true)]
    async fn client_that_owes_five_minutes_of_tokens_is_refused_for_five_minutes() {
        let gateway = Gateway::start();
        // 69,900 tokens are spent of 20,000. So 50,000 tokens are missing for the next request of
        // 100.
        let (status, ..) = gateway.complete("alice", "max_tokens=100&reasoning=69888").await;
        assert_eq!(status, 200);
        for (passed, expected) in [(0, "300"), (1, "299"), (298, "1")] {
            gateway.clock.advance(Duration::from_secs(passed));
            let (status, retry_after, _) = gateway.complete("alice", "max_tokens=100").await;
            assert_eq!((status, retry_after.as_deref()), (429, Some(expected)));
        }
        gateway.clock.advance(Duration::from_secs(1));
        assert_eq!(gateway.complete("alice", "max_tokens=100").await.0, 200);
    }

    #[tokio::test(start_paused = true)]
    async fn limit_of_requests_and_limit_of_tokens_both_refuse() {
        let gateway = Gateway::start();
        let (status, retry_after, _) = gateway.complete("alice", "max_tokens=20001").await;
        assert_eq!((status, retry_after), (429, None), "waiting does not help");
        for _ in 0..60 {
            assert_eq!(gateway.complete("carol", "max_tokens=1").await.0, 200);
        }
        let (status, retry_after, _) = gateway.complete("carol", "max_tokens=1").await;
        assert_eq!((status, retry_after.as_deref()), (429, Some("1")));
    }
}

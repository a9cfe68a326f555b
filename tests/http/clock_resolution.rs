//! A clock that advances in ticks: a client that waits exactly as long as a refusal says is
//! admitted, wherever the refusal is reported.

use std::time::Duration;

use common::random::Numbers;
use common::{Inner, ask, get, policy, retry_after};
use http::Response;
use tower::Layer;
use tower_ratelimit::storage::{Clock, ManualClock};
use tower_ratelimit::{
    Decision, Global, GrpcRejection, Headers, Key, MemoryStorage, OnError, RateLimitLayer, Timestamp,
};

/// A tick that does not divide the periods, in microseconds.
const TICK: u64 = 333_333;

/// Shows the time of the last tick of another clock.
#[derive(Debug)]
struct TickingClock(ManualClock);

impl Clock for TickingClock {
    fn now(&self) -> Timestamp {
        self.0.now().floor_to(TICK)
    }

    fn resolution(&self) -> Duration {
        Duration::from_micros(TICK)
    }
}

/// Returns a storage with a ticking clock, and the exact clock of its clients.
fn storage() -> (MemoryStorage, ManualClock) {
    let exact = ManualClock::default();
    (MemoryStorage::builder().clock(TickingClock(exact.clone())).build().unwrap(), exact)
}

/// The policies take each path of the memory storage: the refusal hint, one limit, several limits,
/// logs, and more limits than the fast path has.
const POLICIES: [&str; 10] = [
    "fixed-window 3/second",
    "elastic-window 2/second",
    "sliding-window-counter 3/second",
    "token-bucket 3/second",
    "leaky-bucket 3/second queue 0",
    "moving-window 3/second",
    "fixed-window 2/second; token-bucket 5/3 seconds",
    "1/s; 2/2s; 3/3s; 4/4s; 5/5s; 6/6s; 7/7s",
    "fixed-window 3/second; shadow 1/minute",
    "fixed-window 2/second; lockout 2 refusals/5 seconds for 2 seconds",
];

/// Returns the wait that the `grpc-retry-pushback-ms` of a refusal asks for.
fn pushback(response: &Response<String>) -> Option<Duration> {
    let millis = response.headers().get("grpc-retry-pushback-ms")?.to_str().ok()?.parse().ok()?;
    Some(Duration::from_millis(millis))
}

/// Sends requests at random times. After each refusal, waits exactly as long as `wait` reads from
/// it, and expects that the next request is admitted. Returns the number of refusals.
async fn obey<S>(
    service: &S,
    exact: &ManualClock,
    what: &str,
    is_refusal: impl Fn(&Response<String>) -> bool,
    wait: impl Fn(&Response<String>) -> Option<Duration>,
) -> u32
where
    S: tower::Service<http::Request<()>, Response = Response<String>, Error = std::convert::Infallible> + Clone,
{
    let (mut numbers, mut refusals) = (Numbers(7), 0);
    for _ in 0..600 {
        exact.advance(Duration::from_micros(numbers.below(2) * numbers.below(700_000)));
        let response = ask(service, get("/")).await;
        if is_refusal(&response) {
            refusals += 1;
            exact.advance(wait(&response).expect("a refusal has a wait"));
            let again = ask(service, get("/")).await;
            assert!(!is_refusal(&again), "{what}: refused after its wait: {again:?}");
        }
    }
    refusals
}

#[tokio::test]
async fn client_that_waits_for_retry_after_or_pushback_is_admitted() {
    for text in POLICIES {
        for headers in [Headers::x_rate_limit(), Headers::draft11(), Headers::none()] {
            let (storage, exact) = storage();
            let layer =
                RateLimitLayer::new(policy(text), Global::new()).storage(storage, OnError::Refuse).headers(headers);
            let service = layer.layer(Inner::default());
            let seconds = |response: &_| retry_after(response).map(Duration::from_secs);
            let what = format!("{text}, {headers:?}");
            assert!(obey(&service, &exact, &what, |response| response.status() == 429, seconds).await > 20, "{what}");

            let service = layer.rejection(GrpcRejection::new()).layer(Inner::default());
            let is_refusal = |response: &Response<String>| response.headers().contains_key("grpc-retry-pushback-ms");
            assert!(obey(&service, &exact, &what, is_refusal, pushback).await > 20, "{what}");
        }
    }
}

/// The wait of a stacked layer, and that of a shared decision.
#[tokio::test]
async fn every_reported_wait_is_longer_by_the_resolution() {
    for text in POLICIES {
        let (storage, exact) = storage();
        let layer = RateLimitLayer::new(policy(text), Global::new()).storage(storage, OnError::Refuse);
        let limiter = layer.limiter().unwrap();
        let service = layer.layer(Inner::default());
        let mut numbers = Numbers(11);
        for round in 0..300 {
            exact.advance(Duration::from_micros(numbers.below(700_000)));
            let response = ask(&service, get("/")).await;
            let reported = response.extensions().get::<Decision>().cloned().filter(Decision::is_refused);
            let peeked = limiter.peek(&Key::global()).await.unwrap();
            // An elastic window moves its end with each refused hit, so a peek is about the next one.
            for (refusal, of) in [(reported, "a response"), (Some(peeked).filter(Decision::is_refused), "a peek")] {
                let Some(refusal) = refusal else { continue };
                let start = exact.now();
                exact.advance(refusal.retry_after().unwrap());
                let admitted = limiter.peek(&Key::global()).await.unwrap().is_admitted();
                assert!(admitted, "{text}, round {round}: refused after the wait of {of}");
                exact.set(start);
            }
        }
    }
}

#[tokio::test]
async fn refused_hits_of_the_limiter_are_admitted_after_retry_after() {
    for text in POLICIES {
        let (storage, exact) = storage();
        let limiter =
            RateLimitLayer::new(policy(text), Global::new()).storage(storage, OnError::Refuse).limiter().unwrap();
        let (key, mut numbers, mut refusals) = (Key::global(), Numbers(5), 0);
        for _ in 0..600 {
            exact.advance(Duration::from_micros(numbers.below(2) * numbers.below(700_000)));
            if numbers.below(9) == 0 {
                let _ = limiter.charge(&key, 1).await.unwrap();
            }
            let decision = limiter.hit(&key).await.unwrap();
            if let Some(wait) = decision.retry_after() {
                refusals += 1;
                exact.advance(wait);
                assert!(limiter.hit(&key).await.unwrap().is_admitted(), "{text}");
            }
        }
        assert!(refusals > 50, "{text}: {refusals}");
    }
}

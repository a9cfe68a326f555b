//! Charging by the response: units are reserved before it, and refunded after it.

use std::convert::Infallible;
use std::future::{pending, ready};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{
    AnswersWithStatus, ask, get, memory_with_manual_clock, numbers, policy, poll, remaining, retry_after, slow, status,
};
use http::{Request, Response, StatusCode};
use tower::{Layer, Service, service_fn};
use tower_ratelimit::storage::ManualClock;
use tower_ratelimit::{
    Event, Global, Headers, Key, MemoryStorage, OnError, RateLimitLayer, RateLimiter, ResponseHead, Storage,
};

fn failures(response: &ResponseHead<'_>) -> bool {
    response.status.is_client_error()
}

/// Charges failures only.
fn layer(text: &str, storage: impl Storage) -> RateLimitLayer {
    RateLimitLayer::new(policy(text).with_name("logins"), Global::new())
        .storage(storage, OnError::Refuse)
        .charge_when(failures)
}

async fn left(text: &str, storage: &MemoryStorage) -> u32 {
    let limiter = RateLimiter::with_storage(policy(text).with_name("logins"), storage.clone());
    limiter.peek(&Key::global()).await.unwrap().remaining()
}

#[tokio::test]
async fn only_selected_responses_are_charged() {
    for text in
        ["fixed-window 3/hour", "moving-window 3/hour", "3/hour", "token-bucket 3/hour", "elastic-window 3/hour"]
    {
        let (storage, clock) = memory_with_manual_clock();
        let service = layer(text, storage.clone()).layer(AnswersWithStatus);
        for _ in 0..20 {
            let response = ask(&service, get("/200")).await;
            assert_eq!((response.status().as_u16(), remaining(&response)), (200, Some(3)), "{text}");
            clock.advance(Duration::from_micros(1));
        }
        for expected in [2, 1, 0] {
            assert_eq!(remaining(&ask(&service, get("/401")).await), Some(expected), "{text}");
        }
        let refused = ask(&service, get("/200")).await;
        assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS, "{text}: no unit to reserve");
        assert_eq!(left(text, &storage).await, 0, "{text}");
    }
}

#[tokio::test]
async fn header_fields_of_an_uncharged_response_include_the_refund() {
    let (storage, clock) = memory_with_manual_clock();
    let headers = Headers::x_rate_limit().and(Headers::draft11()).and(Headers::draft6());
    let service = layer("fixed-window 3/minute", storage).headers(headers).layer(AnswersWithStatus);
    ask(&service, get("/401")).await;
    clock.advance(Duration::from_secs(20));
    for (path, expected) in [("/200", "2"), ("/401", "1")] {
        let response = ask(&service, get(path)).await;
        let field = |name: &str| response.headers()[name].to_str().unwrap().to_owned();
        assert_eq!(field("x-ratelimit-remaining"), expected);
        assert_eq!(field("ratelimit-remaining"), expected);
        assert_eq!(field("ratelimit"), format!("\"logins\";r={expected};t=40"));
        assert_eq!(field("ratelimit-policy"), "\"logins\";q=3;w=60");
    }
}

/// Guards against this defect: a refund goes to the next window and makes it negative.
#[tokio::test]
async fn response_after_the_window_ended_refunds_nothing() {
    for text in ["fixed-window 2/minute", "fixed-window-aligned 2/minute", "elastic-window 2/minute"] {
        let (storage, clock) = memory_with_manual_clock();
        let inner = {
            let clock = clock.clone();
            service_fn(move |_: Request<()>| {
                clock.advance(Duration::from_secs(60));
                ready(Ok::<_, Infallible>(Response::new(String::new())))
            })
        };
        let service = layer(text, storage.clone()).layer(inner);
        let late = ask(&service, get("/")).await;
        assert_eq!(remaining(&late), Some(2), "{text}");
        let failing = layer(text, storage.clone()).layer(AnswersWithStatus);
        for expected in [1, 0] {
            assert_eq!(remaining(&ask(&failing, get("/401")).await), Some(expected), "{text}");
        }
        assert_eq!(status(&failing, get("/401")).await, 429, "{text}: at most two, despite the refunds");
    }
}

/// Concurrent requests cannot exceed the limit, because each reserves its units first.
#[tokio::test]
async fn units_are_reserved_for_requests_in_flight() {
    let (storage, _clock) = memory_with_manual_clock();
    let inner = service_fn(|_: Request<()>| pending::<Result<Response<String>, Infallible>>());
    let mut service = layer("fixed-window 2/minute", storage.clone()).layer(inner);
    let mut under_way = [Box::pin(service.call(get("/"))), Box::pin(service.call(get("/")))];
    assert!(under_way.iter_mut().all(|response| poll(response).is_pending()));
    let third = service.call(get("/")).await.unwrap();
    assert_eq!((third.status().as_u16(), retry_after(&third)), (429, Some(60)));
}

#[tokio::test]
async fn dropped_request_stays_charged() {
    let (storage, _clock) = memory_with_manual_clock();
    let inner = service_fn(|_: Request<()>| pending::<Result<Response<String>, Infallible>>());
    let mut service = layer("fixed-window 2/minute", storage.clone()).layer(inner);
    let mut dropped = Box::pin(service.call(get("/")));
    assert!(poll(&mut dropped).is_pending());
    drop(dropped);
    drop(service.call(get("/")));
    assert_eq!(left("fixed-window 2/minute", &storage).await, 0);
}

#[tokio::test]
async fn failed_request_stays_charged() {
    let (storage, _clock) = memory_with_manual_clock();
    let inner = service_fn(|_: Request<()>| ready(Err::<Response<String>, _>("broken")));
    let mut service = layer("fixed-window 2/minute", storage.clone()).layer(inner);
    assert_eq!(service.call(get("/")).await.unwrap_err(), "broken");
    assert_eq!(left("fixed-window 2/minute", &storage).await, 1);
}

#[tokio::test]
async fn response_does_not_wait_for_a_slow_refund() {
    let (memory, _clock) = memory_with_manual_clock();
    let service = layer("fixed-window 2/minute", slow(memory.clone())).layer(AnswersWithStatus);
    let response = ask(&service, get("/200")).await;
    assert_eq!((response.status().as_u16(), remaining(&response)), (200, Some(1)), "the response shows the charge");
    for _ in 0..10 {
        tokio::task::yield_now().await;
    }
    assert_eq!(left("fixed-window 2/minute", &memory).await, 2, "a task refunds it");
    ask(&service, get("/401")).await;
    for _ in 0..10 {
        tokio::task::yield_now().await;
    }
    assert_eq!(left("fixed-window 2/minute", &memory).await, 1);
}

#[tokio::test]
async fn refund_returns_all_units_of_all_limits() {
    let (storage, _clock) = memory_with_manual_clock();
    let text = "fixed-window 9/minute; moving-window 8/hour; token-bucket 7/hour; 6/day";
    let service =
        layer(text, storage.clone()).cost(|_: &tower_ratelimit::extract::Head<'_>| 5).layer(AnswersWithStatus);
    assert_eq!(remaining(&ask(&service, get("/200")).await), Some(6));
    assert_eq!(remaining(&ask(&service, get("/404")).await), Some(1));
    let limiter = RateLimiter::with_storage(policy(text).with_name("logins"), storage);
    let remaining: Vec<u32> = limiter
        .peek(&Key::global())
        .await
        .unwrap()
        .statuses()
        .iter()
        .map(tower_ratelimit::strategy::Status::remaining)
        .collect();
    assert_eq!(remaining, [4, 3, 2, 1]);
}

#[tokio::test(start_paused = true)]
async fn queue_slot_is_refunded_after_the_response() {
    let storage = MemoryStorage::builder().clock(tower_ratelimit::storage::TokioClock::new()).build().unwrap();
    let text = "leaky-bucket 1/second queue 2";
    let service = layer(text, storage.clone()).layer(AnswersWithStatus);
    let first = ask(&service, get("/401")).await;
    assert_eq!(remaining(&first), Some(2));
    let waited = ask(&service, get("/200")).await;
    assert_eq!(
        (waited.status().as_u16(), remaining(&waited)),
        (200, Some(3)),
        "the slot is free again after the response"
    );
}

#[tokio::test]
async fn refusal_of_an_inner_layer_can_be_excluded_from_the_charge() {
    let (storage, _clock) = memory_with_manual_clock();
    let inner =
        RateLimitLayer::new(policy("fixed-window 1/minute"), Global::new()).storage(storage.clone(), OnError::Refuse);
    let service = layer("fixed-window 9/minute", storage.clone())
        .charge_when(|response| response.status != 429)
        .layer(inner.layer(AnswersWithStatus));
    assert_eq!(status(&service, get("/200")).await, 200);
    for _ in 0..5 {
        let refused = ask(&service, get("/200")).await;
        assert_eq!((refused.status().as_u16(), numbers(&refused).map(|[limit, ..]| limit)), (429, Some(1)));
    }
    assert_eq!(left("fixed-window 9/minute", &storage).await, 8);
}

#[tokio::test]
async fn free_and_unlimited_requests_refund_nothing() {
    let (storage, _clock) = memory_with_manual_clock();
    let service = layer("fixed-window 3/minute", storage.clone())
        .cost(|head: &tower_ratelimit::extract::Head<'_>| u32::from(head.uri().path() == "/401"))
        .layer(AnswersWithStatus);
    ask(&service, get("/401")).await;
    for _ in 0..5 {
        assert_eq!(remaining(&ask(&service, get("/200")).await), Some(2));
    }
    let skipping = layer("fixed-window 3/minute", storage.clone()).skip(|_| true).layer(AnswersWithStatus);
    for _ in 0..5 {
        assert_eq!(numbers(&ask(&skipping, get("/200")).await), None);
    }
    assert_eq!(left("fixed-window 3/minute", &storage).await, 2);
}

#[tokio::test]
async fn free_request_passes_while_the_storage_fails() {
    for (cost, expected) in [(0, 200), (1, 503)] {
        let layer = RateLimitLayer::new(policy("1/day"), Global::new()).storage(common::failing(), OnError::Refuse);
        let service = layer.cost(move |_: &tower_ratelimit::extract::Head<'_>| cost).layer(AnswersWithStatus);
        assert_eq!(status(&service, get("/200")).await, expected);
    }
}

#[tokio::test]
async fn observer_gets_refunds() {
    let outcomes = Arc::new(Mutex::new(Vec::new()));
    let events = Arc::clone(&outcomes);
    let (storage, _clock): (_, ManualClock) = memory_with_manual_clock();
    let service = layer("fixed-window 1/minute", storage)
        .observer(move |event: &Event<'_>| events.lock().unwrap().push(event.outcome()))
        .layer(AnswersWithStatus);
    for (path, expected) in [("/200", 200), ("/401", 401), ("/200", 429)] {
        assert_eq!(status(&service, get(path)).await, expected);
    }
    assert_eq!(*outcomes.lock().unwrap(), ["admitted", "refunded", "admitted", "refused"]);
}

//! Suffixes of field names, and jitter of `Retry-After`.

use std::collections::BTreeMap;
use std::panic::catch_unwind;
use std::time::Duration;

use common::{EVERY_STRATEGY, Inner, T0, ask, get, memory_with_manual_clock, policy, retry_after, with};
use http::Response;
use tower::Layer;
use tower_ratelimit::{
    Global, GrpcRejection, Header, Headers, MemoryStorage, OnError, RateLimitLayer, Rejection, TextRejection,
};

fn layer(text: &str, storage: &MemoryStorage, headers: Headers) -> RateLimitLayer {
    RateLimitLayer::new(policy(text), Global::new()).storage(storage.clone(), OnError::Refuse).headers(headers)
}

/// The values of the fields whose names begin with `x-ratelimit-`, without that prefix.
fn x_fields<B>(response: &Response<B>) -> BTreeMap<&str, u64> {
    let fields = response.headers().iter();
    fields
        .filter_map(|(name, value)| Some((name.as_str().strip_prefix("x-ratelimit-")?, value)))
        .map(|(name, value)| (name, value.to_str().unwrap().parse().unwrap()))
        .collect()
}

#[tokio::test]
async fn layers_with_different_suffixes_write_their_own_numbers() {
    let (storage, _clock) = memory_with_manual_clock();
    let x = Headers::x_rate_limit();
    let tokens = layer("\"tokens\": fixed-window 100/hour", &storage, x.suffix("tokens")).cost(|_| 30);
    let requests = layer("fixed-window 2/minute", &storage, x.reset_in_seconds().suffix("requests"));
    let service = tokens.layer(requests.layer(Inner::default()));
    for (status, remaining_requests, remaining_tokens) in [(200, 1, 70), (200, 0, 40), (429, 0, 10)] {
        let response = ask(&service, get("/")).await;
        assert_eq!(response.status(), status);
        let expected = [
            ("limit-requests", 2),
            ("remaining-requests", remaining_requests),
            ("reset-requests", 60),
            ("limit-tokens", 100),
            ("remaining-tokens", remaining_tokens),
            ("reset-tokens", T0 + 3_600),
        ];
        assert_eq!(x_fields(&response), BTreeMap::from(expected), "{status}");
    }
    // The outer layer refuses, so the inner one is not asked.
    let refused = ask(&service, get("/")).await;
    assert_eq!((refused.status().as_u16(), retry_after(&refused)), (429, Some(3_600)));
    let expected = [("limit-tokens", 100), ("remaining-tokens", 10), ("reset-tokens", T0 + 3_600)];
    assert_eq!(x_fields(&refused), BTreeMap::from(expected));
}

#[tokio::test]
async fn layers_with_the_same_suffix_show_the_fewest_remaining_units() {
    for (outer, inner, [limit, remaining]) in [(5, 7, [5, 4]), (7, 5, [5, 4])] {
        let (storage, _clock) = memory_with_manual_clock();
        let layer =
            |amount| layer(&format!("fixed-window {amount}/hour"), &storage, Headers::x_rate_limit().suffix("a_1"));
        let service = layer(outer).layer(layer(inner).layer(Inner::default()));
        let response = ask(&service, get("/")).await;
        let expected = [("limit-a_1", limit), ("remaining-a_1", remaining), ("reset-a_1", T0 + 3_600)];
        assert_eq!(x_fields(&response), BTreeMap::from(expected), "{outer} around {inner}");
    }
    // A refusal keeps its own numbers, though fewer units remain in the outer layer.
    let (storage, _clock) = memory_with_manual_clock();
    let headers = Headers::x_rate_limit().suffix("a");
    let outer = layer("fixed-window 1/hour", &storage, headers);
    let service = outer.layer(layer("fixed-window 2/minute", &storage, headers).cost(|_| 3).layer(Inner::default()));
    let refused = ask(&service, get("/")).await;
    assert_eq!(refused.status(), 429);
    assert_eq!(x_fields(&refused), BTreeMap::from([("limit-a", 2), ("remaining-a", 2), ("reset-a", T0)]));
}

#[tokio::test]
async fn suffix_changes_only_x_rate_limit() {
    let suffix = Headers::none().suffix("tokens");
    for (headers, names) in [
        (suffix, &[][..]),
        (suffix.and(Headers::draft6()), &["ratelimit-limit", "ratelimit-remaining", "ratelimit-reset"]),
        (suffix.and(Headers::draft11()), &["ratelimit", "ratelimit-policy"]),
        (
            Headers::x_rate_limit().and(suffix).and(Headers::none().suffix("other")),
            &["x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens"],
        ),
    ] {
        let (storage, _clock) = memory_with_manual_clock();
        let response = ask(&layer("10/minute", &storage, headers).layer(Inner::default()), get("/")).await;
        let mut written: Vec<_> = response.headers().keys().map(|name| name.as_str().to_owned()).collect();
        written.sort();
        assert_eq!(written, names, "{headers:?}");
    }
}

#[test]
fn invalid_options_are_rejected() {
    let long = "a".repeat(33);
    for suffix in ["", "Tokens", "to kens", "tok\u{e9}ns", "a:b", &*long] {
        assert!(catch_unwind(|| Headers::x_rate_limit().suffix(suffix)).is_err(), "{suffix:?}");
        if suffix != "Tokens" {
            let error = format!("x, suffix={suffix}").parse::<Headers>().unwrap_err().to_string();
            assert!(error.contains("a suffix is 1 to 32 of the characters"), "{error}");
        }
    }
    assert!(catch_unwind(|| Headers::none().retry_jitter(101)).is_err());
    for text in ["retry-jitter=101", "retry-jitter=-1", "retry-jitter=20%", "retry-jitter="] {
        let error = text.parse::<Headers>().unwrap_err().to_string();
        assert!(error.contains("a percentage from 0 to 100"), "{error}");
    }
}

/// Returns `Retry-After` of the refusals of 200 clients by an aligned window that ends in 50 seconds.
/// Calls `check` with each of them and its response.
async fn waits(
    headers: Headers,
    rejection: impl Rejection<String>,
    check: impl Fn(u64, &Response<String>),
) -> Vec<u64> {
    let (storage, clock) = memory_with_manual_clock();
    clock.advance(Duration::from_secs(10));
    let service = RateLimitLayer::new(policy("fixed-window-aligned 1/minute"), Header::new("x-client"))
        .storage(storage, OnError::Refuse)
        .headers(headers)
        .rejection(rejection)
        .layer(Inner::default());
    let mut waits = Vec::new();
    for client in 0..200 {
        let request = || with("x-client", &client.to_string());
        assert_eq!(ask(&service, request()).await.status(), 200);
        let refused = ask(&service, request()).await;
        let wait = retry_after(&refused).unwrap();
        check(wait, &refused);
        assert_eq!(retry_after(&ask(&service, request()).await), Some(wait), "the same for the same end");
        waits.push(wait);
    }
    waits
}

#[tokio::test]
async fn jitter_lengthens_retry_after_by_at_most_its_share() {
    let text = |wait: u64, refused: &Response<String>| {
        assert_eq!(*refused.body(), format!("too many requests, retry in {wait} s\n"));
        assert_eq!(x_fields(refused)["reset"], T0 + 60, "only the wait changes");
    };
    let headers = Headers::x_rate_limit();
    assert_eq!(waits(headers, TextRejection::new(), text).await, [50; 200]);
    for (percent, most) in [(0, 50), (1, 51), (20, 60), (100, 100)] {
        let waits = waits(headers.retry_jitter(percent), TextRejection::new(), text).await;
        assert!(waits.iter().all(|wait| (50..=most).contains(wait)), "{percent}: {waits:?}");
        let mut distinct = waits.clone();
        distinct.sort_unstable();
        distinct.dedup();
        // 200 clients leave out a value of ten with a probability of one to a hundred million.
        assert!(distinct.len() >= usize::from(percent).min(10), "{percent}: {distinct:?}");
    }
    let pushback = |wait: u64, refused: &Response<String>| {
        let millis: u64 = refused.headers()["grpc-retry-pushback-ms"].to_str().unwrap().parse().unwrap();
        assert_eq!(millis.div_ceil(1_000), wait);
    };
    let waits = waits(headers.retry_jitter(20), GrpcRejection::new(), pushback).await;
    assert!(waits.iter().any(|wait| *wait > 50), "{waits:?}");
}

#[tokio::test]
async fn clients_that_wait_as_long_as_a_jittered_retry_after_are_admitted() {
    for text in EVERY_STRATEGY.map(|text| text.replace("seconds", "minutes")) {
        let (storage, clock) = memory_with_manual_clock();
        let service = |headers| {
            let layer = RateLimitLayer::new(policy(&text), Header::new("x-client"));
            layer.storage(storage.clone(), OnError::Refuse).headers(headers).layer(Inner::default())
        };
        let (jittered, plain) = (service(Headers::none().retry_jitter(20)), service(Headers::none()));
        let request = |client: u32| with("x-client", &client.to_string());
        clock.advance(Duration::from_secs(10));
        let mut waits = Vec::new();
        for client in 0..100 {
            while ask(&plain, request(client)).await.status() == 200 {}
            let shortest = retry_after(&ask(&plain, request(client)).await).unwrap();
            let wait = retry_after(&ask(&jittered, request(client)).await).unwrap();
            assert!((shortest..=(shortest * 6).div_ceil(5)).contains(&wait), "{text}: {wait} s for {shortest} s");
            waits.push((wait, client));
        }
        waits.sort_unstable();
        assert!(waits.chunk_by(|one, next| one.0 == next.0).count() >= 10, "{text}: {waits:?}");
        let mut passed = 0;
        for (wait, client) in waits {
            clock.advance(Duration::from_secs(wait - passed));
            passed = wait;
            assert_eq!(ask(&jittered, request(client)).await.status(), 200, "{text}: after {wait} s");
        }
    }
}

#[tokio::test]
async fn request_that_can_never_be_admitted_has_no_retry_after_with_jitter() {
    let (storage, _clock) = memory_with_manual_clock();
    let layer = layer("10/minute", &storage, Headers::none().retry_jitter(20)).cost(|_| 11);
    let refused = ask(&layer.layer(Inner::default()), get("/")).await;
    assert_eq!((refused.status().as_u16(), retry_after(&refused)), (429, None));
}

//! Refusals of an inner layer behind an outer layer.

use std::time::Duration;

use common::{Inner, ask, get, memory_with_manual_clock, numbers, policy, retry_after, slow};
use http::Response;
use http::header::{HeaderValue, RETRY_AFTER};
use tower::Layer;
use tower_ratelimit::extract::Head;
use tower_ratelimit::{Decision, Global, GrpcRejection, Headers, Key, OnError, RateLimitLayer, RejectReason, Storage};

fn layer(text: &str, storage: &(impl Storage + Clone)) -> RateLimitLayer {
    RateLimitLayer::new(policy(text), Global::new()).storage(storage.clone(), OnError::Refuse)
}

/// Returns all families of fields, the first one with absolute resets.
fn families() -> [Headers; 4] {
    [Headers::x_rate_limit(), Headers::x_rate_limit().reset_in_seconds(), Headers::draft6(), Headers::draft11()]
}

#[tokio::test]
async fn inner_refusal_reports_the_longer_wait_of_both_layers() {
    for headers in families() {
        for (outer, inner, waits) in [
            ("fixed-window 2/hour", "fixed-window 1/minute", [Some(3_600), Some(3_600)]),
            // The outer layer would admit the client again, so its wait does not count.
            ("fixed-window 3/hour", "fixed-window 1/minute", [Some(60), Some(3_600)]),
            ("fixed-window 2/minute", "fixed-window 1/hour", [Some(3_600), Some(60)]),
            ("leaky-bucket 1/minute queue 0", "fixed-window 1/second", [Some(60), Some(60)]),
        ] {
            let (storage, clock) = memory_with_manual_clock();
            let service = layer(outer, &storage).headers(headers).layer(layer(inner, &storage).layer(Inner::default()));
            assert_eq!(ask(&service, get("/")).await.status(), 200);
            if outer.starts_with("leaky") {
                // The only slot is free again after a minute. A hit of the inner limiter then
                // spends the inner window.
                let hit = layer(inner, &storage).limiter().unwrap();
                clock.advance(Duration::from_secs(60));
                assert!(hit.hit(&Key::global()).await.unwrap().is_admitted());
            }
            for wait in waits {
                let refused = ask(&service, get("/")).await;
                assert_eq!(
                    (refused.status().as_u16(), retry_after(&refused)),
                    (429, wait),
                    "{outer}, {inner}, {headers:?}"
                );
            }
        }
    }
}

#[tokio::test]
async fn client_that_obeys_an_inner_refusal_is_admitted() {
    let (storage, clock) = memory_with_manual_clock();
    let by_cost = |head: &Head<'_>| head.uri().path()[1..].parse::<u32>().unwrap();
    // After two requests of cost 3, two units of the outer layer remain.
    let outer = layer("fixed-window 8/hour", &storage).cost(by_cost);
    let service = outer.layer(layer("fixed-window 1/minute", &storage).layer(Inner::default()));
    assert_eq!(ask(&service, get("/3")).await.status(), 200);
    let refused = ask(&service, get("/3")).await;
    assert_eq!((refused.status().as_u16(), retry_after(&refused)), (429, Some(3_600)));
    assert_eq!(
        numbers(&refused).map(|[limit, left, _]| (limit, left)),
        Some((1, 0)),
        "the refusal keeps its own numbers"
    );
    clock.advance(Duration::from_secs(3_600));
    assert_eq!(ask(&service, get("/3")).await.status(), 200);
}

/// Guards against these defects: units that a limit keeps, and limits that header fields do not report, do
/// not count in the wait.
#[tokio::test]
async fn inner_refusal_reports_the_wait_of_each_outer_limit_and_of_its_kept_units() {
    for headers in families() {
        for (outer, inner, cost, after, wait) in [
            ("fixed-window 3/hour keep 1", "fixed-window 1/minute", 1, 0, 3_600),
            ("fixed-window 3/second; fixed-window 8/hour", "fixed-window 1 per 2 seconds", 3, 1, 3_599),
        ] {
            let (storage, clock) = memory_with_manual_clock();
            let outer_layer = layer(outer, &storage).headers(headers).cost(move |_| cost);
            let service = outer_layer.layer(layer(inner, &storage).layer(Inner::default()));
            assert_eq!(ask(&service, get("/")).await.status(), 200);
            clock.advance(Duration::from_secs(after));
            let refused = ask(&service, get("/")).await;
            assert_eq!(retry_after(&refused), Some(wait), "{outer}, {headers:?}");
            clock.advance(Duration::from_secs(wait));
            assert_eq!(ask(&service, get("/")).await.status(), 200, "{outer}, {headers:?}");
        }
    }
}

/// Guards against this defect: a layer that settles reports the wait of a hit of one unit.
#[tokio::test]
async fn inner_refusal_reports_the_wait_of_the_request_cost_of_a_layer_that_settles() {
    for headers in families() {
        for (actual, wait) in [(None, 60), (Some(4), 60), (Some(5), 60), (Some(0), 1)] {
            let (storage, _clock) = memory_with_manual_clock();
            let outer = layer("fixed-window 10/minute", &storage)
                .headers(headers)
                .cost(|_| 4)
                .settle(move |response| actual.filter(|_| response.status == 429));
            let service = outer.layer(layer("fixed-window 1/second", &storage).layer(Inner::default()));
            assert_eq!(ask(&service, get("/")).await.status(), 200);
            // Two units of the outer layer remain, one after a charge, or six after a refund.
            let refused = ask(&service, get("/")).await;
            assert_eq!(
                (refused.status().as_u16(), retry_after(&refused)),
                (429, Some(wait)),
                "{actual:?}, {headers:?}"
            );
        }
    }
}

#[tokio::test]
async fn missing_retry_after_or_date_of_an_inner_refusal_is_unchanged() {
    for value in [None, Some("Sun, 22 Nov 2026 06:31:00 GMT")] {
        let (storage, _clock) = memory_with_manual_clock();
        let inner = layer("fixed-window 1/minute", &storage).cost(|_| 2);
        let dated = tower::util::MapResponseLayer::new(move |mut response: Response<String>| {
            if let Some(value) = value {
                response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static(value));
            }
            response
        });
        let service = layer("fixed-window 1/hour", &storage).layer(dated.layer(inner.layer(Inner::default())));
        let refused = ask(&service, get("/")).await;
        assert_eq!(refused.status(), 429);
        assert_eq!(refused.headers().get(RETRY_AFTER).map(|value| value.to_str().unwrap()), value);
    }
}

/// Tests the example of stacked layers in the guide.
#[tokio::test]
async fn outer_layer_can_refund_inner_refusals() {
    async fn check(outer_storage: impl Storage + Clone, wait: u64) {
        let (storage, _clock) = memory_with_manual_clock();
        let outer = layer("fixed-window 2/hour", &outer_storage)
            .charge_when(|response| response.extensions.get().is_none_or(Decision::is_admitted));
        let limiter = outer.limiter().unwrap();
        let service = outer.layer(layer("fixed-window 1/minute", &storage).layer(Inner::default()));
        assert_eq!(ask(&service, get("/")).await.status(), 200);
        for _ in 0..5 {
            let refused = ask(&service, get("/")).await;
            assert_eq!((refused.status().as_u16(), retry_after(&refused)), (429, Some(wait)));
            for _ in 0..10 {
                tokio::task::yield_now().await;
            }
            let left = limiter.peek(&Key::global()).await;
            assert_eq!(left.ok().map(|decision| decision.remaining()), Some(1), "the inner layer refused");
        }
    }
    check(memory_with_manual_clock().0, 60).await;
    check(slow(memory_with_manual_clock().0), 60).await;
}

/// The outer layer does not call its rejection for a refusal of the inner layer.
#[tokio::test]
async fn inner_refusal_keeps_its_body() {
    let (storage, _clock) = memory_with_manual_clock();
    let loud = |_: RejectReason<'_>, _: &Head<'_>| Response::builder().status(429).body("outer".to_owned()).unwrap();
    let outer = layer("fixed-window 2/hour", &storage).rejection(loud);
    let service = outer.layer(layer("fixed-window 1/minute", &storage).layer(Inner::default()));
    assert_eq!(ask(&service, get("/")).await.status(), 200);
    for (body, wait) in [(false, 3_600), (true, 3_600)] {
        let refused = ask(&service, get("/")).await;
        assert_eq!((refused.body() == "outer", retry_after(&refused)), (body, Some(wait)));
    }
}

#[tokio::test]
async fn grpc_pushback_of_an_inner_refusal_is_the_longer_wait_of_both_layers() {
    let hours = |hours: u64| GrpcRejection::new().max_pushback(Duration::from_secs(hours * 3_600));
    for (inner, rejection, pushback) in [
        ("fixed-window 1/minute", hours(1), "3600000"),
        ("fixed-window 1/day", hours(24), "86400000"),
        ("fixed-window 1/minute", GrpcRejection::new(), "-1"),
        ("fixed-window 1/day", hours(1), "-1"),
    ] {
        let (storage, _clock) = memory_with_manual_clock();
        let grpc = layer(inner, &storage).rejection(rejection);
        let service = layer("fixed-window 2/hour", &storage).layer(grpc.layer(Inner::default()));
        for expected in [None, Some(pushback)] {
            let response = ask(&service, get("/")).await;
            let written = response.headers().get("grpc-retry-pushback-ms");
            assert_eq!(written.map(|value| value.to_str().unwrap()), expected);
        }
    }
}

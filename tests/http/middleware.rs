//! The responses of the middleware: header fields, refusals and their bodies.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::task::Poll;
use std::time::Duration;

use common::{
    EVERY_STRATEGY, Inner, T0, admitted_at_once, ask, get, memory_with_manual_clock, numbers, policy, remaining,
    retry_after, status, with,
};
use http::{Request, Response, StatusCode};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_ratelimit::extract::Head;
use tower_ratelimit::storage::ManualClock;
use tower_ratelimit::{
    Decision, EmptyRejection, Event, Global, Header, Headers, MemoryStorage, OnError, Quota, RateLimit, RateLimitLayer,
    RejectReason, Rejection,
};
use tower_test::mock;

fn limited(text: &str) -> (RateLimit<Inner>, ManualClock) {
    let (storage, clock) = memory_with_manual_clock();
    let layer = RateLimitLayer::new(policy(text), Global::new()).storage(storage, OnError::Refuse);
    (layer.layer(Inner::default()), clock)
}

#[tokio::test]
async fn admitted_response_has_limit_remaining_and_reset() {
    let (service, clock) = limited("fixed-window 3 per 10 seconds");
    let first = ask(&service, get("/")).await;
    assert_eq!(first.status(), 200);
    assert_eq!(numbers(&first), Some([3, 2, T0 + 10]));
    assert_eq!(retry_after(&first), None);
    assert_eq!(first.into_body(), "in");

    clock.advance(Duration::from_secs(4));
    assert_eq!(numbers(&ask(&service, get("/")).await), Some([3, 1, T0 + 10]));
    clock.advance(Duration::from_secs(6));
    assert_eq!(numbers(&ask(&service, get("/")).await), Some([3, 2, T0 + 20]));
}

#[tokio::test]
async fn reset_is_rounded_up_to_the_next_second_of_the_epoch() {
    let (service, clock) = limited("fixed-window 3 per 10 seconds");
    clock.advance(Duration::from_micros(1));
    assert_eq!(numbers(&ask(&service, get("/")).await), Some([3, 2, T0 + 11]));
}

#[tokio::test]
async fn reset_in_seconds_counts_from_now_and_is_rounded_up() {
    let (storage, clock) = memory_with_manual_clock();
    let layer = RateLimitLayer::new(policy("fixed-window 2 per 10 seconds"), Global::new())
        .storage(storage, OnError::Refuse)
        .headers(Headers::x_rate_limit().reset_in_seconds());
    let service = layer.layer(Inner::default());
    clock.advance(Duration::from_millis(900));
    assert_eq!(numbers(&ask(&service, get("/")).await), Some([2, 1, 10]));
    clock.advance(Duration::from_micros(1));
    assert_eq!(numbers(&ask(&service, get("/")).await), Some([2, 0, 10]));
    clock.advance(Duration::from_micros(9_999_998));
    let refused = ask(&service, get("/")).await;
    assert_eq!((numbers(&refused), retry_after(&refused)), (Some([2, 0, 1]), Some(1)));
}

#[tokio::test]
async fn limit_field_of_a_bucket_is_its_burst() {
    let (storage, _clock) = memory_with_manual_clock();
    let layer = RateLimitLayer::new(Quota::per_second(10).burst(20), Global::new())
        .storage(storage, OnError::Refuse)
        .layer(Inner::default());
    assert_eq!(numbers(&ask(&layer, get("/")).await), Some([20, 19, T0 + 1]));
}

#[tokio::test]
async fn refusal_is_429_with_the_same_fields_and_retry_after() {
    let (service, clock) = limited("fixed-window 1 per 10 seconds");
    ask(&service, get("/")).await;
    clock.advance(Duration::from_millis(500));
    let refused = ask(&service, get("/")).await;
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(numbers(&refused), Some([1, 0, T0 + 10]));
    assert_eq!(retry_after(&refused), Some(10));
    assert!(refused.extensions().get::<Decision>().is_some_and(Decision::is_refused));
}

/// Guards against this defect: `Retry-After` is 0, rounded down, or the whole window instead of the
/// remaining time.
#[tokio::test]
async fn retry_after_is_at_least_one_second_and_exact_to_the_second() {
    for text in EVERY_STRATEGY {
        for start in [0, 1, 333_333, 999_999, 1_500_000] {
            let (service, clock) = limited(text);
            clock.advance(Duration::from_micros(start));
            let wait = loop {
                let response = ask(&service, get("/")).await;
                if response.status() == 429 {
                    break retry_after(&response).unwrap();
                }
                assert_eq!(retry_after(&response), None);
                clock.advance(Duration::from_micros(123_457));
            };
            assert!((1..=7).contains(&wait), "{text}: {wait}");
            if text.starts_with("elastic-window") {
                assert_eq!(wait, 7, "the refused hit has moved the end");
                clock.advance(Duration::from_secs(wait));
            } else {
                clock.advance(Duration::from_secs(wait - 1));
                assert_eq!(status(&service, get("/")).await, 429, "{text} from {start}: {wait} s is too long");
                clock.advance(Duration::from_secs(1));
            }
            assert_eq!(status(&service, get("/")).await, 200, "{text} from {start}: {wait} s is too short");
        }
    }
}

#[tokio::test]
async fn one_microsecond_before_the_end_retry_after_is_one() {
    let (service, clock) = limited("fixed-window 1 per 10 seconds");
    ask(&service, get("/")).await;
    clock.advance(Duration::from_micros(9_999_999));
    assert_eq!(retry_after(&ask(&service, get("/")).await), Some(1));
}

/// Guards against this defect: the check ignores the cost, or underflows if the cost exceeds the
/// remaining units.
#[tokio::test]
async fn cost_above_the_capacity_is_refused_without_retry_after_and_spends_nothing() {
    for text in EVERY_STRATEGY {
        let (storage, _clock) = memory_with_manual_clock();
        let cost = |head: &Head<'_>| if head.uri().path() == "/huge" { u32::MAX } else { 1 };
        let layer = RateLimitLayer::new(policy(text), Global::new()).storage(storage, OnError::Refuse).cost(cost);
        let service = layer.layer(Inner::default());
        let huge = ask(&service, get("/huge")).await;
        assert_eq!((huge.status().as_u16(), retry_after(&huge)), (429, None), "{text}");
        let [limit, before, _] = numbers(&huge).unwrap();
        assert_eq!((before, remaining(&ask(&service, get("/")).await)), (limit, Some(limit - 1)), "{text}");
    }
}

#[tokio::test]
async fn refusal_without_header_fields_keeps_retry_after() {
    let (storage, _clock) = memory_with_manual_clock();
    let layer = RateLimitLayer::new(policy("fixed-window 1/minute"), Global::new())
        .storage(storage, OnError::Refuse)
        .headers(Headers::none());
    let service = layer.layer(Inner::default());
    assert!(ask(&service, get("/")).await.headers().is_empty());
    let refused = ask(&service, get("/")).await;
    assert_eq!((refused.status().as_u16(), numbers(&refused), retry_after(&refused)), (429, None, Some(60)));
}

/// Guards against this defect: `remaining` increases, or exceeds the limit.
#[tokio::test]
async fn remaining_falls_by_one_with_each_hit_and_never_exceeds_the_limit() {
    for text in EVERY_STRATEGY {
        let (service, clock) = limited(text);
        let [limit, mut left, _] = numbers(&ask(&service, get("/")).await).unwrap();
        assert_eq!(left, limit - 1, "{text}");
        while left > 0 {
            left -= 1;
            assert_eq!(remaining(&ask(&service, get("/")).await), Some(left), "{text}");
        }
        for step in 0..200_u64 {
            clock.advance(Duration::from_micros(step * step * 997));
            let [limit_now, left, _] = numbers(&ask(&service, get("/")).await).unwrap();
            assert!(limit_now == limit && left < limit, "{text}: {left} of {limit_now}");
        }
    }
}

/// Guards against this defect: `remaining` is negative after the limit was lowered.
#[tokio::test]
async fn lowered_limit_keeps_the_spent_units() {
    let (storage, clock) = memory_with_manual_clock();
    let with_amount = |amount: u32| {
        let policy = policy(&format!("fixed-window {amount}/minute")).with_name("api");
        RateLimitLayer::new(policy, Global::new()).storage(storage.clone(), OnError::Refuse).layer(Inner::default())
    };
    let (wide, narrow, wider) = (with_amount(10), with_amount(3), with_amount(20));
    for _ in 0..8 {
        ask(&wide, get("/")).await;
    }
    let refused = ask(&narrow, get("/")).await;
    assert_eq!((refused.status().as_u16(), numbers(&refused)), (429, Some([3, 0, T0 + 60])));
    assert_eq!(numbers(&ask(&wider, get("/")).await), Some([20, 11, T0 + 60]));
    clock.advance(Duration::from_secs(60));
    assert_eq!(numbers(&ask(&narrow, get("/")).await), Some([3, 2, T0 + 120]));
}

/// Guards against this defect: an idle client gets burst + 1 units.
#[tokio::test]
async fn fresh_and_idle_clients_are_treated_equally() {
    for text in EVERY_STRATEGY {
        let (service, clock) = limited(text);
        let fresh = admitted_at_once(&service).await;
        for idle in [Duration::from_secs(21), Duration::from_secs(86_400), Duration::from_secs(400 * 86_400)] {
            clock.advance(idle);
            assert_eq!(admitted_at_once(&service).await, fresh, "{text} after {idle:?}");
        }
    }
}

/// Guards against this defect: a limit of 1 is rounded to 0 or 2.
#[tokio::test]
async fn limit_of_one_admits_exactly_one_request() {
    for strategy in ["fixed-window", "elastic-window", "moving-window", "sliding-window-counter", "token-bucket"] {
        let (service, clock) = limited(&format!("{strategy} 1/second"));
        for _ in 0..5 {
            assert_eq!(admitted_at_once(&service).await, 1, "{strategy}");
            clock.advance(Duration::from_secs(2));
        }
    }
}

/// Guards against this defect: check and increment are not atomic.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn concurrent_requests_are_admitted_exactly_up_to_the_limit() {
    for strategy in ["fixed-window", "moving-window", "sliding-window-counter", "token-bucket"] {
        let (service, _clock) = limited(&format!("{strategy} 100/minute"));
        let tasks: Vec<_> = (0..8)
            .map(|_| {
                let service = service.clone();
                tokio::spawn(async move {
                    let mut admitted = 0;
                    for _ in 0..50 {
                        admitted += u32::from(status(&service, get("/")).await == 200);
                    }
                    admitted
                })
            })
            .collect();
        let mut admitted = 0;
        for task in tasks {
            admitted += task.await.unwrap();
        }
        assert_eq!((admitted, service.get_ref().calls()), (100, 100), "{strategy}");
    }
}

#[tokio::test]
async fn default_refusal_is_a_short_text() {
    let (service, _clock) = limited("fixed-window 1/minute");
    ask(&service, get("/")).await;
    let refused = ask(&service, get("/")).await;
    assert!(refused.headers()["content-type"].to_str().unwrap().starts_with("text/plain"));
    let text = refused.into_body();
    assert!(text.contains("too many requests") && text.contains("60"), "{text}");
}

#[tokio::test]
async fn fields_of_a_rejection_closure_are_kept() {
    let (storage, _clock) = memory_with_manual_clock();
    let rejection = |refused: RejectReason<'_>, head: &Head<'_>| {
        let RejectReason::Limit(decision) = refused else { panic!("{refused:?}") };
        let text = format!("{} {} {}", refused.status(), head.uri().path(), decision.capacity());
        Response::builder().status(418).header("x-mine", "yes").body(text).unwrap()
    };
    let layer = RateLimitLayer::new(policy("fixed-window 1/minute"), Global::new())
        .storage(storage, OnError::Refuse)
        .rejection(rejection);
    let service = layer.layer(Inner::default());
    let admitted = ask(&service, get("/tea")).await;
    assert_eq!((admitted.status().as_u16(), admitted.body().as_str()), (200, "in"));
    let refused = ask(&service, get("/tea")).await;
    assert_eq!((refused.status().as_u16(), &refused.headers()["x-mine"]), (418, &"yes".parse().unwrap()));
    assert_eq!((numbers(&refused), retry_after(&refused)), (Some([1, 0, T0 + 60]), Some(60)));
    assert_eq!(refused.into_body(), "429 Too Many Requests /tea 1");
}

/// Guards against this defect: the inner service is called before the decision.
#[tokio::test]
async fn refused_request_never_reaches_the_inner_service() {
    let layer = RateLimitLayer::new(Quota::per_hour(1), Global::new());
    let (mut service, mut handle) = mock::spawn_layer::<Request<()>, Response<String>, _>(layer);
    handle.allow(1);
    assert!(service.poll_ready::<Request<()>>().is_ready());
    let first = service.call(get("/first"));
    let (request, answer) = handle.next_request().await.unwrap();
    assert_eq!(request.uri(), "/first");
    answer.send_response(Response::new("in".to_owned()));
    assert_eq!(first.await.unwrap().status(), 200);

    handle.allow(1);
    for _ in 0..3 {
        assert!(service.poll_ready::<Request<()>>().is_ready(), "a refusal does not consume the readiness");
        assert_eq!(service.call(get("/refused")).await.unwrap().status(), 429);
    }
    assert!(handle.poll_request().is_pending());
}

/// The responses to an admitted and a refused request, of a service with the body `B`.
async fn both<B, R>(layer: RateLimitLayer<R>, body: fn() -> B) -> [Response<B>; 2]
where
    R: Rejection<B>,
{
    let inner = service_fn(move |_: Request<()>| ready(Ok::<_, Infallible>(Response::new(body()))));
    let service = layer.layer(inner);
    [ask(&service, get("/")).await, ask(&service, get("/")).await]
}

fn once() -> RateLimitLayer {
    RateLimitLayer::new(Quota::per_hour(1), Global::new())
}

/// Guards against this defect: only axum's body type is accepted.
#[tokio::test]
async fn body_type_is_that_of_the_inner_service() {
    struct CustomBody(String);
    impl From<String> for CustomBody {
        fn from(text: String) -> Self {
            Self(text)
        }
    }
    let [admitted, refused] = both(once(), || CustomBody("in".to_owned())).await;
    assert_eq!((admitted.status().as_u16(), admitted.into_body().0.as_str()), (200, "in"));
    assert_eq!(refused.status(), 429);
    assert!(refused.into_body().0.contains("too many requests"));

    let [admitted, refused] = both(once(), || Full::new(Bytes::from("in"))).await;
    assert_eq!(admitted.into_body().collect().await.unwrap().to_bytes(), "in");
    assert!(refused.into_body().collect().await.unwrap().to_bytes().starts_with(b"too many requests"));
}

/// Guards against this defect: only axum's body type is accepted.
#[tokio::test]
async fn boxed_body_works_with_an_empty_rejection_or_a_closure() {
    type Boxed = UnsyncBoxBody<Bytes, Box<dyn std::error::Error + Send + Sync>>;
    fn boxed() -> Boxed {
        Full::from("in").map_err(|never| match never {}).boxed_unsync()
    }
    let [admitted, refused] = both(once().rejection(EmptyRejection::new()), boxed).await;
    assert_eq!(admitted.into_body().collect().await.unwrap().to_bytes(), "in");
    assert_eq!(
        (refused.status().as_u16(), numbers(&refused).map(|[limit, left, _]| (limit, left))),
        (429, Some((1, 0)))
    );
    assert!(retry_after(&refused).is_some());
    assert!(refused.into_body().collect().await.unwrap().to_bytes().is_empty());

    let grpc =
        |_: RejectReason<'_>, _: &Head<'_>| Response::builder().header("grpc-status", "8").body(boxed()).unwrap();
    let [_, refused] = both(once().rejection(grpc), boxed).await;
    assert_eq!((refused.status().as_u16(), &refused.headers()["grpc-status"]), (200, &"8".parse().unwrap()));
    assert!(retry_after(&refused).is_some(), "for any status");
}

/// Guards against this defect: the inner error type is erased to a box.
#[tokio::test]
async fn error_type_is_that_of_the_inner_service() {
    struct Broken(u8);
    #[derive(Clone)]
    struct Breaks;
    impl Service<Request<()>> for Breaks {
        type Response = Response<String>;
        type Error = Broken;
        type Future = Ready<Result<Response<String>, Broken>>;

        fn poll_ready(&mut self, _: &mut std::task::Context<'_>) -> std::task::Poll<Result<(), Broken>> {
            std::task::Poll::Ready(Ok(()))
        }

        fn call(&mut self, _: Request<()>) -> Self::Future {
            ready(Err(Broken(7)))
        }
    }
    let layer = once();
    let first: Result<Response<String>, Broken> = layer.layer(Breaks).oneshot(get("/")).await;
    assert!(matches!(first, Err(Broken(7))));
    let second: Result<Response<String>, Broken> = layer.layer(Breaks).oneshot(get("/")).await;
    assert!(matches!(second, Ok(response) if response.status() == 429), "a failed request was charged");
}

#[tokio::test]
async fn clients_have_separate_counts() {
    let (storage, _clock) = memory_with_manual_clock();
    let layer =
        RateLimitLayer::new(policy("fixed-window 1/minute"), Header::new("x-client")).storage(storage, OnError::Refuse);
    let service = layer.layer(Inner::default());
    for client in ["alice", "bob"] {
        assert_eq!(numbers(&ask(&service, with("x-client", client)).await), Some([1, 0, T0 + 60]), "{client}");
        assert_eq!(status(&service, with("x-client", client)).await, 429, "{client}");
    }
    assert_eq!(service.get_ref().calls(), 2);
}

/// Guards against this defect: a full map admits every new client without counting.
#[tokio::test]
async fn refusal_by_a_full_storage_has_retry_after() {
    let clock = ManualClock::default();
    let storage = MemoryStorage::builder().max_keys(1).clock(clock.clone()).build().unwrap();
    let layer = RateLimitLayer::new(policy("fixed-window 1/minute"), Header::new("x-client"));
    let service = layer.storage(storage, OnError::Refuse).layer(Inner::default());
    assert_eq!(status(&service, with("x-client", "alice")).await, 200);
    clock.advance(Duration::from_millis(10_500));
    let storage_full = ask(&service, with("x-client", "bob")).await;
    assert_eq!((storage_full.status().as_u16(), retry_after(&storage_full)), (429, Some(50)));
    assert_eq!(numbers(&storage_full), Some([1, 0, T0 + 60]));
    assert_eq!(status(&service, with("x-client", "alice")).await, 429, "stays refused");
    clock.advance(Duration::from_secs(50));
    assert_eq!(status(&service, with("x-client", "bob")).await, 200);
}

/// Guards against this defect: seconds are rounded down in the text, too.
#[tokio::test]
async fn text_of_a_refusal_rounds_the_wait_up() {
    let (service, _) = limited("fixed-window 1/1500ms");
    assert_eq!(status(&service, get("/")).await, 200);
    let refused = ask(&service, get("/")).await;
    assert_eq!((retry_after(&refused), refused.body().as_str()), (Some(2), "too many requests, retry in 2 s\n"));
}

/// The `HeaderMap` takes two allocations and its values none. Without fields there are none.
#[test]
fn layer_allocates_only_for_the_header_map() {
    let service = service_fn(|_: Request<()>| ready(Ok::<_, Infallible>(Response::new(String::new()))));
    for (headers, expected) in [(Headers::none(), 0), (Headers::x_rate_limit(), 2)] {
        // The limit and the reset are too large for precomputed texts.
        let layer = RateLimitLayer::new(policy("fixed-window 2000/hour"), Global::new()).headers(headers);
        let mut limited = layer.layer(service);
        let mut call = || {
            let mut context = std::task::Context::from_waker(std::task::Waker::noop());
            let mut answer = std::pin::pin!(limited.call(Request::new(())));
            let Poll::Ready(Ok(response)) = answer.as_mut().poll(&mut context) else { panic!("pending") };
            assert_eq!(response.status(), 200);
        };
        // From here on, the remaining units are small enough for precomputed texts.
        (0..1_500).for_each(|_| call());
        let allocated = allocation_counter::measure(|| (0..100).for_each(|_| call())).count_total;
        assert_eq!(allocated, 100 * expected, "{headers:?}");
    }
}

/// The response may reuse the memory of the request's extensions, but not its contents.
#[tokio::test]
async fn refusal_carries_its_decision_without_request_data() {
    let (service, _) = limited("fixed-window 1/hour");
    for expected in [200, 429] {
        let mut request = get("/");
        request.extensions_mut().insert("a secret of the server's");
        let answer = ask(&service, request).await;
        assert_eq!(answer.status(), expected);
        assert!(answer.extensions().get::<&'static str>().is_none());
        assert_eq!(answer.extensions().len(), usize::from(expected == 429));
    }
}

#[tokio::test]
async fn large_numbers_are_written_exactly() {
    for limit in (1_020..1_030).chain((2_000..200_000).step_by(64).take(200)) {
        let (service, _) = limited(&format!("fixed-window {limit}/hour"));
        assert_eq!(numbers(&ask(&service, get("/")).await), Some([limit, limit - 1, T0 + 3_600]));
    }
}

/// A layer without options does not create the full decision that an observer needs.
#[tokio::test]
async fn plain_layer_responds_like_an_observed_layer() {
    for text in EVERY_STRATEGY.into_iter().chain(["fixed-window 3/minute; moving-window 2 per 7 seconds"]) {
        let [plain, observed] = [false, true].map(|is_observed| {
            let (storage, clock) = memory_with_manual_clock();
            let layer = RateLimitLayer::new(policy(text), Global::new()).storage(storage, OnError::Refuse);
            let layer = if is_observed { layer.observer(|_: &Event<'_>| ()) } else { layer };
            (layer.layer(Inner::default()), clock)
        });
        let (mut admitted, mut refused) = (0, 0);
        for step in 0..40 {
            let mut responses = Vec::new();
            for (service, clock) in [&plain, &observed] {
                clock.advance(Duration::from_millis(step % 4 * 600));
                let response = ask(service, get("/")).await;
                let decision = response.extensions().get::<Decision>().cloned();
                responses.push((response.status(), response.headers().clone(), decision, response.into_body()));
            }
            assert_eq!(responses[0], responses[1], "{text}, request {step}");
            if responses[0].0 == StatusCode::OK { admitted += 1 } else { refused += 1 }
        }
        assert!(admitted >= 2 && refused >= 5, "{text}: {admitted} and {refused}");
    }
}

#[tokio::test]
async fn plain_layer_reports_a_full_storage() {
    let storage = MemoryStorage::builder().max_keys(1).build().unwrap();
    let layer = RateLimitLayer::new(policy("1/day"), Header::new("x-client")).storage(storage, OnError::Refuse);
    let service = layer.layer(Inner::default());
    assert_eq!(status(&service, with("x-client", "a")).await, 200);
    for (client, is_full) in [("a", false), ("b", true)] {
        let refused = ask(&service, with("x-client", client)).await;
        assert_eq!(refused.status(), 429);
        assert_eq!(refused.extensions().get::<Decision>().unwrap().is_storage_full(), is_full, "{client}");
    }
}

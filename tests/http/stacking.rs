//! Several limits on one request: in one policy, in stacked layers, and on shared storages.
//! Policies and costs that depend on the request.

use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::ConnectInfo;
use axum::routing::{get as on_get, post};
use common::{
    Inner, T0, admitted_at_once, ask, get, memory_with_manual_clock, numbers, policy, remaining, retry_after, status,
    with,
};
use http::{Method, Request, StatusCode};
use tower::Layer;
use tower_ratelimit::extract::{Head, KeyError};
use tower_ratelimit::storage::ManualClock;
use tower_ratelimit::{
    Decision, Global, Header, Headers, Key, LocalLimiter, MemoryStorage, OnError, PeerIp, RateLimit, RateLimitLayer,
    policy_by,
};

fn limited(text: &str) -> (RateLimit<Inner>, ManualClock) {
    let (storage, clock) = memory_with_manual_clock();
    (layer(text, &storage).layer(Inner::default()), clock)
}

/// A layer with one key for all requests. Layers with the same text and storage share counts.
fn layer(text: &str, storage: &MemoryStorage) -> RateLimitLayer {
    RateLimitLayer::new(policy(text), Global::new()).storage(storage.clone(), OnError::Refuse)
}

/// An outer and an inner layer.
type Stacked = RateLimit<RateLimit<Inner>>;

fn stacked(outer: &str, inner: &str) -> (Stacked, ManualClock) {
    let (storage, clock) = memory_with_manual_clock();
    (layer(outer, &storage).layer(layer(inner, &storage).layer(Inner::default())), clock)
}

#[tokio::test]
async fn limit_with_the_fewest_remaining_units_is_shown() {
    let (service, _clock) = limited("fixed-window 10/second; fixed-window 5/minute");
    assert_eq!(numbers(&ask(&service, get("/")).await), Some([5, 4, T0 + 60]));
}

#[tokio::test]
async fn latest_reset_is_shown_if_the_remaining_units_are_equal() {
    for text in ["fixed-window 5/second; fixed-window 5/minute", "fixed-window 5/minute; fixed-window 5/second"] {
        let (service, _clock) = limited(text);
        assert_eq!(numbers(&ask(&service, get("/")).await), Some([5, 4, T0 + 60]), "{text}");
    }
}

#[tokio::test]
async fn refusing_limit_is_shown() {
    let (service, clock) = limited("fixed-window 2/second; fixed-window 3 per 100 seconds");
    for _ in 0..2 {
        ask(&service, get("/")).await;
    }
    let refused = ask(&service, get("/")).await;
    assert_eq!((numbers(&refused), retry_after(&refused)), (Some([2, 0, T0 + 1]), Some(1)));

    clock.advance(Duration::from_secs(1));
    assert_eq!(numbers(&ask(&service, get("/")).await), Some([3, 0, T0 + 100]));
    let refused = ask(&service, get("/")).await;
    assert_eq!((numbers(&refused), retry_after(&refused)), (Some([3, 0, T0 + 100]), Some(99)));
}

#[tokio::test]
async fn refusing_limit_with_the_longest_wait_is_shown() {
    for text in ["fixed-window 3/second; fixed-window 5/minute", "fixed-window 5/minute; fixed-window 3/second"] {
        let (storage, _clock) = memory_with_manual_clock();
        let cost = |head: &Head<'_>| head.uri().path()[1..].parse::<u32>().unwrap();
        let layer = RateLimitLayer::new(policy(text), Global::new()).storage(storage, OnError::Refuse).cost(cost);
        let service = layer.layer(Inner::default());
        ask(&service, get("/3")).await;
        let both = ask(&service, get("/3")).await;
        assert_eq!((numbers(&both), retry_after(&both)), (Some([5, 2, T0 + 60]), Some(60)), "{text}");
        let never = ask(&service, get("/4")).await;
        assert_eq!((numbers(&never), retry_after(&never)), (Some([3, 0, T0 + 1]), None), "{text}");
    }
}

/// Guards against this defect: the earlier limits are spent although a later one refuses.
#[tokio::test]
async fn refusal_spends_nothing_from_any_limit() {
    for text in ["fixed-window 5/minute; fixed-window 1/second", "fixed-window 1/second; fixed-window 5/minute"] {
        let (service, clock) = limited(text);
        for _ in 0..5 {
            assert_eq!(admitted_at_once(&service).await, 1, "{text}");
            assert_eq!(admitted_at_once(&service).await, 0, "{text}");
            clock.advance(Duration::from_secs(1));
        }
        assert_eq!(status(&service, get("/")).await, 429, "{text}");
    }
}

#[tokio::test]
async fn stacked_layers_show_the_numbers_with_fewer_remaining_units() {
    for (outer, inner) in [
        ("fixed-window 100/minute", "fixed-window 5 per 30 seconds"),
        ("fixed-window 5 per 30 seconds", "fixed-window 100/minute"),
        // Compared as text, 5 would come after 100, and 9 after 10.
        ("fixed-window 5 per 30 seconds", "fixed-window 10/minute"),
    ] {
        let (service, _clock) = stacked(outer, inner);
        assert_eq!(numbers(&ask(&service, get("/")).await), Some([5, 4, T0 + 30]), "{outer} around {inner}");
        assert_eq!(numbers(&ask(&service, get("/")).await), Some([5, 3, T0 + 30]), "{outer} around {inner}");
    }
}

#[tokio::test]
async fn inner_numbers_stay_if_stacked_layers_have_equal_remaining_units() {
    for (outer, inner, reset) in [
        ("fixed-window 5/minute", "fixed-window 5 per 30 seconds", 30),
        ("fixed-window 5 per 30 seconds", "fixed-window 5/minute", 60),
    ] {
        let (service, _clock) = stacked(outer, inner);
        assert_eq!(numbers(&ask(&service, get("/")).await), Some([5, 4, T0 + reset]));
    }
}

/// Guards against this defect: a 429 of the inner layer has the numbers of the outer layer, for
/// example 96 remaining units.
#[tokio::test]
async fn inner_refusal_keeps_its_own_numbers() {
    let (service, _clock) = stacked("fixed-window 100/minute", "fixed-window 3 per 10 seconds");
    for left in [2, 1, 0] {
        assert_eq!(remaining(&ask(&service, get("/")).await), Some(left));
    }
    let refused = ask(&service, get("/")).await;
    assert_eq!(refused.status(), 429);
    assert_eq!((numbers(&refused), retry_after(&refused)), (Some([3, 0, T0 + 10]), Some(10)));
}

/// Guards against this defect: with stacked layers, a 429 has the numbers of a layer that did not
/// refuse.
#[tokio::test]
async fn inner_refusal_keeps_its_own_numbers_if_the_outer_layer_has_fewer_units() {
    let (storage, _clock) = memory_with_manual_clock();
    let dear = layer("fixed-window 3 per 10 seconds", &storage).cost(|_| 2);
    let service = layer("fixed-window 2/minute", &storage).layer(dear.layer(Inner::default()));
    assert_eq!(numbers(&ask(&service, get("/")).await), Some([3, 1, T0 + 10]));
    let refused = ask(&service, get("/")).await;
    assert_eq!(refused.status(), 429);
    assert_eq!((numbers(&refused), retry_after(&refused)), (Some([3, 1, T0 + 10]), Some(60)), "0 units remain outside");
}

#[tokio::test]
async fn inner_refusal_without_fields_gets_none_from_the_outer_layer() {
    let (storage, _clock) = memory_with_manual_clock();
    let quiet = layer("fixed-window 1/minute", &storage).headers(Headers::none());
    let service = layer("fixed-window 100/minute", &storage).layer(quiet.layer(Inner::default()));
    assert_eq!(numbers(&ask(&service, get("/")).await), Some([100, 99, T0 + 60]));
    let refused = ask(&service, get("/")).await;
    assert_eq!((refused.status().as_u16(), numbers(&refused), retry_after(&refused)), (429, None, Some(60)));
}

#[tokio::test]
async fn outer_refusal_does_not_reach_or_charge_the_inner_layer() {
    let (storage, _clock) = memory_with_manual_clock();
    let inner = layer("fixed-window 100/minute", &storage);
    let service = layer("fixed-window 1 per 10 seconds", &storage).layer(inner.layer(Inner::default()));
    assert_eq!(status(&service, get("/")).await, 200);
    for _ in 0..4 {
        let refused = ask(&service, get("/")).await;
        assert_eq!(refused.status(), 429);
        assert_eq!((numbers(&refused), retry_after(&refused)), (Some([1, 0, T0 + 10]), Some(10)));
    }
    assert_eq!(inner.limiter().unwrap().peek(&Key::global()).await.unwrap().remaining(), 99);
    assert_eq!(service.get_ref().get_ref().calls(), 1);
}

#[tokio::test]
async fn outer_charge_stays_when_the_inner_layer_refuses() {
    let (service, clock) = stacked("fixed-window 4/minute", "fixed-window 1/second");
    for expected in [200, 429, 429, 429] {
        assert_eq!(status(&service, get("/")).await, expected);
    }
    clock.advance(Duration::from_secs(1));
    let refused = ask(&service, get("/")).await;
    assert_eq!((numbers(&refused), retry_after(&refused)), (Some([4, 0, T0 + 60]), Some(59)));
}

#[tokio::test]
async fn tightest_of_three_layers_is_shown_at_any_position() {
    let texts = ["fixed-window 7/minute", "fixed-window 9/minute", "fixed-window 8/minute"];
    for turn in 0..3 {
        let (storage, _clock) = memory_with_manual_clock();
        let [a, b, c] = [0, 1, 2].map(|place| layer(texts[(place + turn) % 3], &storage));
        let service = a.layer(b.layer(c.layer(Inner::default())));
        assert_eq!(numbers(&ask(&service, get("/")).await), Some([7, 6, T0 + 60]), "turned by {turn}");
    }
}

#[tokio::test]
async fn only_a_refused_response_carries_the_decision() {
    let (service, _clock) = stacked("fixed-window 100/minute", "fixed-window 1/minute");
    assert!(ask(&service, get("/")).await.extensions().get::<Decision>().is_none());
    let refused = ask(&service, get("/")).await;
    assert_eq!(refused.extensions().get::<Decision>().map(Decision::capacity), Some(1));
}

#[tokio::test]
async fn services_of_one_layer_and_its_clones_share_states() {
    let layer = RateLimitLayer::new(policy("3/hour"), Global::new());
    let services =
        [layer.layer(Inner::default()), layer.layer(Inner::default()), layer.clone().layer(Inner::default())];
    for (service, left) in services.iter().zip([2, 1, 0]) {
        assert_eq!(remaining(&ask(service, get("/")).await), Some(left));
    }
    for service in &services {
        assert_eq!(status(service, get("/")).await, 429);
    }
}

#[tokio::test]
async fn layers_share_counts_only_with_the_same_storage_and_policy() {
    let make = || RateLimitLayer::new(policy("1/hour"), Global::new());
    for _ in 0..3 {
        assert_eq!(status(&make().layer(Inner::default()), get("/")).await, 200);
    }
    let storage = MemoryStorage::new();
    for expected in [200, 429] {
        let given = make().storage(storage.clone(), OnError::Refuse);
        assert_eq!(status(&given.layer(Inner::default()), get("/")).await, expected);
    }
    assert_eq!(status(&layer("2/hour", &storage).layer(Inner::default()), get("/")).await, 200, "another policy");
}

#[tokio::test]
async fn limiter_and_its_middleware_share_states() {
    let limiter = LocalLimiter::new(policy("3/hour"));
    let layer = RateLimitLayer::from_limiter(&limiter, Header::new("x-client"));
    let service = layer.layer(Inner::default());
    let alice = Key::from("alice");
    assert!(limiter.hit(&alice).is_admitted());
    assert_eq!(remaining(&ask(&service, with("x-client", "alice")).await), Some(1));
    assert!(layer.limiter().unwrap().hit(&alice).await.unwrap().is_admitted());
    assert_eq!(status(&service, with("x-client", "alice")).await, 429);
    limiter.clear(&alice);
    assert_eq!(remaining(&ask(&service, with("x-client", "alice")).await), Some(2));
}

#[tokio::test]
async fn policy_may_depend_on_the_request_and_no_policy_means_no_limit() {
    let (storage, _clock) = memory_with_manual_clock();
    let free = policy("fixed-window 1/minute").with_name("free");
    // Policies with the same name share counts.
    let trial = policy("fixed-window 3/minute").with_name("free");
    let paid = policy("fixed-window 9/minute").with_name("paid");
    let tier = move |head: &Head<'_>| match head.uri().path() {
        "/free" => Some(free.clone()),
        "/trial" => Some(trial.clone()),
        "/paid" => Some(paid.clone()),
        _ => None,
    };
    let layer = RateLimitLayer::new(policy_by(tier), Global::new()).storage(storage, OnError::Refuse);
    assert!(layer.limiter().is_none());
    let service = layer.layer(Inner::default());
    assert_eq!(numbers(&ask(&service, get("/free")).await), Some([1, 0, T0 + 60]));
    assert_eq!(numbers(&ask(&service, get("/trial")).await), Some([3, 1, T0 + 60]), "equal names share");
    assert_eq!(numbers(&ask(&service, get("/paid")).await), Some([9, 8, T0 + 60]), "other names do not");
    assert_eq!(status(&service, get("/free")).await, 429);
    for _ in 0..20 {
        let response = ask(&service, get("/health")).await;
        assert_eq!(response.status(), 200);
        assert!(response.headers().is_empty());
    }
}

#[tokio::test]
async fn request_spends_its_cost_and_a_free_one_only_peeks() {
    let (storage, clock) = memory_with_manual_clock();
    let cost = |head: &Head<'_>| head.uri().path()[1..].parse::<u32>().unwrap();
    let service = layer("fixed-window 10/minute", &storage).cost(cost).layer(Inner::default());
    assert_eq!(numbers(&ask(&service, get("/0")).await), Some([10, 10, T0]), "all units remain");
    clock.advance(Duration::from_secs(5));
    for (path, left) in [("/4", 6), ("/0", 6), ("/6", 0), ("/0", 0)] {
        let response = ask(&service, get(path)).await;
        assert_eq!(response.status(), 200, "{path}");
        assert_eq!(numbers(&response), Some([10, left, T0 + 65]), "{path}");
    }
    assert_eq!(status(&service, get("/1")).await, 429);
    assert_eq!(service.get_ref().calls(), 5);
}

#[tokio::test]
async fn missing_cost_is_400_or_500_and_spends_nothing() {
    let (storage, _clock) = memory_with_manual_clock();
    let cost = |head: &Head<'_>| match head.uri().path() {
        "/client" => Err(KeyError::client("the field is missing")),
        "/server" => Err(KeyError::server("the table is missing")),
        _ => Ok(1),
    };
    let service = layer("fixed-window 10/minute", &storage).cost(cost).layer(Inner::default());
    for (path, status) in [("/client", StatusCode::BAD_REQUEST), ("/server", StatusCode::INTERNAL_SERVER_ERROR)] {
        let response = ask(&service, get(path)).await;
        assert_eq!((response.status(), numbers(&response), retry_after(&response)), (status, None, None));
    }
    assert_eq!(service.get_ref().calls(), 0);
    assert_eq!(remaining(&ask(&service, get("/")).await), Some(9));
}

#[tokio::test]
async fn route_limit_works_inside_a_router_limit() {
    let (storage, _clock) = memory_with_manual_clock();
    let login =
        RateLimitLayer::new(policy("fixed-window 2/minute"), PeerIp::new()).storage(storage.clone(), OnError::Refuse);
    let app = Router::new()
        .route("/login", post(|| async { "welcome" }).layer(login))
        .route("/", on_get(|| async { "hello" }))
        .route("/other", on_get(|| async { "hello" }))
        .layer(layer("fixed-window 7/minute", &storage));
    let request = |method, path: &str, client: [u8; 4]| {
        let peer = ConnectInfo(std::net::SocketAddr::from((client, 40_000)));
        Request::builder().method(method).uri(path).extension(peer).body(Body::empty()).unwrap()
    };
    for (method, path, client, expected, shown) in [
        (Method::GET, "/", [10, 0, 0, 1], 200, [7, 6]),
        (Method::GET, "/other", [10, 0, 0, 1], 200, [7, 5]),
        (Method::POST, "/login", [10, 0, 0, 1], 200, [2, 1]),
        (Method::POST, "/login", [10, 0, 0, 1], 200, [2, 0]),
        (Method::POST, "/login", [10, 0, 0, 1], 429, [2, 0]),
        (Method::POST, "/login", [10, 0, 0, 2], 200, [2, 1]),
        (Method::GET, "/", [10, 0, 0, 1], 200, [7, 0]),
        (Method::POST, "/login", [10, 0, 0, 3], 429, [7, 0]),
    ] {
        let response = ask(&app, request(method, path, client)).await;
        assert_eq!(
            (response.status().as_u16(), numbers(&response)),
            (expected, Some([shown[0], shown[1], T0 + 60])),
            "{path}"
        );
        assert_eq!(retry_after(&response), (expected == 429).then_some(60), "{path}");
    }
}

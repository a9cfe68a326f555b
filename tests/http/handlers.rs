//! Layers together with handlers that extract the decision, CORS layers, and the limiter.

use std::convert::Infallible;
use std::future::ready;

use axum::Router;
use axum::body::{Body, Bytes, to_bytes};
use axum::extract::State;
use axum::routing::{get as on_get, post};
use common::{Inner, ask, failing, get, memory_with_manual_clock, numbers, policy, slow, status, with};
use http::{Method, Request, Response, StatusCode};
use serde_json::{Value, json};
use tower::{Layer, service_fn};
use tower_http::cors::{Any, CorsLayer};
use tower_ratelimit::extract::{Head, NoDecision};
use tower_ratelimit::{Decision, Global, Header, Key, OnError, RateLimitLayer, RateLimiter, Storage};

fn layer(text: &str) -> RateLimitLayer {
    RateLimitLayer::new(policy(text), Global::new()).storage(memory_with_manual_clock().0, OnError::Refuse)
}

async fn body(app: &Router, path: &str) -> (u16, String) {
    let response = ask(app, Request::get(path).body(Body::empty()).unwrap()).await;
    let status = response.status().as_u16();
    (status, String::from_utf8(to_bytes(response.into_body(), 1_000).await.unwrap().to_vec()).unwrap())
}

#[tokio::test]
async fn handler_extracts_the_shared_decision() {
    let app = || {
        Router::new()
            .route("/must", on_get(|decision: Decision| async move { decision.remaining().to_string() }))
            .route(
                "/may",
                on_get(|decision: Option<Decision>| async move {
                    decision.map_or_else(|| "none".to_owned(), |decision| decision.capacity().to_string())
                }),
            )
    };
    let shared = app().layer(layer("fixed-window 5/minute").share_decision());
    assert_eq!(body(&shared, "/must").await, (200, "4".to_owned()));
    assert_eq!(body(&shared, "/may").await, (200, "5".to_owned()));

    let unshared = app().layer(layer("fixed-window 5/minute"));
    assert_eq!(body(&unshared, "/may").await, (200, "none".to_owned()));
    let (status, text) = body(&unshared, "/must").await;
    assert_eq!((status, text), (500, format!("{}\n", NoDecision::default())));
    assert!(NoDecision::default().to_string().contains("share_decision()"));

    // Requests without a decision.
    let skipped = app().layer(layer("fixed-window 5/minute").share_decision().skip(|_| true));
    assert_eq!(body(&skipped, "/may").await, (200, "none".to_owned()));
    let failing = app().layer(layer("fixed-window 5/minute").share_decision().storage(failing(), OnError::Admit));
    assert_eq!(body(&failing, "/may").await, (200, "none".to_owned()));
    // A shadow layer shares its decisions too.
    let shadow = app().layer(layer("fixed-window 5/minute").share_decision().shadow());
    assert_eq!(body(&shadow, "/must").await, (200, "4".to_owned()));
}

#[tokio::test(start_paused = true)]
async fn layer_shares_the_decision_of_fast_and_slow_storages() {
    async fn check(storage: impl Storage) {
        let seen = service_fn(|request: Request<()>| {
            let decision = request.extensions().get::<Decision>().expect("the layer shares its decision");
            ready(Ok::<_, Infallible>(Response::new(format!("{:?}", decision.delay()))))
        });
        let layer = RateLimitLayer::new(policy("leaky-bucket 1/second queue 1"), Global::new());
        let service = layer.storage(storage, OnError::Refuse).share_decision().layer(seen);
        assert_eq!(ask(&service, get("/")).await.into_body(), "0ns");
        assert_eq!(ask(&service, get("/")).await.into_body(), "1s");
    }
    check(memory_with_manual_clock().0).await;
    check(slow(memory_with_manual_clock().0)).await;
}

#[tokio::test]
async fn stacked_layers_share_the_innermost_decision() {
    let seen = service_fn(|request: Request<()>| {
        let capacity = request.extensions().get::<Decision>().map(Decision::capacity);
        ready(Ok::<_, Infallible>(Response::new(format!("{capacity:?}"))))
    });
    let [outer, inner] = ["fixed-window 5/minute", "fixed-window 9/minute"].map(|text| layer(text).share_decision());
    assert_eq!(ask(&outer.layer(inner.layer(seen)), get("/")).await.into_body(), "Some(9)");
    assert_eq!(ask(&outer.layer(layer("7/minute").layer(seen)), get("/")).await.into_body(), "Some(5)");
}

fn cors() -> CorsLayer {
    CorsLayer::new().allow_origin(Any).allow_methods([Method::GET]).expose_headers(Any)
}

fn browser(method: Method) -> Request<Body> {
    let request = Request::builder().method(method).header("origin", "https://shop.example");
    request.header("access-control-request-method", "GET").body(Body::empty()).unwrap()
}

/// Guards against this defect: preflight `OPTIONS` is counted. A 429 without CORS headers is an
/// opaque error.
#[tokio::test]
async fn preflights_are_not_counted_and_refusals_are_readable_inside_a_cors_layer() {
    let app = Router::new().route("/", on_get(|| async { "in" })).layer(layer("fixed-window 1/minute")).layer(cors());
    for _ in 0..5 {
        let preflight = ask(&app, browser(Method::OPTIONS)).await;
        assert_eq!((preflight.status().as_u16(), numbers(&preflight)), (200, None));
    }
    for expected in [200, 429] {
        let response = ask(&app, browser(Method::GET)).await;
        assert_eq!(response.status(), expected);
        assert_eq!(numbers(&response).map(|[limit, left, _]| [limit, left]), Some([1, 0]));
        assert_eq!(response.headers()["access-control-allow-origin"], "*");
        assert_eq!(response.headers()["access-control-expose-headers"], "*");
    }
}

/// Guards against this defect: preflight `OPTIONS` is counted.
#[tokio::test]
async fn preflights_are_skipped_around_a_cors_layer() {
    let preflight =
        |head: &Head<'_>| head.method == Method::OPTIONS && head.headers.contains_key("access-control-request-method");
    let app = Router::new()
        .route("/", on_get(|| async { "in" }))
        .layer(cors())
        .layer(layer("fixed-window 1/minute").skip(preflight));
    for _ in 0..5 {
        let answer = ask(&app, browser(Method::OPTIONS)).await;
        assert_eq!((answer.status().as_u16(), numbers(&answer)), (200, None));
        assert_eq!(answer.headers()["access-control-allow-origin"], "*");
    }
    for expected in [200, 429] {
        assert_eq!(status(&app, browser(Method::GET)).await, expected);
    }
}

#[tokio::test]
async fn skipped_requests_do_not_reach_the_key_extractor_or_the_cost() {
    let never = |_: &Head<'_>| -> Key { panic!("the key was requested") };
    let layer = RateLimitLayer::new(policy("1/day"), never).storage(failing(), OnError::Refuse);
    let layer = layer.cost(|_| -> u32 { panic!("the cost was requested") });
    let service = layer
        .skip(|head| head.uri().path() == "/health")
        .skip(|head| head.uri().path() == "/ready")
        .layer(Inner::default());
    for path in ["/health", "/ready", "/health"] {
        let response = ask(&service, get(path)).await;
        assert_eq!((response.status().as_u16(), response.headers().len()), (200, 0));
    }
    assert_eq!(service.get_ref().calls(), 3);
}

#[tokio::test]
async fn limiter_of_a_layer_peeks_and_clears_its_counts() {
    let layer = RateLimitLayer::new(policy("fixed-window 2/hour"), Header::new("x-client"));
    let limiter = layer.limiter().unwrap();
    let service = layer.layer(Inner::default());
    let alice = Key::from("alice");
    for (expected, left) in [(200, 1), (200, 0), (429, 0)] {
        assert_eq!(status(&service, with("x-client", "alice")).await, expected);
        assert_eq!(limiter.peek(&alice).await.unwrap().remaining(), left);
    }
    limiter.clear(&alice).await.unwrap();
    assert_eq!(status(&service, with("x-client", "alice")).await, 200);
}

/// A layer reads no bodies, so the handler limits by the account in it, beside the layer.
#[tokio::test]
async fn handler_limits_by_a_field_of_a_json_body() {
    let place_order = |State(accounts): State<RateLimiter>, body: Bytes| async move {
        let order: Value = serde_json::from_slice(&body).unwrap();
        let decision = accounts.hit(&Key::from(order["account"].as_str().unwrap())).await.unwrap();
        if decision.is_admitted() { StatusCode::CREATED } else { StatusCode::TOO_MANY_REQUESTS }
    };
    let accounts = RateLimiter::with_storage(policy("fixed-window 2/minute"), memory_with_manual_clock().0);
    let app =
        Router::new().route("/", post(place_order)).layer(layer("fixed-window 5/minute")).with_state(accounts.clone());
    let order = async |account: &str| {
        let body = Body::from(json!({ "account": account }).to_string());
        let response = ask(&app, Request::post("/").body(body).unwrap()).await;
        (response.status().as_u16(), response.headers()["x-ratelimit-remaining"].to_str().unwrap().to_owned())
    };
    for (account, expected) in [
        ("alice", (201, "4")),
        ("alice", (201, "3")),
        // Refused by the handler.
        ("alice", (429, "2")),
        ("bob", (201, "1")),
        ("carol", (201, "0")),
        // Refused by the layer.
        ("bob", (429, "0")),
    ] {
        let (status, remaining) = order(account).await;
        assert_eq!((status, &*remaining), expected, "{account}");
    }
    assert_eq!(accounts.peek(&Key::from("bob")).await.unwrap().remaining(), 1, "the layer's refusal spends nothing");
}

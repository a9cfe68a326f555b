//! The usage of a client, without spending.

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{Request, Response};
use axum::routing::get as on_get;
use common::{FakeStorage, ask, failing, memory_with_manual_clock, policy};
use serde_json::{Value, json};
use tower_ratelimit::extract::Head;
use tower_ratelimit::{
    Header, Key, LivePolicy, MemoryStorage, OnError, PolicyLookup, RateLimitLayer, UsageError, policy_by,
};

fn app(layer: &RateLimitLayer) -> Router {
    Router::new()
        .route("/", on_get(|| async { "hello" }))
        .layer(layer.clone())
        .route("/usage", on_get(layer.usage_handler()))
}

async fn from(app: &Router, path: &str, client: &str) -> Response<Body> {
    ask(app, Request::get(path).header("x-client", client).body(Body::empty()).unwrap()).await
}

async fn json_of(response: Response<Body>) -> Value {
    serde_json::from_slice(&to_bytes(response.into_body(), 10_000).await.unwrap()).unwrap()
}

fn layer(text: &str) -> RateLimitLayer {
    RateLimitLayer::new(policy(text).with_name("api"), Header::new("x-client"))
        .storage(memory_with_manual_clock().0, OnError::Refuse)
}

#[tokio::test]
async fn handler_returns_the_usage_of_the_client_and_spends_nothing() {
    let app = app(&layer("fixed-window 3/hour; \"daily\" token-bucket 10/day burst 20; shadow 1/hour"));
    assert_eq!(from(&app, "/", "a").await.status(), 200);
    for _ in 0..5 {
        let response = from(&app, "/usage", "a").await;
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()["content-type"], "application/json");
        assert_eq!(response.headers()["cache-control"], "no-store");
        assert!(!response.headers().contains_key("x-ratelimit-limit"));
        let usage = json_of(response).await;
        let [hourly, daily] = &usage["limits"].as_array().unwrap()[..] else { panic!("{usage}") };
        let is_seconds = |limit: &Value| limit["reset"].as_f64().is_some_and(|reset| reset > 0.0);
        assert!(is_seconds(hourly) && is_seconds(daily), "{usage}");
        assert_eq!(usage["limited"], json!(true));
        assert_eq!(usage["admitted"], json!(true));
        let fields =
            |limit: &Value| ["name", "strategy", "quota", "limit", "remaining"].map(|field| limit[field].clone());
        assert_eq!(fields(hourly), [json!("api-1"), json!("fixed-window"), json!("3/hour"), json!(3), json!(2)]);
        let expected = [json!("daily"), json!("token-bucket"), json!("10/day burst 20"), json!(20), json!(19)];
        assert_eq!(fields(daily), expected);
    }
    let other = json_of(from(&app, "/usage", "b").await).await;
    assert_eq!((&other["limits"][0]["remaining"], &other["limits"][0]["reset"]), (&json!(3), &json!(0)));
}

#[tokio::test]
async fn usage_of_a_refused_client_contains_its_wait() {
    let app = app(&layer("token-bucket 1/hour"));
    for _ in 0..2 {
        let _ = from(&app, "/", "a").await;
    }
    let usage = json_of(from(&app, "/usage", "a").await).await;
    assert_eq!((&usage["admitted"], &usage["retry_after"]), (&json!(false), &json!(3600)));
}

#[tokio::test]
async fn usage_of_a_calendar_window_contains_its_first_instant_and_its_end() {
    let october = [json!(1_727_740_800), json!(1_730_419_200)];
    let app = app(&layer("calendar 3/month; 5/hour"));
    for client in ["a", "b"] {
        let usage = json_of(from(&app, "/usage", client).await).await;
        assert_eq!(["begin", "end"].map(|name| usage["limits"][0][name].clone()), october, "{usage}");
        assert_eq!((&usage["limits"][1]["begin"], &usage["limits"][1]["end"]), (&Value::Null, &Value::Null));
        let _ = from(&app, "/", "b").await;
    }
}

#[tokio::test]
async fn names_are_escaped_in_json() {
    let layer = RateLimitLayer::new(policy("1/hour").with_name("a\"b\\c"), Header::new("x-client"));
    let usage = json_of(from(&app(&layer), "/usage", "a").await).await;
    assert_eq!(usage["limits"][0]["name"], json!("a\"b\\c"));
}

#[tokio::test]
async fn usage_reports_that_a_request_is_not_limited() {
    let none = policy_by(|_| None::<tower_ratelimit::Policy>);
    let skipped = layer("1/hour").skip(|_| true);
    for layer in [RateLimitLayer::new(none, Header::new("x-client")), skipped] {
        assert_eq!(json_of(from(&app(&layer), "/usage", "a").await).await, json!({"limited": false}));
    }
}

#[tokio::test]
async fn usage_reports_chosen_live_and_looked_up_policies() {
    let chosen = policy_by(|head| policy(if head.headers["x-client"] == "a" { "2/hour" } else { "5/hour" }));
    let live = LivePolicy::new(policy("1/hour").with_name("api"));
    let lookup = PolicyLookup::new(
        |head: &Head<'_>| head.headers.get("x-client").cloned(),
        |client| async move {
            tokio::task::yield_now().await;
            if client == "c" { Err("the database is down") } else { Ok(policy("2/hour")) }
        },
    );
    let key = || Header::new("x-client");
    let layers = [
        RateLimitLayer::new(chosen, key()),
        RateLimitLayer::new(live.clone(), key()),
        RateLimitLayer::new(lookup, key()),
    ];
    live.set(policy("2/hour").with_name("api")).unwrap();
    for layer in &layers {
        let app = app(layer);
        let _ = from(&app, "/", "a").await;
        let usage = json_of(from(&app, "/usage", "a").await).await;
        assert_eq!((&usage["limits"][0]["limit"], &usage["limits"][0]["remaining"]), (&json!(2), &json!(1)));
    }
    let failed = from(&app(&layers[2]), "/usage", "c").await;
    assert_eq!(failed.status(), 503);
}

#[tokio::test]
async fn usage_errors_have_a_status_and_a_json_body() {
    let app_of = |layer: &RateLimitLayer| app(layer);
    let layer = layer("1/hour").storage(failing(), OnError::Admit);
    let response = from(&app_of(&layer), "/usage", "a").await;
    assert_eq!((response.status().as_u16(), &response.headers()["retry-after"]), (503, &"1".parse().unwrap()));
    assert_eq!(json_of(response).await, json!({"error": "the usage is not available"}));

    let without_key = Request::get("/usage").body(Body::empty()).unwrap();
    let response = ask(&app_of(&layer), without_key).await;
    assert_eq!(response.status(), 400);
    assert!(json_of(response).await["error"].as_str().unwrap().contains("x-client"));

    let Err(UsageError::Key(error)) = layer.usage(&Request::new(())).await else { panic!("there is no key") };
    assert_eq!(error.status(), 400);
}

#[tokio::test]
async fn limiter_for_a_chosen_policy_shares_the_counts() {
    let tier = policy("3/hour").with_name("tier");
    let chosen = tier.clone();
    let layer = RateLimitLayer::new(policy_by(move |_| chosen.clone()), Header::new("x-client"));
    assert!(layer.limiter().is_none());
    let _ = from(&app(&layer), "/", "a").await;
    let limiter = layer.limiter_for(tier).unwrap();
    assert_eq!(limiter.peek(&Key::from("a")).await.unwrap().remaining(), 2);

    let small = layer.storage(FakeStorage::around(MemoryStorage::new()).holding_at_most(50), OnError::Admit);
    assert_eq!(small.limiter_for(policy("51/hour")).unwrap_err().to_string(), "at most 50");
}

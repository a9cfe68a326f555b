//! Clients that are near a limit are reported once.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{
    Behavior, EVERY_STRATEGY, FakeStorage, Inner, ask, get, memory_with_manual_clock, panic_message, policy, status,
    with,
};
use http::Request;
use tower::Layer;
use tower_ratelimit::storage::ManualClock;
use tower_ratelimit::{Event, EventKind, Global, Header, Meter, OnError, RateLimitLayer, Storage};

use crate::log::logged;

/// The key, limit and remaining units of each event about a near limit. An event of a shadow limit
/// ends with `shadow`.
type Reports = Arc<Mutex<Vec<String>>>;

fn layer(text: &str, storage: impl Storage) -> (RateLimitLayer, Reports) {
    let reports = Reports::default();
    let seen = Arc::clone(&reports);
    let observer = move |event: &Event<'_>| {
        if let EventKind::NearLimit { limit, status } = event.kind {
            assert_eq!(event.outcome(), "near_limit");
            assert!(event.policy.limits().iter().any(|of| std::ptr::eq(of, limit)));
            let key = String::from_utf8(event.key.unwrap().as_bytes()[1..].to_vec()).unwrap();
            let shadow = if event.shadow { " shadow" } else { "" };
            seen.lock().unwrap().push(format!("{key}: {limit}, {} left{shadow}", status.remaining()));
        }
    };
    let layer = RateLimitLayer::new(policy(text).with_name("api"), Header::new("x-client"));
    (layer.storage(storage, OnError::Refuse).observer(observer).near_limit(0.8), reports)
}

fn take(reports: &Reports) -> Vec<String> {
    std::mem::take(&mut *reports.lock().unwrap())
}

/// Sends requests of alice, and returns the numbers of those that a near limit was reported for,
/// beginning with 1.
async fn reported(layer: &RateLimitLayer, reports: &Reports, requests: usize) -> Vec<usize> {
    let service = layer.layer(Inner::default());
    let mut numbers = Vec::new();
    for number in 1..=requests {
        ask(&service, with("x-client", "alice")).await;
        numbers.extend(take(reports).iter().map(|_| number));
    }
    numbers
}

fn advance(clock: &ManualClock, seconds: u64) {
    clock.advance(Duration::from_secs(seconds));
}

#[tokio::test]
async fn client_is_reported_once_per_window() {
    let (storage, clock) = memory_with_manual_clock();
    let (layer, reports) = layer("fixed-window 10/minute", storage);
    for _ in 0..3 {
        assert_eq!(reported(&layer, &reports, 12).await, [8], "two of the requests are refused");
        advance(&clock, 60);
    }
    let service = layer.layer(Inner::default());
    for client in ["bob", "carol"].repeat(10) {
        ask(&service, with("x-client", client)).await;
    }
    assert_eq!(take(&reports), ["bob: fixed-window 10/minute, 2 left", "carol: fixed-window 10/minute, 2 left"]);
}

#[tokio::test]
async fn every_strategy_reports_the_hit_that_crosses_the_share() {
    for text in EVERY_STRATEGY {
        let (storage, _clock) = memory_with_manual_clock();
        let (layer, reports) = layer(text, storage);
        let capacity = usize::try_from(policy(text).limits()[0].capacity()).unwrap();
        // The smallest number of units that is at least the share.
        let expected = (8 * capacity).div_ceil(10);
        assert_eq!(reported(&layer, &reports, capacity + 2).await, [expected], "{text}");
    }
}

#[tokio::test]
async fn bucket_is_reported_again_after_it_has_refilled() {
    let (storage, clock) = memory_with_manual_clock();
    let (layer, reports) = layer("token-bucket 10/minute", storage);
    assert_eq!(reported(&layer, &reports, 9).await, [8]);
    // One unit: 8 are spent, and the next hit does not cross the share.
    advance(&clock, 6);
    assert_eq!(reported(&layer, &reports, 1).await, [0; 0]);
    advance(&clock, 12);
    assert_eq!(reported(&layer, &reports, 2).await, [1]);
}

#[tokio::test]
async fn cost_may_jump_over_the_share() {
    let (storage, _clock) = memory_with_manual_clock();
    let (layer, reports) = layer("fixed-window 100/day", storage);
    let layer = layer.cost(|head| head.uri().path()[1..].parse::<u32>().unwrap());
    let service = layer.layer(Inner::default());
    let mut seen = Vec::new();
    for cost in [79, 0, 22, 20, 1, 0, 1] {
        let request = Request::get(format!("/{cost}")).header("x-client", "alice").body(()).unwrap();
        ask(&service, request).await;
        seen.extend(take(&reports).iter().map(|report| (cost, report.clone())));
    }
    // The hit of 22 units is refused, and requests that cost nothing spend nothing.
    assert_eq!(seen, [(20, "alice: fixed-window 100/day, 1 left".to_owned())]);
}

#[tokio::test]
async fn each_limit_and_each_shadow_limit_is_reported() {
    let (storage, _clock) = memory_with_manual_clock();
    let (layer, reports) = layer("fixed-window 5/second; fixed-window 10/day; shadow fixed-window 2/day", storage);
    let service = layer.layer(Inner::default());
    let mut seen = Vec::new();
    for number in 1..=5 {
        ask(&service, with("x-client", "alice")).await;
        seen.extend(take(&reports).into_iter().map(|report| (number, report)));
    }
    let expected = [(2, "alice: fixed-window 2/day, 0 left shadow"), (4, "alice: fixed-window 5/second, 1 left")];
    assert_eq!(seen, expected.map(|(number, report)| (number, report.to_owned())));
}

#[tokio::test]
async fn one_of_several_processes_reports_a_client() {
    let (storage, clock) = memory_with_manual_clock();
    let (one, reports) = layer("fixed-window 10/minute", storage.clone());
    let (other, of_other) = layer("fixed-window 10/minute", storage);
    for turn in 0..2 {
        let services = [&one, &other].map(|layer| layer.layer(Inner::default()));
        for number in 0..12 {
            ask(&services[usize::from(number % 3 == turn)], with("x-client", "alice")).await;
        }
        assert_eq!(take(&reports).len() + take(&of_other).len(), 1);
        advance(&clock, 60);
    }
}

#[tokio::test]
async fn decision_of_a_remote_storage_is_reported() {
    let (storage, _clock) = FakeStorage::in_memory(Behavior::WorksAfterPolls(2));
    let (layer, reports) = layer("fixed-window 5/day", storage);
    assert_eq!(reported(&layer, &reports, 5).await, [4]);
}

#[tokio::test(start_paused = true)]
async fn delayed_hit_is_reported() {
    let (storage, _clock) = memory_with_manual_clock();
    let (layer, reports) = layer("leaky-bucket 1/second queue 4", storage);
    assert_eq!(reported(&layer, &reports, 5).await, [4]);
}

#[tokio::test]
async fn hits_of_a_meter_are_reported() {
    let (storage, _clock) = memory_with_manual_clock();
    let (layer, reports) = layer("fixed-window 10/day", storage);
    let meter = Arc::new(Mutex::new(None));
    let seen = Arc::clone(&meter);
    let service = layer.meter().layer(tower::service_fn(move |request: Request<()>| {
        *seen.lock().unwrap() = request.extensions().get::<Meter>().cloned();
        std::future::ready(Ok::<_, std::convert::Infallible>(http::Response::new(String::new())))
    }));
    assert_eq!(status(&service, with("x-client", "alice")).await, 200);
    let meter = meter.lock().unwrap().take().unwrap();
    for _ in 0..3 {
        let _ = meter.hit(3).await.unwrap();
    }
    assert_eq!(take(&reports), ["alice: fixed-window 10/day, 0 left"]);
}

#[test]
fn near_limit_is_logged_without_an_observer() {
    let layer = RateLimitLayer::new(policy("fixed-window 5/day").with_name("api"), Global::new()).near_limit(0.5);
    let lines = logged(&layer, (0..5).map(|_| get("/")).collect());
    let near: Vec<&String> = lines.iter().filter(|line| line.contains("key near its limit")).collect();
    assert!(matches!(&*near, [line] if line.starts_with("DEBUG ") && line.contains("remaining=2")), "{lines:?}");
}

#[test]
fn invalid_share_panics() {
    let layer = || RateLimitLayer::new(policy("5/day"), Global::new());
    for share in [0.0, -0.1, 1.1, f64::NAN, f64::INFINITY] {
        let message = panic_message(|| layer().near_limit(share));
        assert!(message.contains("write more than 0.0 and at most 1.0"), "{message}");
    }
    let _ = layer().near_limit(1.0);
}

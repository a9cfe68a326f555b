//! Shadow layers and shadow limits.

use std::convert::Infallible;
use std::future::ready;
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use common::{
    AnswersWithStatus, Inner, ask, failing, get, memory_with_manual_clock, numbers, policy, poll, slow, status, with,
};
use http::{Request, Response};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_ratelimit::extract::{Head, KeyError};
use tower_ratelimit::storage::ManualClock;
use tower_ratelimit::{
    Decision, Event, Global, Header, Headers, Key, MemoryStorage, OnError, Policy, RateLimitLayer, RateLimiter, Storage,
};

type Outcomes = Arc<Mutex<Vec<String>>>;

/// A layer whose observer stores the outcomes, with a `?` after those of shadow limits.
fn observed(policy: Policy, storage: impl Storage) -> (RateLimitLayer, Outcomes) {
    let outcomes = Outcomes::default();
    let events = Arc::clone(&outcomes);
    let layer = RateLimitLayer::new(policy, Global::new()).storage(storage, OnError::Refuse).observer(
        move |event: &Event<'_>| {
            let mark = if event.shadow { "?" } else { "" };
            events.lock().unwrap().push(format!("{}{mark}", event.outcome()));
        },
    );
    (layer, outcomes)
}

fn take(outcomes: &Outcomes) -> Vec<String> {
    std::mem::take(&mut outcomes.lock().unwrap())
}

async fn yields() {
    for _ in 0..20 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn shadow_layer_counts_and_reports_but_never_refuses() {
    let (storage, _clock) = memory_with_manual_clock();
    let (layer, outcomes) = observed(policy("fixed-window 2/minute"), storage);
    let layer = layer.shadow().headers(Headers::x_rate_limit().and(Headers::draft11()));
    let service = layer.layer(Inner::default());
    for _ in 0..4 {
        let response = ask(&service, get("/")).await;
        assert_eq!((response.status().as_u16(), response.headers().len()), (200, 0));
        assert!(response.extensions().is_empty());
    }
    assert_eq!(service.get_ref().calls(), 4);
    assert_eq!(take(&outcomes), ["admitted?", "admitted?", "refused?", "refused?"]);
    let left = layer.limiter().unwrap().peek(&Key::global()).await.unwrap();
    assert_eq!(left.remaining(), 0);
}

#[tokio::test]
async fn shadow_layer_does_not_change_the_fields_of_other_layers() {
    let (storage, _clock) = memory_with_manual_clock();
    let shadow =
        RateLimitLayer::new(policy("fixed-window 1/minute"), Global::new()).storage(storage.clone(), OnError::Refuse);
    let outer = RateLimitLayer::new(policy("fixed-window 9/minute"), Global::new()).storage(storage, OnError::Refuse);
    let service = outer.layer(shadow.shadow().layer(Inner::default()));
    for left in [8, 7, 6] {
        assert_eq!(numbers(&ask(&service, get("/")).await).map(|[limit, left, _]| [limit, left]), Some([9, left]));
    }
}

#[tokio::test(start_paused = true)]
async fn shadow_layer_never_delays() {
    let (storage, _clock) = memory_with_manual_clock();
    let (layer, outcomes) = observed(policy("leaky-bucket 1/hour queue 1"), storage);
    let mut service = layer.shadow().layer(Inner::default());
    for _ in 0..3 {
        assert!(poll(&mut Box::pin(service.call(get("/")))).is_ready());
    }
    assert_eq!(take(&outcomes), ["admitted?", "delayed?", "refused?"]);
}

#[tokio::test]
async fn shadow_layer_admits_on_a_missing_key_or_a_storage_failure() {
    let (layer, outcomes) = observed(policy("fixed-window 1/minute"), failing());
    let service = layer.shadow().layer(Inner::default());
    assert_eq!(status(&service, get("/")).await, 200);
    assert_eq!(take(&outcomes), ["failed_open?"]);

    let key = |_: &Head<'_>| -> Result<Key, KeyError> { Err(KeyError::client("no key")) };
    let service = RateLimitLayer::new(policy("fixed-window 1/minute"), key).shadow().layer(Inner::default());
    assert_eq!(status(&service, get("/")).await, 200);
    let cost = |_: &Head<'_>| -> Result<u32, KeyError> { Err(KeyError::server("no cost")) };
    let (layer, outcomes) = observed(policy("fixed-window 1/minute"), memory_with_manual_clock().0);
    let service = layer.cost(cost).shadow().layer(Inner::default());
    assert_eq!(status(&service, get("/")).await, 200);
    assert_eq!(take(&outcomes), ["missing?"]);
}

#[tokio::test]
async fn shadow_layer_does_not_wait_for_its_storage() {
    let (memory, _clock) = memory_with_manual_clock();
    let (layer, outcomes) = observed(policy("fixed-window 1/minute"), slow(memory.clone()));
    let mut service = layer.shadow().layer(Inner::default());
    for _ in 0..2 {
        // Ready at the first poll, although the storage needs three.
        assert!(
            matches!(poll(&mut Box::pin(service.call(get("/")))), Poll::Ready(Ok(response)) if response.status() == 200)
        );
    }
    yields().await;
    assert_eq!(take(&outcomes), ["admitted?", "refused?"]);
    // The hit of a dropped request is decided too.
    drop(service.call(get("/")));
    yields().await;
    assert_eq!(take(&outcomes), ["refused?"]);
}

#[tokio::test]
async fn shadow_layer_charges_by_the_response() {
    async fn check(storage: impl Storage) -> Vec<String> {
        let (layer, outcomes) = observed(policy("fixed-window 2/minute"), storage);
        let service = layer.shadow().charge_when(|response| response.status == 401).layer(AnswersWithStatus);
        for path in ["/200", "/200", "/200", "/401", "/401", "/200"] {
            assert_eq!(status(&service, get(path)).await, path[1..].parse::<u16>().unwrap());
            yields().await;
        }
        take(&outcomes)
    }
    let expected = [
        "admitted?",
        "refunded?",
        "admitted?",
        "refunded?",
        "admitted?",
        "refunded?",
        "admitted?",
        "admitted?",
        "refused?",
    ];
    assert_eq!(check(memory_with_manual_clock().0).await, expected);
    assert_eq!(check(slow(memory_with_manual_clock().0)).await, expected);
}

#[tokio::test]
async fn shadow_limit_is_decided_only_for_requests_that_the_enforced_limits_admit() {
    for is_slow in [false, true] {
        let (memory, _clock) = memory_with_manual_clock();
        let text = "fixed-window 3/minute; shadow fixed-window 1/minute";
        let expected = ["admitted", "admitted?", "admitted", "refused?", "admitted", "refused?", "refused"];
        let statuses = [200, 200, 200, 429];
        let outcomes = if is_slow {
            let (layer, outcomes) = observed(policy(text), slow(memory));
            let service = layer.layer(Inner::default());
            for expected in statuses {
                assert_eq!(status(&service, get("/")).await, expected);
                yields().await;
            }
            outcomes
        } else {
            let (layer, outcomes) = observed(policy(text), memory);
            let service = layer.layer(Inner::default());
            for (expected, left) in statuses.into_iter().zip([2, 1, 0, 0]) {
                let response = ask(&service, get("/")).await;
                assert_eq!(response.status(), expected);
                assert_eq!(numbers(&response).map(|[limit, left, _]| [limit, left]), Some([3, left]));
            }
            outcomes
        };
        assert_eq!(take(&outcomes), expected, "slow: {is_slow}");
    }
}

#[tokio::test]
async fn shadow_limit_is_not_in_the_fields() {
    let (storage, _clock) = memory_with_manual_clock();
    let policy = policy("\"a\": fixed-window 9/minute; shadow \"b\" fixed-window 1/minute");
    let layer = RateLimitLayer::new(policy, Global::new()).storage(storage, OnError::Refuse);
    let service = layer.headers(Headers::draft11()).layer(Inner::default());
    let response = ask(&service, get("/")).await;
    assert_eq!(response.headers()["ratelimit"], "\"a\";r=8;t=60");
    assert_eq!(response.headers()["ratelimit-policy"], "\"a\";q=9;w=60");
}

#[tokio::test]
async fn shadow_limit_is_refunded_with_the_others() {
    let (storage, _clock) = memory_with_manual_clock();
    let text = policy("fixed-window 9/minute; shadow fixed-window 5/minute");
    let layer = RateLimitLayer::new(text.clone(), Global::new()).storage(storage.clone(), OnError::Refuse);
    let service = layer.charge_when(|_| false).layer(Inner::default());
    for _ in 0..7 {
        assert_eq!(status(&service, get("/")).await, 200);
    }
    let shadow = RateLimiter::with_storage(text.shadows()[0].clone(), storage);
    assert_eq!(shadow.peek(&Key::global()).await.unwrap().remaining(), 5);
}

#[tokio::test]
async fn shadow_limits_are_checked_independently() {
    let (storage, _clock) = memory_with_manual_clock();
    let outcomes = Outcomes::default();
    let events = Arc::clone(&outcomes);
    let text = policy("fixed-window 9/minute; shadow fixed-window 1/minute; shadow \"three\" fixed-window 3/minute");
    let layer = RateLimitLayer::new(text.with_name("p"), Global::new()).storage(storage, OnError::Refuse);
    let layer = layer.observer(move |event: &Event<'_>| {
        events.lock().unwrap().push(format!("{} {}", event.policy.identity(), event.outcome()));
    });
    let service = layer.layer(Inner::default());
    for _ in 0..4 {
        assert_eq!(status(&service, get("/")).await, 200);
    }
    let outcomes = take(&outcomes);
    let of = |policy: &str| outcomes.iter().filter_map(|line| line.strip_prefix(policy)).collect::<Vec<_>>();
    assert_eq!(of("p "), ["admitted"; 4]);
    assert_eq!(of("p\u{b7}shadow-1 "), ["admitted", "refused", "refused", "refused"]);
    assert_eq!(of("p\u{b7}shadow-2 "), ["admitted", "admitted", "admitted", "refused"]);
}

/// The states of a shadow limit must not take room from enforced ones.
#[tokio::test]
async fn full_storage_does_not_refuse_because_of_a_shadow_limit() {
    for shadow in ["", "; shadow fixed-window 1/day", "; shadow moving-window 2/day; shadow 5/hour"] {
        let clock = ManualClock::default();
        let storage = MemoryStorage::builder().max_keys(64).clock(clock.clone()).build().unwrap();
        let layer = RateLimitLayer::new(policy(&format!("fixed-window 100/second{shadow}")), Header::new("x-client"));
        let service = layer.storage(storage, OnError::Refuse).layer(Inner::default());
        for client in 0..500 {
            assert_eq!(status(&service, with("x-client", &client.to_string())).await, 200, "client {client}{shadow}");
            clock.advance(Duration::from_secs(5));
        }
    }
}

#[tokio::test]
async fn shadow_limit_evicts_no_key() {
    let (clock, mut admitted) = (ManualClock::default(), 0);
    let storage = MemoryStorage::builder().max_keys(100).clock(clock).build().unwrap();
    let layer =
        RateLimitLayer::new(policy("fixed-window 10/day; shadow fixed-window 1000/day"), Header::new("x-client"));
    let service = layer.storage(storage, OnError::Refuse).layer(Inner::default());
    for _ in 0..30 {
        for client in 0..80 {
            admitted += u32::from(status(&service, with("x-client", &client.to_string())).await == 200);
        }
    }
    assert_eq!(admitted, 800);
}

#[tokio::test]
async fn refund_in_a_full_storage_reports_the_remaining_units() {
    let storage = MemoryStorage::builder().max_keys(1).clock(ManualClock::default()).build().unwrap();
    let layer = RateLimitLayer::new(policy("fixed-window 5/day; shadow fixed-window 1/day"), Global::new());
    let layer = layer.storage(storage, OnError::Refuse).charge_when(|_| false);
    let service = layer.layer(Inner::default());
    for _ in 0..3 {
        assert_eq!(numbers(&ask(&service, get("/")).await).map(|[limit, left, _]| [limit, left]), Some([5, 5]));
    }
}

#[tokio::test]
async fn shadow_layer_shares_its_decision_with_handlers() {
    let seen = service_fn(|request: Request<()>| {
        let left = request.extensions().get::<Decision>().map(Decision::remaining);
        ready(Ok::<_, Infallible>(Response::new(format!("{left:?}"))))
    });
    let layer = RateLimitLayer::new(policy("fixed-window 2/minute"), Global::new()).share_decision().shadow();
    assert_eq!(ask(&layer.layer(seen), get("/")).await.into_body(), "Some(1)");
}

#[tokio::test]
async fn shadow_layer_shares_the_decision_on_a_delayed_request_but_no_refusal() {
    let seen = service_fn(|request: Request<()>| {
        let delay = request.extensions().get::<Decision>().map(Decision::delay);
        ready(Ok::<_, Infallible>(Response::new(format!("{delay:?}"))))
    });
    let layer = RateLimitLayer::new(policy("leaky-bucket 1/hour queue 1"), Global::new())
        .storage(memory_with_manual_clock().0, OnError::Refuse)
        .share_decision()
        .shadow();
    let service = layer.layer(seen);
    for delay in ["Some(0ns)", "Some(3600s)", "None"] {
        assert_eq!(ask(&service, get("/")).await.into_body(), delay);
    }
}

#[test]
fn shadow_limit_does_not_change_the_identity_and_round_trips_as_text() {
    let plain = policy("fixed-window 9/minute");
    let with = policy("fixed-window 9/minute; shadow \"try\" moving-window 5/minute; shadow 1/day");
    assert_eq!(
        (plain.identity(), plain.digest()),
        (with.identity(), with.digest()),
        "adding a shadow limit keeps the counts"
    );
    assert_ne!(plain, with);
    assert_eq!(with.shadows().len(), 2);
    let shadow = &with.shadows()[0];
    assert_eq!((shadow.limits().len(), shadow.limits()[0].name()), (1, Some("try")));
    assert_ne!(shadow, &policy(&shadow.to_string()), "the same limit enforced has another identity");
    assert_eq!(with.shadows()[1].limit_name(0), "fixed-window 9/minute shadow-2", "an ASCII name");
    for text in [
        with.clone(),
        with.clone().with_name("free"),
        with.with_name("free").limit(tower_ratelimit::FixedWindow::new(), tower_ratelimit::Quota::per_day(1)),
    ] {
        let again = policy(&text.to_string());
        assert_eq!(again, text, "{text}");
        assert_eq!(again.shadows(), text.shadows());
    }
    let [free, paid] = ["free", "paid"].map(|name| policy("1/day; shadow 1/hour").with_name(name));
    assert_ne!(free.shadows(), paid.shadows());
}

#[test]
fn first_limit_cannot_be_a_shadow() {
    for text in ["shadow 1/day", "shadow 1/day; 2/hour", "\"a\": shadow 1/day"] {
        let error = text.parse::<Policy>().unwrap_err().to_string();
        assert!(error.contains("first limit") && error.contains("shadow"), "{error}");
    }
    assert!("1/day; shadow".parse::<Policy>().is_err());
    assert!("1/day; shadow shadow 1/day".parse::<Policy>().is_err());
    assert!("1/day; shadowfixed-window 1/day".parse::<Policy>().is_err());
}

#[tokio::test]
async fn panic_of_the_observer_in_a_shadow_check_fails_at_most_one_request() {
    async fn check(storage: impl Storage, is_immediate: bool) {
        let policy: Policy = "fixed-window 9/minute; shadow fixed-window 5/minute".parse().unwrap();
        let layer = RateLimitLayer::new(policy, Global::new())
            .storage(storage, OnError::Refuse)
            .observer(|event: &Event<'_>| assert!(!event.shadow, "the observer panics"));
        let limiter = layer.limiter().unwrap();
        let service = layer.layer(Inner::default());
        let answer = tokio::spawn(service.oneshot(get("/"))).await;
        // With a slow storage, a separate task runs the check.
        assert_eq!(answer.is_err_and(|error| error.is_panic()), is_immediate);
        assert_eq!(limiter.peek(&Key::global()).await.unwrap().remaining(), 8);
    }
    check(memory_with_manual_clock().0, true).await;
    check(slow(memory_with_manual_clock().0), false).await;
}

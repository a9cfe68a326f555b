//! Meters: hits that a handler makes on the key of its request.

use std::future::ready;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::to_bytes;
use axum::routing::get as on_get;
use common::time::eventually;
use common::{Behavior, FakeStorage, Inner, ask, counted, failing, get, memory_with_manual_clock, policy, slow, with};
use http::{Request, Response};
use tower::{Layer, service_fn};
use tower_ratelimit::extract::NoMeter;
use tower_ratelimit::storage::{ManualClock, StorageErrorKind, TokioClock};
use tower_ratelimit::{
    Event, Global, Header, Key, LivePolicy, MemoryStorage, Meter, OnError, PolicyLookup, RateLimitLayer, Reservation,
    Reservations, Storage, Tenant, policy_by,
};

fn layer(text: &str, storage: impl Storage) -> RateLimitLayer {
    RateLimitLayer::new(policy(text), Global::new()).storage(storage, OnError::Refuse).meter()
}

/// Sends a request, and returns the meter and the reservation that its handler gets.
async fn handled(layer: &RateLimitLayer, request: Request<()>) -> (Option<Meter>, Option<Reservation>) {
    let handled = Arc::new(Mutex::new((None, None)));
    let seen = Arc::clone(&handled);
    let handler = service_fn(move |request: Request<()>| {
        let extensions = request.extensions();
        *seen.lock().unwrap() = (extensions.get().cloned(), extensions.get().and_then(Reservations::take));
        ready(Ok::<_, std::convert::Infallible>(Response::new(String::new())))
    });
    assert_eq!(ask(&layer.layer(handler), request).await.status(), 200);
    std::mem::take(&mut *handled.lock().unwrap())
}

async fn meter(layer: &RateLimitLayer) -> Meter {
    handled(layer, get("/")).await.0.expect("the request has a meter")
}

/// Returns `true` for each admitted hit.
async fn hits(meter: &Meter, units: &[u32]) -> Vec<bool> {
    let mut admitted = Vec::new();
    for &units in units {
        admitted.push(meter.hit(units).await.unwrap().is_admitted());
    }
    admitted
}

#[tokio::test]
async fn hits_spend_units_of_the_key_after_the_response() {
    for is_slow in [false, true] {
        let (memory, _clock) = memory_with_manual_clock();
        let limit = policy("fixed-window 10/minute");
        let layer = if is_slow {
            layer("fixed-window 10/minute", slow(memory.clone()))
        } else {
            layer("fixed-window 10/minute", memory.clone())
        };
        let meter = meter(&layer).await;
        assert_eq!(hits(&meter, &[4, 6, 5, 1]).await, [true, false, true, false]);
        assert_eq!(counted(&memory, &limit), 10);
        let peek = meter.peek().await.unwrap();
        assert_eq!((peek.is_refused(), peek.remaining(), peek.retry_after()), (true, 0, Some(Duration::from_secs(60))));
        // Each hit has a reservation of its own.
        limit_clear(&memory, &limit);
        meter.hit(7).await.unwrap().settle(3).await.unwrap();
        assert_eq!(counted(&memory, &limit), 3);
        meter.hit(5).await.unwrap().refund().await.unwrap();
        assert_eq!(counted(&memory, &limit), 3);
        assert!(meter.hit(0).await.unwrap().is_admitted());
    }
}

fn limit_clear(memory: &MemoryStorage, policy: &tower_ratelimit::Policy) {
    tower_ratelimit::LocalLimiter::with_storage(policy.clone(), memory.clone()).clear(&Key::global());
}

#[tokio::test]
async fn reservation_of_the_request_and_hits_of_its_meter_are_settled_separately() {
    let (memory, _clock) = memory_with_manual_clock();
    let limit = policy("fixed-window 100/minute");
    let layer = layer("fixed-window 100/minute", memory.clone()).cost(|_| 20).settle_later();
    let (meter, reservation) = handled(&layer, get("/")).await;
    let (meter, reservation) = (meter.unwrap(), reservation.unwrap());
    assert_eq!(hits(&meter, &[3, 4]).await, [true, true]);
    assert_eq!(counted(&memory, &limit), 27);
    reservation.refund().await.unwrap();
    assert_eq!(counted(&memory, &limit), 7);
    // The meter outlives the reservation.
    let last = meter.hit(5).await.unwrap();
    assert_eq!(counted(&memory, &limit), 12);
    last.clear().await.unwrap();
    assert_eq!(counted(&memory, &limit), 0);
}

#[tokio::test]
async fn meter_follows_a_live_policy_and_keeps_a_chosen_one() {
    let named = |text: &str| policy(text).with_name("api");
    let live = LivePolicy::new(named("fixed-window 2/hour"));
    let follows = meter(&RateLimitLayer::new(live.clone(), Global::new()).cost(|_| 0).meter()).await;
    let chosen = live.clone();
    let keeps =
        meter(&RateLimitLayer::new(policy_by(move |_| chosen.clone()), Global::new()).cost(|_| 0).meter()).await;
    live.set(named("fixed-window 3/hour")).unwrap();
    assert_eq!(hits(&follows, &[1; 4]).await, [true, true, true, false]);
    assert_eq!(hits(&keeps, &[1; 4]).await, [true, true, false, false]);
}

#[tokio::test]
async fn meter_has_the_policy_and_the_key_of_a_lookup() {
    let lookup = PolicyLookup::new(
        |head: &tower_ratelimit::Head<'_>| head.headers.get("x-api-key").cloned(),
        |key: http::HeaderValue| async move {
            tokio::task::yield_now().await;
            match key.as_bytes() {
                b"open" => Ok(Tenant::from(None::<tower_ratelimit::Policy>)),
                b"broken" => Err(std::io::Error::other("no database")),
                _ => Ok(Tenant::from(policy("fixed-window 3/hour").with_name("paid")).key(Key::from(7_u64))),
            }
        },
    );
    let layer = RateLimitLayer::new(lookup, Global::new()).storage(MemoryStorage::new(), OnError::Admit).meter();
    let (one, _) = handled(&layer, with("x-api-key", "a")).await;
    let (two, _) = handled(&layer, with("x-api-key", "b")).await;
    assert_eq!(hits(&one.unwrap(), &[1]).await, [true]);
    assert_eq!(hits(&two.unwrap(), &[1]).await, [false]);
    for key in ["open", "broken"] {
        assert!(handled(&layer, with("x-api-key", key)).await.0.is_none(), "{key}");
    }
}

#[tokio::test]
async fn several_keys_spend_together_or_not_at_all() {
    let (memory, _clock) = memory_with_manual_clock();
    let live = LivePolicy::new(policy("fixed-window 4/minute").with_name("all"));
    let layer = RateLimitLayer::new(policy("fixed-window 10/minute").with_name("user"), Header::new("x-user"))
        .and(live.clone(), Global::new())
        .storage(memory, OnError::Refuse)
        .cost(|_| 0)
        .meter();
    let [one, two] = ["u", "v"].map(|user| with("x-user", user));
    let (one, two) = (handled(&layer, one).await.0.unwrap(), handled(&layer, two).await.0.unwrap());
    assert_eq!(hits(&one, &[3, 2]).await, [true, false]);
    let refused = two.hit(2).await.unwrap();
    assert_eq!((refused.is_refused(), refused.policy().name()), (true, Some("all")));
    assert_eq!(two.peek().await.unwrap().remaining(), 1);
    live.set(policy("fixed-window 20/minute").with_name("all")).unwrap();
    // Nothing of the user was spent by the refusals.
    let hit = one.hit(7).await.unwrap();
    assert_eq!((hit.is_admitted(), hit.remaining(), hit.policy().name()), (true, 0, Some("user")));
    hit.refund().await.unwrap();
    assert_eq!(one.peek().await.unwrap().remaining(), 7);
    let error = one.acquire(1, Duration::from_secs(1)).await.unwrap_err();
    assert_eq!(error.kind(), StorageErrorKind::Unsupported);
    assert!(error.to_string().contains("use `hit`"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn acquire_waits_in_the_queue_of_the_key() {
    let storage = || MemoryStorage::builder().clock(TokioClock::new()).build().unwrap();
    for is_slow in [false, true] {
        let limited = "token-bucket 10/second burst 1";
        let layer = if is_slow { layer(limited, slow(storage())) } else { layer(limited, storage()) };
        let meter = meter(&layer.cost(|_| 0)).await;
        let begin = tokio::time::Instant::now();
        for _ in 0..3 {
            assert!(meter.acquire(1, Duration::from_secs(5)).await.unwrap().is_admitted());
        }
        assert!(begin.elapsed() >= Duration::from_millis(200));
        assert!(meter.acquire(1, Duration::from_millis(1)).await.unwrap().is_refused());
        assert!(meter.acquire(2, Duration::from_secs(5)).await.unwrap().is_refused());
    }
}

#[tokio::test]
async fn shadow_layer_counts_and_admits_every_hit() {
    for is_slow in [false, true] {
        let (memory, _clock) = memory_with_manual_clock();
        let events = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&events);
        let limited = "fixed-window 3/minute";
        let layer = if is_slow { layer(limited, slow(memory.clone())) } else { layer(limited, memory.clone()) };
        let layer = layer.shadow().cost(|_| 0).observer(move |event: &Event<'_>| {
            seen.lock().unwrap().push((event.outcome(), event.shadow));
        });
        let meter = meter(&layer).await;
        assert_eq!(hits(&meter, &[2, 2, 9]).await, [true, true, true]);
        assert!(meter.acquire(1, Duration::ZERO).await.unwrap().is_admitted());
        eventually("all hits are reported", async || events.lock().unwrap().len() == 4).await;
        let outcomes = [("admitted", true), ("refused", true), ("refused", true), ("admitted", true)];
        assert_eq!(*events.lock().unwrap(), outcomes);
        assert_eq!(counted(&memory, &policy(limited)), 3);
        // A hit that was not enforced has nothing to settle.
        meter.hit(9).await.unwrap().settle(0).await.unwrap();
        assert_eq!(counted(&memory, &policy(limited)), 3);
        assert!(meter.peek().await.unwrap().is_refused());
    }
}

#[tokio::test]
async fn observer_receives_hits_shadow_limits_and_locks() {
    let (memory, _clock) = memory_with_manual_clock();
    let events = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&events);
    let layer = layer("lockout 3/minute for 5 minutes; shadow fixed-window 1/minute", memory).cost(|_| 0);
    let layer = layer.observer(move |event: &Event<'_>| seen.lock().unwrap().push((event.outcome(), event.shadow)));
    let meter = meter(&layer).await;
    events.lock().unwrap().clear();
    assert_eq!(hits(&meter, &[1, 1, 1, 1]).await, [true, true, true, false]);
    let expected = [
        ("admitted", false),
        ("admitted", true),
        ("admitted", false),
        ("refused", true),
        ("admitted", false),
        ("locked", false),
        ("refused", true),
        ("refused", false),
    ];
    assert_eq!(*events.lock().unwrap(), expected);
}

#[tokio::test]
async fn failed_storage_admits_or_fails_hits_as_the_layer_selects() {
    for (on_error, outcome) in [(OnError::Admit, "failed_open"), (OnError::Refuse, "failed_closed")] {
        let (storage, _clock): (FakeStorage, ManualClock) = FakeStorage::in_memory(Behavior::Works);
        let events = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&events);
        let layer = layer("fixed-window 3/minute", storage.clone()).storage(storage.clone(), on_error);
        let layer = layer.observer(move |event: &Event<'_>| seen.lock().unwrap().push(event.outcome()));
        let meter = meter(&layer).await;
        storage.set(Behavior::Fails);
        events.lock().unwrap().clear();
        for waits in [false, true] {
            let hit = if waits { meter.acquire(9, Duration::ZERO).await } else { meter.hit(9).await };
            assert_eq!(hit.is_ok(), on_error == OnError::Admit);
            if let Ok(hit) = hit {
                assert!(hit.is_admitted());
                assert_eq!((hit.cost(), hit.has_spent()), (9, false));
                hit.refund().await.unwrap();
            }
        }
        assert_eq!(*events.lock().unwrap(), [outcome; 2]);
        assert!(meter.hit(0).await.unwrap().is_admitted());
        assert!(meter.peek().await.is_err());
        // The meter works again with the storage.
        storage.set(Behavior::Works);
        assert_eq!(hits(&meter, &[2, 1]).await, [true, false]);
    }
    // A request that was forwarded without a decision has a meter too.
    let layer = layer("fixed-window 3/minute", failing()).storage(failing(), OnError::Admit);
    assert_eq!(hits(&meter(&layer).await, &[9]).await, [true]);
}

#[tokio::test]
async fn requests_that_are_not_limited_have_no_meter() {
    let skips = layer("9/minute", MemoryStorage::new()).skip(|head| head.uri().path() == "/skipped");
    assert!(handled(&skips, get("/skipped")).await.0.is_none());
    assert!(handled(&skips, get("/")).await.0.is_some());
    let app = Router::new()
        .route("/skipped", on_get(|_: Meter| async {}))
        .route("/may", on_get(|meter: Option<Meter>| async move { meter.is_some().to_string() }))
        .route("/", on_get(|meter: Meter| async move { meter.peek().await.unwrap().remaining().to_string() }));
    let body = async |app: &Router, path: &str| {
        let response = ask(app, Request::get(path).body(axum::body::Body::empty()).unwrap()).await;
        let extensions = response.extensions().get::<NoMeter>().is_some();
        let status = response.status().as_u16();
        let body = to_bytes(response.into_body(), 1_000).await.unwrap();
        (status, extensions, String::from_utf8(body.to_vec()).unwrap())
    };
    let limited = app
        .clone()
        .layer(layer("fixed-window 9/minute", MemoryStorage::new()).skip(|head| head.uri().path() == "/skipped"));
    assert_eq!(body(&limited, "/").await, (200, false, "8".to_owned()));
    assert_eq!(body(&limited, "/may").await, (200, false, "true".to_owned()));
    assert_eq!(body(&limited, "/skipped").await, (500, true, format!("{}\n", NoMeter::default())));
    // A layer that does not offer it.
    let plain = app.layer(RateLimitLayer::new(policy("9/minute"), Global::new()));
    assert_eq!(body(&plain, "/may").await, (200, false, "false".to_owned()));
    assert_eq!(body(&plain, "/").await, (500, true, format!("{}\n", NoMeter::default())));
    assert!(NoMeter::default().to_string().contains("meter()"));
}

#[tokio::test]
async fn stacked_layers_offer_the_meter_of_the_innermost_layer() {
    let [outer, inner] =
        ["fixed-window 9/minute", "fixed-window 5/minute"].map(|text| layer(text, MemoryStorage::new()));
    let inner = inner.skip(|head| head.uri().path() == "/skipped");
    let seen = Arc::new(Mutex::new(Vec::new()));
    let capacities = Arc::clone(&seen);
    let handler = service_fn(move |request: Request<()>| {
        let (meter, capacities) = (request.extensions().get::<Meter>().cloned(), Arc::clone(&capacities));
        async move {
            let capacity = match meter {
                Some(meter) => Some(meter.peek().await.unwrap().capacity()),
                None => None,
            };
            capacities.lock().unwrap().push(capacity);
            Ok::<_, std::convert::Infallible>(Response::new(String::new()))
        }
    });
    let stacked = outer.layer(inner.layer(handler));
    for path in ["/", "/skipped"] {
        assert_eq!(ask(&stacked, get(path)).await.status(), 200);
    }
    assert_eq!(*seen.lock().unwrap(), [Some(5), None]);
    // A refused request never reaches the handler, and its response has no meter.
    let refusing = layer("fixed-window 1/minute", MemoryStorage::new()).layer(Inner::default());
    assert_eq!(ask(&refusing, get("/")).await.status(), 200);
    let refused = ask(&refusing, get("/")).await;
    assert_eq!((refused.status().as_u16(), refused.extensions().get::<Meter>().is_none()), (429, true));
}

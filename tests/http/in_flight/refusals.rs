//! Refusals, header fields, costs, and the options of the layer.

use std::convert::Infallible;
use std::future::ready;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{Inner, ask, get, retry_after, status};
use futures_util::future::join_all;
use http::{Request, Response, StatusCode};
use http_body_util::BodyExt;
use tower::{Layer, ServiceExt, service_fn};
use tower_ratelimit::extract::{AllowList, Head, KeyError};
use tower_ratelimit::{
    Decision, Event, EventKind, Global, GrpcRejection, Headers, InFlightLayer, LiveSlots, PeerIp, Permit,
    ProblemRejection, RejectReason, Slots, slots_by,
};

use super::{Script, Step, layer, of, streams, user};

/// Returns the values of header fields, or an empty text for a missing one.
fn fields<B>(response: &Response<B>, names: &[&str]) -> Vec<String> {
    let value = |name: &&str| response.headers().get(*name).map_or("", |value| value.to_str().unwrap()).to_owned();
    names.iter().map(value).collect()
}

const X: [&str; 3] = ["x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset"];

#[tokio::test]
async fn request_without_a_free_slot_is_refused() {
    let layer = layer(2);
    let service = streams(&layer);
    let held = [ask(&service, of("a")).await, ask(&service, of("a")).await];
    assert_eq!(held.each_ref().map(|response| fields(response, &X)), [["2", "1", ""], ["2", "0", ""]]);
    for _ in 0..3 {
        let refused = ask(&service, of("a")).await;
        assert_eq!((refused.status().as_u16(), retry_after(&refused)), (429, Some(1)));
        assert_eq!(fields(&refused, &X), ["2", "0", ""]);
        assert_eq!(fields(&refused, &["cache-control"]), ["no-store"]);
        assert!(refused.extensions().get::<Decision>().unwrap().is_refused());
        let text = refused.into_body().collect().await.unwrap().to_bytes();
        assert_eq!(text, "too many requests in flight, retry in 1 s\n");
    }
    assert_eq!(status(&service, of("b")).await, 200, "another key has slots of its own");
    drop(held);
    assert_eq!(status(&service, of("a")).await, 200);
    assert_eq!(layer.in_use(), 0);
}

#[tokio::test]
async fn overload_of_all_clients_is_503() {
    let global = InFlightLayer::new(1, Global::new());
    let service = streams(&global);
    let _held = ask(&service, get("/")).await;
    let refused = ask(&service, get("/")).await;
    assert_eq!((refused.status().as_u16(), retry_after(&refused)), (503, Some(1)));

    for (layer, request, expected) in [(global.clone(), get("/"), 503), (layer_with_one_stream().await, of("a"), 429)] {
        let problem = ask(&streams(&layer.rejection(ProblemRejection::new())), request).await;
        let json: serde_json::Value =
            serde_json::from_slice(&problem.into_body().collect().await.unwrap().to_bytes()).unwrap();
        assert_eq!((&json["status"], &json["violated-policies"][0]), (&expected.into(), &"in-flight".into()));
    }

    for (layer, request, expected) in [
        (global.rejection(GrpcRejection::new()), get("/"), "14"),
        (layer_with_one_stream().await.rejection(GrpcRejection::new()), of("a"), "8"),
    ] {
        let refused = ask(&streams(&layer), request).await;
        assert_eq!((refused.status(), fields(&refused, &["grpc-status"])), (StatusCode::OK, vec![expected.to_owned()]));
    }
}

/// A layer whose only slot of the user `a` is taken until the test ends.
async fn layer_with_one_stream() -> InFlightLayer {
    let layer = layer(1);
    std::mem::forget(ask(&streams(&layer), of("a")).await);
    layer
}

#[tokio::test]
async fn retry_after_can_be_set() {
    let layer = layer_with_one_stream().await;
    for (set, seconds) in [(Duration::from_millis(9_001), 10), (Duration::ZERO, 1)] {
        let layer = layer.clone().retry_after(set);
        assert_eq!(retry_after(&ask(&streams(&layer), of("a")).await), Some(seconds));
    }
}

#[tokio::test]
async fn ietf_fields_name_concurrent_requests() {
    let slots = Slots::new(3).with_name("streams");
    let layer = InFlightLayer::new(slots, user()).headers(Headers::draft11().and(Headers::draft6()));
    let service = streams(&layer);
    let held = join_all([ask(&service, of("a")), ask(&service, of("a")), ask(&service, of("a"))]).await;
    let names = ["ratelimit-policy", "ratelimit", "ratelimit-limit", "ratelimit-remaining", "ratelimit-reset"];
    let policy = "\"streams\";q=3;qu=\"concurrent-requests\"";
    assert_eq!(fields(&held[0], &names), [policy, "\"streams\";r=2", "3", "2", ""]);
    let refused = ask(&service, of("a")).await;
    assert_eq!(fields(&refused, &names), [policy, "\"streams\";r=0", "3", "0", ""]);
    assert_eq!(fields(&refused, &X), ["", "", ""]);
}

#[tokio::test]
async fn request_takes_as_many_slots_as_it_costs() {
    let cost = |head: &Head<'_>| match head.uri().path()[1..].parse::<u32>() {
        Ok(cost) => Ok(cost),
        Err(_) => Err(KeyError::client("the path is not a number")),
    };
    let layer = InFlightLayer::new(10, Global::new()).cost(cost);
    let service = streams(&layer);
    let six = ask(&service, get("/6")).await;
    assert_eq!((fields(&six, &X[..2]), layer.in_use()), (vec!["10".to_owned(), "4".to_owned()], 6));
    let five = ask(&service, get("/5")).await;
    assert_eq!((five.status().as_u16(), retry_after(&five), layer.in_use()), (503, Some(1), 6));
    let four = ask(&service, get("/4")).await;
    assert_eq!((four.status().as_u16(), layer.in_use()), (200, 10));
    let none = ask(&service, get("/0")).await;
    assert_eq!((none.status().as_u16(), fields(&none, &X[1..2])), (200, vec!["0".to_owned()]));
    drop((six, four));
    assert_eq!(layer.in_use(), 0);
    for path in ["/11", "/4294967295"] {
        let never = ask(&service, get(path)).await;
        assert_eq!((never.status().as_u16(), retry_after(&never), layer.in_use()), (503, None, 0), "{path}");
    }
    assert_eq!(status(&service, get("/x")).await, 400);
}

#[tokio::test]
async fn live_slots_can_be_changed_while_requests_are_in_flight() {
    let live = LiveSlots::new(2);
    let layer = InFlightLayer::new(live.clone(), user());
    let service = streams(&layer);
    let mut held = vec![ask(&service, of("a")).await, ask(&service, of("a")).await];
    live.set(3);
    held.push(ask(&service, of("a")).await);
    assert_eq!(fields(&held[2], &X[..2]), ["3", "0"]);
    live.set(1);
    for _ in 0..3 {
        assert_eq!(fields(&ask(&service, of("a")).await, &X[..2]), ["1", "0"]);
        held.pop();
    }
    assert_eq!(status(&service, of("a")).await, 200);
    live.set(0);
    let refused = ask(&service, of("a")).await;
    assert_eq!((refused.status().as_u16(), retry_after(&refused)), (429, None));
    assert_eq!((live.get().number(), live.get()), (0, Slots::new(0)));
}

#[tokio::test]
async fn slots_are_chosen_for_each_request() {
    let (free, paid) = (Slots::new(1), Slots::new(2));
    let layer = InFlightLayer::new(
        slots_by(move |head| match head.uri().path() {
            "/paid" => Some(paid.clone()),
            "/free" => Some(free.clone()),
            _ => None,
        }),
        user(),
    );
    let service = streams(&layer);
    let request = |path: &str| Request::get(path).header("x-user", "a").body(()).unwrap();
    let first = ask(&service, request("/free")).await;
    assert_eq!(status(&service, request("/free")).await, 429);
    assert_eq!(fields(&ask(&service, request("/paid")).await, &X[..2]), ["2", "0"], "they share their counts");
    let unlimited = ask(&service, request("/other")).await;
    assert_eq!((fields(&unlimited, &X), layer.in_use()), (vec![String::new(); 3], 1));
    drop(first);
}

#[tokio::test]
async fn slots_with_other_names_have_other_counts() {
    let layer = InFlightLayer::new(slots_by(|head| Slots::new(1).with_name(head.uri().path())), Global::new());
    let service = streams(&layer);
    let _a = ask(&service, get("/a")).await;
    assert_eq!([status(&service, get("/a")).await, status(&service, get("/b")).await], [503, 200]);
    let error = Slots::new(1).try_with_name("").unwrap_err().to_string();
    assert!(error.contains("for example \"free\""), "{error}");
}

#[tokio::test]
async fn skipped_requests_take_no_slot() {
    let layer = layer(1)
        .skip(|head| head.uri().path() == "/health")
        .allow_list(AllowList::new(PeerIp::new()).allow("10.0.0.0/8"));
    let service = streams(&layer);
    let _held = ask(&service, of("a")).await;
    let mut health = of("a");
    *health.uri_mut() = "/health".parse().unwrap();
    let mut allowed = of("a");
    allowed.extensions_mut().insert(std::net::SocketAddr::from(([10, 1, 1, 1], 80)));
    for request in [health, allowed] {
        let response = ask(&service, request).await;
        assert_eq!((response.status().as_u16(), fields(&response, &X)), (200, vec![String::new(); 3]));
    }
    assert_eq!(layer.in_use(), 1);
    assert_eq!(status(&service, get("/")).await, 400, "the key is missing");
}

/// Collects the outcome, the remaining slots and the shadow flag of each event.
type Events = Arc<Mutex<Vec<(&'static str, Option<u32>, bool)>>>;

fn observed(layer: InFlightLayer) -> (InFlightLayer, Events) {
    let events = Events::default();
    let observed = Arc::clone(&events);
    let layer = layer.observer(move |event: &Event<'_>| {
        let limit = event.policy.limits()[0].to_string();
        assert_eq!((event.policy.identity(), &*limit), ("in-flight", "in-flight 1"));
        let remaining = match event.kind {
            EventKind::Decided(decision) => Some(decision.remaining()),
            _ => None,
        };
        observed.lock().unwrap().push((event.outcome(), remaining, event.shadow));
    });
    (layer, events)
}

#[tokio::test]
async fn observer_gets_each_decision() {
    let (layer, events) = observed(layer(1));
    let service = streams(&layer);
    let held = ask(&service, of("a")).await;
    for request in [of("a"), get("/")] {
        ask(&service, request).await;
    }
    drop(held);
    let expected = [("admitted", Some(0), false), ("refused", Some(0), false), ("missing", None, false)];
    assert_eq!(*events.lock().unwrap(), expected);
}

#[tokio::test]
async fn shadow_layer_forwards_every_request() {
    let (layer, events) = observed(layer(1).shadow().wait(Duration::from_secs(9), 9));
    let with_permit = layer.layer(service_fn(|request: Request<()>| {
        let has_permit = request.extensions().get::<Permit>().is_some();
        assert_eq!(has_permit, request.headers().contains_key("x-user"));
        ready(Ok::<_, Infallible>(Response::new(Script::new(&[Step::Hang]))))
    }));
    let held = ask(&with_permit, of("a")).await;
    assert_eq!(layer.in_use(), 1);
    let beyond = ask(&with_permit, of("a")).await;
    assert_eq!(layer.in_use(), 1, "a request that would be refused takes no slot");
    for response in [held, beyond, ask(&with_permit, get("/")).await] {
        assert_eq!((response.status().as_u16(), fields(&response, &X)), (200, vec![String::new(); 3]));
    }
    let expected = [("admitted", Some(0), true), ("refused", Some(0), true), ("missing", None, true)];
    assert_eq!(*events.lock().unwrap(), expected);
    assert_eq!(layer.in_use(), 0);
}

#[tokio::test]
async fn layer_and_its_clones_share_their_counts() {
    let first = layer(2);
    let second = first.clone().headers(Headers::none()).rejection_by(|refused: RejectReason<'_>, _: &Head<'_>| {
        let mut response = Response::new(Script::default());
        *response.status_mut() = refused.status();
        response
    });
    let _held = [ask(&streams(&first), of("a")).await, ask(&streams(&second), of("a")).await];
    assert_eq!((first.in_use(), second.in_use()), (2, 2));
    assert_eq!(status(&streams(&first), of("a")).await, 429);
    let refused = ask(&streams(&second), of("a")).await;
    assert_eq!((refused.status().as_u16(), fields(&refused, &X)), (429, vec![String::new(); 3]));
}

#[tokio::test]
async fn inner_service_that_was_polled_ready_is_called() {
    let layer = InFlightLayer::new(1, Global::new());
    let inner = Inner::default();
    let service = layer.layer(inner.clone());
    let held = ask(&service, get("/")).await;
    assert_eq!(service.oneshot(get("/")).await.unwrap().status(), 503);
    assert_eq!((inner.calls(), held.status().as_u16()), (1, 200));
}

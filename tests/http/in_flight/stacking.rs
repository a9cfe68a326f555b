//! A limit on requests in flight, around and inside of a rate limit.

use std::time::Duration;

use common::{Inner, ask, get, policy, retry_after, status};
use http::Response;
use tower::Layer;
use tower_ratelimit::{Global, Headers, InFlightLayer, RateLimitLayer};

use super::{Script, Step, streams};

fn rate(text: &str) -> RateLimitLayer {
    RateLimitLayer::new(policy(text).with_name("rate"), Global::new())
}

fn field<B>(response: &Response<B>, name: &str) -> Option<String> {
    response.headers().get(name).map(|value| value.to_str().unwrap().to_owned())
}

fn endless() -> Script {
    Script::new(&[Step::Hang])
}

#[tokio::test]
async fn around_a_rate_its_refusals_spend_no_units_and_hold_no_slot() {
    let in_flight = InFlightLayer::new(1, Global::new());
    let rate = rate("fixed-window 2/hour");
    let service = in_flight.layer(rate.layer(tower::service_fn(|_: http::Request<()>| {
        std::future::ready(Ok::<_, std::convert::Infallible>(Response::new(endless())))
    })));
    let left = async || rate.limiter().unwrap().peek(&tower_ratelimit::Key::global()).await.unwrap().remaining();
    let held = ask(&service, get("/")).await;
    assert_eq!(status(&service, get("/")).await, 503);
    assert_eq!(left().await, 1, "the refused request spends nothing of the rate");
    drop(held);
    drop(ask(&service, get("/")).await);
    let refused = ask(&service, get("/")).await;
    assert_eq!((refused.status().as_u16(), in_flight.in_use()), (429, 0), "a refusal by the rate has ended at once");
}

/// A slot is free at once, so its `Retry-After` does not apply to a refusal by the rate.
#[tokio::test]
async fn around_a_rate_it_does_not_change_the_retry_after_of_its_refusals() {
    for headers in [Headers::x_rate_limit(), Headers::draft11(), Headers::draft6()] {
        let in_flight = InFlightLayer::new(1, Global::new()).retry_after(Duration::from_secs(600)).headers(headers);
        let service = in_flight.layer(rate("fixed-window 1 per 5 seconds").layer(Inner::default()));
        assert_eq!(status(&service, get("/")).await, 200);
        let wait = retry_after(&ask(&service, get("/")).await);
        assert!(wait.is_some_and(|seconds| seconds <= 5), "{wait:?}");
    }
}

#[tokio::test]
async fn inside_of_a_rate_its_refusals_have_spent_units() {
    let in_flight = InFlightLayer::new(1, Global::new());
    let rate = rate("fixed-window 3/hour");
    let service = rate.layer(streams(&in_flight));
    let held = ask(&service, get("/")).await;
    let refused = ask(&service, get("/")).await;
    assert_eq!((refused.status().as_u16(), field(&refused, "x-ratelimit-limit").as_deref()), (503, Some("1")));
    drop((held, refused));
    assert_eq!((status(&service, get("/")).await, in_flight.in_use()), (200, 0));
    assert_eq!((status(&service, get("/")).await, in_flight.in_use()), (429, 0));
}

#[tokio::test]
async fn numbers_report_the_rate_in_either_order_and_lists_report_both() {
    let both = Headers::x_rate_limit().and(Headers::draft11());
    let (in_flight, rate) =
        (InFlightLayer::new(1, Global::new()).headers(both), rate("fixed-window 9/hour").headers(both));
    let inside = ask(&rate.layer(in_flight.layer(Inner::default())), get("/")).await.map(drop);
    let outside = ask(&in_flight.layer(rate.layer(Inner::default())), get("/")).await.map(drop);
    for (response, left) in [(inside, "8"), (outside, "7")] {
        assert_eq!(field(&response, "x-ratelimit-limit").as_deref(), Some("9"));
        assert_eq!(field(&response, "x-ratelimit-remaining").as_deref(), Some(left));
        assert!(field(&response, "x-ratelimit-reset").is_some());
        let policies = field(&response, "ratelimit-policy").unwrap();
        for name in ["\"rate\";q=9;w=3600", "\"in-flight\";q=1;qu=\"concurrent-requests\""] {
            assert!(policies.contains(name), "{policies}");
        }
    }
}

#[tokio::test]
async fn numbers_of_the_fewest_free_slots_are_shown() {
    let (wide, narrow) = (InFlightLayer::new(9, Global::new()), InFlightLayer::new(2, Global::new()));
    for (outer, inner) in [(&wide, &narrow), (&narrow, &wide)] {
        let response = ask(&outer.layer(inner.layer(Inner::default())), get("/")).await;
        let shown =
            ["x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset"].map(|name| field(&response, name));
        assert_eq!(shown, [Some("2".to_owned()), Some("1".to_owned()), None]);
    }
}
